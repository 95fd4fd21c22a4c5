"""Joint vision-text pretraining from step one: start reading here.

    accelerate launch -m earlyfusion.pipeline.pretrain nano          (anywhere)
    accelerate launch -m pipeline.pretrain nano                      (in a checkout)
    torchrun --nproc-per-node 2 -m earlyfusion.pipeline.pretrain nano
    earlyfusion pretrain nano

One step, and where to read on:

    stage_data.py        packed micro-batches of this rank: documents of all sources, pictures in their places
    step.py              model/fusion.py on each: tower, projector, decoder -> weighted mean loss -> gradients
                         (also who encodes which picture, and how fast it goes)
    update.py            clip, guard, MuonClip (or AdamW) with QK-Clip, router biases; or forget the step
    track.py             the numbers, to the terminal and metrics.jsonl

Everything that a resume needs lies in the checkpoint: weights, optimizer, data cursors, random states,
meters, guard. A stopped run (SIGTERM, SIGINT) saves and leaves with exit code 75, also out of an evaluation,
which is then done after the resume; `--resume` goes on bit for bit. The output folder gets metrics.jsonl,
recipe.toml, checkpoints/, eval/, samples/, model/ (the model directory) and report.html.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from earlyfusion.data.loading.loader import Loader
from earlyfusion.eval.protocol import Interrupted
from earlyfusion.kernels.files import Record
from earlyfusion.kernels.products import HALVED, halved_products, halves_pay
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline import build, cli, evaluate, state
from earlyfusion.pipeline.adapter import attach, check_plan
from earlyfusion.pipeline.checkpoint import Checkpointer, Loaded, latest
from earlyfusion.pipeline.config.arguments import RecipeArguments
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE, TrainingStopped
from earlyfusion.pipeline.launch import launch
from earlyfusion.pipeline.plan import banner
from earlyfusion.pipeline.runtime import Runtime, objects_at_rest, seed_everything, spread, whole
from earlyfusion.pipeline.schedule import StageTable, due
from earlyfusion.pipeline.stage_data import StageLoaders
from earlyfusion.pipeline.step import LossMeter, Meter, PictureExchange, forward_backward
from earlyfusion.pipeline.track import Tracker
from earlyfusion.pipeline.update import Guard, Update, Verdict, check_frozen, expert_metrics, update


class Pretraining:
    """The parts of a run, built in the order they need one another; `train` is the loop."""

    def __init__(self, config: RunConfig, resume: bool) -> None:
        # Processes, seeds, and the tokenizer, which decides the size of the vocabulary.
        train = config.train
        self.runtime = runtime = Runtime(train.mixed_precision, train.threads, config.parallel)
        # One decision for all ranks: their gradients are averaged.
        wanted = halves_pay() if train.cpu_products == "auto" else train.cpu_products == "bfloat16"
        self.halved = runtime.device.type == "cpu" and bool(runtime.agree(int(wanted)))
        seed_everything(config.run.seed)
        self.tokenizer = build.tokenizer(config, runtime)
        self.config = config = self.fit_vocabulary(config)
        self.out = Path(config.run.directory)

        # The checkpoint that a resume goes on from; it must be of this recipe and this vocabulary.
        self.checkpoints = Checkpointer.of(config, self.tokenizer, runtime)
        start = self.checkpoints.start(resume)

        # The model, spread over the ranks, and the optimizer over its parameters.
        check_plan(config.adapter, runtime.layout)
        build_model = lambda: attach(self.build_model(), config.adapter)
        self.model, self.fusion, self.plain = spread(build_model, runtime)
        self.fusion.recompute(train.recompute)
        parts: dict[str, Sequence[str]] = {"optim.lr_factors": list(config.optim.lr_factors)}
        parts |= {f"stages.{stage.name}.frozen": stage.frozen for stage in config.stages}
        check_frozen(self.plain, parts)
        self.optimizer = build.optimizer(config.optim, self.fusion, runtime.layout)
        self.guard = Guard(config.guard.policy, runtime.agree)

        # Schedule, data, and who encodes which picture.
        self.step, self.total, self.owed = 0, config.total_steps, False
        self.read: Callable[[str], Tensor] | None = None
        self.stages = StageTable(config.stages, config.optim.lr)
        self.loaders = StageLoaders(config, self.tokenizer, runtime, self.out)
        self.exchange = PictureExchange(config.parallel, self.fusion.config, runtime)

        # What is measured.
        dtype = torch.bfloat16 if train.mixed_precision == "bf16" else torch.float32
        self.meter = Meter(runtime, dtype)
        self.loss_meter = LossMeter([source.name for source in config.data.sources])
        if start is not None:
            self.restore(start)
        self.evaluator = self.build_evaluator()
        self.loaders.at(self.stages.index(self.step))  # missing data is told before anything is written

        # From here on a signal waits for the end of a step, and the output folder is written to.
        runtime.stop.install()
        self.tracker = Tracker(self.out, runtime, total_steps=self.total, start_step=self.step, config=config)
        if runtime.is_main:
            build.write_recipe(self.out, config)

    # What another kind of run builds in another way (pipeline/sft.py).

    def fit_vocabulary(self, config: RunConfig) -> RunConfig:
        """The recipe with the vocabulary that the model is to have: that of the tokenizer."""
        return build.with_tokenizer(config, self.tokenizer)

    def build_model(self) -> NativeFusion:
        """The model with the weights that the run starts from."""
        said: list[str] = []
        made = build.model(self.config, self.tokenizer, said)
        if said and self.runtime.is_main:
            print(*said, sep="\n", file=sys.stderr)
        return made

    def build_evaluator(self) -> evaluate.Evaluator:
        """What measures the model, during the run and after it."""
        return evaluate.Evaluator(self.config, self.plain, self.tokenizer, self.runtime, self.out)

    def write_outputs(self, facts: Record) -> Sequence[str]:
        """The model directory and the report, by rank 0; returns lines to show. facts: of the run."""
        return evaluate.write_outputs(self.out, self.plain, self.tokenizer, facts, self.read)

    # ------------------------------------------------------------------------------------------- the loop

    @objects_at_rest()
    def train(self) -> int:
        """All steps that are left, then the last evaluation, the model directory and the report."""
        config, runtime = self.config, self.runtime
        self.tracker.say(banner(self))
        if not self.evaluated_if_owed():
            return self.leave_early()
        self.meter.restart_clock()
        while self.step < self.total:
            index = self.stages.index(self.step)
            stage, lr = config.stages[index], self.stages.lr(self.step)

            # The next micro-batches of this rank; its wait for them is reported as data_wait.
            with self.meter.waiting():
                on_host = self.loaders.next_step(index)
                batches = [batch.to(runtime.device) for batch in on_host]

            # Forward and backward; pictures may be encoded on other ranks, gradients are averaged over all.
            self.model.train()
            batches, routes = self.exchange.spread(batches, stage.max_patches)
            encoder = self.exchange.encode(self.fusion, batches, stage.max_patches)
            with halved_products(self.halved):
                loss = forward_backward(runtime, self.model, batches, self.loss_meter, routes, encoder)

            # Clip, let the guard look at it, step or forget.
            step = update(
                self.fusion,
                self.optimizer,
                self.guard,
                runtime,
                loss=loss,
                lr=lr,
                clip_grad_norm=config.optim.clip_grad_norm,
                frozen=stage.frozen,
                can_roll_back=self.guard.policy == "rollback" and latest(self.checkpoints.folder) is not None,
            )

            # Count what the step did.
            own = on_host if runtime.layout.counts else []
            decoder_flops, vision_flops = build.step_flops(self.fusion.config, own)
            self.meter.step(
                tokens=sum(batch.num_tokens for batch in own),
                patches=sum(batch.num_patches for batch in own),
                samples=sum(batch.segments.num for batch in own),
                decoder_flops=decoder_flops,
                vision_flops=vision_flops,
            )
            self.step += 1

            # Log it, unless the guard sent the run back to a checkpoint.
            if not (step.refused and self.rolled_back(step.verdict)):
                self.log(stage.name, loss, lr, step)
                # What the next step reads, beside what this one read.
                following, read = self.stages.mixture(self.step), self.stages.mixture(self.step - 1)
                if self.step < self.total and following != read:
                    self.guard.new_stage()

            # Stop on a signal; evaluate and save every so often.
            self.owed = due(config.eval.every, self.step, self.total)
            if runtime.should_stop() or not self.evaluated_if_owed():
                return self.leave_early()
            if due(config.checkpoint.every, self.step, self.total):
                with self.meter.paused():
                    self.save()
        return self.finish()

    def log(self, stage: str, loss: float, lr: float, step: Update) -> None:
        """A line of the terminal at every step, a record every `track.log_every`."""
        record: Record = {"stage": stage, "loss": loss, "lr": lr, "grad_norm": step.grad_norm}
        if self.step % self.config.track.log_every and self.step != self.total:
            self.tracker.tick(self.step, record | {"step_s": self.meter.step_s})
            return
        record |= self.loss_meter.means(self.runtime) | self.loaders.metrics() | self.meter.snapshot()
        self.loss_meter.clear()
        of_layers = build.optimizer_metrics(self.optimizer) | expert_metrics(step.expert_load, self.fusion)
        record |= build.of_all_stages(of_layers, self.runtime)
        self.tracker.log(self.step, record)

    def evaluated(self, *, final: bool, loader: Loader | None = None) -> Record:
        """The numbers of an evaluation at this step, for which every rank holds the whole model; every rank
        calls it."""
        held = nullcontext() if self.evaluator.idle else whole(self.plain, self.fusion, self.runtime)
        with held:
            return self.evaluator.run(self.step, self.tracker, final=final, loader=loader)

    def evaluated_if_owed(self) -> bool:
        """The evaluation of this step, where one is due; False where a signal cut it short: the checkpoint
        remembers that it is still owed."""
        if self.owed:
            try:
                with self.meter.paused():
                    self.evaluated(final=False)
            except Interrupted:
                return False
        self.owed = False
        return True

    def rolled_back(self, verdict: Verdict) -> bool:
        """The guard refused the step: tell it, and stop or go back where its policy asks for that. True: gone
        back, with the data cursors as they are, so that the bad batches are passed over."""
        refused_at, message = self.step, f"{verdict.action}: {verdict.reason}"
        if verdict.action == "rollback":
            loaded = self.checkpoints.load_intact()
            self.restore_weights(loaded)
            self.guard.new_stage()
            self.step = loaded.step
            self.tracker.rewind(self.step)
        self.tracker.event(self.step, "guard", action=verdict.action, seen_at=refused_at, message=message)
        if verdict.action == "stop":
            raise TrainingStopped(f"stopped by the guard at step {self.step}: {verdict.reason}")
        return verdict.action == "rollback"

    # ------------------------------------------------------------------------------------ state, and the end

    def save(self) -> Path:
        """Write a checkpoint; every rank calls it."""
        losses = self.runtime.sum(self.loss_meter.sums_S22).cpu()  # of all ranks: the file keeps rank 0's
        path = self.checkpoints.save(
            self.step,
            model=self.fusion,
            optimizer=self.optimizer,
            trainer={
                "guard": self.guard.state_dict(),
                "meter": self.meter.state_dict(),
                "book": losses,
                "owed": self.owed,
            },
            lanes=self.loaders.state_dict(),
        )
        self.tracker.event(self.step, "checkpoint", path=path.name)
        return path

    def restore_weights(self, loaded: Loaded) -> None:
        """Weights and optimizer of a checkpoint, nothing else."""
        loaded.restore_weights(self.fusion, self.optimizer)

    def restore(self, loaded: Loaded) -> None:
        """Everything, as it was when the checkpoint was written."""
        self.restore_weights(loaded)
        self.guard.load_state_dict(loaded.trainer["guard"])
        self.meter.load_state_dict(loaded.trainer["meter"])
        if self.runtime.is_main:  # losses of all ranks since the last record; the others begin with nothing
            self.loss_meter.sums_S22 = loaded.trainer["book"]
        self.step, self.owed = loaded.step, loaded.trainer.get("owed", False)
        self.loaders.load_state_dict(loaded.lanes)
        loaded.restore_rng(self.runtime.rank, self.config.run.seed)

    def leave_early(self) -> int:
        """Save and leave, to be started again."""
        path = self.save()
        self.checkpoints.wait()
        reason = self.runtime.stop.received or "a signal on another rank"
        message = f"{reason}: saved {path.name}; --resume goes on from here"
        self.tracker.event(self.step, "stop", message=message)
        return EXIT_REQUEUE

    def finish(self) -> int:
        """The last evaluation and checkpoint, the model directory and the report."""
        # The stage of the last step taken: with run.steps it need not be the recipe's last one.
        loader = self.loaders.at(self.stages.index(max(0, self.step - 1)))
        with self.meter.paused():
            try:
                headline = self.evaluated(final=True, loader=loader)
            except Interrupted:
                return self.leave_early()
            path = self.save()
            self.checkpoints.wait()
            if self.runtime.is_main:
                # Of shards nobody holds the whole: it is read from what has just been written.
                self.read = state.reader(self.plain, path) if self.plain is not self.fusion else None
                self.write_all(loader, headline)
        self.runtime.barrier()
        return EXIT_OK

    def write_all(self, loader: Loader, headline: Mapping[str, float]) -> None:
        """What rank 0 writes at the end."""
        shares = loader.stats()["shares"]
        facts = build.run_facts(self.config, self.step, self.meter.seconds, self.runtime)
        if self.halved:
            facts["precision"] = HALVED
        facts["tokens"] = int(self.meter.totals["tokens"])
        facts["sources"] = evaluate.source_facts(self.config, shares)
        facts["length"] = max(stage.length for stage in self.config.stages)
        facts["evals"] = {key: round(value, 4) for key, value in headline.items()}
        for line in self.write_outputs(facts):
            self.tracker.say(line)

    def close(self) -> None:
        """Stop threads, close files, give the signal handlers back."""
        self.checkpoints.close()
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
