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

from dataclasses import replace
from random import Random
from typing import Any

from pydantic import Field, NonNegativeFloat

from earlyfusion.data.sample import Sample, Segment, Text
from earlyfusion.data.sources.base import Generated, GeneratedOptions, source
from earlyfusion.data.tasks.problem import Form, Problem
from earlyfusion.data.tasks.registry import make_task


class ProblemsOptions(GeneratedOptions):
    tasks: dict[str, NonNegativeFloat] = Field(min_length=1)
    """Task -> weight: verifiable tasks of data/tasks, such as { counting = 2, relation = 1 }."""
    difficulty: int | dict[str, int] = 0
    """Level of all tasks, or by task (0 where not named)."""
    options: dict[str, dict[str, Any]] = {}
    """Task -> its options."""
    forms: dict[Form, NonNegativeFloat] = {"picture": 1.0}
    """Form -> weight: the picture, its description in words, or that description drawn as a picture."""
    thought: float = Field(0.0, ge=0, le=1)
    """Share of the documents whose answer tells what there is before it answers."""
    question_loss: float = Field(0.0, ge=0)
    """Loss weight of descriptions and questions; answers have 1."""


@source("problems", ProblemsOptions, pictures=True)
class Problems(Generated):
    """See the file's head. Raises DataError for an unknown task or difficulty."""

    def open(self) -> None:
        self.tasks = {
            name: make_task(name, **self.options.options.get(name, {})) for name in self.options.tasks
        }
        self._problem(0, heldout=False)  # a wrong difficulty is told before training starts

    def _problem(self, number: int, heldout: bool) -> tuple[Problem, Form, bool]:
        """(problem, form, whether its answer tells what there is first)."""
        options = self.options
        # Held-out problems do not depend on the seed: all runs are measured on the same.
        rng = Random(f"{'heldout' if heldout else self.seed}/problems/{number}")
        (name,) = rng.choices(list(options.tasks), list(options.tasks.values()))
        (form,) = rng.choices(list(options.forms), list(options.forms.values()))
        level = options.difficulty
        if isinstance(level, dict):
            level = level.get(name, 0)
        # A number of the problem's own, so that tasks of other weights draw the same problems.
        problem = self.tasks[name].sample(rng.getrandbits(48), "test" if heldout else "train", level)
        return problem, form, rng.random() < options.thought

    def made(self, number: int, key: str, heldout: bool) -> Sample:
        problem, form, thought = self._problem(number, heldout)
        segments: list[Segment] = []
        for segment in problem.prompt(form, thought):
            if isinstance(segment, Text):
                segment = replace(segment, loss=self.options.question_loss)
            segments.append(segment)
        return Sample([*segments, problem.solution(thought)], self.name, key)

    def texts(self, index: int) -> list[str]:
        problem, _, thought = self._problem(index, heldout=False)
        # The words of both forms, without rendering either.
        asked = [segment.text for segment in problem.prompt("twin") if isinstance(segment, Text)]
        return [problem.description, *asked, problem.solution(thought).text]
