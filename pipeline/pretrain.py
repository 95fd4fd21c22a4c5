"""Joint vision-text pretraining from step one: start reading here.

    accelerate launch -m earlyfusion.pipeline.pretrain nano          (anywhere)
    accelerate launch -m pipeline.pretrain nano                      (in a checkout)
    torchrun --nproc-per-node 2 -m earlyfusion.pipeline.pretrain nano
    earlyfusion pretrain nano

One step: packed micro-batches -> NativeFusion -> weighted mean loss -> gradients (averaged over ranks by DDP)
-> guard -> clip -> MuonClip (or AdamW) with QK-Clip -> router biases -> meters. Everything that a resume
needs lies in the checkpoint: weights, optimizer, data cursors, random states, meters, guard. A stopped run
(SIGTERM, SIGINT) saves and leaves with exit code 75; `--resume` goes on bit for bit.

The output folder gets metrics.jsonl, recipe.toml, checkpoints/, eval/, samples/, model/ (the model directory)
and report.html.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline import build, cli, evaluate
from earlyfusion.pipeline.checkpoint import Checkpointer, Loaded, RunFacts
from earlyfusion.pipeline.config.arguments import RecipeArguments
from earlyfusion.pipeline.config.compose import dump, load_config
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE, TrainingStopped
from earlyfusion.pipeline.guard import Guard
from earlyfusion.pipeline.launch import launch
from earlyfusion.pipeline.meter import Meter
from earlyfusion.pipeline.picture_exchange import PictureExchange
from earlyfusion.pipeline.runtime import Runtime, objects_at_rest, seed_everything
from earlyfusion.pipeline.schedule import StageTable
from earlyfusion.pipeline.step import LossBook, drop_frozen_gradients, forward_backward, weigh
from earlyfusion.pipeline.track import Tracker


class Pretraining:
    """The parts of a run, built in the order they need one another; `train` is the loop."""

    def __init__(self, config: RunConfig, resume: bool) -> None:
        self.runtime = runtime = Runtime(
            config.train.mixed_precision, config.train.threads, config.track.trackers
        )
        seed_everything(config.run.seed)
        self.tokenizer = build.tokenizer(config, runtime)
        self.config = config = self._fitted(config)
        self.out = Path(config.run.directory)
        self.stages = StageTable(config.stages, config.optim.lr)
        self.total = config.total_steps
        facts = RunFacts(dump(config), self.tokenizer.hash, self.tokenizer.vocab_size)
        self.checkpoints = Checkpointer(
            self.out, runtime, facts, config.checkpoint.keep, config.checkpoint.keep_every
        )
        start = self.checkpoints.start(resume)

        self.fusion = self._build_model()
        self.fusion.decoder.recompute = config.train.recompute
        build.check_frozen(self.fusion, {f"stages.{one.name}.frozen": one.frozen for one in config.stages})
        self.model = runtime.prepare_model(self.fusion)
        self.optimizer = build.optimizer(config, self.fusion)
        self.guard = Guard(**config.guard.model_dump(), agree=runtime.agree)
        self.meter = Meter(
            runtime, torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32
        )
        self.costs = build.Costs(self.fusion.config)
        self.book = LossBook([source.name for source in config.data.sources])
        self.source_weights = torch.tensor([config.train.loss_weights.get(s, 1.0) for s in self.book.sources])
        self.step = 0
        self.exchange = PictureExchange(config.parallel, self.fusion.config, runtime)
        self.loaders = build.StageLoaders(config, self.tokenizer, runtime, self.out)
        if start is not None:
            self._restore(start)
        self.evaluator = self._build_evaluator()
        self.loaders.at(self.stages.place(self.step).index)  # missing data is told before anything is written
        runtime.stop.install()
        self.tracker = Tracker(
            self.out,
            runtime,
            total_steps=self.total,
            start_step=self.step,
            tensorboard=config.track.tensorboard,
            trackers=config.track.trackers,
            recipe=dump(config),
            name=config.run.name,
        )
        if runtime.is_main:
            build.write_recipe(self.out, config)

    # What a later stage builds in another way (pipeline/sft.py).

    def _fitted(self, config: RunConfig) -> RunConfig:
        """The recipe with the vocabulary that the model is to have."""
        return build.with_tokenizer(config, self.tokenizer)

    def _build_model(self) -> NativeFusion:
        return build.model(self.config, self.tokenizer)

    def _build_evaluator(self) -> evaluate.Evaluator:
        return evaluate.Evaluator(self.config, self.fusion, self.tokenizer, self.runtime, self.out)

    def _write_outputs(self, facts: dict[str, Any]) -> Sequence[str]:
        return evaluate.write_outputs(self.out, self.fusion, self.tokenizer, facts)

    # ------------------------------------------------------------------------------------------------------
    # the loop

    @objects_at_rest()
    def train(self) -> int:
        """All steps that are left, then the last evaluation, the model directory and the report."""
        self.meter.restart_clock()
        while self.step < self.total:
            place = self.stages.place(self.step)
            with self.meter.waiting():
                given = self.loaders.at(place.index).next_step()
                batches = [batch.to(self.runtime.device) for batch in given]
            flops = self.costs.of(given)  # counts labels, on the host
            for batch in batches:
                weigh(batch, self.source_weights, self.config.train.text_loss_weight)
            self._one_step(batches, place, flops)
            if self.runtime.should_stop():
                return self._leave_early()
            self._every_so_often()
        return self._finish()

    def _one_step(self, batches: Sequence[Any], place: Any, flops: tuple[float, float]) -> None:
        self.model.train()
        routes = self.exchange.routes(batches, self.config.stages[place.index].max_patches)
        result = forward_backward(
            self.runtime.accelerator, self.model, batches, self.book, self.runtime.sum, routes
        )
        frozen = build.frozen(self.config.stages[place.index].frozen)
        drop_frozen_gradients(self.fusion, frozen)
        limit = self.config.optim.clip_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(
            self.fusion.parameters(), float("inf") if limit is None else limit
        )
        grad_norm = float(norm)
        can_roll_back = self.guard.policy == "rollback" and self.checkpoints.latest() is not None
        verdict = self.guard.check(result.loss, grad_norm, can_roll_back=can_roll_back)
        lr = self.stages.lr(self.step)
        if verdict.ok:
            build.set_lr(self.optimizer, lr)
            with build.held(self.fusion, frozen):
                self.optimizer.step()
                balance = build.balance_experts(self.fusion, self.runtime)
        else:
            balance = build.forget_step(self.fusion, self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.meter.step(
            tokens=sum(b.num_tokens for b in batches),
            patches=sum(b.num_patches for b in batches),
            samples=sum(b.segments.num for b in batches),
            decoder_flops=flops[0],
            vision_flops=flops[1],
            vision_work=self.exchange.work(batches, routes),
        )
        self.step += 1
        if not verdict.ok and self._react(verdict):
            return
        shown = {
            "stage": place.name,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "fill": result.fill,
        }
        if self.step % self.config.track.log_every == 0 or self.step == self.total:
            self._log(shown, balance)
        else:
            self.tracker.tick(self.step, shown | {"step_s": self.meter.step_s})
        if self.step < self.total and self.stages.place(self.step).index != place.index:
            self.guard.new_stage()

    def _log(self, shown: dict[str, Any], balance: dict[str, Any]) -> None:
        record = shown | self.book.means(self.runtime.sum) | self.loaders.metrics(self.runtime.sum)
        record |= self.meter.snapshot()
        self.book.clear()
        self.tracker.log(
            self.step,
            record | build.optimizer_metrics(self.optimizer) | build.expert_metrics(balance, self.fusion),
        )

    def _react(self, verdict: Any) -> bool:
        """The guard refused the update: say so, and stop or go back when its policy asks for it. True: gone
        back."""
        seen, message = self.step, f"{verdict.action}: {verdict.reason}"
        newest = self.checkpoints.intact() if verdict.action == "rollback" else None
        if newest is not None:
            loaded = self.checkpoints.load(newest)
            self._restore_weights(loaded)  # the data cursors stay, so that the bad batches are passed over
            self.guard.after_rollback()
            self.step = loaded.step
            self.tracker.rewind(self.step)
        self.tracker.event(self.step, "guard", action=verdict.action, seen_at=seen, message=message)
        if verdict.action == "stop":
            raise TrainingStopped(f"stopped by the guard at step {self.step}: {verdict.reason}")
        return newest is not None

    def _every_so_often(self) -> None:
        every, last = self.config.eval.every, self.step == self.total
        if every and self.step % every == 0 and not last:
            with self.meter.paused():
                self.evaluator.run(self.step, self.tracker, final=False)
        if self.config.checkpoint.every and self.step % self.config.checkpoint.every == 0 and not last:
            with self.meter.paused():
                self._save()

    # ------------------------------------------------------------------------------------------- state, and
    # the end

    def _save(self) -> Path:
        book = self.runtime.sum(self.book.sums).cpu()  # of all ranks: the file keeps rank 0's trainer state
        trainer = {"guard": self.guard.state_dict(), "meter": self.meter.state_dict(), "book": book}
        path = self.checkpoints.save(
            self.step,
            model=self.fusion.state_dict(),
            optimizer=self.optimizer.state_dict(),
            trainer=trainer,
            lanes=self.loaders.state_dict(),
        )
        self.tracker.event(self.step, "checkpoint", path=path.name)
        return path

    def _restore_weights(self, loaded: Loaded) -> None:
        self.fusion.load_state_dict(loaded.model)
        self.optimizer.load_state_dict(loaded.optimizer)

    def _restore(self, loaded: Loaded) -> None:
        self._restore_weights(loaded)
        self.guard.load_state_dict(loaded.trainer["guard"])
        self.meter.load_state_dict(loaded.trainer["meter"])
        if self.runtime.is_main:  # what is pending of all ranks; the others begin with nothing
            self.book.sums = loaded.trainer["book"]
        self.step = loaded.step
        self.loaders.load_state_dict(loaded.lanes)
        loaded.restore_rng(self.runtime.rank, self.config.run.seed)

    def _leave_early(self) -> int:
        path = self._save()
        reason = self.runtime.stop.received or "a signal on another rank"
        self.tracker.event(
            self.step, "stop", message=f"{reason}: saved {path.name}; --resume goes on from here"
        )
        return EXIT_REQUEUE

    def _finish(self) -> int:
        # The stage of the last step taken: with run.steps it need not be the last stage, and its cursors are
        # saved below.
        loader = self.loaders.at(self.stages.place(max(0, self.step - 1)).index)
        with self.meter.paused():
            headline = self.evaluator.run(self.step, self.tracker, final=True, loader=loader)
            self._save()
        if self.runtime.is_main:
            facts = evaluate.run_facts(self.config, self.step, self.meter, headline, loader.stats()["shares"])
            for line in self._write_outputs(facts):
                self.tracker.say(line)
        self.runtime.barrier()
        return EXIT_OK

    def close(self) -> None:
        self.loaders.close()
        self.tracker.close()
        self.runtime.close()


def run(parsed: RecipeArguments) -> int:
    """Build and train; returns the exit code."""
    config = load_config(parsed.recipes, parsed.overrides)
    return launch(Pretraining, config, parsed, check=evaluate.Evaluator.check)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m`, `accelerate launch -m` and `earlyfusion pretrain`."""
    return cli.main(["pretrain", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
