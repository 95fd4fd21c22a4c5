"""A verifiable problem in three forms, and the protocol of the tasks that make such problems and judge
answers.

    problem = task.sample(seed, "train", difficulty=1)
    problem.prompt("picture")      the picture, then the question                        (also
                                   problem.segments)
    problem.prompt("twin")         the same scene told in words, then the question       (also problem.twin)
    problem.prompt("rendered")     those words drawn as a picture, then the question     (also
                                   problem.rendered)
    task.reward(problem, "row 2, column 3")   in [0, 1], whatever the text is

A problem depends on (task, seed, split, difficulty) alone. What the two splits have in common is decided by
the hash of `meta["combination"]` (a colour with a shape, a word, the values of a chart, the walls of a maze,
...): combinations on the held-out side are never drawn for training, and every test problem asks about one of
them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from random import Random
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import held_out
from earlyfusion.data.sample import Image, Segment, Text, answer_text, question_text
from earlyfusion.data.synth.palette import HELDOUT_FRACTION
from earlyfusion.data.synth.scene import Scene
from earlyfusion.data.tasks.rendering import render_text
from earlyfusion.data.tasks.scoring.rewards import final_answer
from earlyfusion.kernels.errors import did_you_mean

Split: TypeAlias = Literal["train", "test"]
Form: TypeAlias = Literal["picture", "twin", "rendered"]
Difficulty: TypeAlias = int | Mapping[str, Any]
SPLITS: tuple[Split, ...] = ("train", "test")
FORMS: tuple[Form, ...] = ("picture", "twin", "rendered")
TRIES = 5000
ANSWER_CUE, THOUGHT_CUE = "\nA:", "\nlook:"
"""End of a prompt that asks for the answer, and of one that asks to tell what there is first."""


class TaskError(DataError):
    """A task cannot be made or asked as wanted; the message is one line."""


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer.

    picture: RGB, or None for a task in words alone (its picture form is then its words). description: the
    text twin. answer: the gold answer as JSON types. target: an answer in words that earns the full reward
    but for rounding, at least 0.85 (for PTX and SFT). meta: split, seed, difficulty, knobs, combination,
    category, and what the reward needs (width, height, ...).
    """

    task: str
    key: str
    question: str
    picture: PILImage.Image | None
    description: str
    answer: Any
    target: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The picture, then the question, as in pretraining."""
        if self.picture is None:
            return self.twin
        return Image(self.picture), Text(question_text(self.question), 0.0)

    @property
    def twin(self) -> tuple[Segment, ...]:
        """The description in the picture's place."""
        return (Text(self.description + question_text(self.question), 0.0),)

    @property
    def rendered(self) -> tuple[Segment, ...]:
        """The description drawn as text, then the question."""
        return Image(render_text(self.description)), Text(question_text(self.question), 0.0)

    def check_form(self, form: str) -> None:
        """Raises TaskError for an unknown form."""
        if form not in FORMS:
            raise TaskError(f"prompt form {form!r}; {did_you_mean(str(form), FORMS)}")

    def prompt(self, form: Form = "picture", thought: bool = False) -> tuple[Segment, ...]:
        """The prompt in one form; with `thought` it asks to tell what there is before answering. Raises
        TaskError for an unknown form."""
        self.check_form(form)
        made = {
            "picture": lambda: self.segments,
            "twin": lambda: self.twin,
            "rendered": lambda: self.rendered,
        }[form]()
        if not thought:
            return made
        last = made[-1]
        assert isinstance(last, Text)
        return *made[:-1], Text(last.text.removesuffix(ANSWER_CUE) + THOUGHT_CUE, last.loss)

    @property
    def thought(self) -> str:
        """What there is, in few words and the same for every form: the objects of a scene from left to right,
        or the description."""
        graph = self.meta.get("graph")
        if isinstance(graph, Scene):
            return ", ".join(thing.name for thing in sorted(graph.objects, key=lambda thing: thing.box))
        return self.description.replace("\n", ", ")

    def solution(self, thought: bool = False) -> Text:
        """The target as it stands in a document after the prompt, after the thought if one is asked for."""
        return Text(f" {self.thought}; answer: {self.target}" if thought else answer_text(self.target))


@runtime_checkable
class Task(Protocol):
    """What a trainer needs of a task."""

    name: str

    def sample(self, seed: int, split: Split = "train", difficulty: Difficulty = 0) -> Problem:
        """A problem; equal arguments give equal problems."""
        ...

    def reward(self, problem: Problem, response_text: str) -> float:
        """Reward in [0, 1] of any text."""
        ...


@dataclass(frozen=True)
class Drawn:
    """What a task draws: everything of a Problem that depends on the random numbers."""

    question: str
    picture: PILImage.Image | None
    description: str
    answer: Any
    target: str
    combination: str
    category: str
    meta: Mapping[str, Any] = field(default_factory=dict)


class BaseTask(ABC):
    """Shared behaviour: levels of difficulty, numbering, the bound on rewards.

    levels: knobs of difficulty 0, 1, ...; a mapping instead of a number changes single knobs of level 0.
    fraction: share of combinations on the held-out side.
    """

    name: str
    levels: tuple[Mapping[str, Any], ...]
    fraction = HELDOUT_FRACTION

    def knobs(self, difficulty: Difficulty) -> dict[str, Any]:
        """The knobs of a difficulty. Raises TaskError for a level or a knob that does not exist."""
        if isinstance(difficulty, Mapping):
            unknown = [name for name in difficulty if name not in self.levels[0]]
            if unknown:
                raise TaskError(
                    f"{self.name}: no knob {unknown[0]!r}; {did_you_mean(unknown[0], self.levels[0])}"
                )
            return {**self.levels[0], **difficulty}
        if (
            isinstance(difficulty, bool)
            or not isinstance(difficulty, int)
            or not 0 <= difficulty < len(self.levels)
        ):
            raise TaskError(
                f"{self.name}: difficulty {difficulty!r}; expected 0 to {len(self.levels) - 1}, or knobs"
            )
        return dict(self.levels[difficulty])

    def sample(self, seed: int, split: Split = "train", difficulty: Difficulty = 0) -> Problem:
        """See Task. Raises TaskError for an unknown split or difficulty, and for knobs no problem can
        satisfy."""
        if split not in SPLITS:
            raise TaskError(f"{self.name}: split {split!r}; {did_you_mean(str(split), SPLITS)}")
        knobs = self.knobs(difficulty)
        level = json.dumps(difficulty if isinstance(difficulty, int) else knobs, sort_keys=True)
        key = f"{self.name}/{split}/{level}/{seed}"
        rng = Random(f"rl/{key}")
        for _ in range(TRIES):
            made = self.draw(rng, split == "test", knobs)
            if made is not None and self.heldout(made.combination) == (split == "test"):
                break
        else:
            raise TaskError(f"{self.name}: no {split} problem with {knobs} in {TRIES} tries; widen the knobs")
        about = {"split": split, "seed": seed, "difficulty": difficulty, "knobs": knobs}
        meta = {**about, "combination": made.combination, "category": made.category, **made.meta}
        return Problem(
            self.name, key, made.question, made.picture, made.description, made.answer, made.target, meta
        )

    def heldout(self, combination: str) -> bool:
        """Whether a combination belongs to the test side."""
        return held_out(combination, self.fraction)

    def reward(self, problem: Problem, response_text: str) -> float:
        """The score of the final answer of the response; 0 where there is none, or none that can be read."""
        if problem.task != self.name:
            raise TaskError(f"{self.name}: asked to judge a problem of {problem.task!r}")
        said = final_answer(response_text)
        if not said:
            return 0.0
        value = float(self.score(problem, said))
        return min(1.0, max(0.0, value)) if isfinite(value) else 0.0

    @abstractmethod
    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """One attempt; None, or a combination of the wrong side, leads to the next one."""

    @abstractmethod
    def score(self, problem: Problem, said: str) -> float:
        """The score of a final answer that is not empty."""


def list_pixels(points: Sequence[Sequence[float]]) -> str:
    """ "[12, 30], [40, 58.5]": points or boxes in pixels, with one decimal where they are not whole."""
    return ", ".join("[" + ", ".join(f"{round(x, 1):g}" for x in point) + "]" for point in points)
