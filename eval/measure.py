"""What a model knows of held-out problems: greedy answers, probabilities, samples; the same problems for
every model.

    measured = ask(model, tokenizer, entries, problems=200, seed=7).measured()
    summary(measured)["counting/1/twin"]["accuracy"]                     # eval/measured.py

The engine writes the answers and judges them and the targets; the hidden states it keeps give probabilities
and entropies at any temperature without another pass. Problem i of (task, difficulty, seed) is the same scene
in every form, so forms and models pair by `Measured.key`. Where an answer follows a thought, p_target and
confidence are those of the answer given the model's own greedy thought.

Legend: M scored tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor

from earlyfusion.data.chat.template import Message
from earlyfusion.data.chat.tokens import encode_chat, parse_assistant
from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import Encoded, encode
from earlyfusion.data.sample import Sample
from earlyfusion.data.tasks.problem import Form, Problem, Task
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.blind import Pictures, Shown, instead, is_media, replaced
from earlyfusion.eval.measured import Measured, solved
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.model.engine.engine import Engine, engine_for, evaluating
from earlyfusion.model.engine.requests import Request, SamplingParams, ScoreRequest
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.vision.config import VisionConfig

ANSWER_MARK = "answer:"
"""What stands between a thought and its answer (Problem.solution)."""
LONGER = 4
"""Greedy answers are also judged with this many times the tokens."""


class Entry(Protocol):
    """One kind of question: a task at a level of difficulty, in a form, perhaps with a thought or with
    tools."""

    @property
    def name(self) -> str: ...
    @property
    def difficulty(self) -> int: ...
    @property
    def form(self) -> Form: ...
    @property
    def thought(self) -> bool: ...
    @property
    def tools(self) -> bool: ...
    @property
    def chat(self) -> bool: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def label(self) -> str: ...


EncodePrompt = Callable[[Problem, Any, Tokenizer, VisionConfig, Shown], Encoded]
"""(problem, entry, tokenizer, vision, what stands in the picture's place) -> the prompt, an open document"""


# what is asked


@dataclass(frozen=True)
class Question:
    """One problem in one form, ready to be asked. target: the ids of the target answer and of the end;
    budget: most tokens of an answer; suffix: of the label, for another picture than the problem's own."""

    entry: Entry
    task: Task
    problem: Problem
    prompt: Encoded
    target: tuple[int, ...]
    budget: int
    suffix: str = ""

    @property
    def label(self) -> str:
        """The entry's, with what is shown instead of the true picture."""
        return self.entry.label + self.suffix

    @property
    def id(self) -> str:
        """Key of the request, and so of the noise its samples are drawn with."""
        return f"{self.entry.label}|{self.problem.key}"

    def record(
        self, answer: str, scores: Sequence[float], sampled: Sequence[float], **fields: Any
    ) -> Measured:
        """The measurement. scores: of the greedy answer, and of the one with LONGER times the tokens."""
        problem, form = self.problem, self.entry.form
        return Measured(
            task=problem.task,
            form=form,
            key=problem.key,
            category=problem.category,
            prompt=problem.description if form == "twin" else problem.question,
            target=problem.target,
            answer=answer.strip(),
            score=scores[0],
            solved=solved(problem.task, scores[0]),
            solved_4x=solved(problem.task, scores[1]),
            sampled=tuple(sampled),
            picture=problem.image if form == "picture" else None,
            label=self.label,
            **fields,
        )


def plain_prompt(
    problem: Problem,
    entry: Entry,
    tokenizer: Tokenizer,
    vision: VisionConfig,
    shown: Shown = None,
) -> Encoded:
    """The prompt of a problem without tools, exactly as in training data of kind "problems", or in the chat
    form."""
    if entry.chat:
        messages = shown_in(problem.chat(entry.form), shown)
        return encode_chat(messages, tokenizer, vision, thinking=entry.thought, key=problem.key)
    segments = replaced(problem.prompt(entry.form, entry.thought), shown)
    return encode(Sample(segments, entry.name, problem.key), tokenizer, vision, eos=False)


def shown_in(messages: Sequence[Message], shown: Shown) -> list[Message]:
    """Messages with `shown` in the places of their pictures and clips, in order."""
    given = None if shown is None else list(shown)
    out = []
    places = [sum(map(is_media, message.content)) for message in messages]
    for i, (message, count) in enumerate(zip(messages, places)):
        # What is left over goes to the last message that shows anything.
        part = None
        if given is not None:
            part, given = (given[:count], given[count:]) if any(places[i + 1 :]) else (given, [])
        out.append(replace(message, content=tuple(replaced(message.content, part))))
    return out


def answer_text_of(ids: Sequence[int], text: str, entry: Entry, tokenizer: Tokenizer) -> str:
    """What of an answer is judged: in the chat form the response channel of a message that keeps the form,
    else the text as it was generated."""
    if not entry.chat:
        return text
    parsed = parse_assistant(ids, tokenizer, thinking=entry.thought)
    return parsed.message.text if parsed.well_formed else ""


def questions_of(
    entry: Entry,
    tokenizer: Tokenizer,
    model: NativeFusion,
    problems: int,
    seed: int,
    max_new_tokens: int,
    pictures: Sequence[Pictures] = ("true",),
    encode_prompt: EncodePrompt = plain_prompt,
) -> list[Question]:
    """The questions of one entry, all problems with each of `pictures` in turn."""
    task = make_task(entry.name, **entry.options)
    drawn = task.test_problems(problems, seed, entry.difficulty)
    if not drawn:
        raise DataError(f"{entry.label}: no problem is held out to be measured on")
    targets = [target_ids(problem, entry, tokenizer) for problem in drawn]
    lengths = [len(target) for target in targets]
    if entry.thought and not entry.chat:
        lengths = [len(tokenizer.encode(problem.solution(True).text)) + 1 for problem in drawn]
    # A thought may be told in more words than the shortest way; and a limit that the right answer does not
    # fit into would measure the limit.
    budget = max(max_new_tokens, math.ceil((1.5 if entry.thought else 1.0) * max(lengths)))

    questions = []
    for way in ("true",) if entry.form == "twin" else pictures:  # words alone hold nothing to replace
        suffix = "" if way == "true" else f"/{way}"
        seen = [problem.prompt(entry.form) for problem in drawn]
        for problem, target, shown in zip(drawn, targets, instead(seen, way)):
            prompt = encode_prompt(problem, entry, tokenizer, model.config.vision, shown)
            questions.append(Question(entry, task, problem, prompt, target, budget, suffix))
    return questions


def target_ids(problem: Problem, entry: Entry, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The target answer behind its prompt (or thought), and the tokens that end it."""
    if not entry.chat:
        return (*tokenizer.encode(problem.solution().text), tokenizer.eos_id)
    ends = ["response", "message"] if entry.thought else ["message"]
    ids: list[int] = [*tokenizer.encode(problem.target)]
    for name in ends:
        ids += [tokenizer.close_id, *tokenizer.encode(name), tokenizer.sep_id]
    return (*ids, tokenizer.end_of_msg_id)


# answers


@dataclass(frozen=True)
class Answer:
    """ids: its tokens, the stop token included. ended: it ends with a stop token, not because its budget was
    used up."""

    ids: list[int]
    text: str
    ended: bool = True

    @property
    def judged(self) -> str:
        """What is judged: the text, and "" where it did not end by itself."""
        return self.text if self.ended else ""

    def within(self, budget: int, tokenizer: Tokenizer) -> Answer:
        """This greedy answer as it is with a smaller budget."""
        if len(self.ids) <= budget:
            return self
        # The engine's noise does not depend on the limit, so a shorter answer is a beginning.
        ids = self.ids[:budget]
        return Answer(ids, tokenizer.decode(ids, skip_special=True), ended=False)


@dataclass
class Asked:
    """Questions with their answers, and the hidden states that choose greedy and target tokens; from these
    probabilities at any temperature follow without another pass through the model."""

    model: NativeFusion
    questions: list[Question]
    greedy: list[Answer] = field(default_factory=list)
    longer: list[Answer] = field(default_factory=list)
    """The greedy answers with LONGER times the tokens."""
    samples: list[list[Answer]] = field(default_factory=list)
    marks: list[int | None] = field(default_factory=list)
    """Tokens of the greedy answer up to its answer mark; 0 without a thought; None where the mark never
    came."""
    greedy_MD: list[Tensor] = field(default_factory=list)
    target_MD: list[Tensor] = field(default_factory=list)
    """Empty where the mark never came: the target has no place then."""

    def measured(self, temperature: float = 1.0) -> list[Measured]:
        """The records; probabilities and entropies of softmax(logits / temperature)."""
        # Hidden states do not depend on the temperature: only the softmax is computed anew.
        greedy = token_log_probs(self.model, self.greedy_MD, [one.ids for one in self.greedy], temperature)
        targets = [q.target[: len(states)] for q, states in zip(self.questions, self.target_MD)]
        target = token_log_probs(self.model, self.target_MD, targets, temperature)

        records = []
        for i, question in enumerate(self.questions):
            logps_M, entropies_M = greedy[i]
            answers = [self.greedy[i], self.longer[i], *self.samples[i]]
            rewards = [question.task.reward(question.problem, answer.judged) for answer in answers]
            fields = {
                "p_target": float(target[i][0].sum().exp()) if self.marks[i] is not None else 0.0,
                "confidence": float(logps_M[self.marks[i] or 0 :].sum().exp()),
                "entropy": float(entropies_M.mean()),
                "ended": answers[0].ended,
                "ended_4x": answers[1].ended,
            }
            records.append(question.record(answers[0].text, rewards[:2], rewards[2:], **fields))
        return records

    def entropy(self, temperature: float = 1.0) -> float:
        """Mean over the problems of the mean entropy along the greedy answer, nats."""
        scored = token_log_probs(self.model, self.greedy_MD, [one.ids for one in self.greedy], temperature)
        return fmean(float(entropies.mean()) for _, entropies in scored)

    def only(self, label: str) -> Asked:
        """The part of one entry. Raises DataError for a label that was not asked."""
        chosen = [i for i, question in enumerate(self.questions) if question.label == label]
        if not chosen:
            raise DataError(f"{label!r} was not measured; known: {sorted({q.label for q in self.questions})}")
        part = Asked(self.model, [])
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(part, name, [value[i] for i in chosen])
        return part


def ask(
    model: NativeFusion,
    tokenizer: Tokenizer,
    entries: Sequence[Entry],
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
    """Answers to `problems` held-out problems of every entry, in the order of the entries.

    samples: sampled answers for each problem at `temperature`, with the same noise for every model.
    max_new_tokens: raised for an entry whose targets (or thoughts) would not fit. slots: answers written at a
    time. pictures: what is shown in the problem's place, one after the other for every entry with pictures;
    the labels of others than "true" end in it. share: (rank, world), one of world equal parts: questions
    rank, rank + world, ... Raises TaskError as the tasks do.
    """
    if any(entry.tools for entry in entries):
        raise DataError("entries with tools need the sandbox; measure them with `earlyfusion measure`")
    questions: list[Question] = []
    for entry in entries:
        questions += questions_of(entry, tokenizer, model, problems, seed, max_new_tokens, pictures)
    if not questions:
        raise DataError("no task entries to measure; give at least one")
    asked = Asked(model, questions[share[0] :: share[1]])
    if not asked.questions:
        return asked

    # One engine for greedy and sampled answers and for judging: weights are laid out, pictures encoded once.
    prompts = [question.prompt for question in asked.questions] * max(1, samples)
    longest = LONGER * max(question.budget for question in asked.questions)
    engine = engine_for(model, tokenizer, prompts, longest, max(slots, samples))

    # Greedy answers with the longer limit; at the limit they are their beginnings.
    for done in _written(engine, asked.questions, LONGER, 0.0, 1):
        question = asked.questions[len(asked.longer)]
        asked.longer.append(done)
        asked.greedy.append(done.within(question.budget, tokenizer))
        asked.marks.append(_mark(question, asked.greedy[-1], tokenizer))
    drawn = _written(engine, asked.questions, 1, temperature, samples) if samples else []
    for first in range(len(asked.questions)):
        asked.samples.append(drawn[first * samples : (first + 1) * samples])

    _keep_states(engine, asked)
    return asked


def _written(
    engine: Engine, questions: Sequence[Question], longer: int, temperature: float, samples: int
) -> list[Answer]:
    """The engine's answers to all questions, those of a question side by side."""
    requests = []
    for number, question in enumerate(questions):
        params = SamplingParams(longer * question.budget, temperature, n=samples)
        # The noise depends on the question, not on what else is asked or shown.
        requests.append(Request(str(number), question.prompt, params, noise=question.id))
    answers = []
    for number, done in enumerate(engine.generate(requests)):
        entry = questions[number // samples].entry
        text = answer_text_of(done.ids, done.text, entry, engine.tokenizer)
        answers.append(Answer(done.ids, text, done.finish_reason == "stop"))
    return answers


def _mark(question: Question, answer: Answer, tokenizer: Tokenizer) -> int | None:
    """See Asked.marks."""
    if not question.entry.thought:
        return 0
    if question.entry.chat:
        # The answer begins where the response channel opens.
        opened = [tokenizer.open_id, *tokenizer.encode("response"), tokenizer.sep_id]
        ends = range(len(opened), len(answer.ids) + 1)
        return next((k for k in ends if answer.ids[k - len(opened) : k] == opened), None)
    if ANSWER_MARK not in answer.text:
        return None
    return next(k for k in range(1, len(answer.ids) + 1) if ANSWER_MARK in tokenizer.decode(answer.ids[:k]))


def _keep_states(engine: Engine, asked: Asked) -> None:
    """Fill greedy_MD and target_MD: every prompt is read once for the greedy answer and for the target, which
    stands behind the model's own thought."""
    # Two continuations of one prompt: what the model wrote, and the target behind its own thought.
    requests = []
    for question, answer, mark in zip(asked.questions, asked.greedy, asked.marks):
        continuations = [answer.ids]
        if mark is not None:
            continuations.append([*answer.ids[:mark], *question.target])
        requests.append(ScoreRequest(question.prompt, continuations))

    for scores, mark in zip(engine.score(requests, states=True), asked.marks):
        greedy_MD, target_MD = scores[0].states, scores[-1].states
        assert greedy_MD is not None and target_MD is not None  # an answer has at least one token
        asked.greedy_MD.append(greedy_MD)
        asked.target_MD.append(greedy_MD[:0] if mark is None else target_MD[mark:])


def token_log_probs(
    model: NativeFusion, states: Sequence[Tensor], tokens: Sequence[Sequence[int]], temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """(log-probabilities, entropies), fp32 on the CPU, of each list of tokens from its states; nats."""
    sizes = [len(ids) for ids in tokens]
    if not sum(sizes):  # no thought came to its answer
        return [(torch.zeros(0), torch.zeros(0)) for _ in sizes]
    # All tokens in one product over the vocabulary, in the blocks of the kernel.
    hidden_MD = torch.cat(list(states))
    labels_M = torch.tensor(list(chain(*tokens)), dtype=torch.long, device=hidden_MD.device)
    with evaluating(model):
        logps_M, entropies_M = resolve("token_log_probs", hidden_MD)(
            hidden_MD, model.decoder.head_weight(), labels_M, temperature=temperature
        )
    return list(zip(logps_M.float().cpu().split(sizes), entropies_M.float().cpu().split(sizes)))


# the control for sharpening

COOLEST, HOTTEST = 1 / 64, 64.0
STEPS = 40
CLOSE = 1e-4
"""Nats between the entropy reached and the one asked for."""


@dataclass(frozen=True)
class Matched:
    """The model at `temperature`, whose mean entropy is `entropy`. reached: within CLOSE of the one asked for
    (a model cannot be made less certain than uniform, nor more certain than greedy)."""

    temperature: float
    entropy: float
    reached: bool
    measured: list[Measured]


def match_entropy(asked: Asked, target_entropy: float) -> Matched:
    """The untouched model at the temperature that gives it a treated model's entropy.

    Reinforcement learning lowers entropy, and a lower entropy alone raises p(correct) wherever the likeliest
    answer is more often right than it is likely; so the two are compared at equal mean entropy. Bisection on
    the logarithm of the temperature (the entropy of softmax(z / T) never falls with T). Raises DataError for
    an entropy that is negative or not finite.
    """
    if not 0 <= target_entropy < math.inf:
        raise DataError(f"target entropy {target_entropy}: expected nats, at least 0")
    # On the logarithm: entropies of temperatures 1/2 and 2 lie about as far from that of 1.
    low, high = math.log(COOLEST), math.log(HOTTEST)
    middle = 0.0  # temperature 1 first: an untouched model then keeps its own
    for _ in range(STEPS):
        entropy = asked.entropy(math.exp(middle))
        if abs(entropy - target_entropy) <= CLOSE:
            break
        low, high = (middle, high) if entropy < target_entropy else (low, middle)
        middle = (low + high) / 2

    # The entropy of the records: what is compared later is what was reached, not what was searched.
    measured = asked.measured(math.exp(middle))
    entropy = fmean(one.entropy for one in measured)
    return Matched(math.exp(middle), entropy, abs(entropy - target_entropy) <= 2 * CLOSE, measured)
