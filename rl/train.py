"""Joint vision-text reinforcement learning: start reading here.

    accelerate launch -m earlyfusion.rl.train vision-rl --init-from runs/sft/model
    torchrun --nproc-per-node 2 -m earlyfusion.rl.train vision-rl --init-from DIR
    earlyfusion rl vision-rl --init-from DIR

One iteration, and where to read on:

    rollouts/prompts.py      prompts drawn by the curriculum
    rollouts/collect.py      K answers each from the engine: whole, or partial with what is left going on in
                             the next iteration
    rollouts/experience.py   rewards of the task -> shaping by length -> advantages in the group
    learn.py                 gradients of the objective with the trainable encoder in the graph, an optional
                             PTX loss beside it
    pipeline/update.py       the step of pretraining: clip, guard, MuonClip (or AdamW) with QK-Clip

Everything a resume needs lies in the checkpoint: weights, optimizer, tallies and generator of the prompts,
unfinished answers with their states, the curated data's cursor. A stopped run (SIGTERM, SIGINT) saves and
leaves with exit code 75: after the updates of this iteration, or, while answers are collected, at once and as
the iteration began. `--resume` goes on bit for bit, or by another number of processes, with the same prompts
and answers.

The output folder gets metrics.jsonl, rollouts.jsonl with pictures, recipe.toml, checkpoints/, eval/, model/
and report.html.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from earlyfusion.data.chat.template import ChatTokenizer
from earlyfusion.data.loading.loader import Loader, merge_states
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import measure
from earlyfusion.eval.measured import Measured, summary, write_measured
from earlyfusion.kernels.files import write_json
from earlyfusion.model.engine.engine import RUN_AHEAD, Engine
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline import build, cli
from earlyfusion.pipeline.checkpoint import Checkpointer, Loaded, RunFacts
from earlyfusion.pipeline.config.arguments import RecipeArguments
from earlyfusion.pipeline.config.compose import compose, dump, render, validate
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE, TrainingStopped
from earlyfusion.pipeline.guard import Guard
from earlyfusion.pipeline.launch import launch
from earlyfusion.pipeline.meter import peak_memory_bytes
from earlyfusion.pipeline.parallel import exchange_gradients
from earlyfusion.pipeline.runtime import Runtime, objects_at_rest, seed_everything
from earlyfusion.pipeline.schedule import linear
from earlyfusion.pipeline.track import Tracker
from earlyfusion.pipeline.update import Update, check_frozen, update
from earlyfusion.rl.learn import Learner, Sums, minibatches
from earlyfusion.rl.measure.tools import measure_tools
from earlyfusion.rl.objectives.length import budget_phase, estimate_budgets
from earlyfusion.rl.recipe import RLConfig, start_directory
from earlyfusion.rl.report.run import write_rl_report
from earlyfusion.rl.rewards import STATUSES, Scored, make_reward
from earlyfusion.rl.rollouts.collect import Collected, Collector, Group, Interrupted
from earlyfusion.rl.rollouts.curriculum import temperature
from earlyfusion.rl.rollouts.experience import (
    RIGHT,
    Experience,
    build_rewards,
    experience,
    score,
    score_shares,
)
from earlyfusion.rl.rollouts.log import RolloutLog, group_records
from earlyfusion.rl.rollouts.prompts import PromptPool

PAGE = 16
"""Tokens of a page of the engine's cache."""
BUDGET_ROUND = 99
"""Round of `Collector.collect` for Toggle's budgets: no other round of an update has its number."""


class Reinforcement:
    """The parts of a run, built in the order they need one another; `train` is the loop. All processes hold
    one each."""

    def __init__(self, config: RLConfig, resume: bool) -> None:
        # Processes, seeds, what a resume must agree with, and the checkpoint it goes on from.
        train, track = config.train, config.track
        self.config, self.out = config, Path(config.run.directory)
        self.runtime = runtime = Runtime(train.mixed_precision, train.threads)
        seed_everything(config.run.seed)
        self.start_folder = start_directory(config)
        self.tokenizer = Tokenizer.load(self.start_folder)
        facts = RunFacts(dump(config), self.tokenizer.hash, self.tokenizer.vocab_size)
        keep = config.checkpoint
        self.checkpoints = Checkpointer(self.out, runtime, facts, keep.keep, keep.keep_every)
        start = self.checkpoints.start(resume)

        # The policy, the optimizer over it, and what it may not move away from.
        self.model = load_model(self.start_folder, runtime.device, torch.float32)
        check_frozen(self.model, {"train.frozen": train.frozen})
        self.optimizer = build.optimizer(config.optim, self.model)
        self.guard = Guard(**config.guard.model_dump(), agree=runtime.agree)
        reference = None
        if config.objective.kl_coef:
            reference = load_model(self.start_folder, runtime.device, torch.float32).requires_grad_(False)

        # Prompts, the engine that answers them, what the answers earn, and what is learned from that.
        self.prompts = PromptPool(config, self.tokenizer, self.model.config.vision)
        self.engine = build_engine(config, self.model, self.tokenizer, self.start_folder, runtime)
        self.collector = Collector(config, self.prompts, self.engine, runtime)
        self.rewards = build_rewards(config.reward, self.prompts.tasks, config.run.seed)
        silent = sorted(self.engine.rules.banned_ids)
        self.learner = Learner(config, self.model, runtime, reference, silent)
        self.generator = torch.Generator().manual_seed(config.run.seed + 7919 * runtime.rank)
        lanes = runtime.world if start is None else _lanes(start)
        self.curated = build_curated(config, self.model, self.tokenizer, runtime, lanes)

        # Where the run stands.
        self.update, self.seconds, self.begun = 0, 0.0, False
        self.budgets: dict[int, float] = {}
        self.latest: Experience | None = None
        if start is not None:
            self.restore(start)

        # From here on a signal waits for the end of an iteration, and the output folder is written to.
        self.tracker = Tracker(
            self.out,
            runtime,
            total_steps=config.total_updates,
            start_step=self.update,
            trackers=track.trackers,
            recipe=dump(config),
            name=config.run.name,
            unit="update",
        )
        self.rollouts: RolloutLog | None = None
        if runtime.is_main:
            build.write_recipe(self.out, config)
            self.rollouts = RolloutLog(self.out, start_update=self.update)
        runtime.stop.install()

    # ------------------------------------------------------------------------------------------- the loop

    @objects_at_rest()
    def train(self) -> int:
        """All iterations that are left, then the last measurement, the model directory and the report."""
        config, total = self.config, self.config.total_updates
        if not self.begun and self.unless_stopped(self.begin) is None:
            return self.leave_early()
        while self.update < total:
            # Rollouts, rewards, updates; a signal while answers are collected undoes the iteration.
            start = time.perf_counter()
            record = self.unless_stopped(self.iterate)
            if record is None:
                return self.leave_early()
            seconds = time.perf_counter() - start
            self.update += 1
            self.seconds += seconds
            self.log(record, seconds)

            # Stop on a signal; measure and save every so often.
            if self.runtime.should_stop():
                return self.leave_early()
            if self.due(config.eval.every):
                self.measure()
            if self.due(config.checkpoint.every):
                self.save()
        return self.finish()

    def due(self, every: int) -> bool:
        """Whether something that happens every so many updates (0: never) happens now; the end has its
        own."""
        return every > 0 and self.update % every == 0 and self.update != self.config.total_updates

    def begin(self) -> dict[str, Any]:
        """What comes before the first iteration: the start is measured, and Toggle's budgets."""
        found = self.measure()
        self.find_budgets()
        self.begun = True
        return found

    def unless_stopped(self, action: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """What `action` gives; None where a signal came while it collected answers, and then nothing has
        changed."""
        prompts, counts = self.prompts.state_dict(), self.rewards.counts.copy()
        carried = list(self.collector.carried)
        try:
            return action()
        except Interrupted:
            self.prompts.load_state_dict(prompts)
            self.collector.carried, self.rewards.counts = carried, counts
            return None

    def iterate(self) -> dict[str, Any]:
        """One iteration; returns its numbers."""
        config = self.config
        record: dict[str, Any] = {"temperature": temperature(config.temperature, self.update)}
        if config.objective.reset_optimizer:
            self.optimizer.state.clear()

        # The control arm that trains on curated data alone has no answers.
        collected = Collected([])
        found = experience(config, [], [], self.update, {})
        if not config.ptx.only:
            collected, found, score_s = self.collect_and_score()
            record |= self.rollout_metrics(collected, found) | {"time/score_s": score_s}
            self.latest = found
            if self.update + 1 < config.total_updates:
                self.collector.prefetch(self.update + 1)

        start = time.perf_counter()
        record |= self.learn(found)
        return record | {"time/train_s": time.perf_counter() - start}

    def collect_and_score(self) -> tuple[Collected, Experience, float]:
        """Rollouts, what they earned, and the seconds of scoring; with rollout.resample, groups that teach
        nothing are replaced by new prompts."""
        config, update = self.config, self.update
        self.refresh_engine()
        degree, missing = temperature(config.temperature, update), config.rollout.prompts
        whole, score_s = Collected([]), 0.0
        groups: list[Group] = []
        scored: list[Scored] = []
        for round_ in range(config.rollout.resample + 1):
            collected = self.collector.collect(update, degree, missing, round_)
            start = time.perf_counter()
            judged = score(self.rewards, collected.groups)
            score_s += time.perf_counter() - start
            self.count_solved(experience(config, collected.groups, judged, update, self.budgets))

            # What this round cost is added up; what is carried is what the last one left.
            whole.seconds += collected.seconds
            whole.engine_s += collected.engine_s
            whole.tokens += collected.tokens
            whole.lengths += collected.lengths
            whole.carried = collected.carried
            groups, scored = groups + collected.groups, scored + judged
            found = experience(config, groups, scored, update, self.budgets)
            if round_ == config.rollout.resample:
                break

            # Only groups that teach something are kept, as long as the others can be replaced.
            kept = [i for i, (first, _) in enumerate(found.bounds) if bool(found.informative_N[first])]
            missing = int(self.runtime.sum(len(groups) - len(kept)))
            if not missing:
                break
            scored = [one for i in kept for one in scored[slice(*found.bounds[i])]]
            groups = [groups[i] for i in kept]
        return whole, found, score_s

    def refresh_engine(self) -> None:
        """The engine's weights become the trained ones; tokens from here on carry the update's number."""
        self.model.eval()
        self.engine.load_weights(self.model.state_dict(), self.update)

    def count_solved(self, found: Experience) -> None:
        """Tell the curriculum how the prompts went, on all processes."""
        shares_N = score_shares(self.config.reward, found.scores_N).double()
        table_2P = torch.zeros(2, self.prompts.solved_P.numel(), dtype=torch.float64)
        for group, (start, end) in zip(found.groups, found.bounds):
            table_2P[0, group.prompt.bin] += float(shares_N[start:end].sum())
            table_2P[1, group.prompt.bin] += end - start
        self.prompts.count(*self.runtime.sum(table_2P))

    def learn(self, found: Experience) -> dict[str, Any]:
        """The updates of this iteration; returns their numbers."""
        train, ptx, runtime = self.config.train, self.config.ptx, self.runtime
        self.model.train()
        coef = 1.0 if ptx.only else ptx.coef
        peak, warmup = self.config.optim.lr, train.warmup_updates
        lr = linear(peak, self.update, train.updates, warmup, train.final_lr_ratio)
        gap = self.learner.prepare(found) if found.scored else 0.0
        every, first = Sums(), None
        steps: list[Update] = []
        ptx_losses: list[float] = []
        for _ in range(train.epochs):
            order = torch.randperm(len(found.groups), generator=self.generator).tolist()
            for groups in minibatches(order, train.minibatches):
                # Gradients of this process, then of all.
                sums = Sums()
                if not ptx.only:
                    self.learner.gradients(found, groups, self.update, sums)
                if coef and self.curated is not None:
                    batches = [batch.to(runtime.device) for batch in self.curated.next_step()]
                    ptx_losses.append(self.learner.ptx_gradients(batches, coef, sums))
                exchange_gradients(self.model, runtime)

                # Clip, guard, step or forget.
                values = sums.reduced(runtime)
                steps.append(self.step(values["loss"] + values["ptx"], lr))
                first = values if first is None else first
                every.merge(sums)
        self.model.eval()

        values = every.reduced(runtime)
        tokens = max(1.0, values["tokens"])
        record: dict[str, Any] = {"lr": lr, "loss": values["loss"] / len(steps)}
        record["grad_norm"] = sum(step.grad_norm for step in steps) / len(steps)
        record |= {"refused": sum(step.refused for step in steps), "empty": sum(step.empty for step in steps)}
        if found.scored and first is not None:
            record["clip_share"] = values["outside"] / tokens
            record |= {"k3": values["k3"] / tokens, "touched": values["touched"] / tokens}
            # Before the first update trainer and sampler hold the same weights: what differs is the engine's
            # arithmetic (and, in partial rollouts, older weights).
            record["mismatch_kl"] = first["k3"] / max(1.0, first["tokens"])
            record["mismatch_max"] = max(gap, first["largest"])
        if ptx_losses:
            record["ptx_loss"] = sum(ptx_losses) / len(ptx_losses)
        return record | build.optimizer_metrics(self.optimizer)

    def step(self, loss: float, lr: float) -> Update:
        """Clip, guard, step or forget: as in pretraining. Raises TrainingStopped where the guard asks."""
        # On policy the objective's value is 0 whatever the gradient is, so
        # a jump of it says nothing; that it is finite does.
        watched = loss if self.config.ptx.only or not math.isfinite(loss) else 0.0
        done = update(
            self.model,
            self.optimizer,
            self.guard,
            self.runtime,
            loss=watched,
            lr=lr,
            clip_grad_norm=self.config.optim.clip_grad_norm,
            frozen=self.config.train.frozen,
            balance_experts=False,
        )
        if done.verdict.action == "stop":
            raise TrainingStopped(f"stopped by the guard at update {self.update}: {done.verdict.reason}")
        if done.refused:
            message = f"{done.verdict.action}: {done.verdict.reason}"
            self.tracker.event(self.update, "note", message=message)
        return done

    def find_budgets(self) -> None:
        """Toggle's budgets, once, from answers of the policy it starts from."""
        config, toggle = self.config, self.config.toggle
        if not toggle.every or not budget_phase(toggle, 0):
            return
        self.refresh_engine()
        bins, degree = self.prompts.solved_P.numel(), temperature(config.temperature, 0)
        count = max(bins, config.rollout.prompts)
        collected = self.collector.collect(0, degree, count, BUDGET_ROUND)
        found = experience(config, collected.groups, score(self.rewards, collected.groups), 0, {})

        own: dict[int, float] = {}
        if found.scored:
            bins_N = torch.tensor([g.prompt.bin for g in found.groups for _ in g.trajectories])
            right_N = score_shares(config.reward, found.scores_N) >= RIGHT
            own = estimate_budgets(toggle, found.lengths_N, right_N, bins_N)
        table_P2 = torch.zeros(bins, 2, dtype=torch.float64)
        for bin, budget in own.items():
            table_P2[bin] = torch.tensor([budget, 1.0])
        table = self.runtime.sum(table_P2).tolist()
        self.budgets = {i: total / known for i, (total, known) in enumerate(table) if known}

    # -------------------------------------------------------------------------------- what is measured

    def rollout_metrics(self, collected: Collected, found: Experience) -> dict[str, Any]:
        """Numbers of the rollouts, over all processes."""
        labels = [entry.label for entry in self.config.tasks]
        sums = {f"{name}/{label}": 0.0 for label in labels for name in ("score", "reward", "cut", "count")}
        for group, (start, end) in zip(found.groups, found.bounds):
            label = labels[group.prompt.entry]
            sums[f"score/{label}"] += float(found.scores_N[start:end].sum())
            sums[f"reward/{label}"] += float(found.rewards_N[start:end].sum())
            sums[f"cut/{label}"] += float(found.cut_N[start:end].sum())
            sums[f"count/{label}"] += end - start
        completions = [answer.completion for answer in found.answers]
        versions = [version for completion in completions for version in completion.versions]
        lengths = found.lengths_N.tolist()
        sums |= {
            "answers": len(completions),
            "length": sum(lengths),
            "informative": float(found.informative_N.sum()),
            "staleness": sum(self.update - version for version in versions),
            "trained_tokens": len(versions),
            "surprise": -sum(logp for completion in completions for logp in completion.logprobs),
            "tokens": collected.tokens,
            "carried": collected.carried,
            "in_work": len(collected.lengths),
            "length_in_work": sum(collected.lengths),
            "engine_s": collected.engine_s,
            "seconds": collected.seconds,
        }
        sums |= {f"rewards/{status}": self.rewards.counts[status] for status in STATUSES}
        sums = self.runtime.sum_dict(sums)

        # By task, and over all of them.
        every, written = max(1.0, sums["answers"]), max(1.0, sums["trained_tokens"])
        record: dict[str, Any] = {}
        for name in ("score", "reward", "cut"):
            record[name] = sum(sums[f"{name}/{label}"] for label in labels) / every
            for label in labels:
                if sums[f"count/{label}"]:
                    record[f"{name}/{label}"] = sums[f"{name}/{label}"] / sums[f"count/{label}"]
        record |= {
            "length": sums["length"] / every,
            "length_max": float(self.runtime.max(max(lengths, default=0.0))),
            "length_in_work": sums["length_in_work"] / max(1.0, sums["in_work"]),
            "informative": sums["informative"] / every,
            "staleness": sums["staleness"] / written,
            # Mean -log p of what was drawn: the entropy of the sampling
            # distribution, without looking at all of it.
            "entropy": sums["surprise"] / written,
            "answers": sums["answers"],
            "carried": sums["carried"],
            "tokens": sums["tokens"],
            "time/rollout_s": collected.seconds,
            "engine_idle": 1 - sums["engine_s"] / max(sums["seconds"], 1e-9),
            "tokens_per_s": sums["tokens"] / max(collected.seconds, 1e-9),
        }
        for status in STATUSES:
            if status != "ok" and sums[f"rewards/{status}"]:
                record[f"rewards/{status}"] = sums[f"rewards/{status}"]
        record |= {f"prompts/{reason}": float(count) for reason, count in self.prompts.left_out.items()}
        return record | self.collector.tool_metrics()

    def log(self, record: dict[str, Any], seconds: float) -> None:
        """A line of the terminal at every update, a record every `track.log_every`, rollouts every
        `log.rollouts_every`."""
        config, last = self.config, self.update == self.config.total_updates
        known = sum(record.get(f"time/{name}_s", 0.0) for name in ("rollout", "score", "train"))
        record |= {"time/other_s": max(0.0, seconds - known), "step_s": seconds}
        record |= {"samples_per_s": record.get("answers", 0.0) / seconds, "updates_per_min": 60 / seconds}
        record["memory_gib"] = peak_memory_bytes(self.runtime.device) / 2**30
        if self.update % config.track.log_every == 0 or last:
            self.tracker.log(self.update, record)
        else:
            self.tracker.tick(self.update, record)

        due = self.update == 1 or self.update % config.log.rollouts_every == 0 or last
        if due and self.latest is not None:
            groups = group_records(config, self.latest, self.update, config.log.groups, self.runtime)
            runner = self.collector.tool_runner
            if self.rollouts is not None:
                self.rollouts.write(groups, runner.weaker if runner is not None else "")

    def measure(self) -> dict[str, Any]:
        """Answers to held-out problems, dealt over the processes; written to eval/update-NNNNNN.jsonl by rank
        0."""
        config, runtime = self.config, self.runtime
        if not config.eval.problems:
            return {}
        self.model.eval()
        plain = [entry for entry in config.measured if not entry.tools]
        tools = [entry for entry in config.measured if entry.tools]
        how: dict[str, Any] = {
            "problems": config.eval.problems,
            "seed": config.eval.seed,
            "samples": config.eval.samples,
            "slots": config.rollout.slots,
            "share": (runtime.rank, runtime.world),
        }
        measured: list[Measured] = []
        if plain:
            longest = config.rollout.max_new_tokens
            own = measure(self.model, self.tokenizer, plain, max_new_tokens=longest, **how)
            measured += in_order(own, runtime)
        if tools:
            how["allow_weaker"] = config.sandbox.allow_weaker
            own = measure_tools(self.model, self.tokenizer, tools, config.rollout, **how)
            measured += in_order(own, runtime)

        found = summary(measured)
        weaker = next(({"sandbox": one.sandbox} for one in measured if one.sandbox), {})
        if runtime.is_main:
            write_measured(self.out / "eval" / f"update-{self.update:06d}.jsonl", measured)
            rows = {label: dict(row) for label, row in found.items()}
            self.tracker.event(self.update, "eval", **rows, **weaker)
            accuracy = ", ".join(f"{label} {row['accuracy']:.3f}" for label, row in found.items())
            self.tracker.say(f"update {self.update}: greedy accuracy on held-out problems: {accuracy}")
        return found

    # ------------------------------------------------------------------------------------ state, and the end

    def save(self) -> Path:
        """Write a checkpoint; every process calls it."""
        own = {
            "carried": self.collector.state_dict(),
            "generator": self.generator.get_state(),
            "ptx": None if self.curated is None else self.curated.state_dict(),
            "rewards": dict(self.rewards.counts),
        }
        path = self.checkpoints.save(
            self.update,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            trainer={
                "book": self.prompts.state_dict(),
                "guard": self.guard.state_dict(),
                "budgets": self.budgets,
                "seconds": self.seconds,
                "begun": self.begun,
            },
            lanes={self.runtime.rank: own},
        )
        if self.config.checkpoint.models and self.runtime.is_main:
            self.save_model(self.out / "models" / f"update-{self.update:06d}", self.facts())
        return path

    def restore(self, loaded: Loaded) -> None:
        """Go on from a checkpoint: bit for bit by as many processes as saved it, by others with the
        unfinished answers dealt anew. Raises DataError for PTX rows that these processes cannot share."""
        self.model.load_state_dict(loaded.model)
        self.optimizer.load_state_dict(loaded.optimizer)
        trainer, self.update = loaded.trainer, loaded.step
        self.guard.load_state_dict(trainer["guard"])
        self.prompts.load_state_dict(trainer["book"])
        self.budgets = {int(bin): float(budget) for bin, budget in trainer["budgets"].items()}
        self.seconds, self.begun = float(trainer["seconds"]), bool(trainer["begun"])

        # Unfinished answers and counts: one's own, or those of all dealt anew.
        rank = self.runtime.rank
        lanes = [loaded.lanes[saved] for saved in range(loaded.world)]
        if self.runtime.world == loaded.world:
            carried, counts = lanes[rank]["carried"], Counter(lanes[rank]["rewards"])
        else:
            everything = [one for lane in lanes for one in lane["carried"]]
            first = sum(self.collector.due(len(everything), other) for other in range(rank))
            carried = everything[first : first + self.collector.due(len(everything), rank)]
            counts = Counter()
            for lane in lanes if rank == 0 else []:
                counts.update(lane["rewards"])
        self.collector.load_state_dict(carried)
        self.rewards.counts = counts

        if rank < loaded.world:
            self.generator.set_state(lanes[rank]["generator"])
        if self.curated is not None:
            self.curated.load_state_dict(merge_states([lane["ptx"] for lane in lanes]))
        loaded.restore_rng(rank, self.config.run.seed)

    def leave_early(self) -> int:
        """Save and leave, to be started again."""
        path = self.save()
        reason = self.runtime.stop.received or "a signal on another rank"
        message = f"{reason}: saved {path.name}; --resume goes on from here"
        self.tracker.event(self.update, "note", message=message)
        return EXIT_REQUEUE

    def finish(self) -> int:
        """The last measurement and checkpoint, the model directory and the report."""
        self.measure()
        self.save()
        if self.runtime.is_main:
            facts = self.facts()
            directory = self.save_model(self.out / "model", facts)
            shown = ("name", "steps", "seconds", "device", "precision", "seed")
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            write_json(
                self.out / "facts.json", {key: facts[key] for key in shown} | {"parameters": parameters}
            )
            self.tracker.close()
            self.tracker.say(f"model directory: {directory}")
            self.tracker.say(f"report: {write_rl_report(self.out)}")
        self.runtime.barrier()
        return EXIT_OK

    def facts(self) -> dict[str, Any]:
        """For the model's card."""
        config = self.config
        return {
            "name": config.run.name,
            "recipe": config.run.name,
            "steps": self.update,
            "seconds": round(self.seconds, 1),
            "device": str(self.runtime.device),
            "seed": config.run.seed,
            "precision": config.train.mixed_precision,
            "sources": {},
            "evals": {},
        }

    def save_model(self, directory: Path, facts: dict[str, Any]) -> Path:
        """The trained weights as a model directory, with the chat template where the start had one."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        chat = (self.start_folder / "chat_template.jinja").is_file()
        return save_model(
            self.model, ChatTokenizer(self.tokenizer) if chat else self.tokenizer, directory, facts
        )

    def close(self) -> None:
        """Stop threads and processes, close files, give the signal handlers back."""
        for part in (self.curated, self.rewards, self.collector, self.tracker):
            if part is not None:
                part.close()
        self.runtime.close()


def build_engine(
    config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, folder: Path, runtime: Runtime
) -> Engine:
    """The engine that answers: over `model` itself, or over a bfloat16 copy of the start in `folder`."""
    rollout = config.rollout
    if rollout.dtype == "bfloat16":
        model = load_model(folder, runtime.device, torch.bfloat16)
    longest = (rollout.max_prompt_tokens or 1024) + config.longest_answer
    share = math.ceil(rollout.prompts / runtime.world)
    slots = min(rollout.slots, share * rollout.group_size)
    return Engine(
        model,
        tokenizer,
        max_slots=slots,
        page_size=PAGE,
        max_pages=slots * (math.ceil(longest / PAGE) + 1),
        prefill_chunk=rollout.prefill_chunk,
        max_waiting=4 * share + 1024,
        image_cache=4 * share,
        run_ahead=1 if config.watched else RUN_AHEAD,
    )


def build_curated(
    config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, runtime: Runtime, lanes: int
) -> Loader | None:
    """The curated documents of the PTX loss, `lanes` rows in every update; None where there is none."""
    ptx = config.ptx
    if config.data is None or not (ptx.coef or ptx.only):
        return None
    return Loader(
        config.data,
        tokenizer,
        model.config.vision,
        length=ptx.length,
        tokens=ptx.tokens,
        max_patches=ptx.max_patches,
        lanes=lanes,
        rank=runtime.rank,
        world_size=runtime.world,
    )


def _lanes(start: Loaded) -> int:
    """Curated rows of an update: one for each process that the run began with."""
    ptx = start.lanes[0]["ptx"]
    return 1 if ptx is None else int(ptx["identity"]["lanes"])


def in_order(own: Sequence[Measured], runtime: Runtime) -> list[Measured]:
    """What all processes measured of the problems that were dealt to them, in the problems' order; without
    pictures."""
    shares = runtime.gather([replace(one, picture=None) for one in own])
    return [shares[i % runtime.world][i // runtime.world] for i in range(sum(map(len, shares)))]


def plan(config: RLConfig) -> str:
    """The resolved recipe and what an iteration holds, for --dry-run."""
    rollout, train = config.rollout, config.train
    labels = ", ".join(f"{entry.label} x {entry.weight:g}" for entry in config.tasks)
    prompts = config.total_updates * rollout.prompts
    return "\n".join(
        [
            render(config),
            f"# an iteration: {rollout.prompts} prompts x {rollout.group_size} answers of at most"
            f" {rollout.max_new_tokens} tokens, {train.epochs * train.minibatches} update(s)",
            f"# prompts: {labels}",
            f"# {config.total_updates} iterations = {prompts:,} prompts",
        ]
    )


def run(parsed: RecipeArguments) -> int:
    """Build and train; returns the exit code."""
    config: RLConfig = validate(compose(parsed.recipes, parsed.overrides), RLConfig)
    return launch(
        Reinforcement,
        config,
        parsed,
        show=lambda resolved: print(plan(resolved)),
        check=lambda resolved: make_reward(resolved.reward.name, ()),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m`, `accelerate launch -m` and `earlyfusion rl`."""
    return cli.main(["rl", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
