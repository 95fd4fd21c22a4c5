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

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.lane import Geometry, Spec, add_skip, build_lanes
from earlyfusion.data.loading.mixture import Schedule
from earlyfusion.data.loading.pack import PackedBatch
from earlyfusion.data.loading.prefetch import Feed, open_feed
from earlyfusion.data.loading.stats import append_skipped, check_skipped, total
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.vision.config import VisionConfig

_VERSION = 3


class Loader:
    """Packed micro-batches of the lanes that `rank` of `world_size` owns.

    Args:
        data, tokenizer, vision: what is read, and how it becomes tokens and patches.
        sizes: what one micro-batch is (lane.Geometry): length, tokens, max_patches, max_vision_flops,
            lanes (micro-batches of one optimizer step over all ranks, a multiple of `world_size`) and stage.
            Documents lie end to end, each known by its segment, so a row has no edge that anything could see.
        weights: mixture weights by source, in place of those of the config.
        schedule: weights and vision share by step, in place of `weights`.
        loss_weights: factors of the loss weights by source.
        log: file that gets a line for each sample left out (`stats.skip_file`).

    Raises:
        DataError: missing data, lanes that the ranks cannot share evenly.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Tokenizer,
        vision: VisionConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        weights: Mapping[str, float] | None = None,
        schedule: Schedule | None = None,
        loss_weights: Mapping[str, float] | None = None,
        log: Path | None = None,
        **sizes: Any,
    ) -> None:
        geometry = Geometry(**sizes)
        if geometry.lanes % world_size:
            # A rank with a lane more than the others would make them wait at every step.
            nearest = max(1, round(geometry.lanes / world_size)) * world_size
            raise DataError(
                f"lanes = {geometry.lanes} cannot be shared by {world_size} processes: start as many as"
                f" divide it, or give a multiple of {world_size} (nearest: {nearest})"
            )
        mixture = {source.name: source.weight for source in data.sources}
        # A source that the stage does not name gives nothing.
        if weights:
            mixture = {name: float(weights.get(name, 0.0)) for name in mixture}
        self.spec = Spec(data, tokenizer, vision, geometry, mixture, schedule, loss_weights or {})
        self.sources = self.spec.build_sources()
        self.log = log
        # Taken once: fingerprints of sources may read a file list.
        self._identity = self.spec.identity(self.sources)
        self._feed: Feed | None = None
        self._states: dict[int, dict[str, Any]] = {}
        owned = range(rank, geometry.lanes, world_size)
        # Built to see their states, and to refuse impossible shares before the run.
        for lane in build_lanes(self.spec, self.sources, dict.fromkeys(owned)):
            self._states[lane.index] = lane.state_dict()

    @property
    def step(self) -> int:
        """Steps of this stage delivered or skipped so far."""
        return int(next(iter(self._states.values()))["steps"])

    def next_step(self) -> list[PackedBatch]:
        """The micro-batches of this rank's lanes for the next optimizer step.

        Raises BadSample (on_bad_sample = "raise") or DataExhausted at the step that meets it, and DataError
        when too many samples are bad or a worker has died.
        """
        if self._feed is None:
            # Not before the first step: a resume loads states first, and processes cost memory.
            self._feed = open_feed(self.spec, self.sources, self._states)
        step = self._feed.get()
        self._states = {lane: step.states[lane] for lane in self._states}
        # Written here and not where it is prepared: what was never consumed is no loss.
        if step.skipped:
            if self.log is not None:
                append_skipped(self.log, step.skipped)
            last = step.skipped[-1]["message"]
            check_skipped(total(self._states.values()), self.spec.data.max_bad_share, last)
        return [step.batches[lane] for lane in self._states]

    def close(self) -> None:
        """Stop the prefetch. The loader can go on afterwards: the next step starts it again."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def skip(self, steps: range) -> None:
        """Leave out the data of these steps of the stage (counted as `step` is), for example around a loss
        spike.

        When a lane comes to the first of them it drops the documents waiting to be packed and moves the
        cursor of every source on by the documents that these steps would have taken, by the source's share
        and mean length so far and a tenth more (rounded up). Nothing of it is read. The next batch has the
        number after the last of them, also for a schedule. Steps already delivered stay; ranges that meet
        become one. Part of the state, the same for every prefetch and number of ranks.
        """
        # Steps that were prepared in advance are dropped and made again.
        self.close()
        for state in self._states.values():
            add_skip(state, steps.start, steps.stop)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's lanes stand after the last `next_step`, as JSON types; a few kB for each lane."""
        lanes = {str(lane): deepcopy(state) for lane, state in self._states.items()}
        return {"version": _VERSION, "identity": self._identity, "lanes": lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, bit for bit.

        On another number of ranks, give the merged states of all (`merge_states`). Raises DataError, naming
        each difference, when sources, seed, lanes, tokenizer or shapes are not those of the state.
        """
        # A state is short-lived: no reader of older ones is kept.
        if state.get("version") != _VERSION:
            raise DataError(
                f"data state of version {state.get('version')!r}, expected {_VERSION}; start a new run"
            )
        # All differences at once: finding them one by one takes a start each.
        changes = []
        for key in sorted(state["identity"].keys() | self._identity.keys()):
            was, now = state["identity"].get(key), self._identity.get(key)
            if was != now:
                changes.append(f"{key} was {was!r} and is {now!r}")
        if changes:
            raise DataError(
                f"the data is not that of the checkpoint: {'; '.join(changes)}. Undo the change, or start a"
                " new run"
            )
        missing = [lane for lane in self._states if str(lane) not in state["lanes"]]
        if missing:
            raise DataError(
                f"data state holds lanes {', '.join(state['lanes'])} but this rank also owns {missing}; "
                "merge the states of all ranks first (merge_states)"
            )
        self.close()
        self._states = {lane: deepcopy(state["lanes"][str(lane)]) for lane in self._states}

    def stats(self) -> dict[str, Any]:
        """What this rank has delivered so far, as it came out and not as it was configured.

        tokens, media_tokens (image features), vision_tokens (in documents with a picture), their shares of
        all tokens, and epochs, by source; positions; samples left out (skipped) by reason.
        """
        counts = total(self._states.values())
        epochs, shares = {}, {}
        for name, source in self.sources.items():
            # This rank's lanes stand for all of them.
            read = sum(state["streams"][name]["cursor"] for state in self._states.values())
            epochs[name] = read * self.spec.geometry.lanes / len(self._states) / max(1, len(source))
            shares[name] = counts["tokens"][name] / max(1, counts["tokens"].total())
        positions = counts["positions"].total()
        found: dict[str, Any] = {**counts, "positions": positions, "epochs": epochs, "shares": shares}
        return found


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks of a run as one, which any number of ranks can load."""
    lanes: dict[str, Any] = {}
    for state in states:
        lanes |= state["lanes"]
    return {**states[0], "lanes": lanes}
