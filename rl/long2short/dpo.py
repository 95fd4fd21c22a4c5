"""DPO for length (k1.5 2.4): the shortest right answer against longer wrong ones and right ones of 1.5 times
its length.

Answers are sampled once from the start (long2short_samples), made into pairs, and the policy is trained
against the frozen start with MuonClip or AdamW. Log-probabilities are those of temperature 1 over the tokens
that may be drawn. A stopped run goes on bit for bit with --resume: samples are on disk, the start's
log-probabilities in the checkpoint, and which pairs a step takes is a function of the seed and the step.

    OUT/samples.jsonl  pairs.jsonl  metrics.jsonl  heldout/{before,after}.jsonl  checkpoints/  model/
                       summary.json
    OUT/report.html

Legend: P pairs, N distinct answers of a row, U tokens of them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earlyfusion.data.loading.order import digest64
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import write_atomic
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.rl.learn import Learner, Piece, rows
from earlyfusion.rl.long2short.preferences import LONGER, dpo_loss, preference_pairs
from earlyfusion.rl.long2short.samples import Answered
from earlyfusion.rl.objectives.sequences import sequence_sums


@dataclass(frozen=True)
class DpoOptions:
    """What DPO takes beside the recipe. beta: strength of the pull towards the start. longer: a right answer
    of this many times the chosen one's length is rejected. label_smoothing: share of pairs believed to be the
    wrong way round. nll: weight of the chosen answers' own mean negative log-likelihood (0: DPO alone).
    batch: pairs of an update. epochs: passes over the pairs. per_problem: most pairs of one problem (0: all).
    """

    beta: float = 0.1
    longer: float = LONGER
    label_smoothing: float = 0.0
    nll: float = 0.0
    batch: int = 16
    epochs: int = 2
    per_problem: int = 0

    def check(self) -> None:
        """Raises UserError for numbers out of range."""
        for name, fits, wanted in (
            ("beta", self.beta > 0, "above 0"),
            ("longer", self.longer > 1, "above 1"),
            ("label-smoothing", 0 <= self.label_smoothing < 0.5, "in [0, 0.5)"),
            ("nll", 0 <= self.nll < math.inf, "at least 0"),
            ("batch", self.batch >= 1, "at least 1"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("pairs-per-problem", self.per_problem >= 0, "at least 0 (0: all)"),
        ):
            if not fits:
                value = (
                    self.per_problem if name == "pairs-per-problem" else getattr(self, name.replace("-", "_"))
                )
                raise UserError(f"--{name} {value}: expected {wanted}")


@dataclass(frozen=True)
class Pair:
    """A problem by its number, and two of its answers by theirs."""

    problem: int
    chosen: int
    rejected: int


def make_pairs(answered: Sequence[Answered], options: DpoOptions) -> list[Pair]:
    """The pairs in the order of the problems, the longest rejected answers first where per_problem cuts off.

    Raises UserError when there is none.
    """
    flat = [(g, i) for g, one in enumerate(answered) for i in range(len(one.answers))]
    answers = [answered[g].answers[i] for g, i in flat]
    found = preference_pairs(
        torch.tensor([a.tokens for a in answers]),
        torch.tensor([a.right for a in answers], dtype=torch.bool),
        torch.tensor([g for g, _ in flat], dtype=torch.int64),
        options.longer,
    )
    by_problem: dict[int, list[Pair]] = {}
    for chosen, rejected in found:
        g = flat[chosen][0]
        by_problem.setdefault(g, []).append(Pair(g, flat[chosen][1], flat[rejected][1]))
    pairs = []
    for g, own in sorted(by_problem.items()):
        if options.per_problem and len(own) > options.per_problem:
            own.sort(key=lambda pair: (-answered[g].answers[pair.rejected].tokens, pair.rejected))
            own = own[: options.per_problem]
        pairs += own
    if not pairs:
        some = sum(any(a.right for a in one.answers) for one in answered)
        raise UserError(
            f"no pairs: {some} of {len(answered)} problems got a right answer, and none of these a longer"
            f" wrong one or a right one of {options.longer:g} times its length; take more --problems or"
            " --samples, or other tasks"
        )
    return pairs


def write_pairs(path: Path, answered: Sequence[Answered], pairs: Sequence[Pair]) -> None:
    """pairs.jsonl, for reading."""
    lines = []
    for pair in pairs:
        one = answered[pair.problem]
        told: dict[str, Any] = {"label": one.label, "key": one.problem.key, "target": one.problem.target}
        for name in ("chosen", "rejected"):
            answer = one.answers[getattr(pair, name)]
            told[name] = {"text": answer.text, "tokens": answer.tokens, "right": answer.right}
        lines.append(json.dumps(told, ensure_ascii=False) + "\n")
    write_atomic(path, "".join(lines))


def pairs_digest(answered: Sequence[Answered], pairs: Sequence[Pair]) -> str:
    """16 hexadecimal digits over all pairs with their tokens: a resume must train on the same ones."""
    parts = [
        (one.problem.key, one.answers[pair.chosen].ids, one.answers[pair.rejected].ids)
        for pair in pairs
        for one in (answered[pair.problem],)
    ]
    return f"{digest64('pairs', json.dumps(parts)):016x}"


class PreferenceLearner:
    """Gradients of the DPO loss over pairs, with the learner's packed rows: equal answers and pictures
    computed once.

    `reference` [P, 2]: log-probabilities of chosen and rejected answers under the frozen start.
    """

    def __init__(
        self,
        learner: Learner,
        answered: Sequence[Answered],
        pairs: Sequence[Pair],
        options: DpoOptions,
        row_tokens: int,
    ) -> None:
        self.learner, self.answered, self.pairs, self.options = learner, answered, pairs, options
        self.row_tokens = row_tokens
        self.reference_P2 = torch.zeros(len(pairs), 2)

    def set_reference(self, model: NativeFusion) -> None:
        """Read the log-probabilities of `model`, before it is trained."""
        places = {
            (p.problem, i): self._piece(p.problem, i) for p in self.pairs for i in (p.chosen, p.rejected)
        }
        sums: dict[tuple[int, int], float] = {}
        with torch.no_grad():
            for row in rows([places[key] for key in sorted(places)], self.row_tokens):
                for piece, value in zip(row, self._sums(model, row).tolist()):
                    sums[piece.group, piece.answers[0]] = value
        self.reference_P2 = torch.tensor(
            [[sums[p.problem, p.chosen], sums[p.problem, p.rejected]] for p in self.pairs]
        )

    def gradients(self, batch: Sequence[int], whole: int) -> Tensor:
        """Add the gradients of these pairs of an update of `whole` pairs. Returns sums, float64 [7]: loss,
        margins, margins above 0, chosen and rejected log ratios to the start, tokens of the rows, pairs."""
        sums = torch.zeros(7, dtype=torch.float64)
        for row in self._rows(batch):
            sums += self._row(row, whole)
        return sums

    def _piece(self, problem: int, index: int) -> Piece:
        return Piece(problem, self.answered[problem].trajectory(index), [index])

    def _sums(self, model: NativeFusion, row: Sequence[Piece]) -> Tensor:
        """Log-probabilities [N] of whole answers."""
        lengths = [len(piece.trajectory.ids) for piece in row]
        logp_U = self.learner.log_probs(model, row, torch.ones(sum(lengths)), replay=False)
        return sequence_sums(logp_U, Segments.from_lengths(lengths))

    def _rows(self, batch: Sequence[int]) -> Iterator[list[int]]:
        """Pairs in rows of at most row_tokens; both answers of a pair stand in one row, equal ones once."""
        row: list[int] = []
        held: set[tuple[int, int]] = set()
        tokens = 0
        for p in sorted(batch, key=lambda p: (self.pairs[p].problem, p)):
            pair = self.pairs[p]
            fresh = {(pair.problem, pair.chosen), (pair.problem, pair.rejected)}
            if row and tokens + self._tokens(fresh - held) > self.row_tokens:
                yield row
                row, held, tokens = [], set(), 0
            tokens += self._tokens(fresh - held)
            row.append(p)
            held |= fresh
        if row:
            yield row

    def _tokens(self, places: set[tuple[int, int]]) -> int:
        return sum(len(self.answered[g].prompt.ids) + self.answered[g].answers[i].tokens for g, i in places)

    def _row(self, row: Sequence[int], whole: int) -> Tensor:
        pieces: dict[tuple[int, int], Piece] = {}
        for p in row:
            pair = self.pairs[p]
            for index in (pair.chosen, pair.rejected):
                if (pair.problem, index) not in pieces:
                    pieces[pair.problem, index] = self._piece(pair.problem, index)
        number = {key: n for n, key in enumerate(pieces)}
        model, options = self.learner.model, self.options
        logp_N = self._sums(model, list(pieces.values()))
        index_B2 = torch.tensor(
            [
                [number[pair.problem, i] for i in (pair.chosen, pair.rejected)]
                for pair in (self.pairs[p] for p in row)
            ]
        ).to(logp_N.device)
        chosen_B, rejected_B = logp_N[index_B2[:, 0]], logp_N[index_B2[:, 1]]
        start_B2 = self.reference_P2[list(row)].to(logp_N.device)
        out = dpo_loss(
            chosen_B, rejected_B, start_B2[:, 0], start_B2[:, 1], options.beta, options.label_smoothing
        )
        loss = out.loss * (len(row) / whole)
        if options.nll:
            lengths_B = torch.tensor(
                [
                    float(self.answered[self.pairs[p].problem].answers[self.pairs[p].chosen].tokens)
                    for p in row
                ]
            )
            loss = loss - options.nll * (chosen_B / lengths_B.to(logp_N.device)).sum() / whole
        # Every parameter takes part whatever the row holds, so that
        # all processes exchange the same gradients.
        (loss + model.vision_tower.zero_anchor() + model.mm_projector.zero_anchor()).backward()
        ratios = torch.stack([chosen_B.detach() - start_B2[:, 0], rejected_B.detach() - start_B2[:, 1]])
        tokens = sum(piece.trajectory.total for piece in pieces.values())
        told = [float(loss.detach()), float(out.margins_B.sum()), float((out.margins_B > 0).sum())]
        return torch.tensor(
            [*told, *ratios.double().sum(1).tolist(), float(tokens), float(len(row))]
        ).double()


def batches(pairs: int, batch: int, epochs: int, seed: int) -> list[list[int]]:
    """The pairs of every update: each epoch all of them once, in an order of its own."""
    steps: list[list[int]] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(digest64("dpo", seed, epoch) >> 16)
        order = torch.randperm(pairs, generator=generator).tolist()
        steps += [order[start : start + batch] for start in range(0, pairs, batch)]
    return steps


def record(sums: Tensor, start: float) -> dict[str, Any]:
    """Numbers of an update for metrics.jsonl. margin: beta times the log ratio of chosen minus that of
    rejected, nats; chosen, rejected: mean log ratio to the start, nats an answer."""
    loss, margin, above, chosen, rejected, tokens, count = sums.tolist()
    seconds, pairs = time.perf_counter() - start, max(1.0, count)
    return {
        "loss": loss,
        "margin": margin / pairs,
        "preferred": above / pairs,
        "chosen": chosen / pairs,
        "rejected": rejected / pairs,
        "pairs": count,
        "tokens_per_s": tokens / seconds,
        "step_s": seconds,
    }


def options_tree(options: DpoOptions) -> dict[str, Any]:
    """The options as plain JSON, part of what a resume compares."""
    return asdict(options)
