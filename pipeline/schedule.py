"""Every learning-rate schedule, as a pure function of the step, and the table of stages.

Nothing here is stateful: a resumed run asks for step s and gets what the uninterrupted run got.
"""

import math
from collections.abc import Sequence

from earlyfusion.pipeline.config.schema import StageSection


def lr_ratio(stage: StageSection, step: int) -> float:
    """Share of the peak learning rate at `step` of a stage: a linear rise over its warm-up, then

    cosine  final + (1 - final) (1 + cos(pi u)) / 2, u from 0 (end of warm-up) to 1 (last step)
    wsd     stable at 1, then linear over the last decay_steps; the last step is at the final ratio
    """
    if step < stage.warmup_steps:
        return (step + 1) / stage.warmup_steps  # the first update is never zero
    final = stage.final_lr_ratio
    if stage.schedule == "cosine":
        # steps - 1: the last update, and not the one after it, is at the final ratio.
        u = min(1.0, (step - stage.warmup_steps) / max(1, stage.steps - 1 - stage.warmup_steps))
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * u))
    # + 1: the first update of the decay is already below the peak.
    into_decay = max(0, step - (stage.steps - stage.decay_steps) + 1)
    return 1.0 - (1.0 - final) * min(1.0, into_decay / max(1, stage.decay_steps))


def linear(peak: float, step: int, steps: int, warmup_steps: int, final_ratio: float) -> float:
    """The rate itself: linear rise to `peak`, then evenly towards final_ratio * peak after the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * (1 - (1 - final_ratio) * (step - warmup_steps) / max(1, steps - warmup_steps))


def due(every: int, step: int, total: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after `step`; the end has its
    own."""
    return every > 0 and step % every == 0 and step != total


class StageTable:
    """Global step -> stage and learning rate. `lr` is the peak of stages that name none."""

    def __init__(self, stages: Sequence[StageSection], lr: float) -> None:
        self.stages, self._lr = list(stages), lr
        # One entry more than stages: the end of the run has a place, too.
        self.starts = [0]
        for stage in self.stages:
            self.starts.append(self.starts[-1] + stage.steps)

    def mixture(self, step: int) -> tuple[int, int]:
        """The stage of this step, and how many of its changes of the mixture lie before it or at it."""
        index = self.index(step)
        # Counted within the stage, as `mix_schedule` places them.
        stage, inside = self.stages[index], step - self.starts[index]
        return index, sum(change.at * stage.steps <= inside for change in stage.mix)

    def index(self, step: int) -> int:
        """Number of the stage of a global step; the step after the last belongs to the last stage."""
        index = len(self.stages) - 1
        while step < self.starts[index]:
            index -= 1
        return index

    def peak(self, index: int) -> float:
        """Peak learning rate of a stage."""
        return self.stages[index].lr or self._lr

    def lr(self, step: int) -> float:
        """Learning rate of the update that global step `step` makes."""
        index = self.index(step)
        return self.peak(index) * lr_ratio(self.stages[index], step - self.starts[index])
