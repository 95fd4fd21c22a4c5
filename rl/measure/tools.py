"""Held-out problems answered with the tool: the counterpart of eval/measure.py for entries with `tools`.

    measured = measure_tools(model, tokenizer, entries, config.rollout, problems=200, seed=7)

The same problems as without tools, so the two pair by key. confidence is that of the last message given the
model's own calls and what the programs said; p_target is the same number where that message is the target
word for word, else 0 (the target is not forced into a conversation that would not have led to it). entropy:
over the generated tokens within the limit. Greedy conversations are held once, with LONGER times the tokens:
what they are at the limit is their beginning. Programs find the true picture under its name whatever is
shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from earlyfusion.data.errors import DataError
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import (
    LONGER,
    Pictures,
    Question,
    check_counts,
    questions_of,
    token_log_probs,
)
from earlyfusion.eval.measured import Measured
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import evaluating
from earlyfusion.rl.recipe import RolloutSection, TaskEntry
from earlyfusion.rl.rollouts.packing import Trajectory, pack
from earlyfusion.rl.rollouts.prompts import encode_prompt, tool_files
from earlyfusion.rl.rollouts.tools import ToolRollouts, ToolRunner

PAGE = 16


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
    of the entries. rollout: its limits of turns, tokens and programs hold. The rest as in eval.measure.ask.
    Raises SandboxError where no sandbox can be started, DataError without entries or for numbers out of
    range."""
    limit = rollout.max_new_tokens
    check_counts(problems, samples, limit, slots, temperature)
    if not entries:
        raise DataError("no task entries with tools to measure; give at least one")
    questions: list[Question] = []
    for entry in entries:
        questions += questions_of(
            entry, tokenizer, model, problems, seed, limit, pictures, encode_prompt=encode_prompt
        )
    questions = questions[share[0] :: share[1]]
    if not questions:
        return []

    runner = ToolRunner(rollout, allow_weaker)
    try:
        with evaluating(model):
            longer = rollout.model_copy(update={"max_new_tokens": LONGER * limit})
            params = SamplingParams(longer.max_new_tokens, 0.0, logprobs=True)
            greedy = play(model, tokenizer, questions, longer, runner, params, slots)
            drawn: list[list[Trajectory]] = [[] for _ in questions]
            if samples:
                params = SamplingParams(limit, temperature, logprobs=True, n=samples)
                drawn = play(model, tokenizer, questions, rollout, runner, params, max(slots, samples))
            return [
                _record(model, question, answers[0], more, limit, runner.weaker)
                for question, answers, more in zip(questions, greedy, drawn)
            ]
    finally:
        runner.close()


def play(
    model: NativeFusion,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    rollout: RolloutSection,
    runner: ToolRunner,
    params: SamplingParams,
    slots: int,
) -> list[list[Trajectory]]:
    """`params.n` answers to every question, all side by side."""
    # A conversation grows by what programs print, which the limit of new tokens does not count.
    behind = rollout.max_new_tokens + rollout.tool_turns * rollout.tool_output_tokens
    longest = max(len(question.prompt) for question in questions) + behind
    engine = Engine(
        model,
        tokenizer,
        max_slots=slots,
        page_size=PAGE,
        max_pages=slots * (-(-longest // PAGE) + 1),
        prefill_chunk=rollout.prefill_chunk,
        max_waiting=(params.n + 1) * len(questions),
    )

    tools = ToolRollouts(rollout, runner, tokenizer, model.config.vision, params, replay=False)
    names = [f"{question.label}|{question.problem.key}" for question in questions]
    for name, question in zip(names, questions):
        tools.open(name, question.prompt, tool_files(question.problem, question.entry.form))
        engine.submit(Request(name, question.prompt, params, keep_state=True))

    while engine.has_work or tools.waits:
        for turn in tools.due(idle=not engine.has_work)[0]:
            engine.submit(*turn)
        for event in engine.step():
            if event.completion is not None:
                tools.take(event.completion, event.left)
    return [tools.answers(name) or [] for name in names]


def _record(
    model: NativeFusion,
    question: Question,
    answer: Trajectory,
    sampled: Sequence[Trajectory],
    limit: int,
    sandbox: str,
) -> Measured:
    text, whole = answer.completion.text, answer.completion.finish_reason == "stop"
    ended = whole and len(answer.ids) <= limit
    longer = question.task.reward(question.problem, answer.answer)

    # What the model thought of its own tokens; those of the programs' answers are not judged.
    logp = entropy = torch.zeros(0)
    if answer.ids:
        row, places = pack(model, [answer])
        states = model.hidden(row).index_select(0, places.positions_M)
        ((logp, entropy),) = token_log_probs(model, [states], [answer.ids], 1.0)
    # Confidence is that of the last message: from behind the last program's output.
    last = answer.inserted[-1].at if answer.inserted else 0
    confidence = float(logp[:limit][last:].sum().exp())

    return question.record(
        text,
        [longer if ended else 0.0, longer],
        [question.task.reward(question.problem, one.answer) for one in sampled],
        p_target=confidence if ended and text.strip() == question.problem.target else 0.0,
        confidence=confidence,
        entropy=float(entropy[:limit].mean()) if len(entropy) else 0.0,
        ended=ended,
        ended_4x=whole,
        sandbox=sandbox,
    )
