"""Joint vision-text reinforcement learning: start reading here.

    accelerate launch -m earlyfusion.rl.train vision-rl --init-from runs/sft/model
    torchrun --nproc-per-node 2 -m earlyfusion.rl.train vision-rl --init-from DIR
    earlyfusion rl vision-rl --init-from DIR

One iteration, and where to read on:

    rollouts/prompts.py      prompts drawn by the curriculum
    rollouts/experience.py   K answers each from the engine: whole, or partial with what is left going on in
                             the next iteration; rewards of the task -> shaping by length -> advantages in
                             the group
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

The engine that answers and the curated documents beside it, which no other stage has, are built here too.
"""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from earlyfusion.data.chat.template import ChatTokenizer
from earlyfusion.data.loading.loader import Loader, merge_states
from earlyfusion.data.tasks.file import FileTask
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measured import summary, write_measured
from earlyfusion.eval.protocol import Interrupted
from earlyfusion.eval.rewards import STATUSES, Scored, make_reward
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, write_json
from earlyfusion.model.engine.engine import RUN_AHEAD, Engine
from earlyfusion.model.engine.scheduler import token_rules
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.model.layers import moe_layers
from earlyfusion.pipeline import build, cli, state
from earlyfusion.pipeline.adapter import FOLDER, adapted, attach, check_plan, merged, save_adapter
from earlyfusion.pipeline.checkpoint import Checkpointer, Loaded
from earlyfusion.pipeline.config.arguments import RecipeArguments
from earlyfusion.pipeline.config.compose import compose, render, validate
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE, TrainingStopped
from earlyfusion.pipeline.launch import launch
from earlyfusion.pipeline.runtime import (
    Runtime,
    exchange_gradients,
    objects_at_rest,
    policy,
    seed_everything,
    whole,
)
from earlyfusion.pipeline.schedule import due, linear
from earlyfusion.pipeline.step import peak_memory_bytes
from earlyfusion.pipeline.track import Tracker
from earlyfusion.pipeline.update import Guard, Update, check_frozen, update
from earlyfusion.rl.fleet.fleet import Fleet
from earlyfusion.rl.fleet.remote import EngineOptions, Process, Remote
from earlyfusion.rl.fleet.served import Served, ServedOptions
from earlyfusion.rl.learn import Learner, Sums
from earlyfusion.rl.measure import measure_heldout
from earlyfusion.rl.objectives.length import budget_phase, estimate_budgets
from earlyfusion.rl.recipe import RLConfig, start_directory, temperature
from earlyfusion.rl.report import write_rl_report
from earlyfusion.rl.rollouts.experience import (
    Collector,
    Experience,
    Group,
    build_rewards,
    experience,
    score,
)
from earlyfusion.rl.rollouts.log import RolloutLog, group_records, rollout_metrics
from earlyfusion.rl.rollouts.prompts import PromptPool

PAGE = 16
"""Tokens of a page of the engine's cache."""
LOCAL = (("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0))
"""What every launcher tells of this machine: processes, and the number of this one."""


def build_engine(
    config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, folder: Path, runtime: Runtime
) -> Engine | Fleet:
    """Who answers: an engine over `model` itself, or over a bfloat16 copy of the start in `folder`; with
    roles.engines a fleet of processes with copies of their own."""
    rollout, roles = config.rollout, config.roles
    dtype = torch.bfloat16 if rollout.dtype == "bfloat16" else torch.float32
    # Pages for the longest answers everywhere: the engine then never pauses one for want of memory.
    longest = (rollout.max_prompt_tokens or 1024) + config.longest_answer
    share = math.ceil(rollout.prompts / runtime.world)
    slots = min(rollout.slots, share * rollout.group_size)
    # With several engines answers are dealt to them, and may share the last page of their prompt.
    several = roles.engines > 0
    if several:
        slots = min(slots, math.ceil(share * (1 + roles.ahead) * rollout.group_size / roles.engines))
    about: Record = {
        "max_slots": slots,
        "page_size": PAGE,
        "max_pages": slots * (math.ceil(longest / PAGE) + 1 + several),
        "prefill_chunk": rollout.prefill_chunk,
        "max_waiting": 4 * share + 1024,
        "image_cache": 4 * share,
        # Answers that may be ended or paused are looked at after every token.
        "run_ahead": 1 if config.watched else RUN_AHEAD,
        "speculate": True,
    }
    if roles.servers:
        # Each would write the same folder.
        if runtime.world > 1:
            raise UserError(f"roles.servers with {runtime.world} processes that train; expected one")
        given = ServedOptions(folder, Path(roles.weights_to).resolve(), roles.reload, slots, longest)
        servers = [Served(url, given) for url in roles.servers]
        return Fleet(servers, roles.policy, roles.chunk, about["max_waiting"] * rollout.group_size, tokenizer)
    if several:
        told = str(dtype).removeprefix("torch.")
        options = EngineOptions(str(folder), dtype=told, threads=config.train.threads, engine=about)
        engines = engines_beside(options, roles.engines, runtime)
        waiting = about["max_waiting"] * rollout.group_size
        return Fleet(engines, roles.policy, roles.chunk, waiting, tokenizer)
    # A copy is loaded and not cast: the trained model keeps its fp32 weights, or its shards of them.
    if rollout.dtype == "bfloat16" or runtime.layout.sharded:
        model = load_model(folder, runtime.device, dtype)
    return Engine(model, tokenizer, **about)


def engines_beside(options: EngineOptions, count: int, runtime: Runtime) -> list[Remote]:
    """Processes with engines for this one, on the devices after those of the trainers on this machine."""
    processes = []
    for number in range(count):
        device = "cpu"
        if runtime.device.type == "cuda":
            trainers, own = (int(os.environ.get(name, given)) for name, given in LOCAL)
            device = f"cuda:{trainers + own * count + number}"
        processes.append(Process(replace(options, device=device)))
    return [Remote(process) for process in processes]


def build_curated(
    config: RLConfig, model: NativeFusion, tokenizer: Tokenizer, runtime: Runtime, lanes: int
) -> Loader | None:
    """The curated documents of the PTX loss, `lanes` rows in every update; None where there is none."""
    ptx = config.ptx
    if config.data is None or not (ptx.coef or ptx.only):
        return None
    # Rows of their own beside the rollouts: their loss has its own normaliser.
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


def curated_lanes(start: Loaded) -> int:
    """Curated rows of an update: one for each process that the run began with."""
    ptx = start.lanes[0]["ptx"]
    return 1 if ptx is None else int(ptx["identity"]["lanes"])


def plan(config: RLConfig) -> str:
    """The resolved recipe and what an iteration holds, for --dry-run."""
    rollout, train = config.rollout, config.train
    labels = ", ".join(f"{entry.label} x {entry.weight:g}" for entry in config.tasks)
    files = []
    for entry in config.tasks:
        task = make_task(entry.name, **entry.options)
        if isinstance(task, FileTask):
            files.append(f"# {entry.label}: {task.told}")
    prompts = config.total_updates * rollout.prompts
    return "\n".join(
        [
            render(config),
            f"# an iteration: {rollout.prompts} prompts x {rollout.group_size} answers of at most"
            f" {rollout.max_new_tokens} tokens, {train.epochs * train.minibatches} update(s)",
            f"# prompts: {labels}",
            f"# {config.total_updates} iterations = {prompts:,} prompts",
            *files,
        ]
    )


BUDGET_ROUND = 99
"""Round of `Collector.collect` for Toggle's budgets: no other round of an update has its number."""


class Reinforcement:
    """The parts of a run, built in the order they need one another; `train` is the loop. All processes hold
    one each."""

    def __init__(self, config: RLConfig, resume: bool) -> None:
        # Processes, seeds, what a resume must agree with, and the checkpoint it goes on from.
        self.config, self.out, train = config, Path(config.run.directory), config.train
        self.runtime = runtime = Runtime(train.mixed_precision, train.threads, config.parallel)
        seed_everything(config.run.seed)
        self.start_folder = start_directory(config)
        self.tokenizer = Tokenizer.load(self.start_folder)
        self.checkpoints = Checkpointer.of(config, self.tokenizer, runtime)
        self.checkpoints.chat = (self.start_folder / "chat_template.jinja").is_file()
        start = self.checkpoints.start(resume)

        # The policy, and the optimizer over it.
        # fp32 whatever the start is stored in: an update of 1e-3 would round away in bfloat16.
        check_plan(config.adapter, runtime.layout)
        start_model = lambda: load_model(self.start_folder, runtime.device, torch.float32)
        self.model, self.plain = policy(lambda: attach(start_model(), config.adapter), runtime)
        check_frozen(self.plain, {"train.frozen": train.frozen})
        self.optimizer = build.optimizer(config.optim, self.model)
        self.guard = Guard(config.guard.policy, runtime.agree)

        # Prompts, the engine that answers them, what the answers earn, and what is learned from that.
        self.prompts = PromptPool(config, self.tokenizer, self.model.config.vision)
        self.engine = build_engine(config, self.model, self.tokenizer, self.start_folder, runtime)
        self.rewards = build_rewards(config.reward, self.prompts.tasks, config.run.seed)
        experts = bool(moe_layers(self.plain))
        self.collector = Collector(config, self.prompts, self.engine, runtime, experts, self.rewards)
        rules = token_rules(self.plain, self.tokenizer)
        self.learner = Learner(config, self.model, runtime, sorted(rules.banned_ids))
        # Each process shuffles groups of its own, so its order is its own as well.
        self.generator = torch.Generator().manual_seed(config.run.seed + 7919 * runtime.rank)
        # As many curated rows as the run began with, however many processes go on with it.
        lanes = runtime.world if start is None else curated_lanes(start)
        self.curated = build_curated(config, self.model, self.tokenizer, runtime, lanes)

        # Where the run stands.
        self.update, self.seconds, self.begun = 0, 0.0, False
        self.budgets: dict[int, float] = {}
        self.latest: Experience | None = None
        self.faults_told: set[str] = set()
        if start is not None:
            self.restore(start)

        # From here on a signal waits for the end of an iteration, and the output folder is written to.
        total, done = config.total_updates, self.update
        self.tracker = Tracker(
            self.out, runtime, total_steps=total, start_step=done, config=config, unit="update"
        )
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

            # Stop on a signal; measure and save every so often; the end has its own.
            if self.runtime.should_stop():
                return self.leave_early()
            if due(config.eval.every, self.update, total):
                self.measure()
            if due(config.checkpoint.every, self.update, total):
                self.save()
        return self.finish()

    def begin(self) -> Record:
        """What comes before the first iteration: the start is measured, and Toggle's budgets."""
        found = self.measure()
        if budget_phase(self.config.toggle, 0):
            self.find_budgets()
        self.begun = True
        return found

    def unless_stopped(self, action: Callable[[], Record]) -> Record | None:
        """What `action` gives; None where a signal came while it collected answers, and then nothing has
        changed."""
        prompts, counts = self.prompts.state_dict(), self.rewards.counts.copy()
        carried = list(self.collector.carried)
        try:
            return action()
        except Interrupted:
            self.prompts.load_state_dict(prompts)
            # What programs did is not undone: it happened, and "tools/" counts what happened. Engines that
            # went on ahead have written more since; what there is of it was taken out.
            if not self.config.roles.ahead:
                self.collector.carried = carried
            self.rewards.counts = counts
            return None

    def iterate(self) -> Record:
        """One iteration; returns its numbers."""
        config = self.config
        record: Record = {"temperature": temperature(config.temperature, self.update)}
        # k1.5: a new reference policy is a new problem, to which old moments do not belong.
        if config.objective.reset_optimizer:
            self.optimizer.state.clear()

        # The control arm that trains on curated data alone has no answers.
        found = experience(config, [], [], self.update, {})
        if not config.ptx.only:
            found, score_s = self.collect_and_score()
            counts = {f"rewards/{status}": self.rewards.counts[status] for status in STATUSES[1:]}
            names = [one.name for one in self.rewards.functions]
            record |= rollout_metrics(config, self.runtime, self.update, self.collector, found, counts, names)
            record |= {f"prompts/{reason}": float(n) for reason, n in self.prompts.left_out.items()}
            record |= self.collector.tool_metrics() | {"time/score_s": score_s}
            self.latest = found
            self.collector.spent.clear()

        start = time.perf_counter()
        with self.collector.beside():
            record |= self.learn(found)
        return record | {"time/train_s": time.perf_counter() - start}

    def collect_and_score(self) -> tuple[Experience, float]:
        """Rollouts, what they earned, and the seconds of scoring; with rollout.resample, groups that teach
        nothing are replaced by new prompts."""
        config, update = self.config, self.update
        self.refresh_engine()
        degree, missing = temperature(config.temperature, update), config.rollout.prompts
        annealed = config.reward.anneal_updates
        self.rewards.share = max(0.0, 1 - update / annealed) if annealed else 1.0
        score_s = 0.0
        groups: list[Group] = []
        scored: list[Scored] = []
        for round_ in range(config.rollout.resample + 1):
            collected = self.collector.collect(update, degree, missing, round_)
            start = time.perf_counter()
            judged = score(self.rewards, collected)
            score_s += time.perf_counter() - start
            self.tell_faults(judged)
            # Groups that are replaced below were tried as well, so the curriculum hears of every round.
            self.count_solved(experience(config, collected, judged, update, self.budgets))
            groups, scored = groups + collected, scored + judged
            found = experience(config, groups, scored, update, self.budgets)
            if round_ == config.rollout.resample:
                break

            # Only groups that teach something are kept, as long as the others can be replaced.
            kept = [bounds for bounds in found.bounds if found.informative_N[bounds[0]]]
            missing = int(self.runtime.sum(len(groups) - len(kept)))
            if not missing:
                break
            groups = [group for group, bounds in zip(groups, found.bounds) if bounds in kept]
            scored = [one for bounds in kept for one in scored[slice(*bounds)]]
        return found, score_s

    def refresh_engine(self) -> None:
        """The engine's weights become the trained ones; tokens from here on carry the update's number."""
        self.model.eval()
        # The version stands beside every token, which staleness and temperature are read from.
        # A copy has no adapters: it gets the sums.
        weights = self.model.state_dict()
        if adapted(self.model) and getattr(self.engine, "model", None) is not self.model:
            bare, whole_weight = merged(self.model)
            weights = {name: whole_weight(name) for name in bare.state_dict()}
        self.engine.load_weights(weights, self.update)
        if isinstance(self.engine, Fleet):
            while self.engine.told:
                self.tracker.event(self.update, "note", message=self.engine.told.pop(0))

    def count_solved(self, found: Experience) -> None:
        """Tell the curriculum how the prompts went, on all processes."""
        shares_N = found.shares_N.double()
        table_2P = torch.zeros(2, self.prompts.solved_P.numel(), dtype=torch.float64)
        table_2P.index_add_(1, found.bins_N, torch.stack([shares_N, torch.ones_like(shares_N)]))
        self.prompts.count(*self.runtime.sum(table_2P))

    def learn(self, found: Experience) -> Record:
        """The updates of this iteration; returns their numbers."""
        train, ptx, runtime = self.config.train, self.config.ptx, self.runtime
        self.model.train()
        # The control arm on curated data alone has no objective that a coefficient would balance.
        coef = 1.0 if ptx.only else ptx.coef
        peak, warmup = self.config.optim.lr, train.warmup_updates
        lr = linear(peak, self.update, train.updates, warmup, train.final_lr_ratio)
        gap = self.learner.prepare(found) if found.scored else 0.0
        totals: Counter[str] = Counter()
        steps: list[Update] = []
        ptx_losses: list[float] = []
        mismatch = {"k3": 0.0, "largest": 0.0}
        for _ in range(train.epochs):
            order = torch.randperm(len(found.groups), generator=self.generator).tolist()
            for part in range(train.minibatches):
                # Gradients of this process, then of all.
                sums = Sums()
                if not ptx.only:
                    self.learner.gradients(found, order[part :: train.minibatches], self.update, sums)
                if coef and self.curated is not None:
                    batches = [batch.to(runtime.device) for batch in self.curated.next_step()]
                    ptx_losses.append(self.learner.ptx_gradients(batches, coef, sums))
                exchange_gradients(self.model, runtime)

                # Clip, guard, step or forget.
                values = sums.reduced(runtime)
                if not steps:
                    # Before the first update trainer and sampler hold the same weights: what differs is the
                    # engine's arithmetic (and, in partial rollouts, older weights).
                    mismatch = {"k3": values["k3"] / max(1.0, values["tokens"]), "largest": values["largest"]}
                steps.append(self.step(values["loss"] + values["ptx"], lr))
                totals.update(values)
        self.model.eval()

        tokens = max(1.0, totals["tokens"])
        record: Record = {"lr": lr, "loss": totals["loss"] / len(steps)}
        record["grad_norm"] = sum(step.grad_norm for step in steps) / len(steps)
        record |= {"refused": sum(step.refused for step in steps), "empty": sum(step.empty for step in steps)}
        if found.scored:
            shares = {"clip_share": "outside", "k3": "k3", "touched": "touched"}
            record |= {name: totals[summed] / tokens for name, summed in shares.items()}
            record |= {"mismatch_kl": mismatch["k3"], "mismatch_max": max(gap, mismatch["largest"])}
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
            # Router biases stay as pretraining left them: replayed choices say nothing about balance.
            balance_experts=False,
        )
        if done.verdict.action == "stop":
            raise TrainingStopped(f"stopped by the guard at update {self.update}: {done.verdict.reason}")
        if done.refused:
            message = f"{done.verdict.action}: {done.verdict.reason}"
            self.tracker.event(self.update, "note", message=message)
        return done

    def tell_faults(self, judged: Sequence[Scored]) -> None:
        """Say what went wrong with rewards, the first time for each kind of fault: a count alone tells nobody
        what to mend."""
        faults = Counter(one.status for one in judged if one.status != "ok")
        for status, count in faults.items():
            if status not in self.faults_told:
                self.faults_told.add(status)
                first = next(one.detail for one in judged if one.status == status)
                message = f"reward {status} for {count} of {len(judged)} answers, the first: {first}"
                self.tracker.event(self.update, "note", message=message)

    def find_budgets(self) -> None:
        """Toggle's budgets, once, from answers of the policy it starts from."""
        config = self.config
        self.refresh_engine()
        # Every problem of the pool once at least: a budget is that of one problem.
        bins, degree = self.prompts.solved_P.numel(), temperature(config.temperature, 0)
        count = max(bins, config.rollout.prompts)
        collected = self.collector.collect(0, degree, count, BUDGET_ROUND)
        found = experience(config, collected, score(self.rewards, collected), 0, {})
        self.collector.spent.clear()

        # A bin whose answers lie on several processes has the mean of their budgets.
        table_P2 = torch.zeros(bins, 2, dtype=torch.float64)
        own = estimate_budgets(config.toggle, found.lengths_N, found.right_N, found.bins_N)
        for bin, budget in own.items():
            table_P2[bin] = torch.tensor([budget, 1.0])
        table = self.runtime.sum(table_P2).tolist()
        self.budgets = {i: total / known for i, (total, known) in enumerate(table) if known}

    # -------------------------------------------------------------------------------- what is measured

    def log(self, record: Record, seconds: float) -> None:
        """A line of the terminal at every update, a record every `track.log_every`, rollouts every
        `log.rollouts_every`."""
        config, last = self.config, self.update == self.config.total_updates
        record |= {"step_s": seconds, "samples_per_s": record.get("answers", 0.0) / seconds}
        # What engines wrote beside training is not of the seconds in which answers were waited for.
        if config.roles.ahead:
            record["tokens_per_s"] = record.get("tokens", 0.0) / seconds
        record["memory_gib"] = peak_memory_bytes(self.runtime.device) / 2**30
        if self.update % config.track.log_every == 0 or last:
            self.tracker.log(self.update, record)
        else:
            self.tracker.tick(self.update, record)

        shown = self.update == 1 or self.update % config.log.rollouts_every == 0 or last
        if shown and self.latest is not None:
            groups = group_records(config, self.latest, self.update, config.log.groups, self.runtime)
            environments = self.prompts.environments
            if self.runtime.is_main:
                self.rollouts.write(groups, environments.weaker if environments is not None else "")

    def measure(self) -> Record:
        """Answers to held-out problems, dealt over the processes; written to eval/update-NNNNNN.jsonl by rank
        0."""
        if not self.config.eval.problems:
            return {}
        with whole(self.plain, self.model, self.runtime) as model:
            measured = measure_heldout(self.config, model, self.tokenizer, self.runtime)
        found = summary(measured)
        if self.runtime.is_main:
            write_measured(self.out / "eval" / f"update-{self.update:06d}.jsonl", measured)
            weaker = next(({"sandbox": one.sandbox} for one in measured if one.sandbox), {})
            self.tracker.event(self.update, "eval", **found, **weaker)
            accuracy = ", ".join(
                f"{label} {row['accuracy']:.3f}"
                # Environments and partial credit pay other amounts than nothing and one.
                + (f" (score {row['score']:.3f})" if row["score"] != row["accuracy"] else "")
                for label, row in found.items()
            )
            self.tracker.say(f"update {self.update}: greedy accuracy on held-out problems: {accuracy}")
        return found

    # ------------------------------------------------------------------------------------ state, and the end

    def save(self) -> Path:
        """Write a checkpoint; every process calls it."""
        # Of this process alone; everything that is equal on all goes to `trainer`.
        own = {
            "carried": self.collector.state_dict(),
            "generator": self.generator.get_state(),
            "ptx": None if self.curated is None else self.curated.state_dict(),
            "rewards": dict(self.rewards.counts),
        }
        path = self.checkpoints.save(
            self.update,
            model=self.model,
            optimizer=self.optimizer,
            trainer={
                "book": self.prompts.state_dict(),
                "guard": self.guard.state_dict(),
                "budgets": self.budgets,
                "seconds": self.seconds,
                "begun": self.begun,
            },
            lanes={self.runtime.rank: own},
        )
        if self.config.checkpoint.models:
            self.checkpoints.wait()
            if self.runtime.is_main:
                self.save_model(self.out / "models" / f"update-{self.update:06d}", path)
        return path

    def restore(self, loaded: Loaded) -> None:
        """Go on from a checkpoint: bit for bit by as many processes as saved it, by others with the
        unfinished answers dealt anew. Raises DataError for PTX rows that these processes cannot share."""
        # Weights first: the engine and the learner hold the same tensors.
        loaded.restore_weights(self.model, self.optimizer)
        trainer, self.update = loaded.trainer, loaded.step
        self.guard.load_state_dict(trainer["guard"])
        self.prompts.load_state_dict(trainer["book"])
        self.budgets = {int(bin): float(budget) for bin, budget in trainer["budgets"].items()}
        self.seconds, self.begun = float(trainer["seconds"]), bool(trainer["begun"])

        # Unfinished answers and counts: one's own, or those of all dealt anew.
        rank = self.runtime.rank
        lanes = [loaded.lanes[saved] for saved in range(len(loaded.rng))]
        if self.runtime.world == len(lanes):
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

        if rank < len(lanes):
            self.generator.set_state(lanes[rank]["generator"])
        if self.curated is not None:
            self.curated.load_state_dict(merge_states([lane["ptx"] for lane in lanes]))
        loaded.restore_rng(rank, self.config.run.seed)

    def leave_early(self) -> int:
        """Save and leave, to be started again."""
        path = self.save()
        self.checkpoints.wait()
        reason = self.runtime.stop.received or "a signal on another rank"
        message = f"{reason}: saved {path.name}; --resume goes on from here"
        self.tracker.event(self.update, "note", message=message)
        return EXIT_REQUEUE

    def finish(self) -> int:
        """The last measurement and checkpoint, the model directory and the report."""
        self.measure()
        path = self.save()
        self.checkpoints.wait()
        if self.runtime.is_main:
            directory = self.save_model(self.out / "model", path)
            self.tracker.close()
            self.tracker.say(f"model directory: {directory}")
            self.tracker.say(f"report: {write_rl_report(self.out)}")
        self.runtime.barrier()
        return EXIT_OK

    def save_model(self, directory: Path, checkpoint: Path) -> Path:
        """The trained weights as a model directory, with the chat template where the start had one, and the
        run's facts beside it; by rank 0. checkpoint: where the weights of shards are read."""
        facts = build.run_facts(self.config, self.update, self.seconds, self.runtime)
        parameters = sum(parameter.numel() for parameter in self.plain.parameters())
        write_json(self.out / "facts.json", facts | {"parameters": parameters})
        directory.parent.mkdir(parents=True, exist_ok=True)
        tokenizer: Tokenizer | ChatTokenizer = self.tokenizer
        if (self.start_folder / "chat_template.jinja").is_file():
            tokenizer = ChatTokenizer(self.tokenizer)
        read = None if self.plain is self.model else state.reader(self.plain, checkpoint)
        model = self.plain
        if adapted(model):
            save_adapter(self.out / FOLDER, model, str(self.config.run.init_from))
            model, read = merged(model, read)
        return save_model(model, tokenizer, directory, facts | {"sources": {}, "evals": {}}, read=read)

    def close(self) -> None:
        """Stop threads and processes, close files, give the signal handlers back."""
        self.checkpoints.close()
        for part in (self.curated, self.collector, self.rewards, self.tracker):
            if part is not None:
                part.close()
        self.runtime.close()


def run(parsed: RecipeArguments) -> int:
    """Build and train; returns the exit code."""
    config: RLConfig = validate(compose(parsed.recipes, parsed.overrides), RLConfig)
    return launch(
        Reinforcement,
        config,
        parsed,
        show=lambda resolved: print(plan(resolved)),
        check=lambda resolved: make_reward(resolved.reward.name, (), weights=resolved.reward.weights),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m`, `accelerate launch -m` and `earlyfusion rl`."""
    return cli.main(["rl", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
