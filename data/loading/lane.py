"""A lane: one endless series of micro-batches with its own cursors, mixture account and packing pool.

An optimizer step of the whole job takes one micro-batch of every lane. Lane j of L reads every L-th document,
from j on, of each source's shuffled epochs; rank r of W owns the lanes r, r + W, ... So what a step trains on
depends on the number of lanes and on the seed, never on the number of ranks, processes or threads.

The state of a lane is small JSON: cursors, account, counts, and the pool as (source, epoch, index, start,
stop, tokens, patches, FLOPs) references. A resume reads nothing before the cursor, and of the pool only what
is about to be packed.
"""

import ctypes
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import BadSample, DataError, DataExhausted, told
from earlyfusion.data.loading.encode import (
    Encoded,
    PackedBatch,
    Size,
    assemble,
    choose,
    encode,
    next_cut,
    refuse_longer,
)
from earlyfusion.data.loading.order import Blend, Permutation, Schedule
from earlyfusion.data.sample import one_sample
from earlyfusion.data.sources.base import Source, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.files import Record
from earlyfusion.vision.config import VisionConfig
from earlyfusion.vision.patches import VisionCost

Reference = tuple[str, int, int, int, int]
"""(source, epoch, index, first token, end) of a piece."""
_MARGIN = 1.1
"""Documents passed over for a skip, relative to the mean."""
_MOST_IN_A_ROW = 100_000
"""Bad samples after which a source is given up, however many more its index claims to hold."""
COUNTS = ("tokens", "media_tokens", "vision_tokens", "documents", "skipped", "positions")
"""Counted: tokens delivered, of which image features, of which in documents with a picture, and documents
read, all by source; samples left out, by reason; positions of the micro-batches."""


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


@dataclass(frozen=True)
class Spec:
    """Everything that makes the data of a stage; crosses process boundaries, and builds the same lanes
    there."""

    data: DataConfig
    tokenizer: Tokenizer
    vision: VisionConfig
    geometry: Geometry
    weights: Mapping[str, float]
    """Source -> mixture weight."""
    schedule: Schedule | None = None
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Source -> factor of the loss weights of its documents; 1 where not named."""

    @cached_property
    def cost(self) -> VisionCost:
        """What a picture costs the tower."""
        # Kept: asked for at every piece, and the same for the whole stage.
        return VisionCost.from_config(self.vision)

    def build_sources(self) -> dict[str, Source]:
        """Name -> source, in the order of the config."""
        # The order of the config is the order of the source ids in a batch.
        sources = {}
        for config in self.data.sources:
            source = build_source(config, seed=self.data.seed, val_fraction=self.data.val_fraction)
            sources[config.name] = source
        return sources

    def identity(self, sources: Mapping[str, Source]) -> Record:
        """What a saved cursor belongs to; a resume with another identity is refused, naming the
        differences."""
        vision, decode = self.vision, self.data.decode
        # Whatever changes the tokens of a document or the order they come in.
        facts: Record = {
            "version": 4,
            "seed": self.data.seed,
            "lookahead": self.data.lookahead,
            **asdict(self.geometry),
            "order of the sources": list(sources),
            "tokenizer": self.tokenizer.hash,
            "patches": [vision.patch_size, *vision.merge_kernel_size, vision.in_patch_limit],
            "patches a side": vision.max_patches_per_side,
            "frames": [vision.pos_emb_time, vision.in_patch_limit_each_frame],
            "decode": [decode.fast, decode.video_backend],
        }
        for name, source in sources.items():
            facts[f"options or files of source {name!r}"] = source.fingerprint()
            facts[f"max_epochs of {name!r}"] = source.config.max_epochs
        return facts


class Watch(ctypes.Structure):
    """What a data worker is reading right now, legible to another process, also after the worker has died.

    A line in fixed memory: ordinary, or shared (`multiprocessing.RawValue(Watch)`).
    """

    _fields_ = (("line", ctypes.c_char * 512),)

    def note(self, text: str) -> None:
        """Replace the line (cut at 512 bytes): a worker whose line stands still is stuck."""
        # ctypes refuses more than the field holds.
        self.line = text.encode("utf-8", "replace")[:512]

    @property
    def text(self) -> str:
        """The line; "" before the first note."""
        return bytes(self.line).decode("utf-8", "replace")


@lru_cache(maxsize=64)
def _order(size: int, seed: int, stage: int, name: str, epoch: int) -> Permutation:
    return Permutation(size, seed, stage, name, epoch)


class Stream:
    """The documents of one source that one lane reads, piece by piece."""

    def __init__(self, source: Source, spec: Spec, lane: int, watch: Watch) -> None:
        self.source, self.spec, self.lane, self.watch = source, spec, lane, watch
        self.cursor = self.start = 0
        """Documents of this lane already finished; first token of the next piece inside the current one."""
        self.documents = self.tokens = 0
        """Documents read and their tokens, those left out not counted."""
        self.skipped: list[Record] = []
        """Samples left out and not yet taken for the log."""
        self._document: Encoded | None = None

    def where(self) -> tuple[int, int] | None:
        """(epoch, index) of the current document; None when the source has reached its `max_epochs`."""
        number = self.lane + self.spec.geometry.lanes * self.cursor
        epoch, position = divmod(number, len(self.source))
        limit = self.source.config.max_epochs
        if limit is not None and epoch >= limit:
            return None
        # Kept between calls: its keys cost a few hashes.
        order = _order(
            len(self.source), self.spec.data.seed, self.spec.geometry.stage, self.source.name, epoch
        )
        return epoch, order[position]

    def encoded(self, epoch: int, index: int) -> Encoded:
        """The whole document; raises BadSample, also for what nobody thought of."""
        source, number = f"source {self.source.name!r}", f"sample {index} of epoch {epoch}"
        where = " ".join([source, *self.source.locate(index)])
        with one_sample(where):
            # Before anything is touched: a decoder may end the process here.
            self.watch.note(f"reading {where}, {number}")
            sample = self.source.get(index, epoch)
            self.watch.note(f"encoding {source}, {number}, {sample.key}")
            return encode(sample, self.spec.tokenizer, self.spec.vision, decode=self.spec.data.decode)

    def next_piece(self) -> tuple[Reference, Encoded] | None:
        """(reference, piece) and step on; None when exhausted. Bad samples raise or are skipped, as
        configured."""
        # Counted in a row: one good sample shows that the source can still give.
        failures, geometry = 0, self.spec.geometry
        while (place := self.where()) is not None:
            try:
                document = self._document or self.encoded(*place)
                if self.spec.data.overlong == "skip":
                    refuse_longer(document, geometry.length)
                # A picture that no batch can hold is refused by the cut.
                newline = self.spec.tokenizer.ends_line
                stop = next_cut(document, self.start, geometry.length, geometry.max_patches, newline)
            except BadSample as error:
                if self.spec.data.on_bad_sample == "raise":
                    raise
                failures += 1
                self._skip(error, *place)
                if failures > max(100, min(len(self.source), _MOST_IN_A_ROW)):
                    raise DataError(
                        f"source {self.source.name!r}: {failures} samples in a row cannot be used; last:"
                        f" {error}"
                    ) from None
                continue

            start = self.start
            if start == 0:
                self.documents += 1
                self.tokens += len(document)
            if stop == len(document):
                self._move(1)
            else:
                self.start, self._document = stop, document
            return (self.source.name, *place, start, stop), document.piece(start, stop)
        return None

    def _move(self, documents: int) -> None:
        self.cursor, self.start, self._document = self.cursor + documents, 0, None

    def _skip(self, error: BadSample, epoch: int, index: int) -> None:
        # Where it lies is asked only now: for shards it may read an index.
        shard, key = self.source.locate(index)
        entry = {"source": self.source.name, "shard": shard, "key": key, "epoch": epoch, "index": index}
        self.skipped.append({**entry, "reason": error.reason, "message": str(error)})
        self._move(1)

    def pass_over(self, tokens: float) -> None:
        """Move on, unread, by as many documents as hold `tokens` by the mean of those read, and a tenth more,
        since lengths differ; the current one goes first."""
        if self.documents and tokens > 0:
            # Without a document read there is no length to go by, and the cursor stays.
            mean = self.tokens / self.documents
            self._move(max(1, math.ceil(_MARGIN * tokens / mean)))

    def state_dict(self) -> dict[str, int]:
        """Cursor and counters as JSON types."""
        return {name: getattr(self, name) for name in ("cursor", "start", "documents", "tokens")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken; the current document is encoded again when it is needed."""
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(slots=True)
class Held:
    """A piece that waits to be packed; `piece` is None after a resume until the packer takes it."""

    reference: Reference
    size: Size
    piece: Encoded | None = None


class Lane:
    """Micro-batches of lane `index`, from `state` on (None: the beginning); see the head of this file.

    `watch` tells what is being read.
    """

    def __init__(
        self,
        spec: Spec,
        sources: Mapping[str, Source],
        index: int,
        watch: Watch,
        state: Record | None = None,
    ) -> None:
        self.spec, self.index, self.watch = spec, index, watch
        # Every lane has cursors of its own: the ranks share nothing.
        self.streams = {name: Stream(source, spec, index, watch) for name, source in sources.items()}
        pictures = [config.name for config in spec.data.sources if config.has_pictures]
        self.blend = Blend(spec.weights, pictures, spec.schedule)
        self.steps = 0
        """Steps delivered or skipped."""
        self.skips: list[list[int]] = []
        """Ranges of steps still to be left out, [first, end)."""
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in COUNTS}
        self._pool: list[Held] = []
        if state is None:
            return

        # Nothing is read here: pieces of the pool come back one by one, as they are packed.
        self.steps, self.skips = state["steps"], [list(span) for span in state["skips"]]
        self.counts = {name: Counter(counts) for name, counts in state["counts"].items()}
        self._pool = [Held(tuple(row[:5]), Size(*row[5:])) for row in state["pool"]]
        self.blend.load_state_dict(state["mixture"])
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])

    def state_dict(self) -> Record:
        """Everything the next batch depends on, as JSON types."""
        return {
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "mixture": self.blend.state_dict(),
            # References and sizes: enough to choose from without reading a sample.
            "pool": [[*held.reference, *held.size] for held in self._pool],
            "counts": {name: dict(counts) for name, counts in self.counts.items()},
            "steps": self.steps,
            "skips": [list(span) for span in self.skips],
        }

    def next_batch(self) -> tuple[PackedBatch, list[Record]]:
        """The next micro-batch, and the samples left out on the way (loader.py); raises DataExhausted when
        every source has reached its max_epochs."""
        # Order matters: a skip moves the cursors that the refill reads from.
        self._leave_out()
        self._refill()
        skipped = self._take_skipped()
        if not self._pool:
            lost = self.counts["skipped"]
            raise DataExhausted(
                "every source has reached its max_epochs; raise max_epochs or lower the number of steps"
                f" ({lost.total()} samples left out: {told(lost) or 'none'})"
            )
        documents = self._choose()
        self.steps += 1

        # Counted as they go out, so that the counts are those of the checkpoint's step.
        geometry = self.spec.geometry
        self.counts["positions"]["all"] += geometry.tokens
        for document in documents:
            self.counts["tokens"][document.source] += len(document)
            if document.grids:
                self.counts["vision_tokens"][document.source] += len(document)
                self.counts["media_tokens"][document.source] += len(document.media_positions)
        for name, stream in self.streams.items():
            self.counts["documents"][name] = stream.documents
        self.watch.note("packing")
        batch = assemble(
            documents,
            tokens=geometry.tokens,
            pad_id=self.spec.tokenizer.pad_id,
            sources=list(self.streams),
            patch_size=self.spec.vision.patch_size,
            length=geometry.length,
            factors=self.spec.loss_weights,
        )
        return batch, skipped

    def _refill(self) -> None:
        tokens = self.spec.geometry.tokens
        # Sources that end here are asked no more in this round.
        held, available = self._pool_tokens(), set(self.streams)
        while held < self.spec.data.lookahead * tokens:
            # By the schedule of the step in which the piece will be packed, not of this one.
            name = self.blend.pick(available, self.steps + held / tokens)
            if name is None:
                return
            found = self.streams[name].next_piece()
            if found is None:
                available.discard(name)
                continue
            reference, piece = found
            size = Size(len(piece), piece.num_patches, self.spec.cost.of(piece.grids))
            self._pool.append(Held(reference, size, piece))
            self.blend.add(name, len(piece), bool(piece.grids))
            held += len(piece)

    def _pool_tokens(self) -> int:
        return sum(held.size.tokens for held in self._pool)

    def _choose(self) -> list[Encoded]:
        """The pieces of the next micro-batch, taken out of the pool."""
        # With several lanes a step waits for the one with the most vision work: each keeps to its pool's
        # density.
        geometry, sizes, aim = self.spec.geometry, [held.size for held in self._pool], None
        if geometry.lanes > 1:
            costs = sum(size.cost for size in sizes)
            aim = costs * geometry.tokens / max(geometry.tokens, self._pool_tokens())
        chosen = choose(sizes, Size(geometry.tokens, geometry.max_patches, math.inf), aim)

        # From the end, so that the places of the others stay.
        documents = []
        for held in [self._pool.pop(i) for i in reversed(chosen)]:
            name, epoch, index, start, stop = held.reference
            # After a resume its document is read again now.
            documents.append(held.piece or self.streams[name].encoded(epoch, index).piece(start, stop))
        return documents[::-1]

    def _take_skipped(self) -> list[Record]:
        """Samples left out since the last step, counted and with their place in the run."""
        entries = []
        place = {"stage": self.spec.geometry.stage, "lane": self.index, "step": self.steps + 1}
        for stream in self.streams.values():
            entries += [{**place, **entry} for entry in stream.skipped]
            stream.skipped = []
        # Counted here and not in the stream, so that the counts belong to the step.
        self.counts["skipped"].update(entry["reason"] for entry in entries)
        return entries

    def _leave_out(self) -> None:
        """Pass over the ranges of `skips` that begin here: the pool goes, and every cursor moves on
        unread."""
        while self.skips and self.skips[0][0] <= self.steps:
            count = self.skips.pop(0)[1] - self.steps
            # Shares as they came out so far; before anything came out nothing can be told, and only the pool
            # goes.
            given = self.counts["tokens"]
            for name, stream in self.streams.items():
                share = given[name] / max(1, given.total())
                stream.pass_over(count * self.spec.geometry.tokens * share)
            self._pool = []
            self.steps += count


def add_skip(state: Record, first: int, end: int) -> None:
    """Enter the range of steps [first, end) into a lane's state; overlapping ranges become one."""
    spans: list[list[int]] = []
    # Sorted by their beginnings, ranges that meet stand side by side.
    for a, b in sorted([*state["skips"], [first, end]]):
        if spans and a <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], b)
        else:
            spans.append([a, b])
    # What lies behind stays as it was.
    state["skips"] = [span for span in spans if span[1] > state["steps"]]
