"""Held-out problems answered with the tool: the counterpart of rl/measure/run.py for entries with `tools`.

    measured = measure_tools(model, tokenizer, entries, config.rollout, problems=200, seed=7)

The same problems as without tools, so the two pair by key. confidence is that of the last message given the
model's own calls and what the programs said; p_target is the same number where that message is the target
word for word, else 0 (the target is not forced into a conversation that would not have led to it). entropy:
over the generated tokens within the limit. Greedy conversations are held once, with LONGER times the tokens:
what they are at the limit is their beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import Encoded
from earlyfusion.data.tasks.problem import Problem, Task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.request import Request, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import evaluating
from earlyfusion.rl.measure.pictures import Pictures, pictures_of, suffix_of, ways
from earlyfusion.rl.measure.run import LONGER, check_counts, held_out, solved, token_log_probs
from earlyfusion.rl.recipe import RolloutSection, TaskEntry
from earlyfusion.rl.records import Measured
from earlyfusion.rl.rollouts.packing import Trajectory, pack
from earlyfusion.rl.rollouts.prompts import encode_prompt
from earlyfusion.rl.rollouts.tool_desk import ToolDesk
from earlyfusion.rl.rollouts.tool_prompts import tool_files
from earlyfusion.rl.rollouts.tools import ToolRollouts

PAGE = 16


@dataclass
class _Question:
    entry: TaskEntry
    task: Task
    problem: Problem
    prompt: Encoded
    pictures: Pictures = "true"
    greedy: Trajectory | None = None
    sampled: list[Trajectory] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.label}|{self.problem.key}"

    @property
    def label(self) -> str:
        return self.entry.label + suffix_of(self.pictures)


def measure_tools(
    model: NativeFusion,
    tokenizer: Tokenizer,
    entries: Sequence[TaskEntry],
    rollout: RolloutSection,
    *,
    problems: int,
    seed: int,
    samples: int = 0,
    temperature: float = 1.0,
    slots: int = 128,
    pictures: Sequence[Pictures] = ("true",),
    share: tuple[int, int] = (0, 1),
    allow_weaker: bool = False,
) -> list[Measured]:
    """Greedy answers to `problems` held-out problems of every entry, and `samples` drawn ones, in the order
    of the entries. rollout: its limits of turns, tokens and programs hold. pictures: as in measure.ask;
    programs always find the true one. share: as in measure.measure. Raises SandboxError where no sandbox can
    be started, DataError without entries or for numbers out of range."""
    check_counts(problems, samples, rollout.max_new_tokens, slots, temperature)
    if not entries:
        raise DataError("no task entries with tools to measure; give at least one")
    questions = []
    for entry in entries:
        task, found = held_out(entry, problems, seed)
        for how in ways(entry, pictures):
            for problem, shown in zip(found, pictures_of(entry, found, how)):
                prompt = encode_prompt(problem, entry, tokenizer, model.config.vision, shown)
                questions.append(_Question(entry, task, problem, prompt, how))
    questions = questions[share[0] :: share[1]]
    if not questions:
        return []
    desk = ToolDesk(rollout, allow_weaker)
    try:
        with evaluating(model):
            longer = rollout.model_copy(update={"max_new_tokens": LONGER * rollout.max_new_tokens})
            greedy = SamplingParams(longer.max_new_tokens, 0.0, logprobs=True)
            for question, answers in zip(
                questions, play(model, tokenizer, questions, longer, desk, greedy, slots)
            ):
                question.greedy = answers[0]
            if samples:
                drawn = SamplingParams(rollout.max_new_tokens, temperature, logprobs=True, n=samples)
                every = play(model, tokenizer, questions, rollout, desk, drawn, max(slots, samples))
                for question, answers in zip(questions, every):
                    question.sampled = answers
            measured = [_record(model, question, rollout.max_new_tokens) for question in questions]
            return [replace(one, sandbox=desk.weaker) for one in measured]
    finally:
        desk.close()


def play(
    model: NativeFusion,
    tokenizer: Tokenizer,
    questions: Sequence[_Question],
    rollout: RolloutSection,
    desk: ToolDesk,
    params: SamplingParams,
    slots: int,
) -> list[list[Trajectory]]:
    """`params.n` answers to every question, all side by side."""
    vision = model.config.vision
    prompts = [question.prompt for question in questions]
    behind = rollout.max_new_tokens + rollout.tool_turns * rollout.tool_output_tokens
    longest = max(len(prompt) for prompt in prompts) + behind
    engine = Engine(
        model,
        tokenizer,
        max_slots=slots,
        page_size=PAGE,
        max_pages=slots * (-(-longest // PAGE) + 1),
        prefill_chunk=rollout.prefill_chunk,
        max_waiting=(params.n + 1) * len(prompts),
    )
    tools = ToolRollouts(rollout, desk, tokenizer, vision, params, replay=False)
    for question, prompt in zip(questions, prompts):
        tools.open(question.id, prompt, tool_files(question.problem, question.entry.form))
        engine.submit(Request(question.id, prompt, params, keep_state=True))
    while engine.has_work or tools.waits:
        for turn in tools.due(idle=not engine.has_work)[0]:
            engine.submit(*turn)
        for event in engine.step():
            if event.completion is not None:
                tools.take(event.completion, event.left)
    return [tools.answers(question.id) or [] for question in questions]


def _record(model: NativeFusion, question: _Question, limit: int) -> Measured:
    problem, answer = question.problem, question.greedy
    assert answer is not None
    text, whole = answer.completion.text, answer.completion.finish_reason == "stop"
    ended = whole and len(answer.ids) <= limit
    longer = question.task.reward(problem, answer.answer)
    score = longer if ended else 0.0
    logp = entropy = torch.zeros(0)
    if answer.ids:
        with torch.no_grad():
            row, places = pack(model, [answer])
            states = model.hidden(row).index_select(0, places.positions_M)
        ((logp, entropy),) = token_log_probs(model, [states], [answer.ids], 1.0)
    last = answer.inserted[-1].at if answer.inserted else 0
    logp, entropy = logp[:limit], entropy[:limit]
    confidence = float(logp[last:].sum().exp())
    return Measured(
        task=problem.task,
        form=question.entry.form,
        key=problem.key,
        category=str(problem.meta["category"]),
        prompt=problem.description if question.entry.form == "twin" else problem.question,
        target=problem.target,
        answer=text.strip(),
        score=score,
        solved=solved(problem.task, score),
        p_target=confidence if ended and text.strip() == problem.target else 0.0,
        confidence=confidence,
        entropy=float(entropy.mean()) if len(entropy) else 0.0,
        sampled=tuple(question.task.reward(problem, one.answer) for one in question.sampled),
        picture=problem.picture if question.entry.form == "picture" else None,
        label=question.label,
        ended=ended,
        solved_4x=solved(problem.task, longer),
        ended_4x=whole,
    )
