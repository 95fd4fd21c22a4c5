"""Preference training for shorter answers (DPO, k1.5 2.4): sample, pair, train, measure.

earlyfusion long2short dpo --model DIR --recipe vision-rl --problems 512 --out runs/dpo --set optim.lr=1e-4

Answers are sampled once from the start, made into pairs (the shortest right answer against longer wrong ones
and right ones of 1.5 times its length), and the policy is trained against the frozen start. Log-probabilities
are those of temperature 1 over the tokens that may be drawn. A stopped run goes on bit for bit with --resume:
samples are on disk, the start's log-probabilities in the checkpoint, and which pairs a step takes is a
function of the seed and the step.

OUT holds samples.jsonl, pairs.jsonl, metrics.jsonl, heldout/{before,after}.jsonl, checkpoints, model,
summary.json and report.html.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, FiniteFloat, PositiveInt

from earlyfusion.data.loading.order import digest64
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import read_jsonl, write_atomic, write_json
from earlyfusion.model.engine.scheduler import token_rules
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline import build
from earlyfusion.pipeline.checkpoint import Checkpointer, latest
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE, TrainingStopped
from earlyfusion.pipeline.guard import Guard
from earlyfusion.pipeline.meter import peak_memory_bytes
from earlyfusion.pipeline.options import verb
from earlyfusion.pipeline.parallel import exchange_gradients
from earlyfusion.pipeline.runtime import Runtime, seed_everything
from earlyfusion.pipeline.schedule import linear
from earlyfusion.pipeline.track import Tracker
from earlyfusion.pipeline.update import check_frozen, update
from earlyfusion.rl.learn import Learner
from earlyfusion.rl.long2short.heldout import Row, compared, look, write_report
from earlyfusion.rl.long2short.preferences import (
    LONGER,
    PreferenceLearner,
    batches,
    make_pairs,
    pair_lines,
)
from earlyfusion.rl.long2short.samples import (
    FILE,
    Answered,
    SampleOptions,
    Sampler,
    check_resume,
    recipe_of,
    save_beside,
)
from earlyfusion.rl.measure import show_differences
from earlyfusion.rl.recipe import start_directory

# Said where accuracy fell: shortening is not the only thing that pairs teach.
ADVICE = (
    "where length is part of the answer, pairs teach to leave out: fewer --epochs, more --beta or --nll, or"
    " other tasks"
)
# The largest code of all processes counts, so that any signal stops all.
GOES_ON, STOPPED, DONE = range(3)
"""What rank 0 tells the others while it samples."""


class DpoOptions(SampleOptions):
    beta: Annotated[float, Field(gt=0)] = 0.1
    """strength of the pull towards the start"""
    nll: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """weight of the chosen answers' likelihood beside DPO"""
    batch: PositiveInt = 16
    """pairs of one update"""
    epochs: PositiveInt = 2
    """passes over the pairs"""


# Laid over the recipe, which --set changes: a schedule of reinforcement learning is not meant here.
RECIPE = {
    "optim": {"lr": 2e-4, "weight_decay": 0.0},
    "train": {"final_lr_ratio": 0.1, "warmup_updates": 0},
    "eval": {"problems": 128, "samples": 0},
    "checkpoint": {"every": 0},
}


class DpoRun:
    """Built, then `train`; see the file's head. All processes of a launch hold one each; rank 0 samples and
    measures."""

    def __init__(self, options: DpoOptions) -> None:
        self.options, self.config = options, recipe_of(options, RECIPE)
        config = self.config
        self.folder, self.out, self.step = start_directory(config), Path(options.out), 0
        self.tokenizer = Tokenizer.load(self.folder)
        self.runtime = Runtime(config.train.mixed_precision, config.train.threads)
        seed_everything(config.run.seed)

        # The newest checkpoint, if the run is to go on.
        own = options.model_dump(include={"beta", "nll", "batch", "epochs", "problems"})
        self.checkpoints = Checkpointer.of(config, self.tokenizer, self.runtime, long2short=own)
        newest = latest(self.checkpoints.folder)
        check_resume(self.out, newest is not None or (self.out / FILE).is_file(), options.resume)
        self.start = None if newest is None else self.checkpoints.load(newest)

        self.model = load_model(self.folder, self.runtime.device, torch.float32)
        check_frozen(self.model, {"train.frozen": config.train.frozen})
        self.sampler = Sampler(config, self.model, self.tokenizer, self.folder, options.problems)
        self.optimizer = build.optimizer(config.optim, self.model)
        self.guard = Guard(config.guard.policy, self.runtime.agree)
        silent = sorted(token_rules(self.model, self.tokenizer).banned_ids)
        # Its packed rows and log-probabilities, not its objective.
        self.learner = Learner(config, self.model, self.runtime, silent)
        self.runtime.stop.install()

    def say(self, text: str) -> None:
        if self.runtime.is_main:
            print(text, flush=True)

    def train(self) -> int:
        """Measure, sample, pair, train, measure; returns the exit code."""
        options, main = self.options, self.runtime.is_main
        before = self.look("before")
        answered = self.answers()
        if answered is None:
            self.say("stopped while it sampled; --resume goes on from here")
            return EXIT_REQUEUE
        pairs = make_pairs(answered)
        lines = pair_lines(answered, pairs)
        if main:
            write_atomic(self.out / "pairs.jsonl", lines)
            build.write_recipe(self.out, self.config)
        # What a resume compares: the pairs with all their tokens.
        self.digest = f"{digest64('pairs', lines):016x}"
        self.teacher = PreferenceLearner(self.learner, answered, pairs, options.beta, options.nll)
        self.restore_or_begin()
        steps = batches(len(pairs), options.batch, options.epochs, options.seed)
        self.say(f"{len(pairs)} pairs of {len(answered)} problems, {len(steps)} updates")
        if not self.updates(steps):
            self.say("stopped and saved; --resume goes on")
            return EXIT_REQUEUE
        after = self.look("after")
        if main:
            self.finish(compared(before, after), len(pairs), len(steps))
        return EXIT_OK

    def look(self, name: str) -> list[Row]:
        """Held-out problems under the weights as they are, or what was measured before the stop."""
        path = self.out / "heldout" / f"{name}.jsonl"
        # The start is measured once, whatever happens to the run.
        held = read_jsonl(path) if name == "before" else []
        if self.runtime.is_main and self.config.eval.problems and not held:
            self.model.eval()
            held = look(self.config, self.model, self.tokenizer, self.sampler.rewards)
            write_atomic(path, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in held))
        self.runtime.barrier()
        return held

    def answers(self) -> list[Answered] | None:
        """All samples; None when a signal came. The other processes wait for rank 0 part by part, so that
        none of them runs into the time limit of a collective."""
        runtime = self.runtime

        def agreed(code: int = GOES_ON) -> int:
            return runtime.agree(max(code, int(runtime.stop.received is not None)))

        if runtime.is_main:
            answered = self.sampler.gather(lambda: agreed() == STOPPED)
            if answered is not None:
                agreed(DONE)
            return answered
        code = GOES_ON
        while code == GOES_ON:
            code = agreed()
        return self.sampler.read() if code == DONE else None

    def restore_or_begin(self) -> None:
        """The start's log-probabilities, or everything that the checkpoint holds."""
        start, teacher = self.start, self.teacher
        if start is None:
            self.model.eval()
            teacher.set_reference()
            # Every process computes with the numbers of rank 0, whatever its own rounding.
            own = teacher.reference_P2.double() * self.runtime.is_main
            teacher.reference_P2 = self.runtime.sum(own).float().cpu()
            return
        if start.trainer["pairs"] != self.digest:
            raise UserError(
                f"cannot resume {start.path}: {self.out / FILE} no longer gives the pairs it was trained"
                " on; put the file back, or start another run"
            )
        self.step = start.step
        # Not read again: another packing would round otherwise, and a resume be another run.
        teacher.reference_P2 = start.trainer["reference"].clone()
        self.guard.load_state_dict(start.trainer["guard"])
        self.model.load_state_dict(start.model)
        self.optimizer.load_state_dict(start.optimizer)
        start.restore_rng(self.runtime.rank, self.config.run.seed)

    def updates(self, steps: list[list[int]]) -> bool:
        """The updates that are left; False when a signal came."""
        config, runtime = self.config, self.runtime
        # run.steps cuts the schedule short and leaves it as it is, so that a resume goes on in it.
        total = min(len(steps), config.run.steps or len(steps))
        tracker = Tracker(self.out, runtime, total_steps=total, start_step=self.step, config=config)
        self.model.train()
        stopped = False
        try:
            while self.step < total and not stopped:
                numbers = self.update(steps[self.step], len(steps))
                self.step += 1
                last = self.step == total
                if last or self.step % config.track.log_every == 0:
                    tracker.log(self.step, numbers)
                stopped = runtime.should_stop() and not last
                every = config.checkpoint.every
                if stopped or last or (every and self.step % every == 0):
                    self.save()
        finally:
            tracker.close()
        self.model.eval()
        return not stopped

    def update(self, batch: list[int], total: int) -> dict[str, Any]:
        """One update; its numbers: margin is beta times the log ratio of chosen minus that of rejected, in
        nats, chosen and rejected the mean log ratios to the start, in nats an answer."""
        begun, config, runtime = time.perf_counter(), self.config, self.runtime
        # Every process takes its share of the pairs and their gradients are added up.
        sums = self.teacher.gradients(batch[runtime.rank :: runtime.world], len(batch))
        exchange_gradients(self.model, runtime)
        sums = runtime.sum_dict(sums)
        lr = linear(config.optim.lr, self.step, total, 0, config.train.final_lr_ratio)
        step = update(
            self.model,
            self.optimizer,
            self.guard,
            runtime,
            loss=sums["loss"],
            lr=lr,
            clip_grad_norm=config.optim.clip_grad_norm,
            frozen=config.train.frozen,
            balance_experts=False,
        )
        if step.verdict.action == "stop":
            raise TrainingStopped(f"stopped by the guard at update {self.step}: {step.verdict.reason}")

        # Sums become means over the pairs; the loss is a mean already.
        means = {name: sums[name] / sums["pairs"] for name in ("margin", "preferred", "chosen", "rejected")}
        seconds = time.perf_counter() - begun
        return {
            **sums,
            **means,
            "lr": lr,
            "grad_norm": step.grad_norm,
            "refused": float(step.refused),
            "tokens_per_s": sums["tokens"] / seconds,
            "step_s": seconds,
            "memory_gib": peak_memory_bytes(runtime.device) / 2**30,
        }

    def save(self) -> None:
        reference = self.teacher.reference_P2
        self.checkpoints.save(
            self.step,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            trainer={"guard": self.guard.state_dict(), "pairs": self.digest, "reference": reference},
            lanes={self.runtime.rank: {}},
        )

    def finish(self, rows: list[Row], pairs: int, total: int) -> None:
        """The model directory, summary, report, and the table."""
        options, evals = self.options, {}
        for row in rows:
            name = f"{row['label']}, {row['way']}, {row['metric']}"
            evals[name] = f"{row['before']:.3f} before, {row['after']:.3f} after"
        note = (
            f"DPO for shorter answers (long2short, Kimi k1.5 section 2.4) from `{self.folder}`: {pairs} pairs"
            f" of its own answers to {options.problems} problems, beta {options.beta:g}. Chosen: the shortest"
            " right answer. Rejected: longer wrong ones, and right ones of at least"
            f" {LONGER:g} times its length."
        )
        facts = {"name": self.config.run.name, "steps": self.step, "seed": options.seed, "notes": [note]}
        facts |= {"base": str(self.folder), "evals": evals}
        directory = save_beside(self.model, self.tokenizer, self.out / "model", facts, self.folder)
        summary = {"model": str(self.folder), "pairs": pairs, "problems": options.problems}
        summary |= {"steps": self.step, "of": total, "heldout": rows}
        write_json(self.out / "summary.json", summary)

        show_differences("held-out problems, before and after", rows)
        for row in rows:
            if row["metric"] == "accuracy" and row["high"] < 0:
                self.say(f"accuracy fell: {row['label']} ({row['way']}); {ADVICE}")
        self.say(f"model directory: {directory}\nreport: {write_report(self.out, summary)}")

    def close(self) -> None:
        self.sampler.rewards.close()
        self.runtime.close()


@verb
def dpo(options: DpoOptions) -> int:
    """Entry of `earlyfusion long2short dpo`."""
    run = DpoRun(options)
    try:
        return run.train()
    finally:
        run.close()
