"""Loader: the data of one rank, step by step, resumed exactly.

    sizes = dict(length=1024, tokens=4096, max_patches=4096)
    loader = Loader(config, tokenizer, vision, **sizes, lanes=8, rank=r, world_size=W)
    for step in range(steps):
        batches = loader.next_step()          # lanes r, r + W, ...: one PackedBatch each
        ...
        state = loader.state_dict()           # after exactly this step, however far the prefetch has run

A stage with another length, batch size or number of lanes is a new Loader with the next `stage` number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.lane import Lane, add_skip, build_lanes
from earlyfusion.data.loading.mixture import Mixture, Schedule
from earlyfusion.data.loading.pack import PackedBatch
from earlyfusion.data.loading.prefetch import DirectFeed, Feed, ProcessFeed, ThreadFeed
from earlyfusion.data.loading.stats import LoaderStats, append_skipped
from earlyfusion.data.loading.stream import Geometry, Spec, geometry_identity
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.vision.config import VisionConfig

_VERSION = 2


class Loader:
    """Packed micro-batches of the lanes that `rank` of `world_size` owns.

    Args:
        data, tokenizer, vision: what is read, and how it becomes tokens and patches.
        length: longest document in tokens; longer ones are split.
        tokens: positions of one micro-batch; with several rows, rows * length. Documents lie end to end, each
        known by
            its segment, so a row has no edge that anything could see.
        max_patches: most image patches of one micro-batch.
        max_vision_flops: most forward FLOPs of the vision tower in one micro-batch; None for no limit.
        lanes: micro-batches of one optimizer step over all ranks; a multiple of `world_size`.
        weights: mixture weights by source, in place of those of the config.
        schedule: weights and vision share by step, in place of `weights`.
        loss_weights: factors of the loss weights by source.
        stage: number of the training stage; gives the stage an order of its own.
        log: file that gets a line for each sample left out (`stats.skip_file`).

    Raises:
        DataError: missing data, lanes that the ranks cannot share evenly, unknown names in `weights`.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Tokenizer,
        vision: VisionConfig,
        *,
        length: int,
        tokens: int,
        max_patches: int,
        max_vision_flops: float | None = None,
        lanes: int = 1,
        rank: int = 0,
        world_size: int = 1,
        weights: Mapping[str, float] | None = None,
        schedule: Schedule | None = None,
        loss_weights: Mapping[str, float] | None = None,
        stage: int = 0,
        log: Path | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} of world_size {world_size}: expected 0 <= rank < world_size")
        if lanes % world_size:
            raise DataError(
                f"lanes = {lanes} cannot be shared by {world_size} processes: start {_divisors(lanes)}"
                f" processes, or give a multiple of {world_size} (nearest:"
                f" {max(1, round(lanes / world_size)) * world_size})"
            )
        geometry = Geometry(length, tokens, max_patches, lanes, stage, max_vision_flops)
        self.spec = Spec(data, tokenizer, vision, geometry, schedule, loss_weights or {})
        self.sources = self.spec.build_sources()
        self.owned = list(range(rank, lanes, world_size))
        self.log = log
        self._identity = geometry_identity(self.spec, self.sources)
        start = build_lanes(self.spec, self.sources, dict.fromkeys(self.owned))
        self._states: dict[int, dict[str, Any]] = {lane.index: lane.state_dict() for lane in start}
        self._feed: Feed | None = None
        self._sizes = {name: len(source) for name, source in self.sources.items()}
        if weights:
            self.set_weights(weights)

    @property
    def step(self) -> int:
        """Steps of this stage delivered or skipped so far."""
        return int(self._states[self.owned[0]]["steps"])

    def next_step(self) -> list[PackedBatch]:
        """The micro-batches of this rank's lanes for the next optimizer step.

        Raises BadSample (on_bad_sample = "raise") or DataExhausted at the step that meets it, and DataError
        when too many samples are bad or a worker has died.
        """
        if self._feed is None:
            self._feed = self._open()
        made = self._feed.get()
        self._states = made.states
        if made.skipped and self.log is not None:
            append_skipped(self.log, made.skipped)
        if made.skipped:
            self._stats().check(self.spec.data)
        return made.batches

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        while True:
            yield self.next_step()

    def _open(self) -> Feed:
        data = self.spec.data
        states: dict[int, dict[str, Any] | None] = {lane: self._states[lane] for lane in self.owned}
        if data.prefetch == "process":
            return ProcessFeed(self.spec, states, data.prefetch_steps, data.workers, data.stall_s)
        lanes: list[Lane] = build_lanes(self.spec, self.sources, states)
        if data.prefetch == "thread":
            return ThreadFeed(lanes, data.prefetch_steps, data.stall_s)
        return DirectFeed(lanes)

    def close(self) -> None:
        """Stop the prefetch. The loader can go on afterwards: the next step starts it again."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """New mixture weights from the next step on; sources not named get 0.

        Documents already waiting to be packed (about `lookahead` micro-batches) still come. Deterministic:
        steps that were prepared in advance are dropped and made again.
        """
        if self.spec.schedule is not None:
            raise DataError(
                "the weights follow a schedule; change the schedule (stages.mix), not the weights"
            )
        mixture = Mixture(dict.fromkeys(self.sources, 1.0))
        mixture.set_weights(weights)
        self.close()
        for state in self._states.values():
            state["mixture"]["sources"] = mixture.state_dict()

    def skip(self, steps: range) -> None:
        """Leave out the data of these steps of the stage (counted as `step` is), for example around a loss
        spike.

        When a lane comes to the first of them it drops the documents waiting to be packed and moves the
        cursor of every source on by the documents that these steps would have taken, by the source's share
        and mean length so far and a tenth more (rounded up). Nothing of it is read. The next batch has the
        number after the last of them, also for a schedule. Steps already delivered stay; ranges that meet
        become one. Part of the state, the same for every prefetch and number of ranks.
        """
        if steps.step != 1 or len(steps) == 0:
            raise DataError(f"skip({steps}): expected range(first, end) with first < end")
        self.close()
        for state in self._states.values():
            add_skip(state, steps.start, steps.stop)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's lanes stand after the last `next_step`, as JSON types; a few kB for each lane."""
        return {
            "version": _VERSION,
            "identity": self._identity,
            "lanes": {str(lane): deepcopy(state) for lane, state in sorted(self._states.items())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, bit for bit.

        On another number of ranks, give the merged states of all (`merge_states`). Raises DataError, naming
        each difference, when sources, seed, lanes, tokenizer or shapes are not those of the state.
        """
        if state.get("version") != _VERSION:
            raise DataError(
                f"data state of version {state.get('version')!r}, expected {_VERSION}; start a new run"
            )
        changes = _differences(state["identity"], self._identity)
        if changes:
            lanes = state["identity"]["lanes"]
            share = f" (its {lanes} lanes can be shared by {_divisors(lanes)} processes)"
            raise DataError(
                f"the data is not that of the checkpoint: {'; '.join(changes)}. Undo the change"
                f"{share if lanes != self._identity['lanes'] else ''}, or start a new run"
            )
        missing = [lane for lane in self.owned if str(lane) not in state["lanes"]]
        if missing:
            raise DataError(
                f"data state holds lanes {', '.join(state['lanes'])} but this rank also owns {missing}; "
                "merge the states of all ranks first (merge_states)"
            )
        self.close()
        self._states = {lane: deepcopy(state["lanes"][str(lane)]) for lane in self.owned}

    def _stats(self) -> LoaderStats:
        return LoaderStats(self._states.values(), self._sizes, self.spec.geometry.lanes)

    def stats(self) -> dict[str, Any]:
        """What this rank has delivered so far, as it came out (`LoaderStats.stats`)."""
        return self._stats().stats()


def _divisors(count: int) -> str:
    """The divisors of `count` in words: 1, 2 or 4."""
    found = [str(n) for n in range(1, count + 1) if count % n == 0]
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one, which any number of ranks can load."""
    first = states[0]
    for other in states[1:]:
        changes = _differences(first["identity"], other["identity"])
        if changes:
            raise DataError(f"data states of different runs cannot be merged: {'; '.join(changes)}")
    lanes = {lane: value for state in states for lane, value in state["lanes"].items()}
    return {**first, "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changes = []
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key), now.get(key)
        if key == "sources" and isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += [f"source {name!r} is new" for name in new if name not in old]
            changes += [f"source {name!r} is gone" for name in old if name not in new]
            changes += [
                f"source {name!r} has other options or files"
                for name in old
                if name in new and old[name] != new[name]
            ]
        elif key == "order":
            if old != new and sorted(old or []) == sorted(new or []):
                changes.append("the sources are in another order")
        elif key == "max_epochs" and isinstance(old, Mapping) and isinstance(new, Mapping):
            both = [name for name in new if name in old and old[name] != new[name]]
            changes += [f"max_epochs of {name!r} was {old[name]} and is {new[name]}" for name in both]
        elif old != new:
            changes.append(f"{key} was {old!r} and is {new!r}")
    return changes
