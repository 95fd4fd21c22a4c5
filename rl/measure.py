"""What a model knows of held-out problems of the verifiable tasks (eval/measure.py): greedy accuracy,
p(correct), pass@k and calibration, the same problems for every model.

earlyfusion measure --model DIR --tasks counting/1/picture \\
    counting/1/twin --samples 8
earlyfusion measure --model TREATED --recipe vision-rl \\
    --against BEFORE/measured.jsonl --out AFTER
earlyfusion measure --model UNTOUCHED --tasks counting/1/twin \\
    --match-entropy 0.21
earlyfusion measure --model SFT --tasks counting/0/picture/tools \\
    --pictures true,grey,swapped,none

An answer that the limit cut off is no answer. "ended" is the share of greedy answers that ended by
themselves; "accuracy_4x" and "ended_4x" are accuracy and that share with four times the limit, where a policy
that does not end is found out. With --out the answers are kept with the table. --against pairs every
problem with an earlier measurement of other weights: difference, 95 % interval, exact or sampled
sign-flip test, Holm over the rows.

Answers with the tool (`measure_tools`) are those to the same problems as without, so the two pair by key.
Their confidence is that of the last message given the model's own calls and what the programs said; p_target
is the same number where that message is the target word for word, else 0 (the target is not forced into a
conversation that would not have led to it). Greedy conversations are held once, with LONGER times the tokens:
what they are at the limit is their beginning. Programs find the true picture under its name whatever is
shown.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from earlyfusion.data.options import Options, verb
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.blind import Pictures, parse_pictures
from earlyfusion.eval.measure import (
    LONGER,
    Question,
    ask,
    match_entropy,
    questions_of,
    token_log_probs,
)
from earlyfusion.eval.measured import Measured, load_measured, paired, summary, write_measured
from earlyfusion.eval.rewards import TaskReward
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.model.engine.engine import engine_for, evaluating
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.pipeline.config.compose import compose, validate
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.generate_cmd import model_on
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.recipe import RLConfig, RolloutSection, TaskEntry, entry_of, replies_of
from earlyfusion.rl.rollouts.episodes import Environments, Episodes
from earlyfusion.rl.rollouts.packing import Trajectory, pack
from earlyfusion.rl.rollouts.prompts import encode_prompt

TOKENS, TOKENS_WITH_TOOLS = 8, 512  # longest answer of --tasks where nothing is said


def measure_heldout(
    config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, runtime: Runtime
) -> list[Measured]:
    """Greedy (and sampled) answers to the held-out problems of `eval`, the same on every process; every
    process calls it."""
    model.eval()
    section, rollout = config.eval, config.rollout
    how: Record = {"problems": section.problems, "seed": section.seed, "samples": section.samples}
    how |= {"slots": rollout.slots, "share": (runtime.rank, runtime.world)}
    measured: list[Measured] = []
    # Answers with tools come in turns, so they are measured by another loop.
    plain, tools = by_way(config.measured)
    if plain:
        asked = ask(model, tokenizer, plain, max_new_tokens=rollout.max_new_tokens, **how)
        measured += in_order(asked.measured(), runtime)
    if tools:
        weaker = config.sandbox.allow_weaker
        own = measure_tools(model, tokenizer, tools, rollout, allow_weaker=weaker, **how)
        measured += in_order(own, runtime)
    return measured


def by_way(entries: Sequence[TaskEntry]) -> tuple[list[TaskEntry], list[TaskEntry]]:
    """Those that are answered at once, and those that are answered with tools."""
    plain, tools = ([entry for entry in entries if bool(entry.place) is tooled] for tooled in (False, True))
    return plain, tools


def in_order(own: Sequence[Measured], runtime: Runtime) -> list[Measured]:
    """What all processes measured of the problems that were dealt to them, in the problems' order; without
    pictures."""
    # Pictures are large and rank 0 can draw them again from the key.
    shares = runtime.gather([replace(one, picture=None) for one in own])
    return [shares[i % runtime.world][i // runtime.world] for i in range(sum(map(len, shares)))]


# ---- Answers with the tool.


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
    Raises SandboxError where no sandbox can be started, DataError for numbers out of range."""
    limit = rollout.max_new_tokens
    environments = Environments(entries, rollout, allow_weaker)
    try:
        encode = partial(encode_prompt, environments=environments)
        # The same problems as without tools: they are drawn by the entry alone.
        every: list[Question] = []
        for entry in entries:
            every += questions_of(entry, tokenizer, model, problems, seed, limit, pictures, encode)
        # Every process measures its own share; the caller gathers.
        questions = every[share[0] :: share[1]]
        if not questions:
            return []
        with evaluating(model):
            # One conversation with the long limit holds the short one as its beginning.
            longer = rollout.model_copy(update={"max_new_tokens": LONGER * limit})
            params = SamplingParams(longer.max_new_tokens, 0.0, logprobs=True)
            greedy = play(model, tokenizer, questions, longer, environments, params, slots)
            drawn: list[list[Trajectory]] = [[] for _ in questions]
            if samples:
                params = SamplingParams(limit, temperature, logprobs=True, n=samples)
                drawn = play(model, tokenizer, questions, rollout, environments, params, max(slots, samples))
            records = []
            for question, answers, more in zip(questions, greedy, drawn):
                records.append(record(model, question, answers[0], more, limit, environments.weaker))
            return records
    finally:
        environments.close()


def play(
    model: NativeFusion,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    rollout: RolloutSection,
    environments: Environments,
    params: SamplingParams,
    slots: int,
) -> list[list[Trajectory]]:
    """`params.n` answers to every question, all side by side."""
    # A conversation grows by what programs print, which the limit of new tokens does not count.
    replies = [replies_of(rollout, question.entry) for question in questions]  # type: ignore[arg-type]
    behind = rollout.max_new_tokens + max(replies)
    prompts = [question.prompt for question in questions for _ in range(params.n + 1)]
    engine = engine_for(model, tokenizer, prompts, behind, slots)

    tools = Episodes(environments, tokenizer, model.config.vision, params, replay=False)
    names = [f"{question.label}|{question.problem.key}" for question in questions]
    for name, question in zip(names, questions):
        entry: TaskEntry = question.entry  # type: ignore[assignment]
        tools.open(name, question.prompt, question.problem, entry, rollout.max_new_tokens)
        engine.submit(Request(name, question.prompt, params, keep_state=True))

    while engine.has_work or tools.waits:
        for turn in tools.due(idle=not engine.has_work)[0]:
            engine.submit(*turn)
        for event in engine.step():
            if event.completion is not None:
                tools.take(event.completion, event.left)
    return [tools.answers(name) or [] for name in names]


def record(
    model: NativeFusion,
    question: Question,
    answer: Trajectory,
    sampled: Sequence[Trajectory],
    limit: int,
    sandbox: str,
) -> Measured:
    """The measurement of one question."""
    text, ended_4x = answer.completion.text, answer.ended
    ended = ended_4x and len(answer.ids) <= limit
    paid = TaskReward([question.task])
    longer, *drawn = [paid(question.problem, one.answer, one.paid) for one in (answer, *sampled)]

    # What the model thought of its own tokens; those of the programs' answers are not judged.
    logp = entropy = torch.zeros(0)
    if answer.ids:
        row, places = pack(model, [answer])
        states = model.hidden(row).index_select(0, places.positions_M)
        ((logp, entropy),) = token_log_probs(model, [states], [answer.ids], 1.0)
    # Confidence is that of the last message: from behind the last program's output.
    last = answer.inserted[-1].at if answer.inserted else 0
    confidence = float(logp[:limit][last:].sum().exp())

    # The target is not forced into a conversation that would not have led to it.
    said = ended and text.strip() == question.problem.target
    return question.record(
        text,
        [longer * ended, longer],
        drawn,
        p_target=confidence * said,
        confidence=confidence,
        entropy=float(entropy[:limit].mean()) if len(entropy) else 0.0,
        ended=ended,
        ended_4x=ended_4x,
        sandbox=sandbox,
    )


# ---- The verb.


class MeasureOptions(Options):
    model: str
    """model directory, or embedded:NAME"""
    tasks: list[str] = []
    """such as counting/1/twin: task/difficulty/form[/thought or /tools]"""
    recipe: str | None = None
    """measure what this reinforcement learning recipe measures"""
    problems: PositiveInt = 200
    """held-out problems of each task"""
    seed: int = 12345
    """which problems"""
    samples: NonNegativeInt = 0
    """sampled answers to each problem (pass@k)"""
    temperature: PositiveFloat = 1.0
    """of samples and probabilities"""
    max_new_tokens: PositiveInt | None = None
    """longest answer, in tokens; if not given the recipe's, or 8, with tools 512"""
    pictures: str = "true"
    """what is shown, one after the other: true, grey, swapped (another problem's), none; tools keep the true
    one"""
    slots: PositiveInt = 128
    """answers written at a time"""
    match_entropy: float | None = None
    """also at the temperature of this mean entropy, in nats"""
    against: Path | None = None
    """measured.jsonl of other weights, paired by problem"""
    out: Path | None = None
    """folder for measured.jsonl and summary.json"""
    allow_weaker: Annotated[bool, Field(serialization_alias="sandbox.allow_weaker")] = False
    """run programs although walls of the sandbox are missing here; the records name them"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""


@verb
def measure(options: MeasureOptions) -> None:
    """Entry of `earlyfusion measure`."""
    entries, rollout, weaker = asked_for(options)
    plain, tools = by_way(entries)
    if tools and options.match_entropy is not None:
        raise UserError(
            f"--match-entropy: {tools[0].label} answers with tools, whose entropy is not matched; leave"
            " it out"
        )
    # A file that cannot be read is named before the model is loaded.
    earlier = load_measured(options.against) if options.against else None
    shared: Record = options.model_dump(include={"problems", "seed", "samples", "slots", "temperature"})
    shared["pictures"] = parse_pictures(options.pictures)
    folder = model_folder(options.model)
    model, tokenizer = model_on(folder, options.device), Tokenizer.load(folder)

    # The same problems without and with the tool.
    result: Record = {"model": options.model, "seed": options.seed}
    measured: list[Measured] = []
    if plain:
        # A recipe knows how long its answers may be.
        tokens = options.max_new_tokens or (rollout.max_new_tokens if options.recipe else TOKENS)
        asked = ask(model, tokenizer, plain, max_new_tokens=tokens, **shared)
        measured += asked.measured(options.temperature)
        # The control for sharpening.
        if options.match_entropy is not None:
            result["matched"] = {}
            for label in summary(measured):
                found = match_entropy(asked.only(label), options.match_entropy)
                about = {"temperature": found.temperature, "reached": found.reached}
                result["matched"][label] = {**summary(found.measured)[label], **about}
    if tools:
        measured += measure_tools(model, tokenizer, tools, rollout, allow_weaker=weaker, **shared)

    result["tasks"] = summary(measured)
    # A figure from a weaker sandbox must say so.
    if missing := {one.sandbox for one in measured} - {""}:
        result["sandbox"] = missing.pop()
    show(options.model, result["tasks"])
    if "matched" in result:
        show(f"at entropy {options.match_entropy:g}", result["matched"])
    if earlier is not None:
        result["against"] = {"file": str(options.against), "rows": paired(earlier, measured)}
        title = "against the earlier weights; clear: the interval excludes 0, also after Holm"
        show_differences(title, result["against"]["rows"])
    if options.out:
        write_measured(options.out / "measured.jsonl", measured)
        write_json(options.out / "summary.json", result)
        print(f"written: {options.out}/measured.jsonl, {options.out}/summary.json")


def asked_for(options: MeasureOptions) -> tuple[list[TaskEntry], RolloutSection, bool]:
    """What is measured, the limits of answers with tools, and whether a weaker sandbox is allowed."""
    if bool(options.tasks) == bool(options.recipe):
        raise UserError("what is to be measured? Give --tasks TASK ... or --recipe RECIPE, one of them")
    entries, weaker = [entry_of(label) for label in options.tasks], options.allow_weaker
    rollout = RolloutSection(max_new_tokens=TOKENS_WITH_TOOLS)
    if options.recipe:
        config = validate(compose([options.recipe]), RLConfig)
        entries, rollout, weaker = config.measured, config.rollout, config.sandbox.allow_weaker or weaker
    if options.max_new_tokens:
        rollout = rollout.model_copy(update={"max_new_tokens": options.max_new_tokens})

    for name, count in Counter(entry.label for entry in entries).items():
        if count > 1:
            raise UserError(f"--tasks: {name} is given twice; name every one once")
    return entries, rollout, weaker


def show_differences(title: str, rows: Sequence[Record]) -> None:
    """Print paired differences: those of eval.measured.paired, and of long2short."""
    columns: dict[str, Record] = {}
    for row in rows:
        name = " ".join([row["label"], row.get("way", ""), row["metric"]])
        for figure in ("before", "after", "value", "low", "high", "p_holm", "clear"):
            if figure in row:
                columns.setdefault(figure, {})[name] = row[figure]
    show(title, columns)
