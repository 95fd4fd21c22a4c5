"""Preference training for shorter answers (DPO, k1.5 2.4): sample, pair, train, measure.

earlyfusion long2short dpo --model DIR --recipe vision-rl --problems 512 \\
    --out runs/dpo --set optim.lr=1e-4

Answers are sampled once from the start, made into pairs (the shortest right answer against longer wrong ones
and right ones of 1.5 times its length), and the policy is trained against the frozen start. Log-probabilities
are those of temperature 1 over the tokens that may be drawn. A stopped run goes on bit for bit with --resume:
samples are on disk, the start's log-probabilities in the checkpoint, and which pairs a step takes is a
function of the seed and the step.

OUT holds samples.jsonl, pairs.jsonl, metrics.jsonl, heldout/{before,after}.jsonl, checkpoints, model,
summary.json and report.html.

Legend: P pairs of the run, B pairs of a row, U tokens of their answers.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor

from earlyfusion.data.loading.order import digest64
from earlyfusion.data.options import verb
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.eval.measure import Answer, ask
from earlyfusion.eval.measured import solved
from earlyfusion.eval.rewards import Rewards
from earlyfusion.eval.stats import mean_estimate
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record, read_jsonl, write_atomic, write_json, write_jsonl
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.scheduler import token_rules
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline import build
from earlyfusion.pipeline.checkpoint import Checkpointer, latest
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_REQUEUE, TrainingStopped
from earlyfusion.pipeline.report.page import read_run, write_page
from earlyfusion.pipeline.runtime import Runtime, exchange_gradients, seed_everything
from earlyfusion.pipeline.schedule import linear
from earlyfusion.pipeline.step import peak_memory_bytes
from earlyfusion.pipeline.track import Tracker
from earlyfusion.pipeline.update import Guard, check_frozen, update
from earlyfusion.rl.learn import Learner, Piece
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
from earlyfusion.rl.objectives.losses import sequence_sums, wide
from earlyfusion.rl.recipe import start_directory


class DpoOptions(SampleOptions):
    beta: Annotated[float, Field(gt=0)] = 0.1
    """strength of the pull towards the start"""
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


SUMS = ("loss", "margin", "preferred", "chosen", "rejected", "tokens", "pairs")
"""What is added up over the pairs of an update."""
LONGER = 1.5
"""k1.5: a right answer this many times as long as the shortest one counts as rejected."""


class Pair(NamedTuple):
    """A problem by its number, and two of its answers by theirs."""

    problem: int
    chosen: int
    rejected: int


def make_pairs(answered: Sequence[Answered]) -> list[Pair]:
    """The shortest right answer of a problem against each longer wrong one, and each right one of at least
    LONGER times its length, in the order of the problems.

    A wrong answer that is not longer makes no pair: it would teach length the wrong way round. Raises
    UserError when there is none.
    """
    pairs = []
    for number, one in enumerate(answered):
        chosen = one.shortest()
        if chosen is None:
            continue
        least = one.answers[chosen].tokens
        for index, answer in enumerate(one.answers):
            # Right and hardly longer is no worse: such an answer is neither chosen nor rejected.
            if answer.tokens > least and not (answer.right and answer.tokens < LONGER * least):
                pairs.append(Pair(number, chosen, index))
    if not pairs:
        some = sum(one.shortest() is not None for one in answered)
        raise UserError(
            f"no pairs: {some} of {len(answered)} problems got a right answer, and none of these a longer"
            f" wrong one or a right one of {LONGER:g} times its length; take more --problems or"
            " --samples, or other tasks"
        )
    return pairs


def pair_lines(answered: Sequence[Answered], pairs: Sequence[Pair]) -> str:
    """pairs.jsonl: for reading, and what a resume must train on again."""
    lines = []
    for pair in pairs:
        one = answered[pair.problem]
        problem = one.prompt.problem
        told: Record = {"label": one.label, "key": problem.key, "target": problem.target}
        for name, index in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            answer = one.answers[index]
            told[name] = {"text": answer.text, "ids": answer.ids, "right": answer.right}
        lines.append(json.dumps(told, ensure_ascii=False) + "\n")
    return "".join(lines)


def batches(pairs: int, batch: int, epochs: int, seed: int) -> list[list[int]]:
    """The pairs of every update: each epoch all of them once, in an order of its own."""
    steps: list[list[int]] = []
    for epoch in range(epochs):
        # A function of seed and epoch: a resume needs no state of a generator.
        generator = torch.Generator().manual_seed(digest64("dpo", seed, epoch) >> 16)
        order = torch.randperm(pairs, generator=generator).tolist()
        steps += [order[start : start + batch] for start in range(0, pairs, batch)]
    return steps


# ---- The loss.


def dpo_loss(logp_B2: Tensor, reference_B2: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """(mean of -log sigmoid(m), margins m_B detached), m = beta [(chosen - ref_chosen) - (rejected -
    ref_rejected)].

    [B, 2]: log-probabilities of whole chosen and rejected answers (`sequences.sequence_sums`) under policy
    and reference. Derivative by chosen: -beta sigmoid(-m) / B. Source: 2305.18290 eq. 7. No pairs: loss 0.
    """
    # Differences of long sums: in bfloat16 little of them would be left.
    ours_B, theirs_B = (wide(one_B2[:, 0]) - wide(one_B2[:, 1]) for one_B2 in (logp_B2, reference_B2))
    margins_B = beta * (ours_B - theirs_B.detach())
    return -F.logsigmoid(margins_B).sum() / max(1, margins_B.numel()), margins_B.detach()


# ---- Before and after: held-out problems, paired by problem.

# The two that shortening trades.
METRICS = ("accuracy", "tokens")
Row = Record


def judged(question: Any, own: Sequence[Answer], way: str, rewards: Rewards) -> Row:
    """The row of a question: accuracy and tokens of its answer, or means over its samples."""
    # One call a question keeps the judgements beside their answers.
    scored = rewards([(question.problem, one.judged) for one in own])
    right = [solved(question.problem.task, rewards.span.share(one.value)) for one in scored]
    row: Row = {"label": question.entry.label, "key": question.problem.key, "way": way}
    row |= {"accuracy": fmean(right), "tokens": fmean(len(one.ids) for one in own)}
    return row | {"answer": own[0].text.strip()}


def pairs_of(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row]]:
    """What was measured both times."""
    name = itemgetter("label", "key", "way")
    first = {name(one): one for one in before}
    return [(first[name(one)], one) for one in after if name(one) in first]


def compared(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """A row for every entry (and "all"), way and metric: n, means before and after, the mean paired
    difference `value` and its 95 % Student t interval."""
    groups: dict[tuple[str, str], list[tuple[Row, Row]]] = defaultdict(list)
    for pair in pairs_of(before, after):
        # Problems count alike in the mean over all entries.
        for label in (pair[1]["label"], "all"):
            groups[label, pair[1]["way"]].append(pair)
    rows = []
    for (label, way), own in groups.items():
        for metric in METRICS:
            a, b = (np.array([one[metric] for one in side]) for side in zip(*own))
            row = {"label": label, "way": way, "metric": metric, "before": a.mean(), "after": b.mean()}
            rows.append(row | vars(mean_estimate(b - a)))
    return rows


def write_report(out: Path, summary: Record) -> Path:
    """OUT/report.html: the table before and after, the curves, and greedy answers that changed, the largest
    changes of length first. One file that loads nothing from elsewhere."""
    pairs = pairs_of(*(read_jsonl(out / "heldout" / f"{name}.jsonl") for name in ("before", "after")))
    pairs.sort(key=lambda pair: -abs(pair[1]["tokens"] - pair[0]["tokens"]))
    page = {"title": f"long2short · {out.resolve().name}", "summary": summary, "pairs": pairs}
    return write_page(out / "report.html", "long2short.html", read_run(out) | page)


# ---- The run.


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
        own = options.model_dump(include={"beta", "batch", "epochs", "problems"})
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
        answered = self.sampler.gather(self.runtime)
        if answered is None:
            self.say("stopped while it sampled; --resume goes on from here")
            return EXIT_REQUEUE
        self.take(answered)
        lines = pair_lines(answered, self.pairs)
        if main:
            write_atomic(self.out / "pairs.jsonl", lines)
            build.write_recipe(self.out, self.config)
        # What a resume compares: the pairs with all their tokens.
        self.digest = f"{digest64('pairs', lines):016x}"
        self.restore_or_begin()
        steps = batches(len(self.pairs), options.batch, options.epochs, options.seed)
        self.say(f"{len(self.pairs)} pairs of {len(answered)} problems, {len(steps)} updates")
        if not self.updates(steps):
            self.say("stopped and saved; --resume goes on")
            return EXIT_REQUEUE
        after = self.look("after")
        if main:
            self.finish(compared(before, after), len(steps))
        return EXIT_OK

    def take(self, answered: Sequence[Answered]) -> None:
        """Train on the pairs of these answers. reference_P2: log-probabilities of chosen and rejected answers
        under the frozen start."""
        self.answered, self.pairs = answered, make_pairs(answered)
        self.reference_P2 = torch.zeros(len(self.pairs), 2)

    def look(self, name: str) -> list[Row]:
        """Answer eval.problems held-out problems of every entry under the weights as they are, judged by the
        run's own reward; or what was measured before the stop."""
        section, rollout = self.config.eval, self.config.rollout
        path = self.out / "heldout" / f"{name}.jsonl"
        # The start is measured once, whatever happens to the run.
        held = read_jsonl(path) if name == "before" else []
        if self.runtime.is_main and section.problems and not held:
            self.model.eval()
            asked = ask(
                self.model,
                self.tokenizer,
                self.config.measured,
                problems=section.problems,
                seed=section.seed,
                samples=section.samples,
                max_new_tokens=rollout.max_new_tokens,
                slots=rollout.slots,
            )
            # Greedy answers may all be short already where samples are not.
            ways = {"greedy": [[one] for one in asked.greedy], "sampled": asked.samples}
            for way, answers in ways.items():
                for question, own in zip(asked.questions, answers):
                    if own:
                        held.append(judged(question, own, way, self.sampler.rewards))
            write_jsonl(path, held)
        self.runtime.barrier()
        return held

    def restore_or_begin(self) -> None:
        """The start's log-probabilities, or everything that the checkpoint holds."""
        start = self.start
        if start is None:
            self.model.eval()
            self.set_reference()
            # Every process computes with the numbers of rank 0, whatever its own rounding.
            own = self.reference_P2.double() * self.runtime.is_main
            self.reference_P2 = self.runtime.sum(own).float().cpu()
            return
        if start.trainer["pairs"] != self.digest:
            raise UserError(
                f"cannot resume {start.path}: {self.out / FILE} no longer gives the pairs it was trained"
                " on; put the file back, or start another run"
            )
        self.step = start.step
        # Not read again: another packing would round otherwise, and a resume be another run.
        self.reference_P2 = start.trainer["reference"].clone()
        self.guard.load_state_dict(start.trainer["guard"])
        start.restore_weights(self.model, self.optimizer)
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

    def update(self, batch: list[int], total: int) -> Record:
        """One update; its numbers: margin is beta times the log ratio of chosen minus that of rejected, in
        nats, chosen and rejected the mean log ratios to the start, in nats an answer."""
        begun, config, runtime = time.perf_counter(), self.config, self.runtime
        # Every process takes its share of the pairs and their gradients are added up.
        sums = self.gradients(batch[runtime.rank :: runtime.world], len(batch))
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

    def set_reference(self) -> None:
        """Read the log-probabilities of the model, before it is trained."""
        with torch.no_grad():
            for row, held in self.rows(range(len(self.pairs))):
                self.reference_P2[row] = self.log_probs(held).cpu()

    def log_probs(self, pieces: Sequence[Piece]) -> Tensor:
        """Of the chosen and of the rejected answers of a row, [B, 2]."""
        lengths = [piece.length for piece in pieces]
        logp_U = self.learner.log_probs(pieces, torch.ones(sum(lengths)), replay=False)
        return sequence_sums(logp_U, Segments.from_lengths(lengths)).unflatten(0, (-1, 2))

    def gradients(self, batch: Sequence[int], whole: int) -> dict[str, float]:
        """Add the gradients of these pairs of an update of `whole` pairs. Returns sums over them: loss,
        margins, margins above 0, chosen and rejected log ratios to the start, tokens of the rows, pairs."""
        sums: dict[str, float] = dict.fromkeys(SUMS, 0.0)
        for row, held in self.rows(batch):
            logp_B2 = self.log_probs(held)
            start_B2 = self.reference_P2[row].to(logp_B2.device)
            mean, margins_B = dpo_loss(logp_B2, start_B2, self.options.beta)
            loss = mean * (len(row) / whole)
            # Every parameter takes part whatever the row holds, so that
            # all processes exchange the same gradients.
            (loss + self.model.vision_anchor()).backward()

            chosen, rejected = (logp_B2.detach() - start_B2).double().sum(0)
            tokens = sum(piece.trajectory.total for piece in held)
            told = (loss.detach(), margins_B.sum(), (margins_B > 0).sum(), chosen, rejected, tokens, len(row))
            for name, value in zip(SUMS, told):
                sums[name] += float(value)
        return sums

    def rows(self, batch: Sequence[int]) -> Iterator[tuple[list[int], list[Piece]]]:
        """Pairs in rows of at most row_tokens (one that is longer makes its own), with the chosen and the
        rejected answer of each."""
        row: list[int] = []
        held: list[Piece] = []
        tokens = 0
        for p in batch:
            number, *two = self.pairs[p]
            # Pairs of one problem seldom meet in an update: a chosen answer is not looked for twice.
            both = [Piece(self.answered[number].trajectory(i), [i]) for i in two]
            more = sum(piece.trajectory.total for piece in both)
            if row and tokens + more > self.config.train.row_tokens:
                yield row, held
                row, held, tokens = [], [], 0
            row.append(p)
            held += both
            tokens += more
        if row:
            yield row, held

    def save(self) -> None:
        reference = self.reference_P2
        self.checkpoints.save(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            trainer={"guard": self.guard.state_dict(), "pairs": self.digest, "reference": reference},
            lanes={self.runtime.rank: {}},
        )

    def finish(self, rows: list[Row], total: int) -> None:
        """The model directory, summary, report, and the table."""
        options, pairs = self.options, len(self.pairs)
        note = (
            f"DPO for shorter answers (long2short, Kimi k1.5 section 2.4) from `{self.folder}`: {pairs} pairs"
            f" of its own answers to {options.problems} problems, beta {options.beta:g}. Chosen: the shortest"
            " right answer. Rejected: longer wrong ones, and right ones of at least"
            f" {LONGER:g} times its length."
        )
        facts = {"name": self.config.run.name, "steps": self.step, "seed": options.seed, "notes": [note]}
        facts["base"] = str(self.folder)
        directory = save_beside(self.model, self.tokenizer, self.out / "model", facts, self.folder)
        summary = {"model": str(self.folder), "pairs": pairs, "problems": options.problems}
        summary |= {"steps": self.step, "of": total, "heldout": rows}
        write_json(self.out / "summary.json", summary)

        show_differences("held-out problems, before and after", rows)
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
