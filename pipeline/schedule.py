"""Learning rate as a pure function of the step, and the table of stages.

Nothing here is stateful: a resumed run asks for step s and gets what the uninterrupted run got.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class StageLike(Protocol):
    """The fields of a stage that a schedule reads (see pipeline.config.StageSection)."""

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def final_lr_ratio(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int: ...


def warmup(step: int, warmup_steps: int) -> float:
    """Linear rise: (step + 1) / warmup_steps below warmup_steps, 1 after it; the first update is never
    zero."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0


def cosine(step: int, steps: int, warmup_steps: int = 0, final_ratio: float = 0.0) -> float:
    """Warm-up, then final + (1 - final) (1 + cos(pi u)) / 2 with u from 0 (end of warm-up) to 1 (last
    step)."""
    if step < warmup_steps:
        return warmup(step, warmup_steps)
    u = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * u))


def wsd(
    step: int, steps: int, warmup_steps: int = 0, decay_steps: int = 0, final_ratio: float = 0.0
) -> float:
    """Warm-up, stable at 1, then linear fall over the last decay_steps steps; the last step is at
    final_ratio."""
    if step < warmup_steps:
        return warmup(step, warmup_steps)
    into_decay = step - (steps - decay_steps) + 1
    if decay_steps <= 0 or into_decay <= 0:
        return 1.0
    return 1.0 - (1.0 - final_ratio) * min(1.0, into_decay / decay_steps)


def stage_ratio(stage: StageLike, step: int) -> float:
    """Share of the stage's peak learning rate at its local step."""
    if stage.schedule == "cosine":
        return cosine(step, stage.steps, stage.warmup_steps, stage.final_lr_ratio)
    return wsd(step, stage.steps, stage.warmup_steps, stage.decay_steps, stage.final_lr_ratio)


@dataclass(frozen=True)
class Place:
    """Where a global step lies: stage number, its name, the step inside it, its first global step."""

    index: int
    name: str
    local_step: int
    first_step: int


class StageTable:
    """Global step -> stage and learning rate. `lr` is the peak of stages that name none."""

    def __init__(self, stages: Sequence[StageLike], lr: float):
        if not stages:
            raise ValueError("a run needs at least one stage")
        self.stages = list(stages)
        self._lr = lr
        self.starts = [0]
        for stage in self.stages:
            self.starts.append(self.starts[-1] + stage.steps)

    @property
    def total_steps(self) -> int:
        return self.starts[-1]

    def place(self, step: int) -> Place:
        """The stage of a global step; the step after the last one belongs to the last stage (a finished
        run)."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step {step} lies outside the run of {self.total_steps} steps")
        index = len(self.stages) - 1
        while step < self.starts[index]:
            index -= 1
        return Place(index, self.stages[index].name, step - self.starts[index], self.starts[index])

    def peak(self, index: int) -> float:
        """Peak learning rate of a stage."""
        own = self.stages[index].lr
        return self._lr if own is None else own

    def lr(self, step: int) -> float:
        """Learning rate of the update that global step `step` makes."""
        at = self.place(step)
        return self.peak(at.index) * stage_ratio(self.stages[at.index], at.local_step)
