"""Which prompts an iteration asks, in words and pictures, and how often each was solved.

A bin is what the curriculum weighs: a task entry (new problems for every prompt), or, with rollout.pool, one
problem that is asked again and again. Everything drawn is a function of the seed, the generator's state and
the counters, which the checkpoint keeps. All processes draw the same prompts, but each makes and reads only
those of its own share.

Legend: P bins, E entries of the recipe.

Which prompts are drawn, and the temperature of sampling.

A prompt is described by how often it was tried and solved; from that come a difficulty and a weight. All
schedules are functions of the update's number, so a resumed run needs no more than that number, the tallies
and the generator.

Legend: P prompts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.errors import REASONS, BadSample, DataError
from earlyfusion.data.loading.encode import Encoded
from earlyfusion.data.sample import Segment, Text
from earlyfusion.data.tasks.problem import Problem, Task
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.tool_problems import tool_messages
from earlyfusion.eval.blind import Shown
from earlyfusion.eval.measure import plain_prompt, shown_in
from earlyfusion.kernels.files import Record
from earlyfusion.rl.recipe import CurriculumConfig, RLConfig, TaskEntry
from earlyfusion.rl.rollouts.episodes import Environments
from earlyfusion.vision.config import VisionConfig

# Without it a prompt that failed once would count as unsolvable.
PRIOR_TRIALS = 2.0
"""Imagined trials, half of them successes, before a prompt was tried."""
MEMORY_ANSWERS = 100.0
"""Answers to a prompt (with rollout.pool = 0: of a task entry) after which older ones count 1/e: the policy
changes."""


def success_rates(solved_P: Tensor, tried_P: Tensor) -> Tensor:
    """(solved + prior/2) / (tried + prior), float64 in (0, 1): a prompt that was never tried stands at one
    half. solved_P may be a sum of rewards in [0, 1]."""
    return (solved_P.double() + PRIOR_TRIALS / 2) / (tried_P.double() + PRIOR_TRIALS)


def prompt_weights(
    config: CurriculumConfig, solved_P: Tensor, tried_P: Tensor, levels_P: Tensor, update: int
) -> Tensor:
    """Weight of every prompt in the draw, float64 [P]. levels_P in [0, 1]: the task's own difficulty, which a
    prompt has before it was ever tried.

    hard_after_warmup (k1.5): all, then from `warmup_updates` on those whose failure rate is at least
    `hard_from`. easy_to_hard: those of at most a level that grows evenly from `start_difficulty` to 1. Where
    no prompt fits, all are offered. prioritised (k1.5): in proportion to the failure rate, but at least
    `floor`.
    """
    failures_P = 1 - success_rates(solved_P, tried_P)
    offered_P = torch.ones_like(failures_P, dtype=torch.bool)
    if config.mode == "hard_after_warmup" and update >= config.warmup_updates:
        offered_P = failures_P >= config.hard_from
    elif config.mode == "easy_to_hard" and update < config.warmup_updates:
        share = update / config.warmup_updates
        offered_P = levels_P <= config.start_difficulty + (1 - config.start_difficulty) * share
    # Rather everything than nothing: a run must not stop because it has become too good.
    if not offered_P.any():
        offered_P = ~offered_P
    if config.prioritised:
        return failures_P.clamp(min=config.floor) * offered_P
    return offered_P.double()


def draw(weights_P: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """`count` prompts by weight, in the order drawn: without repetition while there are unused prompts of
    positive weight, then over again. Bit for bit the same for the same generator state."""
    # multinomial without replacement refuses to draw more than have a weight.
    available = int((weights_P > 0).sum())
    drawn: list[int] = []
    # Everything once before anything twice.
    while len(drawn) < count:
        size = min(available, count - len(drawn))
        drawn += torch.multinomial(weights_P, size, replacement=False, generator=generator).tolist()
    return drawn


def spread_evenly(weights_P: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """`count` prompts in proportion to their weights, in mixed order: each gets the whole part of its due,
    chance decides on the rest. An iteration then shows every task as often as it should, with no luck of the
    draw between them."""
    due_P = weights_P / weights_P.sum() * count
    whole_P = (due_P + 1e-9).floor()  # a due of 2.9999999 is 3
    rest_P = (due_P - whole_P).clamp(min=0)
    bins = torch.arange(weights_P.numel()).repeat_interleave(whole_P.long()).tolist()
    if len(bins) < count:
        if float(rest_P.sum()) == 0:
            rest_P = weights_P
        bins += draw(rest_P, count - len(bins), generator)
    order = torch.randperm(len(bins), generator=generator).tolist()
    return [bins[i] for i in order]


OBJECTIONS = ("", "too_long", *REASONS)
"""Why a prompt is left out; 0 is none, 1 is its length."""
TRIES = 50
"""Prompts that are drawn in place of one that is too long."""


@dataclass(frozen=True)
class Prompt:
    """One prompt to be asked: bin, entry of the recipe, number of its problem.

    Its problem and document are made when they are first asked for, and kept as long as it is.
    """

    bin: int
    entry: int
    number: int
    pool: PromptPool = field(repr=False, compare=False)

    @cached_property
    def problem(self) -> Problem:
        """Equal numbers of two entries of one task are one problem in two forms, so that forms compare."""
        task, difficulty = self.pool.tasks[self.entry], self.pool.entries[self.entry].difficulty
        return task.numbered(self.number, self.pool.config.run.seed, difficulty)

    @cached_property
    def encoded(self) -> Document:
        """The open document that the engine reads. Raises BadSample for one that cannot be read."""
        return Document(self)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What is asked, as messages, for rewards that look at the conversation."""
        return tuple(messages_of(self.problem, self.pool.entries[self.entry], self.pool.environments))

    @property
    def ids(self) -> list[int]:
        """What names it, for JSON and checkpoints: `PromptPool.prompt(*ids)`."""
        return [self.bin, self.entry, self.number]


class Document:
    """A prompt as the engine and the trainer read it: ids [n] and places stay, patches are decoded again when
    the pool has let them go (rollout.prompt_cache_mb)."""

    def __init__(self, prompt: Prompt) -> None:
        whole = prompt.pool.read(prompt)
        self.ids, self.grids = whole.ids, tuple(whole.grids)
        self.media_positions = whole.media_positions
        self._prompt = prompt if whole.patches is not None else None

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def patches(self) -> Tensor | None:
        """uint8 [P, 3, p, p] of all pictures, or None."""
        return None if self._prompt is None else self._prompt.pool.read(self._prompt).patches


def encode_prompt(
    problem: Problem,
    entry: TaskEntry,
    tokenizer: Tokenizer,
    vision: VisionConfig,
    shown: Shown = None,
    environments: Environments | None = None,
) -> Encoded:
    """The prompt of a problem as an open document, exactly as in training data of kind "problems"; with tools
    as in that of kind "chat_scenes" (or "zero_vision", for a form in words), open where the assistant is to
    speak.

    shown: what stands in the picture's place, if not the picture (eval/blind.py)."""
    # Exactly the training form: another blank would be another question to a small model.
    if not entry.place:
        return plain_prompt(problem, entry, tokenizer, vision, shown)
    messages = shown_in(messages_of(problem, entry, environments), shown)
    return encode_chat(messages, tokenizer, vision, thinking=entry.thought, key=problem.key)


def messages_of(problem: Problem, entry: TaskEntry, environments: Environments | None) -> list[Message]:
    """The prompt as messages: what the environment begins with, or the problem itself. Raises BadSample for
    an environment that does not begin."""
    if entry.place == "python":
        return tool_messages(problem, entry.form)
    if entry.place is None:
        return problem.chat(entry.form)
    assert environments is not None  # made for every run that has such an entry
    try:
        return environments.prompt(entry, problem)
    except Exception as error:  # an environment may raise anything
        raise BadSample(
            f"{entry.label} {problem.key}: {type(error).__name__}: {error}", "unexpected"
        ) from error


def prompt_segments(
    problem: Problem, entry: TaskEntry, environments: Environments | None = None
) -> list[Segment]:
    """Text and pictures of a prompt; of the chat form, its messages with an empty line between them."""
    if not (entry.place or entry.chat):
        return list(problem.prompt(entry.form, entry.thought))
    messages = messages_of(problem, entry, environments)
    segments: list[Segment] = []
    for message in messages:
        segments += [Text("\n\n", 0.0), *message.content] if segments else message.content
    return segments


def size_of(document: Encoded) -> int:
    """Bytes of its patches."""
    return 0 if document.patches is None else document.patches.nbytes


class PromptPool:
    """Draws prompts by the curriculum, and remembers how they went; see the file's head.

    config: tasks, rollout.pool, curriculum and seed are read. Raises TaskError for a task that cannot be
    made.
    """

    def __init__(self, config: RLConfig, tokenizer: Tokenizer, vision: VisionConfig) -> None:
        self.config, self.tokenizer, self.vision = config, tokenizer, vision
        self.entries = config.tasks
        self.tasks: list[Task] = [make_task(entry.name, **entry.options) for entry in self.entries]

        self.environments: Environments | None = None
        if config.has_tools:
            entries = [*self.entries, *config.eval.tasks]
            self.environments = Environments(entries, config.rollout, config.sandbox.allow_weaker)
            # What can be told now would otherwise cost every answer of the run.
            for task, entry in zip(self.tasks, self.entries):
                if entry.environment:
                    self.environments.check(entry, task.sample(0, "train", entry.difficulty))

        # One bin an entry, or one for each problem of its pool.
        self.size = config.rollout.pool
        self.each = max(1, self.size)
        levels, shares = [], []
        for task, entry in zip(self.tasks, self.entries):
            highest = max(1, len(getattr(task, "levels", ())) - 1)
            levels += [entry.difficulty / highest] * self.each
            shares += [entry.weight] * self.each
        self.levels_P, self.shares_P = torch.tensor([levels, shares], dtype=torch.float64)
        self.solved_P, self.tried_P = torch.zeros(2, len(levels), dtype=torch.float64)

        # Documents that were read last, and the bytes of their patches.
        self.held: OrderedDict[tuple[int, int], Encoded] = OrderedDict()
        self.held_bytes = 0
        self.drawn_E = [0] * len(self.entries)
        self.generator = torch.Generator().manual_seed(config.run.seed)
        self.left_out: Counter[str] = Counter()

    def prompt(self, bin: int, entry: int, number: int) -> Prompt:
        """A prompt by what names it."""
        return Prompt(bin, entry, number, self)

    def read(self, prompt: Prompt) -> Encoded:
        """The whole document of a prompt. Raises BadSample."""
        # Two entries of one task differ in form, so the entry and not the task is the name.
        name = prompt.entry, prompt.number
        if name in self.held:
            self.held.move_to_end(name)
            return self.held[name]
        entry = self.entries[prompt.entry]
        given = (prompt.problem, entry, self.tokenizer, self.vision, None, self.environments)
        read = encode_prompt(*given)
        self.held[name] = read
        self.held_bytes += size_of(read)
        # The newest stays, however large it is.
        while self.held_bytes > self.config.rollout.prompt_cache_mb << 20 and len(self.held) > 1:
            self.held_bytes -= size_of(self.held.popitem(last=False)[1])
        return read

    def weights(self, update: int) -> Tensor:
        """Probability of every bin at this update, float64 [P]."""
        # Shares of the recipe times what the curriculum thinks of each bin.
        curriculum = self.config.curriculum
        weights_P = prompt_weights(curriculum, self.solved_P, self.tried_P, self.levels_P, update)
        weights_P = weights_P * self.shares_P
        if not weights_P.any():  # the curriculum offers bins of weight 0 alone: the recipe's weights decide
            weights_P = self.shares_P
        return weights_P / weights_P.sum()

    def draw(
        self,
        count: int,
        update: int,
        share: slice = slice(None),
        agree: Callable[[Tensor], Tensor] = lambda found_N: found_N,
    ) -> list[Prompt]:
        """`count` prompts for this update; those that are too long or broken are left out, counted and
        replaced.

        share: which of them this process makes. agree: sums float64 [count] over processes, whose shares must
        together be all; every process calls it equally often and gets the same prompts. Raises DataError
        where TRIES prompts in a row do not serve.
        """
        # A pool is drawn by chance; entries get exactly their share of every iteration.
        draw_bins = draw if self.size else spread_evenly
        prompts = []
        for bin in draw_bins(self.weights(update), count, self.generator):
            prompts.append(self._next(bin))

        # All processes judge their own share and hear of the others, so that all replace the same ones.
        mine, unsure = set(range(*share.indices(count))), list(range(count))
        for _ in range(TRIES):
            found_N = torch.zeros(count, dtype=torch.float64)
            for i in mine.intersection(unsure):
                found_N[i] = self._objection(prompts[i])
            objections = agree(found_N).long().tolist()
            unsure = [i for i in unsure if objections[i]]
            if not unsure:
                return prompts
            for i in unsure:
                self.left_out[OBJECTIONS[objections[i]]] += 1
                prompts[i] = self._another(prompts[i])
        raise DataError(
            f"{self.entries[prompts[unsure[0]].entry].label}: {TRIES} prompts in a row were left out"
            f" ({dict(self.left_out)}); raise rollout.max_prompt_tokens or make the task easier"
        )

    def _next(self, bin: int) -> Prompt:
        """What a bin asks: its own problem of the pool, or the next one of its entry."""
        if self.size:
            return self.prompt(bin, bin // self.size, bin % self.size)
        self.drawn_E[bin] += 1
        return self.prompt(bin, bin, self.drawn_E[bin] - 1)

    def _another(self, prompt: Prompt) -> Prompt:
        """In place of a problem that does not serve: another one of the same entry."""
        # The next one of the entry; of a pool, any other of the same entry.
        if not self.size:
            return self._next(prompt.bin)
        other = int(torch.randint(self.size, (1,), generator=self.generator))
        return self._next(prompt.entry * self.size + other)

    def _objection(self, prompt: Prompt) -> int:
        """Why a prompt cannot be asked, as a number of OBJECTIONS; 0 if it can."""
        try:
            # Reading it is the only way to know; the document is kept for the engine.
            tokens = len(prompt.encoded.ids)
        except BadSample as error:
            return OBJECTIONS.index(error.reason)
        limit = self.config.rollout.max_prompt_tokens
        return int(limit is not None and tokens > limit)

    def count(self, solved_P: Tensor, tried_P: Tensor) -> None:
        """Add what all processes saw at this update: sums of scores and numbers of answers by bin. What was
        there before fades by the answers that were added, so that a rate follows the policy."""
        # By answers and not by updates, so that a rare prompt is not forgotten faster.
        kept_P = (-tried_P.cpu() / MEMORY_ANSWERS).exp()
        self.solved_P = self.solved_P * kept_P + solved_P.cpu()
        self.tried_P = self.tried_P * kept_P + tried_P.cpu()

    def state_dict(self) -> Record:
        """For the checkpoint; equal on all processes."""
        return {
            "solved": self.solved_P,
            "tried": self.tried_P,
            "made": list(self.drawn_E),
            "generator": self.generator.get_state(),
            "left_out": dict(self.left_out),
            "tasks": [task.identity for task in self.tasks],
        }

    def load_state_dict(self, state: Record) -> None:
        """What `state_dict` gave, of the same recipe. Raises DataError where a file of questions has
        changed."""
        for task, entry, known in zip(self.tasks, self.entries, state.get("tasks", [])):
            if task.identity != known:
                raise DataError(
                    f"{entry.label}: the file has changed since the run began, and so would the order; put"
                    " the old one back, or start a new run from this one's model"
                )
        self.solved_P, self.tried_P = state["solved"], state["tried"]
        self.drawn_E, self.left_out = list(state["made"]), Counter(state["left_out"])
        self.generator.set_state(state["generator"])
