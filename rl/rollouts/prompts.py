"""Which prompts an iteration asks, and what is remembered of how often each was solved.

A bin is what the curriculum weighs: a task entry (new problems for every prompt), or, with rollout.pool, one
problem that is asked again and again. Everything drawn is a function of the seed, the generator's state and
the counters, which the checkpoint keeps. All processes draw the same prompts, but each makes and reads only
those of its own share.

Legend: P bins.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.errors import REASONS, BadSample, DataError
from earlyfusion.data.loading.encode import Encoded
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.sample import Image, Segment, Text
from earlyfusion.data.tasks.problem import Problem, Task
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import plain_prompt, replaced
from earlyfusion.rl.recipe import RLConfig, TaskEntry
from earlyfusion.rl.rollouts.sampling import draw, prompt_weights
from earlyfusion.rl.rollouts.tool_prompts import tool_messages
from earlyfusion.vision.config import VisionConfig

KEPT_BYTES = 1 << 30
"""Memory of encoded prompts that are kept (a pool asks the same again, and an iteration's are made ahead).
Pictures are what counts: 16,384 patches of 14 x 14 pixels take 9.6 MB."""
OBJECTIONS = ("", "too_long", *REASONS)
"""Why a prompt is left out; 0 is none."""
TRIES = 50
"""Prompts that are drawn in place of one that is too long."""


@dataclass(frozen=True)
class Ask:
    """One prompt to be asked: bin, entry of the recipe, number of its problem. JSON: list(ask)."""

    bin: int
    entry: int
    number: int

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.bin, self.entry, self.number))


def encode_prompt(
    problem: Problem,
    entry: TaskEntry,
    tokenizer: Tokenizer,
    vision: VisionConfig,
    shown: Sequence[Image] | None = None,
) -> Encoded:
    """The prompt of a problem as an open document, exactly as in training data of kind "problems"; with tools
    as in that of kind "chat_scenes" (or "zero_vision", for a form in words), open where the assistant is to
    speak.

    shown: what stands in the picture's place, if not the picture (eval/measure.py)."""
    if entry.tools:
        said = [
            replace(m, content=tuple(replaced(m.content, shown))) for m in tool_messages(problem, entry.form)
        ]
        return encode_chat(said, tokenizer, vision, key=problem.key)
    return plain_prompt(problem, entry, tokenizer, vision, shown)


def prompt_segments(problem: Problem, entry: TaskEntry) -> list[Segment]:
    """What a prompt says and shows; of the chat form, its messages with an empty line between them."""
    if entry.tools:
        system, question = tool_messages(problem, entry.form)
        return [*system.content, Text("\n\n", 0.0), *question.content]
    return list(problem.prompt(entry.form, entry.thought))


def prompt_bytes(made: tuple[Problem, Encoded]) -> int:
    """Memory of a problem and its prompt: the picture, its patches and the ids."""
    problem, prompt = made
    tensors = [prompt.ids, prompt.loss_weights, prompt.media_positions]
    tensors += [] if prompt.patches is None else [prompt.patches]
    picture = problem.picture
    pixels = 0 if picture is None else picture.width * picture.height * len(picture.getbands())
    return pixels + sum(tensor.nbytes for tensor in tensors)


class Remembered:
    """`make(ask)`, with the latest results kept: as many as fit in `limit` bytes, the last one in any case.
    One thread at a time (a collector waits for the thread that makes prompts ahead before it asks). made:
    calls of `make`."""

    def __init__(self, make: Callable[[Ask], tuple[Problem, Encoded]], limit: int) -> None:
        self.make, self.limit = make, limit
        self.bytes = self.made = 0
        self._known: OrderedDict[Ask, tuple[Problem, Encoded]] = OrderedDict()

    def __call__(self, ask: Ask) -> tuple[Problem, Encoded]:
        if ask in self._known:
            self._known.move_to_end(ask)
            return self._known[ask]
        self.made += 1
        found = self._known[ask] = self.make(ask)
        self.bytes += prompt_bytes(found)
        while self.bytes > self.limit and len(self._known) > 1:
            self.bytes -= prompt_bytes(self._known.popitem(last=False)[1])
        return found


class PromptBook:
    """See the file's head.

    config: tasks, rollout.pool, curriculum and seed are read. Raises TaskError for a task that cannot be
    made.
    """

    def __init__(self, config: RLConfig, tokenizer: Tokenizer, vision: VisionConfig) -> None:
        self.config, self.tokenizer, self.vision = config, tokenizer, vision
        self.entries = config.tasks
        self.tasks: list[Task] = [make_task(entry.name, **entry.options) for entry in self.entries]
        self.pool = config.rollout.pool
        own = [share_of_levels(task, entry.difficulty) for task, entry in zip(self.tasks, self.entries)]
        self.difficulty_P = torch.tensor(own, dtype=torch.float64).repeat_interleave(max(1, self.pool))
        bins = len(self.entries) * max(1, self.pool)
        self.solved_P, self.tried_P = (
            torch.zeros(bins, dtype=torch.float64),
            torch.zeros(bins, dtype=torch.float64),
        )
        self.made_E = [0] * len(self.entries)
        self.generator = torch.Generator().manual_seed(config.run.seed)
        self.left_out: Counter[str] = Counter()
        self.prompt = Remembered(self._prompt, KEPT_BYTES)

    def weights(self, update: int) -> Tensor:
        """Probability of every bin at this update, float64 [P]."""
        shares = torch.tensor([entry.weight for entry in self.entries], dtype=torch.float64)
        shares_P = shares.repeat_interleave(max(1, self.pool))
        curriculum = self.config.curriculum
        own_P = self.difficulty_P if curriculum.mode == "easy_to_hard" else None
        weights_P = prompt_weights(curriculum, self.solved_P, self.tried_P, update, own_P) * shares_P
        total = weights_P.sum()
        # The curriculum may allow only bins whose entries have weight 0: then the recipe's own weights
        # decide.
        return weights_P / total if float(total) > 0 else shares_P / shares_P.sum()

    def draw(
        self,
        count: int,
        update: int,
        share: slice = slice(None),
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Ask]:
        """`count` prompts for this update; those that are too long or broken are left out, counted and
        replaced.

        share: which of them this process makes. agree: sums float64 [count] over processes, whose shares must
        together be all; every process calls it equally often and gets the same prompts. Raises DataError
        where TRIES prompts in a row do not serve.
        """
        asks = self._proposed(count, update)
        mine, unsure = set(range(*share.indices(count))), list(range(count))
        for _ in range(TRIES):
            found_N = torch.zeros(count, dtype=torch.float64)
            for i in unsure:
                if i in mine:
                    found_N[i] = self._objection(asks[i])
            objections = [int(x) for x in (found_N if agree is None else agree(found_N)).tolist()]
            unsure = [i for i in unsure if objections[i]]
            if not unsure:
                return asks
            for i in unsure:
                self.left_out[OBJECTIONS[objections[i]]] += 1
                asks[i] = self._another(asks[i])
        raise DataError(
            f"{self.entries[asks[unsure[0]].entry].label}: {TRIES} prompts in a row were left out"
            f" ({dict(self.left_out)}); raise rollout.max_prompt_tokens or make the task easier"
        )

    def coming(self, count: int, update: int) -> list[Ask]:
        """What `draw` would begin with if it were called now; nothing changes."""
        generator, made_E = self.generator.get_state(), list(self.made_E)
        asks = self._proposed(count, update)
        self.made_E = made_E
        self.generator.set_state(generator)
        return asks

    def _proposed(self, count: int, update: int) -> list[Ask]:
        how = draw if self.pool else spread_evenly
        bins = how(self.weights(update), count, self.generator)
        return [Ask(bin, bin // max(1, self.pool), self._number(bin)) for bin in bins]

    def _number(self, bin: int) -> int:
        """Which problem a bin asks: its own of the pool, or the next one of its entry."""
        if self.pool:
            return bin % self.pool
        self.made_E[bin] += 1
        return self.made_E[bin] - 1

    def _another(self, ask: Ask) -> Ask:
        """In place of a problem that does not serve: another one of the same entry."""
        bin = ask.bin
        if self.pool:
            bin = ask.entry * self.pool + int(torch.randint(self.pool, (1,), generator=self.generator))
        return Ask(bin, ask.entry, self._number(bin))

    def _objection(self, ask: Ask) -> int:
        """Why a prompt cannot be asked, as a number of OBJECTIONS; 0 if it can."""
        try:
            tokens = len(self.prompt(ask)[1].ids)
        except BadSample as error:
            return OBJECTIONS.index(error.reason)
        limit = self.config.rollout.max_prompt_tokens
        return 0 if limit is None or tokens <= limit else OBJECTIONS.index("too_long")

    def _prompt(self, ask: Ask) -> tuple[Problem, Encoded]:
        entry, task = self.entries[ask.entry], self.tasks[ask.entry]
        # Equal numbers of two entries of one task are one problem in two forms, so that forms can be
        # compared.
        seed = digest64("rl", self.config.run.seed, entry.name, ask.number) >> 16
        problem = task.sample(seed, "train", entry.difficulty)
        return problem, encode_prompt(problem, entry, self.tokenizer, self.vision)

    def note(self, solved_P: Tensor, tried_P: Tensor) -> None:
        """Add what all processes saw at this update: sums of scores and numbers of answers by bin. What was
        there before fades by the answers that were added, so that a rate follows the policy."""
        kept_P = (-tried_P.cpu() / self.config.curriculum.memory_answers).exp()
        self.solved_P = self.solved_P * kept_P + solved_P.cpu()
        self.tried_P = self.tried_P * kept_P + tried_P.cpu()

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint; equal on all processes."""
        return {
            "solved": self.solved_P.clone(),
            "tried": self.tried_P.clone(),
            "made": list(self.made_E),
            "generator": self.generator.get_state(),
            "left_out": dict(self.left_out),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave, of the same recipe."""
        self.solved_P, self.tried_P = state["solved"].clone(), state["tried"].clone()
        self.made_E, self.left_out = list(state["made"]), Counter(state["left_out"])
        self.generator.set_state(state["generator"])


def share_of_levels(task: Task, level: int) -> float:
    """A level of difficulty as a share of the task's highest, in [0, 1]; 0 for a task with one level."""
    highest = len(getattr(task, "levels", ())) - 1
    return level / highest if highest > 0 else 0.0


def spread_evenly(weights_P: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """`count` bins in proportion to their weights: each gets the whole part of its due, chance decides on the
    rest.

    An iteration then shows every task as often as it should, with no luck of the draw between them; the order
    is mixed.
    """
    due_P = weights_P.double() / weights_P.sum() * count
    whole_P = (due_P + 1e-9).floor()
    rest_P = (due_P - whole_P).clamp(min=0)
    left = count - int(whole_P.sum())
    bins = torch.arange(weights_P.numel()).repeat_interleave(whole_P.long()).tolist()
    if left > 0:
        bins += draw(rest_P if float(rest_P.sum()) > 0 else weights_P.double(), left, generator)
    order = torch.randperm(len(bins), generator=generator).tolist()
    return [bins[i] for i in order]
