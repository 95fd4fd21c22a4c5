"""Joint vision-text reinforcement learning: start reading here.

    accelerate launch -m earlyfusion.rl.train vision-rl --init-from runs/sft/model
    torchrun --nproc-per-node 2 -m earlyfusion.rl.train vision-rl --init-from DIR
    earlyfusion rl vision-rl --init-from DIR

One iteration: prompts drawn by the curriculum -> K answers each from the engine (whole, or partial with what
is left going on in the next iteration) -> rewards of the task -> shaping by length -> advantages in the group
-> updates of the objective with the trainable encoder in the graph, an optional PTX loss beside it ->
MuonClip (or AdamW) with QK-Clip. Everything a resume needs lies in the checkpoint: weights, optimizer,
tallies and generator of the prompts, unfinished answers with their states, the curated data's cursor. A
stopped run (SIGTERM, SIGINT) saves and leaves with exit code 75: after the updates of this iteration, or,
while answers are collected, at once and as the iteration began. `--resume` goes on bit for bit, or by another
number of processes, with the same prompts and answers.

The output folder gets metrics.jsonl, rollouts.jsonl with pictures, recipe.toml, checkpoints/, eval/, model/
and report.html.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from earlyfusion.pipeline import build, cli
from earlyfusion.pipeline.checkpoint import Loaded
from earlyfusion.pipeline.config.arguments import RecipeArguments
from earlyfusion.pipeline.config.compose import compose, validate
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE, TrainingStopped
from earlyfusion.pipeline.launch import launch
from earlyfusion.pipeline.meter import peak_memory_bytes
from earlyfusion.pipeline.parallel import exchange_gradients
from earlyfusion.pipeline.runtime import objects_at_rest
from earlyfusion.rl import parts
from earlyfusion.rl.learn import Sums, minibatches
from earlyfusion.rl.objectives.length import budget_phase, estimate_budgets
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rewards import STATUSES, make_reward
from earlyfusion.rl.rollouts.collect import Collected, Interrupted
from earlyfusion.rl.rollouts.experience import RIGHT, Experience, experience, records, score, shares
from earlyfusion.rl.rollouts.sampling import temperature


class Reinforcement:
    """The parts of a run, built in the order they need one another; `train` is the loop."""

    def __init__(self, config: RLConfig, resume: bool) -> None:
        self.config, self.update = config, 0
        self.kit = kit = parts.build_kit(config, resume)
        self.out, self.runtime, self.model = kit.out, kit.runtime, kit.model
        self.budgets: dict[int, float] = {}
        self.latest: Experience | None = None
        self.seconds, self.begun = 0.0, False
        if kit.start is not None:
            self._restore(kit.start)
        kit.open_log(self.update)
        self.runtime.stop.install()

    # ------------------------------------------------------------------------------------------------------
    # the loop

    @objects_at_rest()
    def train(self) -> int:
        """All iterations that are left, then the last measurement, the model directory and the report."""
        config, total = self.config, self.config.total_updates
        if not self.begun and self._unless_stopped(self._begin) is None:
            return self._leave_early()
        while self.update < total:
            begun = time.perf_counter()
            record = self._unless_stopped(self._iterate)
            if record is None:
                return self._leave_early()
            self.update += 1
            self.seconds += time.perf_counter() - begun
            self._log(record, time.perf_counter() - begun)
            if self.runtime.should_stop():
                return self._leave_early()
            last = self.update == total
            if config.eval.every and self.update % config.eval.every == 0 and not last:
                self.kit.measure(self.update)
            if config.checkpoint.every and self.update % config.checkpoint.every == 0 and not last:
                self._save()
        return self._finish()

    def _begin(self) -> dict[str, Any]:
        """What comes before the first iteration."""
        found = self.kit.measure(0)
        self._budgets()
        self.begun = True
        return found

    def _unless_stopped(self, action: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """What `action` gives; None where a signal came while it collected answers, and then nothing has
        changed."""
        mark = self.kit.mark()
        try:
            return action()
        except Interrupted:
            self.kit.go_back(mark)
            return None

    def _iterate(self) -> dict[str, Any]:
        """One iteration; returns its numbers."""
        kit, config, update = self.kit, self.config, self.update
        heat = temperature(config.temperature, update)
        record: dict[str, Any] = {"temperature": heat}
        if config.objective.reset_optimizer:
            kit.optimizer.state.clear()
        start = time.perf_counter()
        if config.ptx.only:
            seen = experience(config, [], [], update, {})
            record |= self._learn(seen)
            return record | {"time/train_s": time.perf_counter() - start}
        kit.refresh_engine(update)
        collected, seen, score_s = self._experience(heat, update)
        record |= self._seen(collected, seen, score_s)
        if update + 1 < config.total_updates:
            kit.collector.prefetch(update + 1)
        start = time.perf_counter()
        record |= self._learn(seen)
        return record | {"time/train_s": time.perf_counter() - start}

    def _experience(self, heat: float, update: int) -> tuple[Collected, Experience, float]:
        """Rollouts and what they earned; with rollout.resample, groups that teach nothing are replaced by new
        prompts."""
        kit, config = self.kit, self.config
        collected = kit.collector.collect(update, heat, config.rollout.prompts)
        begun = time.perf_counter()
        scored = score(kit.rewards, collected.groups)
        score_s = time.perf_counter() - begun
        seen = experience(config, collected.groups, scored, update, self.budgets)
        kit.note(seen)
        for round_ in range(1, config.rollout.resample + 1):
            kept = [i for i, (start, _) in enumerate(seen.bounds) if bool(seen.informative_N[start])]
            missing = int(self.runtime.sum(len(seen.groups) - len(kept)))
            if not missing:
                break
            more = kit.collector.collect(update, heat, missing, round_)
            begun = time.perf_counter()
            fresh = score(kit.rewards, more.groups)
            score_s += time.perf_counter() - begun
            kit.note(experience(config, more.groups, fresh, update, self.budgets))
            groups = [seen.groups[i] for i in kept] + more.groups
            scored = [s for i in kept for s in seen.scored[slice(*seen.bounds[i])]] + fresh
            seen = experience(config, groups, scored, update, self.budgets)
            collected.add_cost(more)
        return collected, seen, score_s

    def _learn(self, seen: Experience) -> dict[str, Any]:
        """The updates of this iteration."""
        kit, train, ptx = self.kit, self.config.train, self.config.ptx
        self.model.train()
        coef = 1.0 if ptx.only else ptx.coef
        lr = kit.lr(self.update)
        record: dict[str, Any] = {"lr": lr}
        gap = kit.learner.prepare(seen) if seen.answers else 0.0
        first: dict[str, float] | None = None
        total, norms, ptx_losses, refused, empty = Sums(), [], [], 0, 0
        for _ in range(train.epochs):
            for part in minibatches(len(seen.groups), train.minibatches, self._order):
                sums = Sums()
                if not ptx.only:
                    kit.learner.gradients(seen, part, self.update, sums)
                if coef:
                    ptx_losses.append(kit.learner.ptx_gradients(kit.curated(), coef, sums))
                exchange_gradients(self.model, self.runtime)
                step = kit.step(sums, lr)
                norm, verdict = step.grad_norm, step.verdict
                empty += step.empty
                refused += step.refused
                if verdict.action == "stop":
                    raise TrainingStopped(f"stopped by the guard at update {self.update}: {verdict.reason}")
                if not verdict.ok:
                    kit.say(self.update, f"{verdict.action}: {verdict.reason}")
                norms.append(norm)
                values = sums.reduced(self.runtime)
                first = values if first is None else first
                total.values += sums.values
                total.largest = max(total.largest, sums.largest)
        self.model.eval()
        values = total.reduced(self.runtime)
        tokens = max(1.0, values["tokens"])
        record |= {"grad_norm": sum(norms) / len(norms), "loss": values["loss"] / len(norms)}
        record |= {"refused": refused, "empty": empty}
        if seen.answers and first is not None:
            record |= {"clip_share": values["outside"] / tokens}
            record |= {"k3": values["k3"] / tokens, "touched": values["touched"] / tokens}
            # Before the first update trainer and sampler hold the same weights: what differs is the engine's
            # arithmetic
            # (and, in partial rollouts, older weights).
            record |= {"mismatch_kl": first["k3"] / max(1.0, first["tokens"])}
            record |= {"mismatch_max": max(gap, first["largest"])}
        if ptx_losses:
            record["ptx_loss"] = sum(ptx_losses) / len(ptx_losses)
        return record | build.optimizer_metrics(kit.optimizer)

    def _order(self, count: int) -> list[int]:
        """The mixed order of the groups; of this process alone."""
        return torch.randperm(count, generator=self.kit.generator).tolist()

    def _seen(self, collected: Collected, seen: Experience, score_s: float) -> dict[str, Any]:
        """Numbers of the rollouts, over all processes."""
        labels = [entry.label for entry in self.config.tasks]
        by_task = torch.zeros(len(labels), 4, dtype=torch.float64)
        for group, (start, end) in zip(seen.groups, seen.bounds):
            row = by_task[group.ask.entry]
            sums_N = (part_N[start:end].sum() for part_N in (seen.scores_N, seen.rewards_N, seen.cut_N))
            row += torch.tensor([*map(float, sums_N), float(end - start)])
        versions = [v for g in seen.groups for t in g.trajectories for v in t.completion.versions]
        lag = float(sum(self.update - v for v in versions))
        surprise = -float(sum(p for g in seen.groups for t in g.trajectories for p in t.completion.logprobs))
        lengths = [float(x) for x in seen.lengths_N.tolist()]
        usual = [
            sum(lengths),
            float(seen.cut_N.sum()),
            float(seen.informative_N.sum()),
            float(seen.answers),
            lag,
            float(len(versions)),
            float(collected.tokens),
            float(sum(collected.lengths)),
            float(len(collected.lengths)),
            float(collected.carried),
            collected.working_s,
            collected.seconds,
            surprise,
        ]
        flat = self.runtime.sum(torch.cat([by_task.flatten(), torch.tensor(usual, dtype=torch.float64)]))
        longest = float(self.runtime.max(max(lengths, default=0.0)))
        sums = flat[: by_task.numel()].view(-1, 4).tolist()
        total, cut, told, answers, lag, aged, tokens, work, works, carried, working, seconds, surprise = flat[
            by_task.numel() :
        ].tolist()
        record: dict[str, Any] = {}
        for label, (scores, rewards, ended_late, count) in zip(labels, sums):
            if count:
                record |= {f"score/{label}": scores / count, f"reward/{label}": rewards / count}
                record[f"cut/{label}"] = ended_late / count
        every = max(1.0, answers)
        record |= {"reward": sum(s[1] for s in sums) / every, "score": sum(s[0] for s in sums) / every}
        record |= {
            "length": total / every,
            "length_max": longest,
            "cut": cut / every,
            "informative": told / every,
        }
        record |= {
            "length_in_work": work / max(1.0, works),
            "staleness": lag / max(1.0, aged),
            "answers": answers,
        }
        # Mean -log p of what was drawn: the entropy of the sampling distribution, without looking at all of
        # it.
        record |= {"carried": carried, "tokens": tokens, "entropy": surprise / max(1.0, aged)}
        record |= {"time/rollout_s": collected.seconds, "time/score_s": score_s}
        record |= {
            "engine_idle": 1 - working / max(seconds, 1e-9),
            "tokens_per_s": tokens / max(collected.seconds, 1e-9),
        }
        counted = self.runtime.sum(torch.tensor([float(self.kit.rewards.counts[name]) for name in STATUSES]))
        bad = {name: count for name, count in zip(STATUSES, counted.tolist()) if name != "ok" and count}
        record |= {f"rewards/{name}": count for name, count in bad.items()}
        record |= {f"prompts/{name}": float(count) for name, count in self.kit.book.left_out.items()}
        record |= self.kit.collector.tool_metrics()
        self.latest = seen
        return record

    def _log(self, record: dict[str, Any], seconds: float) -> None:
        kit, config = self.kit, self.config
        known = sum(record.get(f"time/{name}_s", 0.0) for name in ("rollout", "score", "train"))
        record |= {"time/other_s": max(0.0, seconds - known), "step_s": seconds}
        record |= {"samples_per_s": record.get("answers", 0.0) / seconds, "updates_per_min": 60 / seconds}
        record["memory_gib"] = peak_memory_bytes(self.runtime.device) / 2**30
        last = self.update == config.total_updates
        kit.show(self.update, record, write=self.update % config.track.log_every == 0 or last)
        due = self.update == 1 or self.update % config.log.rollouts_every == 0 or last
        if due and self.latest is not None:
            told = records(config, self.latest, self.update, config.log.groups, self.runtime)
            if kit.rollouts is not None:
                kit.rollouts.write(told, kit.collector.desk.weaker if kit.collector.desk is not None else "")

    def _budgets(self) -> None:
        """Toggle's budgets, once, from answers of the policy it starts from."""
        toggle = self.config.toggle
        if not toggle.every or not budget_phase(toggle, 0):
            return
        kit, config = self.kit, self.config
        kit.refresh_engine(0)
        bins = len(config.tasks) * max(1, config.rollout.pool)
        collected = kit.collector.collect(
            0, temperature(config.temperature, 0), max(bins, config.rollout.prompts), 99
        )
        seen = experience(config, collected.groups, score(kit.rewards, collected.groups), 0, {})
        bins_N = torch.tensor([g.ask.bin for g in seen.groups for _ in g.trajectories])
        right_N = shares(config.reward, seen.scores_N) >= RIGHT
        own = estimate_budgets(toggle, seen.lengths_N, right_N, bins_N) if seen.answers else {}
        table = torch.zeros(bins, 2, dtype=torch.float64)
        for bin, budget in own.items():
            table[bin] = torch.tensor([budget, 1.0])
        table = self.runtime.sum(table)
        self.budgets = {i: float(b / n) for i, (b, n) in enumerate(table.tolist()) if n}

    # ------------------------------------------------------------------------------------------- state, and
    # the end

    def _save(self) -> Path:
        trainer = self.kit.state_dict() | {
            "budgets": self.budgets,
            "seconds": self.seconds,
            "begun": self.begun,
        }
        return self.kit.save(self.update, trainer)

    def _restore(self, loaded: Loaded) -> None:
        self.update = loaded.step
        self.budgets = {int(k): float(v) for k, v in loaded.trainer["budgets"].items()}
        self.seconds, self.begun = float(loaded.trainer["seconds"]), bool(loaded.trainer["begun"])
        self.kit.load_state_dict(loaded)

    def _leave_early(self) -> int:
        path = self._save()
        reason = self.runtime.stop.received or "a signal on another rank"
        self.kit.say(self.update, f"{reason}: saved {path.name}; --resume goes on from here")
        return EXIT_REQUEUE

    def _finish(self) -> int:
        self.kit.measure(self.update)
        self._save()
        if self.runtime.is_main:
            self.kit.write_outputs(self.update, self.seconds)
        self.runtime.barrier()
        return EXIT_OK

    def close(self) -> None:
        self.kit.close()


def run(parsed: RecipeArguments) -> int:
    """Build and train; returns the exit code."""
    config: RLConfig = validate(compose(parsed.recipes, parsed.overrides), RLConfig)
    return launch(
        Reinforcement,
        config,
        parsed,
        show=lambda resolved: print(parts.plan(resolved)),
        check=lambda resolved: make_reward(resolved.reward.name, ()),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m`, `accelerate launch -m` and `earlyfusion rl`."""
    return cli.main(["rl", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
