"""A verifiable problem in three forms, and what a task is: who makes such problems and judges answers to
them.

    problem = task.sample(seed, "train", difficulty=1)
    problem.prompt("picture")      the picture, then the question
    problem.prompt("twin")         the same scene told in words, then the question
    problem.prompt("rendered")     those words drawn as a picture, then the question
    task.reward(problem, "row 2, column 3")   in [0, 1], whatever the text is

A problem depends on (task, seed, split, difficulty) alone. What the two splits have in common is decided by
the hash of its `combination` (a colour with a shape, a word, the values of a chart, the walls of a maze):
combinations on the held-out side are never drawn for training, and every test problem asks about one of them.

A task is one class in one file, registered by its decorator:

    @task("counting")
    class Counting(Task):
        levels = (...)                              knobs of difficulty 0, 1, ...
        def draw(self, rng, heldout, knobs): ...    one attempt at a problem
        def score(self, problem, answer): ...       the reward of a final answer

Reinforcement learning asks it for problems and rewards, the source `problems` for training documents, and
`earlyfusion eval` for its exam, where it has one (data/tasks/exam.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from random import Random
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import held_out
from earlyfusion.data.sample import Image, Segment, Text, Video, answer_text, question_text
from earlyfusion.data.synth.graph import Graph
from earlyfusion.data.synth.palette import HELDOUT_FRACTION
from earlyfusion.data.tasks.exam import Kind
from earlyfusion.data.tasks.rendering import render_text
from earlyfusion.data.tasks.scoring import rewards
from earlyfusion.data.tasks.scoring.text import exact_match, first_line
from earlyfusion.kernels.errors import did_you_mean

Split: TypeAlias = Literal["train", "test"]
Form: TypeAlias = Literal["picture", "twin", "rendered"]
Knobs: TypeAlias = Mapping[str, Any]
SPLITS: tuple[Split, ...] = ("train", "test")
FORMS: tuple[Form, ...] = ("picture", "twin", "rendered")
Judged: TypeAlias = tuple[Any, float, dict[str, float]]
"""What was read out of an answer (or None), its score, and further metrics."""
# A combination of the test side comes about once in eight draws; this is far beyond bad luck.
TRIES = 5000
# A word of their own for thoughts: the model must know from the prompt which of the two is wanted.
ANSWER_CUE, THOUGHT_CUE = "\nA:", "\nlook:"
"""End of a prompt that asks for the answer, and of one that asks to tell what there is first."""
# Limits of the pictures of every exam, in pixels and objects.
MIN_SIDE, MAX_SIDE, MAX_OBJECTS = 40, 96, 5


class TaskError(DataError):
    """A task cannot be made or asked as wanted; the message is one line."""


@dataclass(frozen=True)
class Drawn:
    """What a task draws: everything of a Problem that depends on the random numbers.

    picture: RGB (of a clip, its first frame), or None for a task in words alone (its picture form is then its
    words). description: the text twin. answer: the gold answer as JSON types. target: an answer in words that
    earns the full reward but for rounding, at least 0.85 (for PTX and SFT). meta: what the reward needs
    (graph, ...).
    """

    question: str
    picture: PILImage.Image | None
    description: str
    answer: Any
    target: str
    combination: str
    category: str
    meta: Knobs = field(default_factory=dict)


def about(
    graph: Graph, question: str, answer: Any, target: str, key: str, category: str, **meta: Any
) -> Drawn:
    """A question about a graph: its picture and its words; `key` is the combination."""
    meta["graph"] = graph
    return Drawn(question, graph.draw(), graph.words(), answer, target, key, category, meta)


@dataclass(frozen=True, kw_only=True)
class Problem(Drawn):
    """One question with its gold answer; meta also holds difficulty, knobs, combination and category."""

    task: str
    key: str

    def check_form(self, form: str) -> None:
        """Raises TaskError for an unknown form."""
        if form not in FORMS:
            raise TaskError(f"prompt form {form!r}; {did_you_mean(str(form), FORMS)}")

    def prompt(self, form: Form = "picture", thought: bool = False) -> tuple[Segment, ...]:
        """The prompt in one form, as in pretraining; with `thought` it asks to tell what there is before
        answering. Raises TaskError for an unknown form."""
        self.check_form(form)
        question = question_text(self.question)
        if thought:
            question = question.removesuffix(ANSWER_CUE) + THOUGHT_CUE
        # The question is always text: only what it is about changes its form.
        if form == "rendered":
            return Image(render_text(self.description)), Text(question, 0.0)
        if form == "twin" or self.picture is None:
            return (Text(self.description + question, 0.0),)
        return self.media(), Text(question, 0.0)

    def media(self) -> Image | Video:
        """The picture, or the clip with its times, as a segment. Raises TaskError where there is none."""
        if self.picture is None:
            raise TaskError(f"{self.key}: a problem in words alone has no picture")
        return self.meta["graph"].media() if "graph" in self.meta else Image(self.picture)

    @property
    def thought(self) -> str:
        """What there is, in few words and the same for every form: the objects of a scene from left to right,
        or the description."""
        # A scene has a shorter telling than its twin with every box.
        graph = self.meta.get("graph")
        return (graph and graph.thought) or self.description.replace("\n", ", ")

    def solution(self, thought: bool = False) -> Text:
        """The target as it stands in a document after the prompt, after the thought if one is asked for."""
        return Text(f" {self.thought}; answer: {self.target}" if thought else answer_text(self.target))


class Task:
    """Problems and their rewards, by level of difficulty; and the exam, a benchmark's questions by kind.

    levels: knobs of difficulty 0, 1, ...; a mapping instead of a number changes single knobs of level 0. None
    for a task that is an exam alone. fraction: share of combinations on the held-out side.

    kinds: category -> kind of question of the exam, asked in turn about `graph`; none for a task without one.
    listed: questions that a graph lists for an exam. answer_tokens: most tokens of an answer there.
    """

    name: ClassVar[str]
    levels: ClassVar[tuple[Knobs, ...]] = ()
    fraction: float = HELDOUT_FRACTION
    kinds: ClassVar[Mapping[str, Kind]] = {}
    listed: ClassVar[int] = 99
    answer_tokens: ClassVar[int] = 24
    video: ClassVar[bool] = False

    def knobs(self, difficulty: int | Knobs) -> dict[str, Any]:
        """The knobs of a difficulty. Raises TaskError for a level or a knob that does not exist."""
        # Single knobs lie over the easiest level.
        if isinstance(difficulty, Mapping):
            for knob in difficulty:
                if knob not in self.levels[0]:
                    raise TaskError(f"{self.name}: no knob {knob!r}; {did_you_mean(knob, self.levels[0])}")
            return {**self.levels[0], **difficulty}
        if difficulty not in range(len(self.levels)):
            raise TaskError(
                f"{self.name}: difficulty {difficulty!r}; expected 0 to {len(self.levels) - 1}, or knobs"
            )
        return dict(self.levels[difficulty])

    def sample(self, seed: int, split: Split = "train", difficulty: int | Knobs = 0) -> Problem:
        """A problem; equal arguments give equal problems. Raises TaskError for an unknown split or
        difficulty, and for knobs no problem can satisfy."""
        if not self.levels:
            raise TaskError(f"{self.name}: is an exam alone, asked by earlyfusion eval; choose another task")
        if split not in SPLITS:
            raise TaskError(f"{self.name}: split {split!r}; {did_you_mean(str(split), SPLITS)}")
        knobs = self.knobs(difficulty)
        # The key holds everything the problem depends on, so that a log finds it again.
        level = json.dumps(difficulty if isinstance(difficulty, int) else knobs, sort_keys=True)
        key = f"{self.name}/{split}/{level}/{seed}"

        # Attempts until one asks about a combination of the split.
        rng = Random(f"rl/{key}")
        for _ in range(TRIES):
            drawn = self.draw(rng, split == "test", knobs)
            if drawn is not None and self.heldout(drawn.combination) == (split == "test"):
                return self._problem(key, drawn, difficulty=difficulty, knobs=knobs)
        raise TaskError(f"{self.name}: no {split} problem with {knobs} in {TRIES} tries; widen the knobs")

    def _problem(self, key: str, drawn: Drawn, **meta: Any) -> Problem:
        # Benchmarks and reports read both from here.
        meta |= {"combination": drawn.combination, "category": drawn.category, **drawn.meta}
        return Problem(**{**vars(drawn), "meta": meta}, task=self.name, key=key)

    def heldout(self, combination: str) -> bool:
        """Whether a combination belongs to the test side."""
        return held_out(combination, self.fraction)

    def reward(self, problem: Problem, response_text: str) -> float:
        """Reward in [0, 1] of any text: the score of its final answer; 0 where there is none, or none that
        can be read."""
        if problem.task != self.name:
            raise TaskError(f"{self.name}: asked to judge a problem of {problem.task!r}")
        # Thinking and announcements are no answer; their end is.
        answer = rewards.final_answer(response_text)
        value = float(self.score(problem, answer)) if answer else 0.0
        # Whatever a scorer of one's own returns, the trainer gets a number of [0, 1].
        return min(1.0, max(0.0, value)) if isfinite(value) else 0.0

    def draw(self, rng: Random, heldout: bool, knobs: Knobs) -> Drawn | None:
        """One attempt; None, or a combination of the wrong side, leads to the next one."""
        raise NotImplementedError

    def score(self, problem: Problem, answer: str) -> float:
        """The score of a final answer that is not empty: 1 for the words themselves."""
        return rewards.words(answer, problem.answer)

    # The exam.

    def exam(self, count: int, seed: int) -> list[Problem]:
        """`count` questions about held-out pictures, the kinds in turn; each depends on (seed, its number)
        alone."""
        names = list(self.kinds)
        problems = []
        for number in range(count):
            # In turn, so that every limit on questions holds all kinds alike.
            category = names[number % len(names)]
            rng = Random(f"eval/{self.name}/{seed}/{number}")
            graph, (question, answer) = self.kinds[category].draw(rng, self.graph, self.listed)
            drawn = about(graph, question, answer, answer, "", category)
            problems.append(self._problem(f"{self.name}/{number:05d}", drawn))
        return problems

    def graph(self, rng: Random) -> Graph:
        """A held-out graph for a question of the exam."""
        raise NotImplementedError

    def judge(self, problem: Problem, text: str) -> Judged:
        """What an exam makes of an answer: equal to gold without case, article and closing punctuation."""
        return first_line(text) or None, float(exact_match(text, problem.answer)), {}


TASKS: dict[str, type[Task]] = {}
"""Every registered task by its name; data/tasks/registry.py imports those of the project."""

AnyTask = TypeVar("AnyTask", bound="type[Task]")


def task(name: str) -> Callable[[AnyTask], AnyTask]:
    """Register the decorated class as the task `name`."""

    def register(cls: AnyTask) -> AnyTask:
        cls.name = name
        TASKS[name] = cls
        return cls

    return register


def list_pixels(points: Sequence[Sequence[float]]) -> str:
    """ "[12, 30], [40, 58.5]": points or boxes in pixels, with one decimal where they are not whole."""
    listed = []
    for point in points:
        numbers = [f"{x:.1f}".removesuffix(".0") for x in point]
        listed.append(f"[{', '.join(numbers)}]")
    return ", ".join(listed)
