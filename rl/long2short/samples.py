"""Answers to training problems, sampled once and kept in OUT/samples.jsonl: what the shortest right answers
and the preference pairs are made of.

    {"settings": {...}}                                                     what they were sampled with
    {"ask": [bin, entry, number], "key": "counting/train/0/7", "answers": [{"ids", "text", "finish", "score"},
    ...]}

Problems are sampled in parts of PART; a stopped run goes on behind the last whole part, with the same
answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from earlyfusion.data.loading.encode import Encoded
from earlyfusion.data.tasks.problem import Problem
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measured import solved
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_atomic
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Completion, SamplingParams
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.config.compose import dump
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rewards import Rewards
from earlyfusion.rl.rollouts.collect import Group
from earlyfusion.rl.rollouts.curriculum import temperature
from earlyfusion.rl.rollouts.experience import build_rewards, score
from earlyfusion.rl.rollouts.packing import Trajectory, rollout
from earlyfusion.rl.rollouts.prompts import Prompt, PromptPool

FILE = "samples.jsonl"
PART = 64
"""Problems that are sampled together, and written together."""
PAGE = 16


class Stopped(Exception):
    """A signal came while answers were sampled; what was sampled is kept."""


@dataclass(frozen=True)
class Answer:
    """One sampled answer. ids: its tokens, the stop token included. right: its score counts as solved."""

    ids: tuple[int, ...]
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

    asked: Prompt
    label: str
    problem: Problem
    prompt: Encoded
    answers: list[Answer]

    def trajectory(self, index: int) -> Trajectory:
        """An answer as the learner packs it; without what only the sampler knew."""
        answer = self.answers[index]
        blank = [float("nan")] * answer.tokens
        done = Completion(
            self.problem.key,
            index,
            list(answer.ids),
            blank,
            blank,
            [0] * answer.tokens,
            answer.text,
            "length" if answer.finish == "length" else "stop",
            len(self.prompt.ids),
            0,
        )
        return Trajectory(self.prompt, done)


def settings_of(config: RLConfig, folder: Path, tokenizer: Tokenizer, problems: int) -> dict[str, Any]:
    """What decides on the answers, as JSON."""
    tree = dump(config)
    return {
        "model": str(folder),
        "tokenizer": tokenizer.hash,
        "seed": config.run.seed,
        "problems": problems,
        "tasks": tree["tasks"],
        "rollout": tree["rollout"],
        "reward": tree["reward"],
        "temperature": temperature(config.temperature, 0),
    }


class Sampler:
    """Samples rollout.group_size answers to each of `problems` prompts of the recipe, or reads those that are
    there.

    Raises UserError when OUT holds samples of other settings, TaskError and RewardError as the tasks and
    rewards do.
    """

    def __init__(
        self,
        config: RLConfig,
        model: NativeFusion,
        tokenizer: Tokenizer,
        out: Path,
        folder: Path,
        problems: int,
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.path = out / FILE
        self.settings = settings_of(config, folder, tokenizer, problems)
        self.prompts = PromptPool(config, tokenizer, model.config.vision)
        self.rewards: Rewards = build_rewards(config.reward, self.prompts.tasks, config.run.seed)
        self.asked = self.prompts.draw(problems, 0)

    def gather(self, console: Console, stop: Callable[[], bool] = lambda: False) -> list[Answered]:
        """All answers, sampled as far as the file does not hold them. Raises Stopped when `stop()` turns
        true."""
        lines = self._known()
        columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=len(self.asked), completed=len(lines))
            engine = self._engine() if len(lines) < len(self.asked) else None
            while len(lines) < len(self.asked):
                if stop():
                    raise Stopped(f"{len(lines)} of {len(self.asked)} problems are answered")
                assert engine is not None
                lines += self._part(engine, len(lines))
                progress.update(bar, completed=len(lines))
                if not console.is_terminal:
                    console.print(f"answers: {len(lines)}/{len(self.asked)} problems", markup=False)
        return self.read(lines)

    def read(self, lines: Sequence[dict[str, Any]] | None = None) -> list[Answered]:
        """The answers of the file (or of its lines)."""
        found = []
        for line in self._known() if lines is None else lines:
            asked = self.prompts.prompt(*line["ask"])
            problem, prompt = asked.problem, asked.encoded
            right = [solved(problem.task, self.rewards.span.share(a["score"])) for a in line["answers"]]
            answers = [
                Answer(tuple(a["ids"]), a["text"], a["finish"], a["score"], well)
                for a, well in zip(line["answers"], right)
            ]
            found.append(Answered(asked, self.config.tasks[asked.entry].label, problem, prompt, answers))
        return found

    def _known(self) -> list[dict[str, Any]]:
        """The lines that are there; a torn one at the end is cut off."""
        if not self.path.is_file():
            return []
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        try:
            records = [json.loads(line) for line in whole.splitlines()]
            old = records[0]["settings"] if records else self.settings
            lines = records[1:]
            asked = [self.prompts.prompt(*line["ask"]) for line in lines]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.path}: not a file of samples; remove it, or name another --out") from None
        if old != self.settings or asked != self.asked[: len(asked)]:
            odd = [key for key in self.settings if old.get(key) != self.settings[key]] or ["prompts"]
            raise UserError(
                f"{self.path} was sampled with other settings ({', '.join(odd)} differ); put them back, or"
                " name another --out"
            )
        # A part is sampled again whole: the noise of a sample is keyed by its place in the part.
        kept = len(lines) if len(lines) == len(self.asked) else len(lines) // PART * PART
        if len(whole) < len(raw) or kept < len(lines):
            write_atomic(self.path, b"".join(whole.splitlines(keepends=True)[: 1 + kept]))
        return lines[:kept]

    def _engine(self) -> Engine:
        rollout_, n = self.config.rollout, self.config.rollout.group_size
        longest = max(len(prompt.encoded.ids) for prompt in self.asked)
        pages = -(-(longest + rollout_.max_new_tokens) // PAGE) + 1
        slots = max(n, min(rollout_.slots, PART * n))
        return Engine(
            self.model,
            self.tokenizer,
            max_slots=slots,
            page_size=PAGE,
            max_pages=slots * pages,
            prefill_chunk=rollout_.prefill_chunk,
            max_waiting=2 * PART,
            image_cache=2 * PART,
        )

    def _part(self, engine: Engine, start: int) -> list[dict[str, Any]]:
        """Sample, judge and write the next part."""
        rollout_, asked = self.config.rollout, self.asked[start : start + PART]
        params = SamplingParams(
            rollout_.max_new_tokens,
            temperature(self.config.temperature, 0),
            rollout_.top_p,
            rollout_.min_p,
            seed=self.config.run.seed,
        )
        made = rollout(
            engine,
            [prompt.encoded for prompt in asked],
            group_size=rollout_.group_size,
            params=params,
            name=f"long2short/{start}",
        )
        groups = [Group(prompt, answers) for prompt, answers in zip(asked, made)]
        scored = iter(score(self.rewards, groups))
        lines: list[dict[str, Any]] = []
        for group in groups:
            answers = [
                {"ids": t.ids, "text": t.completion.text, "finish": t.completion.finish_reason}
                | {"score": next(scored).value}
                for t in group.trajectories
            ]
            lines.append({"ask": group.prompt.ids, "key": group.problem.key, "answers": answers})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.is_file() or not self.path.stat().st_size
        with self.path.open("a", encoding="utf-8") as file:
            written = [{"settings": self.settings}, *lines] if fresh else lines
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in written))
            file.flush()
            os.fsync(file.fileno())
        return lines

    def close(self) -> None:
        self.rewards.close()


def refuse_taken(out: Path, resume: bool) -> None:
    """UserError when OUT already holds samples and the run is not to go on, or holds none and is."""
    there = (out / FILE).is_file()
    if there and not resume:
        raise UserError(
            f"{out} already holds {FILE}: add --resume to go on, or name another folder with --out"
        )
    if resume and not there:
        raise UserError(f"nothing to resume in {out}: no {FILE}; start without --resume")
