"""The data of a run, stage by stage: a loader with the stage's length, budgets, mixture and order, and what
it gave."""

from pathlib import Path
from typing import Any

from earlyfusion.data.errors import REASONS
from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.data.loading.loader import Loader, skip_file
from earlyfusion.data.loading.order import Point, Schedule
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.pipeline.config.schema import RunConfig, StageSection
from earlyfusion.pipeline.parallel.mesh import check_stage
from earlyfusion.pipeline.runtime import Runtime


def mix_schedule(stage: StageSection, weights: dict[str, float]) -> Schedule | None:
    """The stage's mixture by step; None where one set of weights (of data.sources: `weights`) holds
    throughout."""
    # Constant weights need no schedule, and the loader then tells none.
    if stage.vision_share is None and not stage.mix:
        return None
    points = [Point(0.0, stage.weights or weights, stage.vision_share)]
    for change in stage.mix:
        at, linear = change.at * stage.steps, change.ramp == "linear"
        points.append(Point(at, change.weights or None, change.vision_share, linear))
    return Schedule(points)


def describe_mix(stage: StageSection, weights: dict[str, float]) -> str:
    """The stage's mixture in words: shares of the sources, vision share, and where they change."""

    def in_words(weights: dict[str, float], vision: float | None) -> str:
        whole = sum(weights.values()) or 1.0
        parts = [] if vision is None else [f"vision {100 * vision:.1f} %"]
        return " ".join(parts + [f"{name} {100 * weight / whole:.1f} %" for name, weight in weights.items()])

    phrases = [in_words(stage.weights or weights, stage.vision_share)]
    for change in stage.mix:
        when = f"{'up to' if change.ramp == 'linear' else 'from'} step {change.at * stage.steps:g}"
        phrases.append(f"{when}: {in_words(change.weights, change.vision_share)}")
    return "; ".join(phrases)


class StageLoaders:
    """The data loader of the current stage, which has its own length, budget, mixture and order.

    The cursors of a stage that was left are kept: a rollback into it goes on behind what was read, not from
    its start.
    """

    def __init__(
        self, config: RunConfig, tokens: Tokenizer, runtime: Runtime, out: Path | None = None
    ) -> None:
        """out: the run's folder, which gets the log of samples left out; None (a benchmark) writes and
        deletes nothing."""
        self.config, self.tokens, self.runtime = config, tokens, runtime
        for stage in config.stages:
            # A layout that cannot be shared is refused before any work is done.
            check_stage(runtime.layout.sizes, stage.name, stage.tokens, stage.lanes)
        self._stage = -1
        self._loader: Loader | None = None
        self._left: dict[int, dict[int, Any]] = {}  # stage -> lane -> cursor
        self._log = None if out is None else skip_file(out, runtime.rank)
        self._fresh = True

    def next_step(self, index: int) -> list[PackedBatch]:
        """This rank's next micro-batches of stage `index`, on the host, with the recipe's loss weights."""
        return self.at(index).next_step()

    def at(self, index: int) -> Loader:
        """The loader of stage `index`, going on where that stage was left (or saved) if it was ever begun."""
        if self._loader is not None and index == self._stage:
            return self._loader
        # Before it is closed: the cursors of the stage that is left.
        self._left |= self._current()
        self.close()
        if self._fresh and self._log is not None:
            self._log.unlink(missing_ok=True)  # what an earlier run in this folder left out is not this run's
            self._fresh = False

        stage, data = self.config.stages[index], self.config.data
        schedule = mix_schedule(stage, {source.name: source.weight for source in data.sources})
        loader = Loader(
            data,
            self.tokens,
            self.config.vision,
            length=stage.length,
            tokens=stage.tokens,
            max_patches=stage.max_patches,
            lanes=stage.lanes,
            rank=self.runtime.layout.data_rank,
            world_size=self.runtime.layout.data_world,
            weights=None if schedule else stage.weights or None,
            schedule=schedule,
            loss_weights=self.config.train.loss_weights,
            stage=index,
            log=self._log,
        )

        cursors = self._left.pop(index, {})
        if cursors:
            head = next(iter(cursors.values()))["head"]
            lanes = {str(lane): cursor["state"] for lane, cursor in cursors.items()}
            loader.load_state_dict({**head, "lanes": lanes})
        # Skipping counts steps of the stage's data, so it comes after the cursors are set.
        for first, end in stage.skip:
            loader.skip(range(first, end))
        self._stage, self._loader = index, loader
        return loader

    def metrics(self) -> dict[str, float]:
        """What the current stage's data turned out to be so far, over all ranks; every rank calls it.

        data/step: steps of the stage's data delivered or skipped (what stages.skip counts);
        data/share/<source>: share of the tokens; data/vision_share: of tokens in documents with a picture;
        data/media_share: of image features; data/fill; data/epoch/<source>: passes; data/skipped and
        data/skipped/<reason>: samples left out.
        """
        loader = self._loader
        if loader is None:
            return {}
        # Passes are means over ranks, everything else is summed.
        stats, world = loader.stats(), self.runtime.world
        own = {f"share/{name}": stats["tokens"][name] for name in loader.sources}
        own["vision_share"] = sum(stats["vision_tokens"].values())
        own["media_share"] = sum(stats["media_tokens"].values())
        own["positions"] = stats["positions"]
        own |= {f"skipped/{reason}": stats["skipped"][reason] for reason in REASONS}
        own |= {f"epoch/{name}": stats["epochs"][name] / world for name in loader.sources}
        sums = self.runtime.sum_dict(own)

        # Shares are of the tokens of all sources; reasons that never came up are left out.
        tokens = sum(sums[f"share/{name}"] for name in loader.sources)
        record = {"data/step": loader.step, "data/fill": tokens / max(1.0, sums.pop("positions"))}
        record["data/skipped"] = sum(sums[f"skipped/{reason}"] for reason in REASONS)
        for key, value in sums.items():
            if key.partition("/")[0].endswith("share"):
                value = value / max(1.0, tokens)
            if value or not key.startswith("skipped/"):
                record[f"data/{key}"] = value
        return record

    def _current(self) -> dict[int, dict[int, Any]]:
        """Cursors of the open loader's lanes, as an entry of `_left`."""
        if self._loader is None:
            return {}
        state = self._loader.state_dict()
        head = {key: value for key, value in state.items() if key != "lanes"}
        lanes = {int(lane): {"head": head, "state": saved} for lane, saved in state["lanes"].items()}
        return {self._stage: lanes}

    def state_dict(self) -> dict[int, Any]:
        """Lane -> stage -> cursor, of this rank's lanes and every stage that was begun."""
        # By lane first: another number of ranks deals lanes out anew, never stages.
        by_lane: dict[int, Any] = {}
        for stage, cursors in (self._left | self._current()).items():
            for lane, cursor in cursors.items():
                by_lane.setdefault(lane, {})[stage] = cursor
        return by_lane

    def load_state_dict(self, lanes: dict[int, Any]) -> None:
        """Continue from the lanes of all ranks of a checkpoint, whatever the number of ranks was."""
        self.close()
        self._left, self._fresh = {}, False
        for lane, stages in lanes.items():
            for stage, cursor in stages.items():
                self._left.setdefault(stage, {})[lane] = cursor

    def close(self) -> None:
        """Stop the prefetch."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
