"""One source as one lane reads it: in the epoch's order, long documents piece by piece, bad samples raised or
left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, TypeAlias

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import BadSample, DataError, one_sample
from earlyfusion.data.loading.encode import Encoded, encode, next_cut, refuse_longer
from earlyfusion.data.loading.mixture import Schedule
from earlyfusion.data.loading.order import Permutation
from earlyfusion.data.sources.base import Source, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.vision.balance import VisionCost
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import num_patches

Reference: TypeAlias = tuple[str, int, int, int, int]
"""(source, epoch, index, first token, end) of a piece."""
_MARGIN = 1.1
"""Documents passed over for a skip, relative to the mean."""
_MOST_IN_A_ROW = 100_000
"""Bad samples after which a source is given up, however many more its index claims to hold."""
_LAST = 8
"""Messages of left-out samples kept for a report."""


@dataclass(frozen=True)
class Geometry:
    """Shape of the micro-batches and of the job."""

    length: int
    """Longest document in tokens."""
    tokens: int
    """Positions of one micro-batch: rows x length, laid end to end."""
    max_patches: int
    """Most patches of one micro-batch."""
    lanes: int = 1
    """Micro-batches of one optimizer step, over all ranks."""
    stage: int = 0
    """Number of the training stage; each stage has an order of its own."""
    max_vision_flops: float | None = None
    """Most forward FLOPs of the vision tower in one micro-batch; None for no limit."""

    def __post_init__(self) -> None:
        for name, least in (("length", 8), ("tokens", 8), ("max_patches", 0), ("lanes", 1), ("stage", 0)):
            value = getattr(self, name)
            if value < least:
                raise DataError(f"{name} = {value}: expected at least {least}")
        if self.length > self.tokens:
            raise DataError(
                f"length {self.length} is more than tokens {self.tokens}: raise tokens or lower length"
            )

    @property
    def max_cost(self) -> float:
        """`max_vision_flops`, infinity for no limit."""
        return math.inf if self.max_vision_flops is None else self.max_vision_flops


@dataclass(frozen=True)
class Spec:
    """Everything that makes the data of a stage; crosses process boundaries, and builds the same lanes
    there."""

    data: DataConfig
    tokenizer: Tokenizer
    vision: VisionConfig
    geometry: Geometry
    schedule: Schedule | None = None
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Source -> factor of the loss weights of its documents; 1 where not named."""

    @cached_property
    def cost(self) -> VisionCost:
        """What a picture costs the tower."""
        return VisionCost.from_config(self.vision)

    def build_sources(self) -> dict[str, Source]:
        """Name -> source, in the order of the config."""
        seed, fraction = self.data.seed, self.data.val_fraction
        return {
            config.name: build_source(config, seed=seed, val_fraction=fraction)
            for config in self.data.sources
        }


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
        "patches": [
            vision.patch_size,
            *vision.merge_kernel_size,
            vision.in_patch_limit,
            vision.max_patches_per_side,
        ],
        "frames": [vision.pos_emb_time, vision.in_patch_limit_each_frame],
        "decode": [spec.data.decode.fast, spec.data.decode.jpeg_gap, spec.data.decode.video_backend],
    }


@lru_cache(maxsize=64)
def _order(size: int, seed: int, stage: int, name: str, epoch: int) -> Permutation:
    return Permutation(size, seed, stage, name, epoch)


class Watch:
    """What a data worker is reading right now, legible to another process, also after the worker has died.

    A line of text in fixed memory: ordinary, or shared (`multiprocessing.RawArray("B", Watch.SIZE)`)."""

    BYTES, COUNT = 512, 8
    SIZE = BYTES + COUNT

    def __init__(self, memory: Any = None) -> None:
        self._view = memoryview(bytearray(self.SIZE) if memory is None else memory).cast("B")

    def note(self, text: str) -> None:
        """Replace the line (cut at 511 bytes) and count the change."""
        raw = text.encode("utf-8", "replace")[: self.BYTES - 1]
        self._view[self.COUNT : self.COUNT + len(raw) + 1] = raw + b"\0"
        self._view[: self.COUNT] = ((self.count + 1) % 2**63).to_bytes(self.COUNT, "little")

    @property
    def count(self) -> int:
        """Changes so far: a worker whose count stands still is stuck, or has nothing to do."""
        return int.from_bytes(self._view[: self.COUNT], "little")

    @property
    def text(self) -> str:
        """The line; empty before the first note."""
        return bytes(self._view[self.COUNT :]).split(b"\0", 1)[0].decode("utf-8", "replace")


class Stream:
    """The documents of one source that one lane reads, piece by piece."""

    def __init__(self, source: Source, spec: Spec, lane: int, watch: Watch | None = None) -> None:
        self.source, self.spec, self.lane, self.watch = source, spec, lane, watch or Watch()
        self.cursor, self.start = 0, 0
        """Documents of this lane already finished; first token of the next piece inside the current one."""
        self.given = [0, 0]
        """Documents read and their tokens, those left out not counted."""
        self.skipped: dict[str, int] = {}
        """Samples left out, by reason."""
        self.last: list[str] = []
        """Their messages, newest last; only as many as fit a report."""
        self.noted: list[dict[str, Any]] = []
        """Those not yet taken for the log."""
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
        return limit is not None and self.lane + self.spec.geometry.lanes * self.cursor >= limit * len(
            self.source
        )

    def encoded(self, epoch: int, index: int) -> Encoded:
        """The whole document; raises BadSample."""
        name = self.source.name
        self.watch.note(
            f"reading source {name!r}, sample {index} of epoch {epoch}, {' '.join(self.source.locate(index))}"
        )
        sample = self.source.get(index, epoch)
        self.watch.note(f"encoding source {name!r}, sample {index} of epoch {epoch}, {sample.key}")
        return encode(sample, self.spec.tokenizer, self.spec.vision, decode=self.spec.data.decode)

    def _described(self, index: int) -> str:
        return " ".join(["source", repr(self.source.name), *self.source.locate(index)])

    def next_piece(self) -> tuple[Reference, Encoded] | None:
        """(reference, piece) and step on; None when exhausted. Bad samples raise or are skipped, as
        configured."""
        failures = 0
        while not self.exhausted:
            epoch, index = self.where()
            try:
                with one_sample(partial(self._described, index)):
                    document = self._document
                    if document is None:
                        document = self.encoded(epoch, index)
                    stop = self._cut(document)
            except BadSample as error:
                if self.spec.data.on_bad_sample == "raise":
                    raise
                failures += 1
                self._skip(error, epoch, index, failures)
                continue
            if self.start == 0:
                self.given = [self.given[0] + 1, self.given[1] + len(document)]
            piece = document.piece(self.start, stop)
            reference = (self.source.name, epoch, index, self.start, stop)
            if stop == len(document):
                self._next_document()
            else:
                self.start, self._document = stop, document
            return reference, piece
        return None

    def _next_document(self) -> None:
        self.cursor, self.start, self._document = self.cursor + 1, 0, None

    def _cut(self, document: Encoded) -> int:
        """End of the piece that begins at `start`, within length, patches and vision FLOPs."""
        geometry = self.spec.geometry
        if self.spec.data.overlong == "skip":
            refuse_longer(document, geometry.length)
        patches = geometry.max_patches
        if geometry.max_vision_flops is not None:
            patches = min(patches, self._affordable(document, geometry.max_vision_flops))
        return next_cut(document, self.start, geometry.length, patches, self.spec.tokenizer.ends_line)

    def _affordable(self, document: Encoded, limit: float) -> int:
        """Patches of the media items from `start` on that together cost at most `limit`."""
        patches, spent = 0, 0.0
        for (first, _), grid in zip(document.spans, document.grids):
            if first < self.start:
                continue
            cost = self.spec.cost.of([grid])
            if cost > limit:
                raise BadSample(
                    f"{document.source} {document.key}: a picture of {num_patches(grid)} patches costs"
                    f" {cost:.3g} FLOPs; max_vision_flops = {limit:.3g} allows less: raise it or lower"
                    " vision.in_patch_limit",
                    "over_budget",
                )
            if spent + cost > limit:
                break
            patches, spent = patches + num_patches(grid), spent + cost
        return patches

    def _skip(self, error: BadSample, epoch: int, index: int, failures: int) -> None:
        shard, key = self.source.locate(index)
        self._next_document()
        reason, message = error.reason, str(error)
        self.skipped = {**self.skipped, reason: self.skipped.get(reason, 0) + 1}
        self.last = [*self.last[1 - _LAST :], message]
        self.noted.append(
            {
                "source": self.source.name,
                "shard": shard,
                "key": key,
                "epoch": epoch,
                "index": index,
                "reason": reason,
                "message": message,
            }
        )
        if failures > max(100, min(len(self.source), _MOST_IN_A_ROW)):
            raise DataError(
                f"source {self.source.name!r}: {failures} samples in a row cannot be used; last: {message}"
            )

    def pass_over(self, tokens: float) -> None:
        """Move on, unread, by as many documents as hold `tokens` by the mean of those read, and a tenth more,
        since lengths differ; the current one goes first."""
        if self.given[0] == 0 or tokens <= 0:
            return
        mean = self.given[1] / self.given[0]
        self.cursor += max(1, math.ceil(_MARGIN * tokens / mean))
        self.start, self._document = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Cursor and counters as JSON types."""
        return {
            "cursor": self.cursor,
            "start": self.start,
            "given": list(self.given),
            "skipped": self.skipped,
            "last": self.last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the current document is encoded again when it is needed."""
        self.cursor, self.start, self._document = int(state["cursor"]), int(state["start"]), None
        self.given = [int(n) for n in state["given"]]
        self.skipped, self.last, self.noted = dict(state["skipped"]), list(state["last"]), []
