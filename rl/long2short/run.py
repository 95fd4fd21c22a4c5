"""The DPO run of `earlyfusion long2short dpo`: start, samples, pairs, updates, and what came of it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from earlyfusion.data.chat.template import TEMPLATE_FILE
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_json
from earlyfusion.model.engine.state import token_rules
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline import build
from earlyfusion.pipeline.checkpoint import Checkpointer, Loaded, RunFacts
from earlyfusion.pipeline.config.compose import dump
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE, TrainingStopped
from earlyfusion.pipeline.guard import Guard
from earlyfusion.pipeline.meter import peak_memory_bytes
from earlyfusion.pipeline.parallel import exchange_gradients
from earlyfusion.pipeline.runtime import Runtime, seed_everything
from earlyfusion.pipeline.schedule import linear
from earlyfusion.pipeline.track import Tracker
from earlyfusion.pipeline.update import check_frozen, update
from earlyfusion.rl.learn import Learner
from earlyfusion.rl.long2short.dpo import (
    DpoOptions,
    PreferenceLearner,
    batches,
    make_pairs,
    options_tree,
    pairs_digest,
    record,
    write_pairs,
)
from earlyfusion.rl.long2short.heldout import Held, compared, fallen, look, read_held, table, write_held
from earlyfusion.rl.long2short.report import write_report
from earlyfusion.rl.long2short.samples import FILE, Answered, Sampler, Stopped
from earlyfusion.rl.recipe import RLConfig, start_directory

WIDTH = 100
"""Columns of the table where nothing says how many there are."""

ADVICE = (
    "where length is part of the answer, pairs teach to leave out: fewer --epochs, more --beta or --nll, or"
    " other tasks"
)
GOES_ON, DONE = 0, 2
"""Codes of rank 0 while it samples; 1 is a signal."""


class DpoRun:
    """Built, then `train`; see the file's head. All processes of a launch hold one each; rank 0 samples and
    measures."""

    def __init__(self, config: RLConfig, options: DpoOptions, problems: int, resume: bool) -> None:
        options.check()
        self.config, self.options, self.problems, self.step = config, options, problems, 0
        self.folder, self.out = start_directory(config), Path(config.run.directory)
        self.tokenizer = Tokenizer.load(self.folder)
        self.runtime = Runtime(config.train.mixed_precision, config.train.threads)
        seed_everything(config.run.seed)
        self.console = Console(stderr=True, highlight=False, quiet=not self.runtime.is_main)
        tree = dump(config) | {"long2short": options_tree(options) | {"problems": problems}}
        facts = RunFacts(tree, self.tokenizer.hash, self.tokenizer.vocab_size)
        self.checkpoints = Checkpointer(
            self.out, self.runtime, facts, config.checkpoint.keep, config.checkpoint.keep_every
        )
        self.start = self._start(resume)
        self.model = load_model(self.folder, self.runtime.device, torch.float32)
        check_frozen(self.model, {"train.frozen": config.train.frozen})
        self.sampler = Sampler(config, self.model, self.tokenizer, self.out, self.folder, problems)
        self.optimizer = build.optimizer(config.optim, self.model)
        self.guard = Guard(**config.guard.model_dump(), agree=self.runtime.agree)
        silent = sorted(token_rules(self.model, self.tokenizer).banned_ids)
        self.learner = Learner(config, self.model, self.runtime, silent)
        self.tracker: Tracker | None = None
        self.runtime.stop.install()

    def _start(self, resume: bool) -> Loaded | None:
        newest, sampled = self.checkpoints.latest(), (self.out / FILE).is_file()
        if resume and newest is None and not sampled:
            raise UserError(f"nothing to resume in {self.out}; start without --resume")
        if not resume and (newest is not None or sampled):
            raise UserError(
                f"{self.out} already holds a run: add --resume to go on, or name another folder with --out"
            )
        return self.checkpoints.load(newest) if newest is not None else None

    # the phases

    def train(self) -> int:
        """Measure, sample, pair, train, measure; returns the exit code."""
        before = self._look("before")
        answered = self._answers()
        if answered is None:
            return EXIT_REQUEUE
        pairs = make_pairs(answered, self.options)
        solved = sum(any(a.right for a in one.answers) for one in answered)
        self.console.print(
            f"{len(pairs)} pairs of {len(answered)} problems, {solved} of them with a right answer"
        )
        if self.runtime.is_main:
            write_pairs(self.out / "pairs.jsonl", answered, pairs)
            build.write_recipe(self.out, self.config)
        self.teacher = PreferenceLearner(
            self.learner, answered, pairs, self.options, self.config.train.row_tokens
        )
        self.digest = pairs_digest(answered, pairs)
        self._restore_or_begin()
        steps = batches(len(pairs), self.options.batch, self.options.epochs, self.config.run.seed)
        code = self._updates(steps)
        return code if code != EXIT_OK else self._finish(before, len(steps))

    def _look(self, name: str) -> list[Held]:
        """Held-out problems under the weights as they are, or what was measured before the stop."""
        path = self.out / "heldout" / f"{name}.jsonl"
        held: list[Held] = []
        if self.runtime.is_main and self.config.eval.problems:
            if name == "before" and path.is_file():
                held = read_held(path)
            else:
                self.model.eval()
                held = look(self.config, self.model, self.tokenizer, self.sampler.rewards)
                write_held(path, held)
        self.runtime.barrier()
        return held

    def _answers(self) -> list[Answered] | None:
        """All samples; None when a signal came. The other processes wait for rank 0 part by part, so that
        none of them runs into the time limit of a collective."""
        runtime, received = self.runtime, lambda: int(self.runtime.stop.received is not None)
        if not runtime.is_main:
            while (code := runtime.agree(received())) == GOES_ON:
                pass
            return self.sampler.read() if code == DONE else None
        try:
            answered = self.sampler.gather(self.console, lambda: bool(runtime.agree(received())))
        except Stopped as told:
            self.console.print(f"{runtime.stop.received or 'a signal'}: {told}; --resume goes on from here")
            return None
        runtime.agree(DONE)
        return answered

    def _restore_or_begin(self) -> None:
        if self.start is None:
            self.model.eval()
            self.teacher.set_reference(self.model)
            # Every process computes with the numbers of rank 0, whatever its own rounding.
            own = (
                self.teacher.reference_P2
                if self.runtime.is_main
                else torch.zeros_like(self.teacher.reference_P2)
            )
            self.teacher.reference_P2 = self.runtime.sum(own.double()).float().cpu()
            return
        trainer = self.start.trainer
        if trainer["pairs"] != self.digest:
            raise UserError(
                f"cannot resume {self.start.path}: {self.out / FILE} no longer gives the pairs it was trained"
                " on; put the file back, or start another run"
            )
        self.step = self.start.step
        self.teacher.reference_P2 = trainer["reference"].clone()
        self.guard.load_state_dict(trainer["guard"])
        self.model.load_state_dict(self.start.model)
        self.optimizer.load_state_dict(self.start.optimizer)
        self.start.restore_rng(self.runtime.rank, self.config.run.seed)

    # the updates

    def _updates(self, steps: list[list[int]]) -> int:
        """The updates that are left; EXIT_REQUEUE when a signal came."""
        config, runtime = self.config, self.runtime
        total = len(steps) if config.run.steps is None else min(len(steps), config.run.steps)
        self.tracker = Tracker(
            self.out,
            runtime,
            total_steps=total,
            start_step=self.step,
            trackers=config.track.trackers,
            name=config.run.name,
            console=self.console,
        )
        self.model.train()
        while self.step < total:
            numbers = self._update(steps[self.step], len(steps))
            self.step += 1
            last = self.step == total
            if self.step % config.track.log_every == 0 or last:
                self.tracker.log(self.step, numbers)
            else:
                self.tracker.tick(self.step, numbers)
            if runtime.should_stop() and not last:
                path = self._save()
                self.console.print(
                    f"{runtime.stop.received or 'a signal'}: saved {path.name}; --resume goes on"
                )
                return EXIT_REQUEUE
            if config.checkpoint.every and self.step % config.checkpoint.every == 0 and not last:
                self._save()
        self.model.eval()
        if self.start is None or self.step != self.start.step:
            self._save()
        self.tracker.close()
        self.tracker = None
        return EXIT_OK

    def _update(self, batch: list[int], total: int) -> dict[str, Any]:
        begun, config = time.perf_counter(), self.config
        train = config.train
        sums = self.teacher.gradients(batch[self.runtime.rank :: self.runtime.world], len(batch))
        exchange_gradients(self.model, self.runtime)
        sums = self.runtime.sum(sums).cpu()

        lr = linear(config.optim.lr, self.step, total, train.warmup_updates, train.final_lr_ratio)
        step = update(
            self.model,
            self.optimizer,
            self.guard,
            self.runtime,
            loss=float(sums[0]),
            lr=lr,
            clip_grad_norm=config.optim.clip_grad_norm,
            frozen=train.frozen,
            balance_experts=False,
        )
        if step.verdict.action == "stop":
            raise TrainingStopped(f"stopped by the guard at update {self.step}: {step.verdict.reason}")
        if step.refused and self.tracker is not None:
            message = f"{step.verdict.action}: {step.verdict.reason}"
            self.tracker.event(self.step, "note", message=message)
        numbers = record(sums, begun) | {
            "lr": lr,
            "grad_norm": step.grad_norm,
            "refused": float(step.refused),
        }
        return numbers | {"memory_gib": peak_memory_bytes(self.runtime.device) / 2**30}

    def _save(self) -> Path:
        trainer = {
            "guard": self.guard.state_dict(),
            "pairs": self.digest,
            "reference": self.teacher.reference_P2,
        }
        return self.checkpoints.save(
            self.step,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            trainer=trainer,
            lanes={self.runtime.rank: {}},
        )

    # the end

    def _finish(self, before: list[Held], total: int) -> int:
        after = self._look("after")
        if not self.runtime.is_main:
            return EXIT_OK
        rows = compared(before, after) if before else []
        pairs = len(self.teacher.pairs)
        directory = self._write_model(pairs, rows)
        summary = {
            "model": str(self.folder),
            "pairs": pairs,
            "problems": self.problems,
            "steps": self.step,
            "of": total,
            "options": options_tree(self.options),
            "heldout": rows,
        }
        write_json(self.out / "summary.json", summary)
        report = write_report(self.out, summary)
        if rows:
            wide = Console(highlight=False)
            wide = wide if wide.is_terminal else Console(highlight=False, width=max(wide.width, WIDTH))
            wide.print(table(rows))
            for row in fallen(rows):
                self.console.print(f"accuracy fell: {row}; {ADVICE}", soft_wrap=True)
        self.console.print(f"model directory: {directory}", soft_wrap=True)
        self.console.print(f"report: {report}", soft_wrap=True)
        return EXIT_OK

    def _write_model(self, pairs: int, rows: list[dict[str, Any]]) -> Path:
        options = self.options
        evals = {}
        for row in rows:
            for metric in ("accuracy", "tokens"):
                a, b = row[metric]["before"], row[metric]["after"]
                evals[f"{row['label']}, {row['way']}, {metric}"] = f"{a:.3f} before, {b:.3f} after"
        facts = {
            "name": self.config.run.name,
            "steps": self.step,
            "seed": self.config.run.seed,
            "base": str(self.folder),
            "device": str(self.runtime.device),
            "precision": self.config.train.mixed_precision,
            "evals": evals,
            "notes": [
                (
                    f"DPO for shorter answers (long2short, Kimi k1.5 section 2.4) from `{self.folder}`:"
                    f" {pairs} pairs of its own answers to {self.problems} problems, beta {options.beta:g}."
                ),
                (
                    "Chosen: the shortest right answer. Rejected: longer wrong ones, and right ones of at"
                    f" least {options.longer:g} times its length."
                ),
            ],
        }
        directory = save_model(self.model, self.tokenizer, self.out / "model", facts)
        template = self.folder / TEMPLATE_FILE
        if template.is_file():
            shutil.copy(template, directory / TEMPLATE_FILE)
        return directory

    def close(self) -> None:
        if self.tracker is not None:
            self.tracker.close()
        self.sampler.close()
        self.runtime.close()
