"""The parts of a reinforcement learning run and what the loop asks of them, in one place: `Kit`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from earlyfusion.data.chat.template import ChatTokenizer
from earlyfusion.data.loading.loader import Loader, merge_states
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import measure
from earlyfusion.eval.measured import Measured, summary, write_measured
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.engine.engine import RUN_AHEAD, Engine
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline import build
from earlyfusion.pipeline.checkpoint import Checkpointer, Loaded, RunFacts
from earlyfusion.pipeline.config.compose import dump, render
from earlyfusion.pipeline.guard import Guard
from earlyfusion.pipeline.runtime import Runtime, seed_everything
from earlyfusion.pipeline.schedule import linear
from earlyfusion.pipeline.statefile import write_text
from earlyfusion.pipeline.track import Tracker
from earlyfusion.pipeline.update import Update, check_frozen, update
from earlyfusion.rl.learn import Learner, Sums
from earlyfusion.rl.measure.tools import measure_tools
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.report.run import write_rl_report
from earlyfusion.rl.rewards import Rewards
from earlyfusion.rl.rollouts.collect import Collector
from earlyfusion.rl.rollouts.experience import Experience, build_rewards, shares
from earlyfusion.rl.rollouts.log import RolloutLog
from earlyfusion.rl.rollouts.prompts import PromptBook

PAGE = 16


def start_directory(config: RLConfig) -> Path:
    """The model directory a run starts from. Raises UserError when run.init_from names none or an unknown
    one."""
    given = config.run.init_from
    if given is None:
        raise UserError(
            "reinforcement learning needs a model to start from: --init-from DIR, or --init-from"
            " embedded:skills"
        )
    return model_folder(given)


def build_kit(config: RLConfig, resume: bool) -> Kit:
    """Everything, ready to train. Raises UserError for what a user can get wrong, before anything is
    written."""
    runtime = Runtime(config.train.mixed_precision, config.train.threads)
    seed_everything(config.run.seed)
    folder = start_directory(config)
    tokenizer = Tokenizer.load(folder)
    out = Path(config.run.directory)
    facts = RunFacts(dump(config), tokenizer.hash, tokenizer.vocab_size)
    checkpoints = Checkpointer(out, runtime, facts, config.checkpoint.keep, config.checkpoint.keep_every)
    start = checkpoints.start(resume)
    model = load_model(folder, runtime.device, torch.float32)
    reference = None
    if config.objective.kl_coef:
        reference = load_model(folder, runtime.device, torch.float32).requires_grad_(False)
    return Kit(config, runtime, tokenizer, model, reference, out, folder, checkpoints, start)


class Kit:
    """Built once; see the methods. All processes hold one each."""

    def __init__(
        self,
        config: RLConfig,
        runtime: Runtime,
        tokenizer: Tokenizer,
        model: NativeFusion,
        reference: NativeFusion | None,
        out: Path,
        folder: Path,
        checkpoints: Checkpointer,
        start: Loaded | None,
    ) -> None:
        self.config, self.runtime, self.tokenizer, self.model = config, runtime, tokenizer, model
        self.out, self.folder, self.checkpoints, self.start = out, folder, checkpoints, start
        check_frozen(model, {"train.frozen": config.train.frozen})
        self.optimizer = build.optimizer(config.optim, model)
        self.guard = Guard(**config.guard.model_dump(), agree=runtime.agree)
        self.book = PromptBook(config, tokenizer, model.config.vision)
        self.engine = self._engine()
        self.collector = Collector(config, self.book, self.engine, runtime)
        self.rewards: Rewards = build_rewards(config.reward, self.book.tasks, config.run.seed)
        self.learner = Learner(config, model, runtime, reference, sorted(self.engine.rules.banned_ids))
        self.generator = torch.Generator().manual_seed(config.run.seed + 7919 * runtime.rank)
        self.loader: Loader | None = self._loader()
        self.rollouts: RolloutLog | None = None
        self._tracker: Tracker | None = None

    def _engine(self) -> Engine:
        rollout, model = self.config.rollout, self.model
        if rollout.dtype == "bfloat16":
            model = load_model(self.folder, self.runtime.device, torch.bfloat16)
        longest = rollout.max_prompt_tokens or 1024
        pages = -(-(longest + self.config.longest_answer) // PAGE) + 1
        share = -(-rollout.prompts // self.runtime.world)
        slots = min(rollout.slots, share * rollout.group_size)
        return Engine(
            model,
            self.tokenizer,
            max_slots=slots,
            page_size=PAGE,
            max_pages=slots * pages,
            prefill_chunk=rollout.prefill_chunk,
            max_waiting=4 * share + 1024,
            image_cache=4 * share,
            run_ahead=1 if self.config.watched else RUN_AHEAD,
        )

    def _loader(self) -> Loader | None:
        """The curated documents of the PTX loss: in every update one row for each process that the run began
        with."""
        ptx, data = self.config.ptx, self.config.data
        if data is None or not (ptx.coef or ptx.only):
            return None
        world = self.runtime.world
        lanes = world if self.start is None else self.start.lanes[0]["ptx"]["identity"]["lanes"]
        return Loader(
            data,
            self.tokenizer,
            self.model.config.vision,
            length=ptx.length,
            tokens=ptx.tokens,
            max_patches=ptx.max_patches,
            lanes=lanes,
            rank=self.runtime.rank,
            world_size=world,
        )

    # ----------------------------------------------------------------------------------------------- what a
    # step needs

    def refresh_engine(self, version: int) -> None:
        """The engine's weights become the trained ones; tokens from here on carry `version`."""
        self.model.eval()
        self.engine.load_weights(self.model.state_dict(), version, self.config.rollout.resume)

    def curated(self) -> Sequence[Any]:
        """The next rows of curated data, on the device."""
        assert self.loader is not None
        return [batch.to(self.runtime.device) for batch in self.loader.next_step()]

    def lr(self, update: int) -> float:
        """The learning rate of an update: linear rise, then evenly down to final_lr_ratio of it."""
        train = self.config.train
        return linear(self.config.optim.lr, update, train.updates, train.warmup_updates, train.final_lr_ratio)

    def step(self, sums: Sums, lr: float) -> Update:
        """Guard, clip, update. Gradients are gone afterwards."""
        values = sums.reduced(self.runtime)
        loss = values["loss"] + values["ptx"]
        # On policy the objective's value is 0 whatever the gradient is, so a jump of it says nothing; that it
        # is finite does.
        watched = loss if self.config.ptx.only or not math.isfinite(loss) else 0.0
        return update(
            self.model,
            self.optimizer,
            self.guard,
            self.runtime,
            loss=watched,
            lr=lr,
            clip_grad_norm=self.config.optim.clip_grad_norm,
            frozen=self.config.train.frozen,
            balance_experts=self.config.train.balance_experts,
        )

    def note(self, seen: Experience) -> None:
        """Tell the curriculum how the prompts went, on all processes."""
        bins = self.book.solved_P.numel()
        solved_N = shares(self.config.reward, seen.scores_N).double()
        table = torch.zeros(2, bins, dtype=torch.float64)
        for group, (start, end) in zip(seen.groups, seen.bounds):
            table[0, group.ask.bin] += float(solved_N[start:end].sum())
            table[1, group.ask.bin] += end - start
        table = self.runtime.sum(table)
        self.book.note(table[0], table[1])

    # ----------------------------------------------------------------------------------------------------
    # what is seen

    def open_log(self, update: int) -> None:
        """Begin (or go on with) metrics.jsonl and rollouts.jsonl; write recipe.toml."""
        config = self.config
        self._tracker = Tracker(
            self.out,
            self.runtime,
            total_steps=config.total_updates,
            start_step=update,
            trackers=config.track.trackers,
            recipe=dump(config),
            name=config.run.name,
            unit="update",
        )
        if self.runtime.is_main:
            build.write_recipe(self.out, config)  # type: ignore[arg-type]
            self.rollouts = RolloutLog(self.out, start_update=update)

    def show(self, update: int, record: Mapping[str, Any], write: bool) -> None:
        """Numbers of an update: on the live view, and in metrics.jsonl when it is time."""
        if self._tracker is not None:
            (self._tracker.log if write else self._tracker.tick)(update, record)

    def say(self, update: int, message: str) -> None:
        """An event in words."""
        if self._tracker is not None:
            self._tracker.event(update, "note", message=message)

    def measure(self, update: int) -> dict[str, Any]:
        """Answers to held-out problems, dealt over the processes; written to eval/update-NNNNNN.jsonl by rank
        0."""
        config, runtime = self.config, self.runtime
        if not config.eval.problems:
            return {}
        self.model.eval()
        plain, tools = ([e for e in config.measured if e.tools is wanted] for wanted in (False, True))
        shared: dict[str, Any] = {
            "problems": config.eval.problems,
            "seed": config.eval.seed,
            "samples": config.eval.samples,
            "slots": config.rollout.slots,
            "share": (runtime.rank, runtime.world),
        }
        measured, longest = [], config.rollout.max_new_tokens
        if plain:
            own = measure(self.model, self.tokenizer, plain, max_new_tokens=longest, **shared)
            measured += self._of_all(own)
        if tools:
            shared["allow_weaker"] = config.sandbox.allow_weaker
            measured += self._of_all(
                measure_tools(self.model, self.tokenizer, tools, config.rollout, **shared)
            )
        found = summary(measured)
        weaker = next(({"sandbox": one.sandbox} for one in measured if one.sandbox), {})
        if runtime.is_main:
            write_measured(self.out / "eval" / f"update-{update:06d}.jsonl", measured)
            told = ", ".join(f"{label} {row['accuracy']:.3f}" for label, row in found.items())
            if self._tracker is not None:
                self._tracker.event(
                    update, "eval", **{label: dict(row) for label, row in found.items()}, **weaker
                )
                self._tracker.say(f"update {update}: greedy accuracy on held-out problems: {told}")
        return found

    def _of_all(self, own: Sequence[Measured]) -> list[Measured]:
        """What the processes measured of the problems that were dealt to them, in the problems' order; no
        pictures."""
        shares = self.runtime.gather([replace(one, picture=None) for one in own])
        world = self.runtime.world
        return [shares[i % world][i // world] for i in range(sum(map(len, shares)))]

    # ---------------------------------------------------------------------------------------------- state,
    # and the end

    def state_dict(self) -> dict[str, Any]:
        """Trainer state that is equal on all processes."""
        return {"book": self.book.state_dict(), "guard": self.guard.state_dict()}

    def save(self, update: int, trainer: dict[str, Any]) -> Path:
        """Write a checkpoint; every process calls it."""
        rank = self.runtime.rank
        own = {
            "carried": self.collector.state_dict(),
            "generator": self.generator.get_state(),
            "ptx": None if self.loader is None else self.loader.state_dict(),
            "rewards": dict(self.rewards.counts),
        }
        path = self.checkpoints.save(
            update,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            trainer=trainer,
            lanes={rank: own},
        )
        if self.config.checkpoint.models and self.runtime.is_main:
            self._save_model(
                self.out / "models" / f"update-{update:06d}", self._facts(update, trainer["seconds"])
            )
        return path

    def _facts(self, update: int, seconds: float) -> dict[str, Any]:
        """For the model's card."""
        config = self.config
        return {
            "name": config.run.name,
            "recipe": config.run.name,
            "steps": update,
            "seconds": round(seconds, 1),
            "device": str(self.runtime.device),
            "seed": config.run.seed,
            "precision": config.train.mixed_precision,
            "sources": {},
            "evals": {},
        }

    def _save_model(self, directory: Path, facts: dict[str, Any]) -> Path:
        """The trained weights as a model directory, with the chat template where the start had one."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        chat = (self.folder / "chat_template.jinja").is_file()
        return save_model(
            self.model, ChatTokenizer(self.tokenizer) if chat else self.tokenizer, directory, facts
        )

    def load_state_dict(self, loaded: Loaded) -> None:
        """Go on from a checkpoint: bit for bit by as many processes as saved it, by others with the
        unfinished answers dealt anew. Raises DataError for PTX rows that these processes cannot share."""
        self.model.load_state_dict(loaded.model)
        self.optimizer.load_state_dict(loaded.optimizer)
        self.guard.load_state_dict(loaded.trainer["guard"])
        self.book.load_state_dict(loaded.trainer["book"])
        rank, world = self.runtime.rank, self.runtime.world
        lanes = [loaded.lanes[saved] for saved in range(loaded.world)]
        counts: Counter[str] = Counter()
        if world == loaded.world:
            self.collector.load_state_dict(lanes[rank]["carried"])
            counts.update(lanes[rank]["rewards"])
        else:
            carried = [one for lane in lanes for one in lane["carried"]]
            shares = [self.collector.due(len(carried), other) for other in range(rank + 1)]
            self.collector.load_state_dict(carried[sum(shares[:-1]) : sum(shares)])
            for lane in lanes if rank == 0 else []:
                counts.update(lane["rewards"])
        self.rewards.counts = counts
        if rank < loaded.world:
            self.generator.set_state(lanes[rank]["generator"])
        if self.loader is not None:
            self.loader.load_state_dict(merge_states([lane["ptx"] for lane in lanes]))
        loaded.restore_rng(rank, self.config.run.seed)

    def mark(self) -> dict[str, Any]:
        """What collecting answers changes, as it is now."""
        return {
            "book": self.book.state_dict(),
            "carried": list(self.collector.carried),
            "counts": self.rewards.counts.copy(),
        }

    def go_back(self, mark: dict[str, Any]) -> None:
        """As at `mark`: for an iteration that a signal ended."""
        self.book.load_state_dict(mark["book"])
        self.collector.carried, self.rewards.counts = mark["carried"], mark["counts"]

    def write_outputs(self, update: int, seconds: float) -> None:
        """The model directory and the report."""
        facts = self._facts(update, seconds)
        directory = self._save_model(self.out / "model", facts)
        facts_shown = {key: facts[key] for key in ("name", "steps", "seconds", "device", "precision", "seed")}
        facts_shown["parameters"] = sum(p.numel() for p in self.model.parameters())
        write_text(self.out / "facts.json", json.dumps(facts_shown, indent=1))
        if self._tracker is not None:
            self._tracker.close()
            self._tracker.say(f"model directory: {directory}")
            self._tracker.say(f"report: {write_rl_report(self.out)}")

    def close(self) -> None:
        for thing in (self.loader, self.rewards, self.collector, self._tracker):
            if thing is not None:
                thing.close()
        self.runtime.close()


def plan(config: RLConfig) -> str:
    """The resolved recipe and what an iteration holds, for --dry-run."""
    rollout, train = config.rollout, config.train
    labels = ", ".join(f"{entry.label} x {entry.weight:g}" for entry in config.tasks)
    return (
        render(config)
        + f"\n# an iteration: {rollout.prompts} prompts x {rollout.group_size} answers of at most "
        + f"{rollout.max_new_tokens} tokens, {train.epochs * train.minibatches} update(s)\n# prompts:"
        f" {labels}\n"
        + f"# {config.total_updates} iterations = {config.total_updates * rollout.prompts:,} prompts"
    )
