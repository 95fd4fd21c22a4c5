"""A lane: one endless series of micro-batches with its own cursors, mixture account and packing pool.

An optimizer step of the whole job takes one micro-batch of every lane. Lane j of L reads every L-th document,
from j on, of each source's shuffled epochs; rank r of W owns the lanes r, r + W, ... So what a step trains on
depends on the number of lanes and on the seed, never on the number of ranks, processes or threads.

The state of a lane is small JSON: cursors, account, counts, and the pool as (source, epoch, index, start,
stop, tokens, patches, FLOPs) references. A resume reads nothing before the cursor, and of the pool only what
is about to be packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from earlyfusion.data.errors import DataExhausted, told
from earlyfusion.data.loading.encode import Encoded
from earlyfusion.data.loading.mixture import Blend
from earlyfusion.data.loading.pack import PackedBatch, Size, assemble, choose
from earlyfusion.data.loading.stream import Reference, Spec, Stream, Watch
from earlyfusion.data.sources.base import Source
from earlyfusion.kernels.errors import one_line

COUNTS = ("tokens", "media_tokens", "vision_tokens", "documents", "skipped", "positions")
"""Tokens delivered, of which image features, of which in documents with a picture, and documents read, all by
source; samples left out, by reason; positions of the micro-batches."""


@dataclass(slots=True)
class Held:
    """A piece that waits to be packed; `piece` is None after a resume until the packer takes it."""

    reference: Reference
    size: Size
    piece: Encoded | None = None


class Lane:
    """Micro-batches of lane `index`; see the head of this file. `watch` tells what is being read."""

    def __init__(self, spec: Spec, sources: Mapping[str, Source], index: int, watch: Watch) -> None:
        self.spec, self.index, self.watch = spec, index, watch
        self.streams = {name: Stream(source, spec, index, watch) for name, source in sources.items()}
        pictures = [config.name for config in spec.data.sources if config.has_pictures]
        self.blend = Blend(spec.weights, pictures, spec.schedule)
        self.steps = 0
        """Steps delivered or skipped."""
        self.skips: list[list[int]] = []
        """Ranges of steps still to be left out, [first, end)."""
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in COUNTS}
        self.last_skipped = ""
        """Message of the last sample left out."""
        self._pool: list[Held] = []
        # Pieces of one document of a restored pool are often wanted one after the other.
        self._whole = lru_cache(maxsize=8)(self._encoded)

    def _encoded(self, name: str, epoch: int, index: int) -> Encoded:
        return self.streams[name].encoded(epoch, index)

    def _refill(self) -> None:
        tokens = self.spec.geometry.tokens
        held = self._pool_tokens()
        available = {name for name, stream in self.streams.items() if not stream.exhausted}
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

    def next_batch(self) -> tuple[PackedBatch, list[dict[str, Any]]]:
        """The next micro-batch, and the samples left out on the way (stats.py); raises DataExhausted when
        every source has reached its max_epochs."""
        self._leave_out()
        self._refill()
        skipped = self._take_skipped()
        if not self._pool:
            lost = self.counts["skipped"]
            why = f" ({lost.total()} samples left out: {told(lost)}; last: {one_line(self.last_skipped)})"
            raise DataExhausted(
                "every source has reached its max_epochs; raise max_epochs or lower the number of steps"
                + why * bool(lost)
            )

        # With several lanes a step waits for the one with the most vision work: each keeps to its pool's
        # density.
        geometry, sizes, aim = self.spec.geometry, [held.size for held in self._pool], None
        if geometry.lanes > 1:
            costs = sum(size.cost for size in sizes)
            aim = costs * geometry.tokens / max(geometry.tokens, self._pool_tokens())
        chosen = choose(sizes, Size(geometry.tokens, geometry.max_patches, geometry.max_cost), aim)
        documents = [self._piece(self._pool[i]) for i in chosen]
        for i in reversed(chosen):
            del self._pool[i]
        self.steps += 1

        # Counted as they go out, so that the counts are those of the checkpoint's step.
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

    def _take_skipped(self) -> list[dict[str, Any]]:
        """Samples left out since the last step, counted and with their place in the run."""
        entries = []
        place = {"stage": self.spec.geometry.stage, "lane": self.index, "step": self.steps + 1}
        for stream in self.streams.values():
            entries += [{**place, **entry} for entry in stream.skipped]
            stream.skipped = []
        for entry in entries:
            self.counts["skipped"][entry["reason"]] += 1
            self.last_skipped = entry["message"]
        return entries

    def _piece(self, held: Held) -> Encoded:
        """The piece itself; after a resume its document is read again now."""
        if held.piece is not None:
            return held.piece
        name, epoch, index, start, stop = held.reference
        return self._whole(name, epoch, index).piece(start, stop)

    def _leave_out(self) -> None:
        """Pass over the ranges of `skips` that begin here: the pool goes, and every cursor moves on
        unread."""
        while self.skips and self.skips[0][0] <= self.steps:
            _, end = self.skips.pop(0)
            count = end - self.steps
            if count <= 0:
                continue
            # Shares as they came out so far; before anything came out nothing can be told, and only the pool
            # goes.
            given = self.counts["tokens"]
            for name, stream in self.streams.items():
                share = given[name] / max(1, given.total())
                stream.pass_over(count * self.spec.geometry.tokens * share)
            self._pool = []
            self.steps += count

    def state_dict(self) -> dict[str, Any]:
        """Everything the next batch depends on, as JSON types."""
        return {
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "mixture": self.blend.state_dict(),
            "pool": [[*held.reference, *held.size] for held in self._pool],
            "counts": {name: dict(counts) for name, counts in self.counts.items()},
            "last_skipped": self.last_skipped,
            "steps": self.steps,
            "skips": [list(span) for span in self.skips],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; reads no sample."""
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        self.blend.load_state_dict(state["mixture"])
        self._pool = [Held(tuple(row[:5]), Size(*row[5:])) for row in state["pool"]]
        self.counts = {name: Counter(counts) for name, counts in state["counts"].items()}
        self.last_skipped, self.steps = state["last_skipped"], state["steps"]
        self.skips = [list(span) for span in state["skips"]]


def add_skip(state: dict[str, Any], first: int, end: int) -> None:
    """Enter the range of steps [first, end) into a lane's state; overlapping ranges become one."""
    spans: list[list[int]] = []
    for a, b in sorted([*state["skips"], [first, end]]):
        if spans and a <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], b)
        else:
            spans.append([a, b])
    # What lies behind stays as it was.
    state["skips"] = [span for span in spans if span[1] > state["steps"]]


def build_lanes(
    spec: Spec,
    sources: Mapping[str, Source],
    states: Mapping[int, Mapping[str, Any] | None],
    watch: Watch | None = None,
) -> list[Lane]:
    """Lanes by index, each at its state (None: at the beginning)."""
    lanes = []
    for index, state in states.items():
        lane = Lane(spec, sources, index, watch or Watch())
        if state is not None:
            lane.load_state_dict(state)
        lanes.append(lane)
    return lanes
