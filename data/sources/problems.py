"""Problems of the verifiable tasks as training documents: data for pretraining, for SFT and for the PTX loss.

    [[data.sources]]
    name = "skills"
    kind = "problems"
    options = { tasks = { counting = 2, relation = 1 }, difficulty = { counting = 1 }, forms = { picture = 3,
    twin = 1 } }

A document is what reinforcement learning will show as the prompt, then the answer. Problem `number` = epoch *
count + index is drawn from the training side of every task; held-out documents come from the test side. With
`thought` an answer first tells what there is (`problem.thought`) and then the answer itself, the same words
whatever the form.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Literal, cast

from pydantic import Field, PositiveInt, model_validator

from earlyfusion.data.sample import Sample, Segment, Text
from earlyfusion.data.sources.base import Options, Source, SourceConfig, source
from earlyfusion.data.tasks.problem import Form, Problem, Split
from earlyfusion.data.tasks.registry import make_task

_VERSION = 1
"""Part of the fingerprint: raise it when the tasks draw something else than before."""


class ProblemsOptions(Options):
    tasks: dict[str, float] = Field(min_length=1)
    """Task -> weight: verifiable tasks of data/tasks, such as { counting = 2, relation = 1 }."""
    difficulty: int | dict[str, int] = 0
    """Level of all tasks, or by task (0 where not named)."""
    forms: dict[Literal["picture", "twin", "rendered"], float] = {"picture": 1.0}
    """Form -> weight: the picture, its description in words, or that description drawn as a picture."""
    thought: float = Field(0.0, ge=0, le=1)
    """Share of the documents whose answer tells what there is before it answers."""
    count: PositiveInt = 100_000
    """Problems of one epoch; the next epoch makes new ones."""
    heldout_count: PositiveInt = 512
    """Problems held out."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of descriptions and questions; answers have 1."""

    @model_validator(mode="after")
    def _check(self) -> ProblemsOptions:
        for name, weights in (("tasks", self.tasks), ("forms", self.forms)):
            if not weights or min(weights.values()) < 0 or not any(weights.values()):
                raise ValueError(f"{name} {dict(weights)}: expected no weight below 0 and at least one above")
        return self


@source("problems", ProblemsOptions, pictures=True)
class Problems(Source):
    """See the file's head. Raises TaskError for an unknown task, difficulty or form."""

    def __init__(self, config: SourceConfig, *, seed: int, val_fraction: float) -> None:
        super().__init__(config, seed=seed, val_fraction=val_fraction)
        self.options = cast(ProblemsOptions, config.typed)
        self.tasks = {name: make_task(name) for name in self.options.tasks}
        self._first = self._problem(0, "train")[
            0
        ]  # a wrong difficulty or form is told before training starts

    def __len__(self) -> int:
        return self.options.count

    def heldout_len(self) -> int:
        return self.options.heldout_count

    def contents(self) -> Iterator[object]:
        yield _VERSION
        yield len(self)

    def _problem(self, number: int, split: Split) -> tuple[Problem, Form, bool]:
        """(problem, form, whether its answer tells what there is first)."""
        options = self.options
        rng = Random(f"{self.seed if split == 'train' else 'heldout'}/problems/{number}")
        (name,) = rng.choices(list(options.tasks), list(options.tasks.values()))
        (form,) = rng.choices(list(options.forms), list(options.forms.values()))
        level = (
            options.difficulty.get(name, 0) if isinstance(options.difficulty, dict) else options.difficulty
        )
        problem = self.tasks[name].sample(rng.getrandbits(48), split, level)
        problem.check_form(form)
        return problem, cast(Form, form), rng.random() < options.thought

    def _sample(self, number: int, key: str, split: Split) -> Sample:
        problem, form, thought = self._problem(number, split)
        segments: list[Segment] = []
        for segment in problem.prompt(form, thought):
            weight = self.options.question_loss
            segments.append(Text(segment.text, weight) if isinstance(segment, Text) else segment)
        return Sample([*segments, problem.solution(thought)], self.name, key)

    def get(self, index: int, epoch: int) -> Sample:
        number = epoch * len(self) + index
        return self._sample(number, str(number), "train")

    def heldout(self, index: int) -> Sample:
        return self._sample(index, f"heldout/{index}", "test")

    def texts(self, index: int) -> list[str]:
        problem, _, thought = self._problem(index, "train")
        asked = [segment.text for segment in problem.prompt("twin") if isinstance(segment, Text)]
        return [problem.description, *asked, problem.solution(thought).text]
