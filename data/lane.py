"""A lane: one endless series of micro-batches with its own cursors, mixture account and packing pool.

An optimizer step of the whole job takes one micro-batch of every lane. Lane j of L reads every L-th document, from j on,
of each source's shuffled epochs; rank r of W owns the lanes r, r + W, ... So what a step trains on depends on the number
of lanes and on the seed, never on the number of ranks, processes or threads.

The state of a lane is small JSON: cursors, account, and the pool as (source, epoch, index, start, stop) references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from earlyfusion.data.config import DataConfig
from earlyfusion.data.encode import Encoded, encode, next_cut
from earlyfusion.data.errors import BadSample, DataError, DataExhausted
from earlyfusion.data.mixture import Mixture
from earlyfusion.data.order import Permutation
from earlyfusion.data.pack import PackedBatch, assemble, choose
from earlyfusion.data.sources import Source, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.vision.config import VisionConfig


@dataclass(frozen=True)
class Geometry:
    """Shape of the micro-batches and of the job."""

    length: int
    """Longest document in tokens."""
    tokens: int
    """Positions of one micro-batch."""
    max_patches: int
    """Most patches of one micro-batch."""
    lanes: int = 1
    """Micro-batches of one optimizer step, over all ranks."""
    stage: int = 0
    """Number of the training stage; each stage has an order of its own."""

    def __post_init__(self) -> None:
        for name, least in (("length", 8), ("tokens", 8), ("max_patches", 0), ("lanes", 1), ("stage", 0)):
            value = getattr(self, name)
            if value < least:
                raise DataError(f"{name} = {value}: expected at least {least}")
        if self.length > self.tokens:
            raise DataError(f"length {self.length} is more than tokens {self.tokens}: raise tokens or lower length")


@dataclass(frozen=True)
class Spec:
    """Everything that makes the data of a stage; crosses process boundaries, and builds the same lanes there."""

    data: DataConfig
    tokenizer: Tokenizer
    vision: VisionConfig
    geometry: Geometry

    def build_sources(self) -> dict[str, Source]:
        """Name -> source, in the order of the config."""
        seed, fraction = self.data.seed, self.data.val_fraction
        return {config.name: build_source(config, seed=seed, val_fraction=fraction) for config in self.data.sources}


@lru_cache(maxsize=64)
def _order(size: int, seed: int, stage: int, name: str, epoch: int) -> Permutation:
    return Permutation(size, seed, stage, name, epoch)


class Stream:
    """The documents of one source that one lane reads, piece by piece."""

    def __init__(self, source: Source, spec: Spec, lane: int) -> None:
        self.source, self.spec, self.lane = source, spec, lane
        self.cursor, self.start = 0, 0
        """Documents of this lane already finished; first token of the next piece inside the current one."""
        self.skipped: list[str] = []
        """Reasons, newest last; only as many as fit a report."""
        self.num_skipped = 0
        self._document: Encoded | None = None

    def where(self) -> tuple[int, int]:
        """(epoch, index) of the current document."""
        geometry, size = self.spec.geometry, len(self.source)
        epoch, position = divmod(self.lane + geometry.lanes * self.cursor, size)
        return epoch, _order(size, self.spec.data.seed, geometry.stage, self.source.name, epoch)[position]

    @property
    def exhausted(self) -> bool:
        """Whether the source has reached its `max_epochs` for this lane."""
        limit = self.source.config.max_epochs
        return limit is not None and self.lane + self.spec.geometry.lanes * self.cursor >= limit * len(self.source)

    def encoded(self, epoch: int, index: int) -> Encoded:
        """The whole document; raises BadSample."""
        return encode(self.source.get(index, epoch), self.spec.tokenizer, self.spec.vision)

    def next_piece(self) -> tuple[list[Any], Encoded] | None:
        """(reference, piece) and step on; None when exhausted. Bad samples raise or are skipped, as configured."""
        geometry = self.spec.geometry
        failures = 0
        while not self.exhausted:
            epoch, index = self.where()
            try:
                document = self._document or self.encoded(epoch, index)
                newline = self.spec.tokenizer.ends_line
                stop = next_cut(document, self.start, geometry.length, geometry.max_patches, newline)
            except BadSample as error:
                if self.spec.data.on_bad_sample == "raise":
                    raise
                failures += 1
                self._skip(str(error), failures)
                continue
            piece = document.piece(self.start, stop)
            reference = [self.source.name, epoch, index, self.start, stop]
            if stop == len(document):
                self.cursor, self.start, self._document = self.cursor + 1, 0, None
            else:
                self.start, self._document = stop, document
            return reference, piece
        return None

    def _skip(self, reason: str, failures: int) -> None:
        self.cursor, self.start, self._document = self.cursor + 1, 0, None
        self.num_skipped += 1
        self.skipped = [*self.skipped[-7:], reason]
        if failures > max(100, len(self.source)):
            raise DataError(f"source {self.source.name!r}: {failures} samples in a row cannot be used; last: {reason}")

    def state_dict(self) -> dict[str, Any]:
        """Cursor and counters as JSON types."""
        return {"cursor": self.cursor, "start": self.start, "skipped": self.skipped, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the current document is encoded again when it is needed."""
        self.cursor, self.start, self._document = int(state["cursor"]), int(state["start"]), None
        self.skipped, self.num_skipped = list(state["skipped"]), int(state["num_skipped"])


class Lane:
    """Micro-batches of lane `index`; see the head of this file."""

    def __init__(self, spec: Spec, sources: Mapping[str, Source], index: int) -> None:
        self.spec, self.index = spec, index
        self.streams = {name: Stream(source, spec, index) for name, source in sources.items()}
        self.mixture = Mixture({config.name: config.weight for config in spec.data.sources})
        self.delivered = dict.fromkeys(sources, 0)
        self.positions = 0
        self._pool: list[tuple[list[Any], Encoded]] = []

    def _refill(self) -> None:
        target = self.spec.data.lookahead * self.spec.geometry.tokens
        held = sum(len(piece) for _, piece in self._pool)
        available = {name for name, stream in self.streams.items() if not stream.exhausted}
        while held < target:
            name = self.mixture.pick(available)
            if name is None:
                return
            found = self.streams[name].next_piece()
            if found is None:
                available.discard(name)
                continue
            self._pool.append(found)
            self.mixture.add(name, len(found[1]))
            held += len(found[1])

    def next_batch(self) -> PackedBatch:
        """The next micro-batch; raises DataExhausted when every source has reached its max_epochs."""
        self._refill()
        if not self._pool:
            raise DataExhausted(
                "every source has reached its max_epochs; raise max_epochs or lower the number of steps"
            )
        geometry = self.spec.geometry
        chosen = choose([piece for _, piece in self._pool], geometry.tokens, geometry.max_patches)
        documents = [self._pool[i][1] for i in chosen]
        taken = set(chosen)
        self._pool = [entry for i, entry in enumerate(self._pool) if i not in taken]
        self.positions += geometry.tokens
        for document in documents:
            self.delivered[document.source] += len(document)
        return self.assemble(documents)

    def assemble(self, documents: Sequence[Encoded]) -> PackedBatch:
        """Documents as one micro-batch of this job's geometry."""
        return assemble(
            documents,
            tokens=self.spec.geometry.tokens,
            pad_id=self.spec.tokenizer.pad_id,
            sources=list(self.streams),
            patch_size=self.spec.vision.patch_size,
            length=self.spec.geometry.length,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything the next batch depends on, as JSON types."""
        return {
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "mixture": self.mixture.state_dict(),
            "pool": [reference for reference, _ in self._pool],
            "delivered": dict(self.delivered),
            "positions": self.positions,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: only the documents of the pool are encoded again."""
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        self.mixture.load_state_dict(state["mixture"])
        self.delivered, self.positions = dict(state["delivered"]), int(state["positions"])
        whole: dict[tuple[str, int, int], Encoded] = {}
        self._pool = []
        for name, epoch, index, start, stop in state["pool"]:
            key = (name, epoch, index)
            if key not in whole:
                whole[key] = self.streams[name].encoded(epoch, index)
            self._pool.append(([name, epoch, index, start, stop], whole[key].piece(start, stop)))


def build_lanes(
    spec: Spec, sources: Mapping[str, Source], states: Mapping[int, Mapping[str, Any] | None]
) -> list[Lane]:
    """Lanes by index, each at its state (None: at the beginning)."""
    lanes = []
    for index, state in states.items():
        lane = Lane(spec, sources, index)
        if state is not None:
            lane.load_state_dict(state)
        lanes.append(lane)
    return lanes


def geometry_identity(spec: Spec, sources: Mapping[str, Source]) -> dict[str, Any]:
    """What a saved cursor belongs to; a resume with another identity is refused, naming the differences."""
    vision = spec.vision
    return {
        "seed": spec.data.seed,
        "lookahead": spec.data.lookahead,
        **asdict(spec.geometry),
        "order": list(sources),
        "sources": {name: source.fingerprint() for name, source in sources.items()},
        "max_epochs": {name: source.config.max_epochs for name, source in sources.items()},
        "tokenizer": spec.tokenizer.hash,
        "patches": [vision.patch_size, *vision.merge_kernel_size, vision.in_patch_limit, vision.max_patches_per_side],
        "frames": [vision.pos_emb_time, vision.in_patch_limit_each_frame],
    }
