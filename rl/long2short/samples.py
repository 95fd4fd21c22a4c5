"""Answers to training problems, sampled once and kept in OUT/samples.jsonl: what the shortest right answers
and the preference pairs are made of.

    {"settings": {...}}                                                     what they were sampled with
    {"key": "counting/train/0/7", "answers": [{"ids", "text", "finish", "score"}, ...]}

Problems are sampled in parts of PART; a stopped run goes on behind the last part, with the same answers.

The shortest right answers, as documents for fine-tuning (shortest rejection sampling, k1.5 2.4):

earlyfusion long2short shortest --model DIR --tasks counting/1/twin \\
    --problems 512 --out runs/shortest
earlyfusion sft runs/shortest/sft.toml

OUT/train.jsonl holds rows of kind "chat_files" (template "plain", pictures in OUT/images), OUT/sft.toml a
recipe that trains on them, OUT/summary.json the lengths before and after. A document is the prompt that was
asked, token for token, and the text of the answer: what reinforcement learning and `earlyfusion measure` will
ask again.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from earlyfusion.data.chat.template import TEMPLATE_FILE
from earlyfusion.data.options import Options, verb
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measured import solved
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, read_jsonl, write_atomic, write_json, write_jsonl
from earlyfusion.model.engine.engine import engine_for
from earlyfusion.model.engine.requests import Completion, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline.config.compose import compose, validate
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE
from earlyfusion.pipeline.figures import show
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.recipe import RLConfig, TaskEntry, entry_of, start_directory, temperature
from earlyfusion.rl.rollouts.experience import Group, build_rewards, score
from earlyfusion.rl.rollouts.packing import Trajectory, rollout
from earlyfusion.rl.rollouts.prompts import Prompt, PromptPool

FILE = "samples.jsonl"
# Large enough to fill the engine, small enough to lose little.
PART = 64
"""Problems that are sampled together, and written together."""


class SampleOptions(Options):
    """What `shortest` and `dpo` are asked alike."""

    model: str
    """model directory to start from, or embedded:NAME"""
    out: str
    """output folder"""
    tasks: list[str] = []
    """such as counting/1/twin: task/difficulty/form[/thought]"""
    recipe: str | None = None
    """a reinforcement learning recipe: its [[tasks]] and [rollout]"""
    set_: list[str] = []
    """KEY=VALUE changes a key of the recipe, as optim.lr=1e-4"""
    problems: PositiveInt = 256
    """training problems, over all tasks together"""
    samples: Annotated[int, Field(ge=2)] = 8
    """sampled answers to each problem"""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """of the samples"""
    max_new_tokens: PositiveInt | None = None
    """longest answer in tokens; the recipe's (8) if left out"""
    seed: NonNegativeInt = 0
    """of problems, samples and the order of pairs"""
    resume: bool = False
    """go on with what the output folder holds"""


def recipe_of(options: SampleOptions, more: Record) -> RLConfig:
    """The run as a recipe: the one named, or of the tasks, with what the options say laid over. Raises
    UserError.

    more: further keys, laid over as well.
    """
    if bool(options.tasks) == bool(options.recipe):
        raise UserError("give --tasks TASK... or --recipe RECIPE, one of them")
    changes = []
    for change in options.set_:
        key, equals, value = change.partition("=")
        if not equals or "." not in key:
            raise UserError(f"--set {change}: expected section.key=VALUE, such as optim.lr=1e-4")
        changes.append((key.strip(), value.strip()))

    # Without a recipe the defaults of reinforcement learning hold.
    base: Any = options.recipe
    if base is None:
        base = {"tasks": [entry_of(label).model_dump(mode="json") for label in options.tasks]}
    out, degree = Path(options.out), options.temperature
    asked: Record = {
        "run": {"name": out.name, "out": options.out, "init_from": options.model, "seed": options.seed},
        "rollout": {"group_size": options.samples},
        "temperature": {"start": degree, "end": degree},
    }
    if options.max_new_tokens is not None:
        asked["rollout"]["max_new_tokens"] = options.max_new_tokens
    config: RLConfig = validate(compose([base, asked, more], changes), RLConfig)
    for entry in config.tasks:
        # A conversation with a tool has no text that could be shortened as one.
        if entry.place:
            raise UserError(f"{entry.label}: long2short samples answers without tools; leave it out")
    return config


def check_resume(out: Path, holds: bool, resume: bool) -> None:
    """UserError when a run would start over what its folder holds, or go on with nothing."""
    if holds and not resume:
        raise UserError(
            f"{out} already holds a run: add --resume to go on, or name another folder with --out"
        )
    if resume and not holds:
        raise UserError(f"nothing to resume in {out}; start without --resume")


def save_beside(model: NativeFusion, tokenizer: Tokenizer, out: Path, facts: Record, base: Path) -> Path:
    """Write a model directory that speaks as `base` does: its chat template goes along."""
    directory = save_model(model, tokenizer, out, dict(facts))
    if (base / TEMPLATE_FILE).is_file():
        shutil.copy(base / TEMPLATE_FILE, directory / TEMPLATE_FILE)
    return directory


@dataclass(frozen=True)
class Answer:
    """One sampled answer. ids: its tokens, the stop token included. right: its score counts as solved."""

    ids: list[int]
    text: str
    finish: str
    score: float
    right: bool

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Answered:
    """A training problem of entry `label` with its sampled answers."""

    prompt: Prompt
    label: str
    answers: list[Answer]

    def trajectory(self, index: int) -> Trajectory:
        """An answer as the learner packs it; without what only the sampler knew."""
        answer, prompt = self.answers[index], self.prompt.encoded
        unknown, versions = [float("nan")] * answer.tokens, [0] * answer.tokens
        # The prompt was read once for all answers, so nothing of it counts as cached.
        read = len(prompt.ids)
        done = Completion("", index, answer.ids, unknown, unknown, versions, answer.text, "stop", read, 0)
        return Trajectory(prompt, done)

    def shortest(self) -> int | None:
        """Number of the shortest right answer (the first of equals); None where none is right."""
        # Ties go to the first, so that a resume chooses alike.
        right = [i for i, answer in enumerate(self.answers) if answer.right]
        return min(right, key=lambda i: self.answers[i].tokens, default=None)


class Sampler:
    """Samples rollout.group_size answers to each of `problems` prompts of the recipe, or reads those that are
    there.

    Raises UserError when OUT holds samples of other settings, TaskError and RewardError as the tasks and
    rewards do.
    """

    def __init__(
        self, config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, folder: Path, problems: int
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.path = Path(config.run.directory) / FILE
        self.prompts = PromptPool(config, tokenizer, model.config.vision)
        self.rewards = build_rewards(config.reward, self.prompts.tasks, config.run.seed)
        # Drawn in one go: which problems are asked does not depend on where a run was stopped.
        self.asked = self.prompts.draw(problems, 0)
        self.settings = {
            "model": str(folder.resolve()),
            "tokenizer": tokenizer.hash,
            "seed": config.run.seed,
            "problems": problems,
            **config.model_dump(mode="json", include={"tasks", "rollout", "reward", "temperature"}),
        }

    def gather(self, runtime: Runtime) -> list[Answered] | None:
        """All answers, sampled by rank 0 as far as the file does not hold them; None after a signal. Every
        process calls it."""
        # Asked between parts: a part is written whole or not at all, and the processes that wait meet rank 0
        # after each, within the time limit of a collective.
        while len(lines := self._known()) < len(self.asked):
            if runtime.should_stop():
                return None
            if runtime.is_main:
                lines += self._part(len(lines))
                write_jsonl(self.path, [{"settings": self.settings}, *lines])
                print(f"answers: {len(lines)}/{len(self.asked)} problems", flush=True)
            runtime.barrier()
        return self.read()

    def read(self) -> list[Answered]:
        """The answers of the file."""
        found = []
        for prompt, line in zip(self.asked, self._known()):
            answers = []
            for one in line["answers"]:
                right = solved(prompt.problem.task, self.rewards.span.share(one["score"]))
                answers.append(Answer(**one, right=right))
            found.append(Answered(prompt, self.config.tasks[prompt.entry].label, answers))
        return found

    def _known(self) -> list[Record]:
        """The lines that are there."""
        head, *lines = read_jsonl(self.path) or [{"settings": self.settings}]
        old = head.get("settings", {})
        odd = [key for key in self.settings if old.get(key) != self.settings[key]]
        if odd:
            raise UserError(
                f"{self.path} was sampled with other settings ({', '.join(odd)} differ); put them back, or"
                " name another --out"
            )
        return lines

    def _part(self, start: int) -> list[Record]:
        """Sample and judge the next part."""
        options, asked = self.config.rollout, self.asked[start : start + PART]
        params = SamplingParams(
            options.max_new_tokens,
            temperature(self.config.temperature, 0),
            options.top_p,
            options.min_p,
            seed=self.config.run.seed,
        )
        prompts, size = [prompt.encoded for prompt in asked], options.group_size
        slots = max(size, options.slots)
        # An engine for each part, just large enough: memory is given back in between.
        engine = engine_for(self.model, self.tokenizer, prompts * size, options.max_new_tokens, slots)
        made = rollout(engine, prompts, group_size=size, params=params, name=f"long2short/{start}")
        groups = [Group(prompt, answers) for prompt, answers in zip(asked, made)]
        scored = iter(score(self.rewards, groups))

        lines: list[Record] = []
        for group in groups:
            answers = []
            for one in group.trajectories:
                told = {"ids": one.ids, "text": one.completion.text, "score": next(scored).value}
                answers.append({**told, "finish": one.completion.finish_reason})
            lines.append({"key": group.problem.key, "answers": answers})
        return lines


# ---- The shortest right answers.

# Few and small: the model wrote these answers itself.
EPOCHS, TOKENS = 2, 4096
"""Passes over the rows and tokens of one step, of the recipe that is written."""


def lengths(answered: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """By entry, and "all": problems, solved (with a right answer), accuracy of single answers, and mean
    tokens of all answers, of the right ones, and of the shortest right ones; the last two over solved
    problems, problems counting alike."""
    table = {}
    for label in [*dict.fromkeys(one.label for one in answered), "all"]:
        own = [one for one in answered if label in (one.label, "all")]
        every = [answer for one in own for answer in one.answers]
        # A problem with many right answers must not count more than one with few.
        right = [[answer.tokens for answer in one.answers if answer.right] for one in own]
        solved = [tokens for tokens in right if tokens]
        table[label] = {
            "problems": float(len(own)),
            "accuracy": fmean(answer.right for answer in every),
            "tokens_all": fmean(answer.tokens for answer in every),
            "solved": float(len(solved)),
            "tokens_right": fmean(map(fmean, solved)) if solved else math.nan,
            "tokens_shortest": fmean(map(min, solved)) if solved else math.nan,
        }
    return table


def write_documents(answered: Sequence[Answered], entries: Sequence[TaskEntry], out: Path) -> list[int]:
    """Write train.jsonl, a problem with its answer as a conversation, the pictures beside; returns the tokens
    of every document. Raises UserError when no problem was solved."""
    rows, sizes = [], []
    (out / "images").mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(answered):
        index = one.shortest()
        # An empty answer that was right teaches to say nothing.
        if index is None or not one.answers[index].text.strip():
            continue

        answer, entry = one.answers[index], entries[one.prompt.entry]
        content: list[dict[str, str]] = []
        for segment in one.prompt.problem.prompt(entry.form, entry.thought):
            # PNG: the pixels that were asked, not their compression.
            if isinstance(segment, Image):
                name = f"images/{number:06d}.png"
                segment.open().convert("RGB").save(out / name)
                content.append({"type": "image", "image": name})
            elif isinstance(segment, Text):
                content.append({"type": "text", "text": segment.text})
        said = {"role": "assistant", "content": [{"type": "text", "text": answer.text}]}
        about = {"task": one.label, "key": one.prompt.problem.key, "tokens": answer.tokens}
        rows.append({"messages": [{"role": "user", "content": content}, said], **about})
        sizes.append(len(one.prompt.encoded) + answer.tokens)
    if not rows:
        raise UserError(
            f"none of {len(answered)} problems got a right answer: nothing to learn from; take more"
            " --samples, easier tasks, or a model that solves some"
        )
    write_jsonl(out / "train.jsonl", rows)
    return sizes


def recipe_text(out: Path, model: Path, sizes: Sequence[int]) -> str:
    """A recipe of `earlyfusion sft` for documents of these sizes."""
    # Rows as long as the longest document, rounded up so that kernels tile well.
    length = 64 * math.ceil(max(sizes) / 64)
    tokens = max(TOKENS, length)
    steps = max(1, math.ceil(EPOCHS * sum(sizes) / tokens))
    return f"""# Fine-tuning on the shortest right answers: earlyfusion sft {out / "sft.toml"}

[run]
name = "sft-{out.name}"
init_from = {json.dumps(str(model.resolve()))}

[data]
overlong = "skip"
on_bad_sample = "skip"

[[data.sources]]
name = "shortest"
kind = "chat_files"
path = {json.dumps(str((out / "train.jsonl").resolve()))}
options = {{ template = "plain" }}

[optim]
name = "muonclip"
lr = 1e-3
weight_decay = 0.0
head_group_size = 1

[[stages]]
name = "sft"
steps = {steps}
length = {length}
tokens = {tokens}
lanes = 1
schedule = "cosine"
warmup_steps = {steps // 20}
final_lr_ratio = 0.05

[eval]
every = {max(1, steps // 2)}
tasks = ["answer_loss"]
samples = 0
"""


@verb
def shortest(options: SampleOptions) -> int:
    """Entry of `earlyfusion long2short shortest`."""
    config, out = recipe_of(options, {}), Path(options.out)
    folder = start_directory(config)
    tokenizer = Tokenizer.load(folder)
    check_resume(out, (out / FILE).is_file(), options.resume)
    runtime = Runtime(config.train.mixed_precision, config.train.threads)
    model = load_model(folder, runtime.device, torch.float32)
    sampler = Sampler(config, model, tokenizer, folder, options.problems)

    # Sample; what there is stays for --resume when a signal comes.
    # From here on a signal waits for the end of a part.
    runtime.stop.install()
    try:
        answered = sampler.gather(runtime)
    finally:
        sampler.rewards.close()
        runtime.close()
    if answered is None:
        print(f"{runtime.stop.received}: the samples are kept; --resume goes on from here")
        return EXIT_REQUEUE

    # Choose and write.
    sizes = write_documents(answered, config.tasks, out)
    write_atomic(out / "sft.toml", recipe_text(out, folder, sizes))
    rows = lengths(answered)
    write_json(out / "summary.json", {"model": str(folder), "documents": len(sizes), "entries": rows})
    show("mean tokens of the sampled answers", rows)
    print(f"{len(sizes)} documents; train on them: earlyfusion sft {out / 'sft.toml'}")
    return EXIT_OK
