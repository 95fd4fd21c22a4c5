"""What a model knows of held-out problems: greedy answers, probabilities, samples; the same problems for
every model.

    measured = measure(model, tokenizer, entries, problems=200, seed=7)
    summary(measured)["counting/1/twin"]["accuracy"]

Problem i of (task, difficulty, seed) is the same scene in every form, so forms and models pair by
`Measured.key`.

    accuracy    share of greedy answers that are solved (`SOLVED_FROM`); one cut off by the limit is no answer
    ended       share of greedy answers that ended by themselves; accuracy_4x, ended_4x: with four times the
                limit
    p_target    probability of exactly the target's tokens and the end after them, over the whole vocabulary
    pass@k      1 - C(n - c, k) / C(n, k) for c solved of n samples: unbiased (Chen et al. 2021, arXiv
                2107.03374)
    ece         sum over bins of n_b / n |accuracy - confidence|, bins of equal mass (Nguyen and O'Connor
                2015)

Where an answer follows a thought, p_target and confidence are those of the answer given the model's own
greedy thought.

Legend: M scored tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import Encoded
from earlyfusion.data.tasks.problem import Problem, Task
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.model.engine.sequence import house_of
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import evaluating
from earlyfusion.rl.measure.files import load_measured as load_measured
from earlyfusion.rl.measure.files import write_measured as write_measured
from earlyfusion.rl.measure.forward import Reading, Written, forced, write
from earlyfusion.rl.measure.pictures import Pictures, pictures_of, suffix_of, ways
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.rl.records import Measured
from earlyfusion.rl.rollouts.prompts import encode_prompt

SOLVED_FROM = {"grounding": 0.5, "pointing": 0.5, "polygon": 0.5}
"""Score from which an answer counts as solved: overlap of one half for places, everything for the rest."""
SOLVED_ELSE = 0.999
IN_VAIN = 100
"""Draws in a row that bring no new problem, after which a task's held-out side counts as used up: fewer
problems, none twice."""
SEED_STEP = 1_000_003
ANSWER_MARK = "answer:"
"""What stands between a thought and its answer (Problem.solution)."""
BINS = 10
LONGER = 4
"""Greedy answers are also judged with this many times the tokens."""


@dataclass(frozen=True)
class Question:
    """One problem in one form, ready to be asked. target: the ids of the target answer and of the end."""

    entry: TaskEntry
    task: Task
    problem: Problem
    prompt: Encoded
    target: tuple[int, ...]
    budget: int
    suffix: str = ""
    """Of the label, for another picture than the problem's own."""

    @property
    def label(self) -> str:
        """The entry's, with what is shown instead of the true picture."""
        return self.entry.label + self.suffix

    @property
    def id(self) -> str:
        """Key of the request, and so of the noise its samples are drawn with."""
        return f"{self.entry.label}|{self.problem.key}"


@dataclass
class Asked:
    """Questions with their greedy answers, samples, and the hidden states that choose greedy and target
    tokens; from these probabilities at any temperature follow without another pass through the model."""

    model: NativeFusion
    questions: list[Question]
    greedy: list[Written] = field(default_factory=list)
    longer: list[Written] = field(default_factory=list)
    """The greedy answers with LONGER times the tokens."""
    samples: list[list[Written]] = field(default_factory=list)
    marks: list[int | None] = field(default_factory=list)
    """Tokens of the greedy answer up to its answer mark; 0 without a thought; None where the mark never came.
    """
    target_MD: list[Tensor | None] = field(default_factory=list)

    def measured(self, temperature: float = 1.0) -> list[Measured]:
        """The records; probabilities and entropies of softmax(logits / temperature)."""
        greedy = token_log_probs(
            self.model,
            [done.states for done in self.greedy if done.states is not None],
            [done.ids for done in self.greedy],
            temperature,
        )
        known = [i for i, states in enumerate(self.target_MD) if states is not None]
        wanted = token_log_probs(
            self.model,
            [states for states in self.target_MD if states is not None],
            [self.questions[i].target for i in known],
            temperature,
        )
        target = dict(zip(known, wanted))
        return [self._record(i, greedy[i], target.get(i)) for i in range(len(self.questions))]

    def entropy(self, temperature: float = 1.0) -> float:
        """Mean over the problems of the mean entropy along the greedy answer, nats."""
        states = [done.states for done in self.greedy if done.states is not None]
        scored = token_log_probs(self.model, states, [done.ids for done in self.greedy], temperature)
        return sum(float(entropies.mean()) for _, entropies in scored) / len(scored)

    def only(self, label: str) -> Asked:
        """The part of one entry. Raises DataError for a label that was not asked."""
        chosen = [i for i, question in enumerate(self.questions) if question.label == label]
        if not chosen:
            raise DataError(f"{label!r} was not measured; known: {sorted({q.label for q in self.questions})}")
        parts = (self.questions, self.greedy, self.longer, self.samples, self.marks, self.target_MD)
        return Asked(self.model, *([part[i] for i in chosen] for part in parts))  # type: ignore[arg-type]

    def _record(
        self, i: int, greedy: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor] | None
    ) -> Measured:
        question, problem = self.questions[i], self.questions[i].problem
        score, longer = (
            question.task.reward(problem, done.answer) for done in (self.greedy[i], self.longer[i])
        )
        sampled = tuple(question.task.reward(problem, done.answer) for done in self.samples[i])
        return Measured(
            task=problem.task,
            form=question.entry.form,
            key=problem.key,
            category=str(problem.meta["category"]),
            prompt=problem.description if question.entry.form == "twin" else problem.question,
            target=problem.target,
            answer=self.greedy[i].text.strip(),
            score=score,
            solved=solved(problem.task, score),
            p_target=float(target[0].sum().exp()) if target is not None else 0.0,
            confidence=float(greedy[0][self.marks[i] or 0 :].sum().exp()),
            entropy=float(greedy[1].mean()) if len(greedy[1]) else 0.0,
            sampled=sampled,
            picture=problem.picture if question.entry.form == "picture" else None,
            label=question.label,
            ended=self.greedy[i].ended,
            solved_4x=solved(problem.task, longer),
            ended_4x=self.longer[i].ended,
        )


def solved(task: str, score: float) -> bool:
    """Whether a score counts as solved."""
    return score >= SOLVED_FROM.get(task, SOLVED_ELSE)


def check_counts(problems: int, samples: int, max_new_tokens: int, slots: int, temperature: float) -> None:
    """DataError if one is out of range."""
    if problems < 1 or samples < 0 or max_new_tokens < 1 or slots < 1 or not temperature > 0:
        raise DataError(
            f"problems={problems}, samples={samples}, max_new_tokens={max_new_tokens}, slots={slots},"
            f" temperature={temperature}: expected at least 1, 0, 1, 1 and a temperature above 0"
        )


def measure(
    model: NativeFusion,
    tokenizer: Any,
    entries: Sequence[TaskEntry],
    *,
    problems: int,
    seed: int,
    samples: int = 0,
    max_new_tokens: int = 8,
    temperature: float = 1.0,
    slots: int = 128,
    pictures: Sequence[Pictures] = ("true",),
    share: tuple[int, int] = (0, 1),
) -> list[Measured]:
    """Answers to `problems` held-out problems of every entry, in the order of the entries.

    samples: sampled answers for each problem at `temperature`, with the same noise for every model; the
    probabilities are at `temperature` too. max_new_tokens: raised for an entry whose targets (or thoughts)
    would not fit. slots: answers written at a time. pictures: what is shown in the problem's place
    (measure_pictures.py), one after the other for every entry with pictures; the labels of others than "true"
    end in it. share: (rank, world), one of world equal parts: questions rank, rank + world, ... Raises
    DataError for counts below 1, TaskError as the tasks do.
    """
    asked = ask(
        model,
        tokenizer,
        entries,
        problems=problems,
        seed=seed,
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        slots=slots,
        pictures=pictures,
        share=share,
    )
    return asked.measured(temperature)


def ask(
    model: NativeFusion,
    tokenizer: Any,
    entries: Sequence[TaskEntry],
    *,
    problems: int,
    seed: int,
    samples: int = 0,
    max_new_tokens: int = 8,
    temperature: float = 1.0,
    slots: int = 128,
    pictures: Sequence[Pictures] = ("true",),
    share: tuple[int, int] = (0, 1),
) -> Asked:
    """As `measure`, but keeps what is needed for other temperatures."""
    check_counts(problems, samples, max_new_tokens, slots, temperature)
    if any(entry.tools for entry in entries):
        raise DataError(
            "entries with tools need the sandbox; measure them with rl.tool_measure.measure_tools or"
            " `earlyfusion measure`"
        )
    questions = [
        question
        for entry in entries
        for how in ways(entry, pictures)
        for question in questions_of(entry, tokenizer, model, problems, seed, max_new_tokens, how)
    ]
    if not questions:
        raise DataError("no task entries to measure; give at least one")
    asked = Asked(model, questions[share[0] :: share[1]])
    _answers(asked, tokenizer, samples, temperature, max(slots, samples))
    return asked


def held_out(entry: TaskEntry, problems: int, seed: int) -> tuple[Task, list[Problem]]:
    """The task and up to `problems` different held-out problems; no two with the same words and question."""
    task = make_task(entry.name, **entry.options)
    found: dict[tuple[str, str], Problem] = {}
    number = vain = 0
    while len(found) < problems and vain < IN_VAIN:
        problem = task.sample(seed * SEED_STEP + number, "test", entry.difficulty)
        known = len(found)
        found.setdefault((problem.description, problem.question), problem)
        vain = vain + 1 if len(found) == known else 0
        number += 1
    return task, list(found.values())


def questions_of(
    entry: TaskEntry,
    tokenizer: Any,
    model: NativeFusion,
    problems: int,
    seed: int,
    max_new_tokens: int,
    pictures: Pictures = "true",
) -> list[Question]:
    """The questions of one entry."""
    task, drawn = held_out(entry, problems, seed)
    ends = [(*tokenizer.encode(problem.solution().text), tokenizer.eos_id) for problem in drawn]
    longest = max(len(ids) for ids in ends)
    if entry.thought:  # a thought may be told in more words than the shortest way
        longest = math.ceil(
            1.5 * max(len(tokenizer.encode(problem.solution(True).text)) + 1 for problem in drawn)
        )
    made = []
    for problem, target, picture in zip(drawn, ends, pictures_of(entry, drawn, pictures)):
        prompt = encode_prompt(problem, entry, tokenizer, model.config.vision, picture)
        budget = max(max_new_tokens, longest)
        made.append(Question(entry, task, problem, prompt, target, budget, suffix_of(pictures)))
    return made


def _answers(asked: Asked, tokenizer: Any, samples: int, temperature: float, slots: int) -> None:
    """Fill greedy answers, samples and states, `slots` answers at a time."""
    model, house, many = asked.model, house_of(asked.model, tokenizer), max(1, slots // max(1, samples))
    with evaluating(model):
        for start in range(0, len(asked.questions), many):
            part = asked.questions[start : start + many]
            reading = Reading.of(model, house, [question.prompt for question in part])
            budgets = [question.budget for question in part]
            longer = write(reading, [LONGER * budget for budget in budgets])
            greedy = [done.within(house, budget) for done, budget in zip(longer, budgets)]
            drawn: list[Written] = []
            if samples:
                drawn = write(
                    reading, budgets, ids=[q.id for q in part], samples=samples, temperature=temperature
                )
            marks = [_mark(question, done, tokenizer) for question, done in zip(part, greedy)]
            asked.greedy += greedy
            asked.longer += longer
            asked.samples += [drawn[i * samples : (i + 1) * samples] for i in range(len(part))]
            asked.marks += marks
            asked.target_MD += _target_states(reading, part, greedy, marks)


def _mark(question: Question, done: Written, tokenizer: Any) -> int | None:
    if not question.entry.thought:
        return 0
    if ANSWER_MARK not in done.text:
        return None
    return next(k for k in range(1, len(done.ids) + 1) if ANSWER_MARK in tokenizer.decode(done.ids[:k]))


def _target_states(
    reading: Reading, part: Sequence[Question], greedy: Sequence[Written], marks: Sequence[int | None]
) -> list[Tensor | None]:
    """States that choose the target's tokens; those of the greedy answer where that is the target."""
    out: list[Tensor | None] = [None] * len(part)
    other = []
    for i, (question, done, mark) in enumerate(zip(part, greedy, marks)):
        if mark is not None and tuple(done.ids[mark:]) == question.target and done.states is not None:
            out[i] = done.states[mark:]
        elif mark is not None:
            other.append(i)
    if other:
        tokens = [(*greedy[i].ids[: marks[i]], *part[i].target) for i in other]
        for i, states in zip(other, forced(reading.fork(other), tokens)):
            out[i] = states[marks[i] or 0 :]
    return out


def token_log_probs(
    model: NativeFusion, states: Sequence[Tensor], tokens: Sequence[Sequence[int]], temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """(log-probabilities, entropies), fp32 on the CPU, of each list of tokens from its states; nats."""
    sizes = [len(ids) for ids in tokens]
    if not sum(sizes):
        return [(torch.zeros(0), torch.zeros(0)) for _ in sizes]
    hidden_MD = torch.cat(list(states))
    labels_M = torch.tensor([i for ids in tokens for i in ids], dtype=torch.long, device=hidden_MD.device)
    with evaluating(model):
        logps_M, entropies_M = resolve("token_log_probs", hidden_MD.device)(
            hidden_MD, model.decoder.head_weight(), labels_M, temperature=temperature
        )
    return list(zip(logps_M.float().cpu().split(sizes), entropies_M.float().cpu().split(sizes)))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples drawn without replacement from these is correct."""
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise DataError(f"pass@{k} of {correct} correct among {samples}: expected 1 <= k <= samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def ece(confidence: Sequence[float], right: Sequence[bool | float], bins: int = BINS) -> float:
    """Expected calibration error with bins of equal mass."""
    sure, hit = np.asarray(confidence, dtype=np.float64), np.asarray(right, dtype=np.float64)
    if sure.shape != hit.shape or sure.ndim != 1 or not len(sure):
        raise DataError(
            f"calibration of {sure.shape} confidences and {hit.shape} outcomes: expected one of each, not"
            " none"
        )
    order = np.argsort(sure, kind="stable")
    parts = np.array_split(order, min(bins, len(order)))
    return float(sum(abs(hit[part].sum() - sure[part].sum()) for part in parts) / len(sure))


def summary(measured: Iterable[Measured], bins: int = BINS) -> dict[str, dict[str, float]]:
    """Label -> n, accuracy, score, p_target, confidence, ece, entropy, and with samples pass@1, pass@2,
    pass@4, ..."""
    by_label: dict[str, list[Measured]] = {}
    for one in measured:
        by_label.setdefault(one.label or f"{one.task}/{one.form}", []).append(one)
    return {label: _summary(part, bins) for label, part in by_label.items()}


def _summary(part: Sequence[Measured], bins: int) -> dict[str, float]:
    names = {"accuracy": "solved", "ended": "ended", "accuracy_4x": "solved_4x", "ended_4x": "ended_4x"}
    names |= {"score": "score", "p_target": "p_target", "confidence": "confidence"}
    out: dict[str, float] = {"n": len(part)}
    out |= {name: float(np.mean([float(getattr(one, key)) for one in part])) for name, key in names.items()}
    out["ece"] = ece([one.confidence for one in part], [one.solved for one in part], bins)
    out["entropy"] = float(np.mean([one.entropy for one in part]))
    drawn = min(len(one.sampled) for one in part)
    for k in (2**i for i in range(drawn.bit_length())):
        out[f"pass@{k}"] = float(np.mean([sampled_pass(one, k) for one in part]))
    return out


def sampled_pass(one: Measured, k: int) -> float:
    """pass@k of one problem's samples."""
    return pass_at_k(len(one.sampled), sum(solved(one.task, score) for score in one.sampled), k)
