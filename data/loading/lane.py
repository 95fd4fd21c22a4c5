"""A lane: one endless series of micro-batches with its own cursors, mixture account and packing pool.

An optimizer step of the whole job takes one micro-batch of every lane. Lane j of L reads every L-th document,
from j on, of each source's shuffled epochs; rank r of W owns the lanes r, r + W, ... So what a step trains on
depends on the number of lanes and on the seed, never on the number of ranks, processes or threads.

The state of a lane is small JSON: cursors, account, and the pool as (source, epoch, index, start, stop,
tokens, patches, FLOPs) references. A resume reads nothing before the cursor, and of the pool only what is
about to be packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from earlyfusion.data.errors import DataError, DataExhausted, told
from earlyfusion.data.loading.encode import Encoded
from earlyfusion.data.loading.mixture import Blend
from earlyfusion.data.loading.pack import PackedBatch, assemble, choose
from earlyfusion.data.loading.stream import Reference, Spec, Stream, Watch
from earlyfusion.data.sources.base import Source
from earlyfusion.kernels.errors import one_line

_KEPT_WHOLE = 8
"""Documents of a restored pool kept whole while their other pieces may still be wanted."""


@dataclass(slots=True)
class Held:
    """A piece that waits to be packed; `piece` is None after a resume until the packer takes it."""

    reference: Reference
    tokens: int
    num_patches: int
    cost: float
    piece: Encoded | None = None

    def __len__(self) -> int:
        return self.tokens

    def saved(self) -> list[Any]:
        """As JSON types."""
        return [*self.reference, self.tokens, self.num_patches, self.cost]


class Lane:
    """Micro-batches of lane `index`; see the head of this file."""

    def __init__(self, spec: Spec, sources: Mapping[str, Source], index: int) -> None:
        self.spec, self.index = spec, index
        self._watch = Watch()
        self.streams = {name: Stream(source, spec, index, self._watch) for name, source in sources.items()}
        pictures = [config.name for config in spec.data.sources if config.has_pictures]
        self.blend = Blend(
            {config.name: config.weight for config in spec.data.sources}, pictures, spec.schedule
        )
        self.delivered = {name: [0, 0, 0] for name in sources}
        """Source -> [tokens, of which image features, of which in documents with a picture]."""
        self.positions, self.steps = 0, 0
        """Positions of the micro-batches delivered; steps delivered or skipped."""
        self.skips: list[list[int]] = []
        """Ranges of steps still to be left out, [first, end)."""
        self._pool: list[Held] = []
        self._whole: dict[tuple[str, int, int], Encoded] = {}

    def watch_with(self, watch: Watch) -> None:
        """Note every sample in `watch` before it is read."""
        self._watch = watch
        for stream in self.streams.values():
            stream.watch = watch

    def _refill(self) -> None:
        tokens = self.spec.geometry.tokens
        target = self.spec.data.lookahead * tokens
        held = sum(map(len, self._pool))
        available = {name for name, stream in self.streams.items() if not stream.exhausted}
        while held < target:
            name = self.blend.pick(
                available, self.steps + held / tokens
            )  # the step in which the piece will be packed
            if name is None:
                return
            found = self.streams[name].next_piece()
            if found is None:
                available.discard(name)
                continue
            reference, piece = found
            cost = self.spec.cost.of(piece.grids)
            self._pool.append(Held(reference, len(piece), piece.num_patches, cost, piece))
            self.blend.add(name, len(piece), bool(piece.grids))
            held += len(piece)

    def next_batch(self) -> PackedBatch:
        """The next micro-batch; raises DataExhausted when every source has reached its max_epochs."""
        self._leave_out()
        self._refill()
        if not self._pool:
            raise DataExhausted(
                "every source has reached its max_epochs; raise max_epochs or lower the number of steps"
                + self._told_of_skipped()
            )
        chosen = self._choose()
        documents = [self._taken(self._pool[i]) for i in chosen]
        taken = set(chosen)
        self._pool = [held for i, held in enumerate(self._pool) if i not in taken]
        self.positions += self.spec.geometry.tokens
        self.steps += 1
        for document in documents:
            row, count = self.delivered[document.source], len(document)
            row[0] += count
            row[1] += len(document.media_positions)
            row[2] += count if document.grids else 0
        self._watch.note("packing")
        return self.assemble(documents)

    def _told_of_skipped(self) -> str:
        """What was left out on the way: the reason why there is no more, when all samples of a source are
        bad."""
        lost = sum((Counter(stream.skipped) for stream in self.streams.values()), Counter[str]())
        if not lost:
            return ""
        last = next(message for stream in self.streams.values() for message in stream.last)
        return f" ({lost.total()} samples left out: {told(lost)}; one of them: {one_line(last)})"

    def _choose(self) -> list[int]:
        geometry = self.spec.geometry
        costs = [held.cost for held in self._pool]
        # With several lanes a step waits for the one with the most
        # vision work: each keeps to the density of its pool.
        aim = None
        if geometry.lanes > 1:
            aim = sum(costs) * geometry.tokens / max(geometry.tokens, sum(map(len, self._pool)))
        return choose(
            self._pool,
            geometry.tokens,
            geometry.max_patches,
            costs=costs,
            max_cost=geometry.max_cost,
            aim=aim,
        )

    def _taken(self, held: Held) -> Encoded:
        """The piece itself; after a resume its document is read again now."""
        if held.piece is not None:
            return held.piece
        name, epoch, index, start, stop = held.reference
        key = (name, epoch, index)
        if key not in self._whole:
            while len(self._whole) >= _KEPT_WHOLE:
                self._whole.pop(next(iter(self._whole)))
            self._whole[key] = self.streams[name].encoded(epoch, index)
        return self._whole[key].piece(start, stop)

    def _leave_out(self) -> None:
        """Pass over the ranges of `skips` that begin here: the pool goes, and every cursor moves on
        unread."""
        while self.skips and self.skips[0][0] <= self.steps:
            first, end = self.skips.pop(0)
            count = end - max(first, self.steps)
            if count <= 0:
                continue
            total = max(1, sum(row[0] for row in self.delivered.values()))
            for name, stream in self.streams.items():
                # shares as they came out so far; before anything came out
                # nothing can be told, and only the pool goes
                stream.pass_over(count * self.spec.geometry.tokens * self.delivered[name][0] / total)
            self._pool, self._whole = [], {}
            self.steps += count

    def take_skipped(self) -> list[dict[str, Any]]:
        """Samples left out since the last call, for the log."""
        found = []
        for stream in self.streams.values():
            found += [
                {"stage": self.spec.geometry.stage, "lane": self.index, "step": self.steps, **e}
                for e in stream.noted
            ]
            stream.noted = []
        return found

    def assemble(self, documents: Sequence[Encoded]) -> PackedBatch:
        """Documents as one micro-batch of this job's geometry."""
        return assemble(
            documents,
            tokens=self.spec.geometry.tokens,
            pad_id=self.spec.tokenizer.pad_id,
            sources=list(self.streams),
            patch_size=self.spec.vision.patch_size,
            length=self.spec.geometry.length,
            factors=self.spec.loss_weights,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything the next batch depends on, as JSON types."""
        return {
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "mixture": self.blend.state_dict(),
            "pool": [held.saved() for held in self._pool],
            "delivered": {name: list(row) for name, row in self.delivered.items()},
            "positions": self.positions,
            "steps": self.steps,
            "skips": [list(span) for span in self.skips],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; reads no sample."""
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])
        self.blend.load_state_dict(state["mixture"])
        self.delivered = {name: [int(n) for n in row] for name, row in state["delivered"].items()}
        self.positions, self.steps = int(state["positions"]), int(state["steps"])
        self.skips = [list(span) for span in state["skips"]]
        self._pool = [Held(tuple(row[:5]), int(row[5]), int(row[6]), float(row[7])) for row in state["pool"]]
        self._whole = {}


def add_skip(state: dict[str, Any], first: int, end: int) -> None:
    """Enter the range of steps [first, end) into a lane's state; overlapping ranges become one."""
    if not 0 <= first < end:
        raise DataError(f"skip of steps {first} to {end}: expected 0 <= first < end")
    spans: list[list[int]] = []
    for a, b in sorted([*state["skips"], [first, end]]):
        if spans and a <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], b)
        else:
            spans.append([a, b])
    state["skips"] = [span for span in spans if span[1] > state["steps"]]


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
