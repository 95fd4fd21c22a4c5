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
`earlyfusion eval` for its exam, where it has one.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar, Literal, get_args

from PIL import Image as PILImage

from earlyfusion.data.chat.template import Message, chat_sample
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.sample import Image, Segment, Text, Video, answer_text, question_text
from earlyfusion.data.synth.graph import Graph, Question, on_side
from earlyfusion.data.synth.panels import render_text
from earlyfusion.data.tasks import scoring
from earlyfusion.data.tasks.scoring import exact_match, first_line
from earlyfusion.kernels.errors import did_you_mean

Split = Literal["train", "test"]
Form = Literal["picture", "twin", "rendered"]
Knobs = Mapping[str, Any]
FORMS: tuple[Form, ...] = get_args(Form)
Judged = tuple[Any, float, dict[str, float]]
"""What was read out of an answer (or None), its score, and further metrics."""
# A combination of the test side comes about once in eight draws; this is far beyond bad luck.
TRIES = 5000
SEED_STEP = 1_000_003
IN_VAIN = 100
"""Draws in a row that bring no new problem, after which a task's held-out side counts as used up: fewer
problems, none twice."""
# A word of their own for thoughts: the model must know from the prompt which of the two is wanted.
ANSWER_CUE, THOUGHT_CUE = "\nA:", "\nlook:"
"""End of a prompt that asks for the answer, and of one that asks to tell what there is first."""
# Pictures of an exam looked at before another answer is drawn.
PICTURES = 2000
HIGHEST = 4
"""Largest answer of an exam's question of number."""
# Limits of the pictures of every exam, in pixels and objects.
MIN_SIDE, MAX_SIDE, MAX_OBJECTS = 40, 96, 5


class TaskError(DataError):
    """A task cannot be made or asked as wanted; the message is one line."""


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer. A task draws everything but the last two, which `sample` adds.

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
    task: str = ""
    key: str = ""
    messages: tuple[Message, ...] = ()
    """The question as a conversation that ends with the user, where it comes from a file; empty for a drawn
    one."""
    max_new_tokens: int | None = None
    """Most tokens of an answer to this problem; None: the run's limit."""

    def prompt(self, form: Form = "picture", thought: bool = False) -> tuple[Segment, ...]:
        """The prompt in one form, as in pretraining; with `thought` it asks to tell what there is before
        answering. Raises TaskError for an unknown form."""
        if form not in FORMS:
            raise TaskError(f"prompt form {form!r}; {did_you_mean(str(form), FORMS)}")
        if self.messages:
            if form != "picture":
                raise TaskError(f"{self.task}: questions of a file have no {form} form; use form = 'picture'")
            return tuple(chat_sample(self.messages, source=self.task, key=self.key, template="qa").segments)
        question = question_text(self.question)
        if thought:
            question = question.removesuffix(ANSWER_CUE) + THOUGHT_CUE
        # The question is always text: only what it is about changes its form.
        if form == "rendered":
            return Image(render_text(self.description)), Text(question, 0.0)
        if form == "twin" or self.picture is None:
            return (Text(self.description + question, 0.0),)
        return *self.seen(), Text(question, 0.0)

    def chat(self, form: Form = "picture") -> list[Message]:
        """The same prompt as messages, for the chat form."""
        if self.messages:
            return list(self.messages)
        # The question alone: its marks belong to the form of pretraining.
        shown = self.prompt(form)[:-1]
        told = f"{self.description}\n" if not shown and self.description else ""
        return [Message("user", (*shown, Text(told + self.question, 0.0)))]

    @property
    def image(self) -> PILImage.Image | None:
        """What a person is shown of it: the picture, or the first one of its messages; None for words."""
        for message in self.messages:
            for part in message.content:
                if isinstance(part, Image):
                    return part.open()
        return self.picture

    def seen(self) -> tuple[Segment, ...]:
        """What stands before the question in the form "picture"."""
        return (self.media(),)

    def media(self) -> Image | Video:
        """The picture, or the clip with its times, as a segment."""
        if "graph" in self.meta:
            return self.meta["graph"].media()
        assert self.picture is not None  # asked only where something is seen
        return Image(self.picture)

    @property
    def thought(self) -> str:
        """What there is, in few words and the same for every form: the steps of a rule, the objects of a
        scene from left to right, or the description."""
        if "thought" in self.meta:
            return str(self.meta["thought"])
        # A scene has a shorter telling than its twin with every box.
        graph = self.meta.get("graph")
        return (graph and graph.thought) or self.description.replace("\n", ", ")

    def solution(self, thought: bool = False) -> Text:
        """The target as it stands in a document after the prompt, after the thought if one is asked for."""
        return Text(f" {self.thought}; answer: {self.target}" if thought else answer_text(self.target))


def about(
    graph: Graph, question: str, answer: Any, target: str, key: str, category: str, **meta: Any
) -> Problem:
    """A question about a graph: its picture and its words; `key` is the combination."""
    meta["graph"] = graph
    return Problem(question, graph.draw(), graph.words(), answer, target, key, category, meta)


@dataclass(frozen=True)
class Kind:
    """One kind of question of an exam; answers are spread so that a constant one earns little.

    pattern: a regular expression for the questions of a graph that are of this kind. ask: makes the question,
    in place of a choice among the graph's own, or gives None where there is none. balanced: yes and no are
    equally likely. lowest: the answer is a number, drawn first, from `lowest` to HIGHEST.
    """

    pattern: str = ""
    ask: Callable[[Any, Random], Question | None] | None = None
    balanced: bool = False
    lowest: int | None = None

    def draw(self, rng: Random, make: Callable[[Random], Graph], listed: int) -> tuple[Graph, Question]:
        """A graph and its question. listed: how many questions a graph is asked to list.

        Raises TaskError when no graph has one: the generator has changed.
        """
        # The answer first, then a picture that has it: pictures drawn first have mostly small answers.
        number = None
        for attempt in range(10 * PICTURES):
            # Some answers are rare: after many pictures without one another is drawn.
            if self.lowest is not None and attempt % PICTURES == 0:
                number = str(rng.randint(self.lowest, HIGHEST))

            graph = make(rng)
            asked = self.ask(graph, rng) if self.ask else self.choose(graph, rng, listed, number)
            # A coin decides before the picture whether yes or no is wanted.
            if asked is None or (self.balanced and asked[1] != ("yes", "no")[rng.random() < 0.5]):
                continue
            return graph, asked
        raise TaskError(f"no question {self.pattern!r} in {attempt} generated pictures")

    def choose(self, graph: Graph, rng: Random, listed: int, number: str | None = None) -> Question | None:
        """One of the graph's own questions of this kind, with the answer `number` if one is given."""
        fitting = []
        for question, answer in graph.questions(rng, listed):
            if re.search(self.pattern, question) and number in (None, answer):
                fitting.append((question, answer))
        return rng.choice(fitting) if fitting else None


class Task:
    """Problems and their rewards, by level of difficulty; and the exam, a benchmark's questions by kind.

    levels: knobs of difficulty 0, 1, ...; none for a task that is an exam alone.

    kinds: category -> kind of question of the exam, asked in turn; none for a task without one. make: makes
    the graphs they are asked about. listed: questions that a graph lists for an exam. answer_tokens: most
    tokens of an answer there. scorer: (answer, gold, question) -> reward.
    """

    name: str
    levels: ClassVar[tuple[Knobs, ...]] = ()
    scorer: ClassVar[Callable[..., float]] = staticmethod(scoring.words)
    kinds: ClassVar[Mapping[str, Kind]] = {}
    make: ClassVar[Callable[..., Graph]]
    listed: ClassVar[int] = 99
    answer_tokens: ClassVar[int] = 24
    video: ClassVar[bool] = False
    quick: bool = True
    """Whether its rewards are sure to return soon; others run in processes with a deadline."""
    identity: str = ""
    """What changes when its problems do, for tasks that read a file."""

    def sample(self, seed: int, split: Split = "train", difficulty: int = 0) -> Problem:
        """A problem; equal arguments give equal problems. Raises TaskError for an unknown split or
        difficulty, and for knobs no problem can satisfy."""
        if split not in get_args(Split):
            raise TaskError(f"{self.name}: split {split!r}; expected train or test")
        if difficulty not in range(len(self.levels)):
            raise TaskError(f"{self.name}: difficulty {difficulty!r} of {len(self.levels)}")
        knobs = self.levels[difficulty]
        # The key holds everything the problem depends on, so that a log finds it again.
        key = f"{self.name}/{split}/{difficulty}/{seed}"

        # Attempts until one asks about a combination of the split.
        rng = Random(f"rl/{key}")
        for _ in range(TRIES):
            drawn = self.draw(rng, split == "test", knobs)
            if drawn is not None and self.heldout(drawn.combination) == (split == "test"):
                return replace(drawn, task=self.name, key=key)
        raise TaskError(f"{self.name}: no {split} problem with {knobs} in {TRIES} tries; widen the knobs")

    def numbered(self, number: int, seed: int, difficulty: int = 0) -> Problem:
        """Training problem of a number; equal numbers of two forms of one task are one problem."""
        # By the task and not by the entry, so that its forms can be compared problem by problem.
        return self.sample(digest64("rl", seed, self.name, number) >> 16, "train", difficulty)

    def test_problems(self, count: int, seed: int, difficulty: int = 0) -> list[Problem]:
        """Up to `count` held-out problems, no two with the same words and question."""
        # Problems are numbered; those that repeat an earlier one are passed over.
        found: dict[tuple[str, str], Problem] = {}
        number = vain = 0
        while len(found) < count and vain < IN_VAIN:
            problem = self.sample(seed * SEED_STEP + number, "test", difficulty)
            known = len(found)
            found.setdefault((problem.description, problem.question), problem)
            vain = vain + 1 if len(found) == known else 0
            number += 1
        return list(found.values())

    def heldout(self, combination: str) -> bool:
        """Whether a combination belongs to the test side."""
        return on_side(combination, heldout=True)

    def reward(self, problem: Problem, response_text: str) -> float:
        """Reward in [0, 1] of any text: the score of its final answer; 0 where there is none, or none that
        can be read."""
        # Thinking and announcements are no answer; their end is.
        answer = scoring.final_answer(response_text)
        return float(self.score(problem, answer)) if answer else 0.0

    def draw(self, rng: Random, heldout: bool, knobs: Knobs) -> Problem | None:
        """One attempt; None, or a combination of the wrong side, leads to the next one."""
        raise NotImplementedError

    def score(self, problem: Problem, answer: str) -> float:
        """The score of a final answer that is not empty, in [0, 1]."""
        return self.scorer(answer, problem.answer, problem.question)

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
            problems.append(replace(drawn, task=self.name, key=f"{self.name}/{number:05d}"))
        return problems

    def graph(self, rng: Random) -> Graph:
        """A held-out graph for a question of the exam."""
        return self.make(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, heldout=True)

    def judge(self, problem: Problem, text: str) -> Judged:
        """What an exam makes of an answer: equal to gold without case, article and closing punctuation."""
        return first_line(text) or None, float(exact_match(text, problem.answer)), {}


TASKS: dict[str, type[Task]] = {}
"""Every registered task by its name; data/tasks/registry.py imports those of the project."""


def task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Register the decorated class as the task `name`."""

    def register(cls: type[Task]) -> type[Task]:
        cls.name = name
        TASKS[name] = cls
        return cls

    return register
