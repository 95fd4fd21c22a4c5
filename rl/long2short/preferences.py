"""Preference pairs for shorter answers, and the gradients of their loss (DPO, k1.5 2.4).

Legend: P pairs of the run, B pairs of a row, N distinct answers of a row, U tokens of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.data.loading.order import digest64
from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.segments import Segments
from earlyfusion.rl.learn import Learner, Piece
from earlyfusion.rl.long2short.samples import Answered
from earlyfusion.rl.objectives.sequences import sequence_sums, wide

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
        told: dict[str, Any] = {"label": one.label, "key": problem.key, "target": problem.target}
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


Held = dict[tuple[int, int], Piece]
"""Answers of a row, by the numbers of problem and answer."""


class PreferenceLearner:
    """Gradients of the DPO loss over pairs, with the learner's packed rows: equal answers and pictures
    computed once.

    beta: strength of the pull towards the start. nll: weight of the chosen answers' own mean negative
    log-likelihood (0: DPO alone). reference_P2: log-probabilities of chosen and rejected answers under the
    frozen start.
    """

    def __init__(
        self, learner: Learner, answered: Sequence[Answered], pairs: Sequence[Pair], beta: float, nll: float
    ) -> None:
        self.learner, self.answered, self.pairs, self.beta, self.nll = learner, answered, pairs, beta, nll
        self.row_tokens = learner.config.train.row_tokens
        self.reference_P2 = torch.zeros(len(pairs), 2)

    def set_reference(self) -> None:
        """Read the log-probabilities of the model, before it is trained."""
        with torch.no_grad():
            for row, held in self.rows(range(len(self.pairs))):
                self.reference_P2[row] = self.log_probs(row, held).cpu()

    def log_probs(self, row: Sequence[int], held: Held) -> Tensor:
        """Of the chosen and of the rejected answers of these pairs, [B, 2]."""
        pieces = list(held.values())
        lengths = [piece.length for piece in pieces]
        logp_U = self.learner.log_probs(pieces, torch.ones(sum(lengths)), replay=False)
        logp_N = sequence_sums(logp_U, Segments.from_lengths(lengths))
        places = {key: n for n, key in enumerate(held)}
        pairs = [self.pairs[p] for p in row]
        return logp_N[torch.tensor([[places[g, i], places[g, j]] for g, i, j in pairs])]

    def gradients(self, batch: Sequence[int], whole: int) -> dict[str, float]:
        """Add the gradients of these pairs of an update of `whole` pairs. Returns sums over them: loss,
        margins, margins above 0, chosen and rejected log ratios to the start, tokens of the rows, pairs."""
        sums: dict[str, float] = dict.fromkeys(SUMS, 0.0)
        for row, held in self.rows(batch):
            for name, value in self.row(row, held, whole).items():
                sums[name] += float(value)
        return sums

    def rows(self, batch: Sequence[int]) -> Iterator[tuple[list[int], Held]]:
        """Pairs in rows of at most row_tokens, with the answers that each row holds; both answers of a pair
        stand in one row, equal ones once."""
        row: list[int] = []
        held: Held = {}
        # Pairs of one problem share their answers, if they stand in one row.
        for p in sorted(batch, key=lambda p: (self.pairs[p].problem, p)):
            number, *two = self.pairs[p]
            both = {(number, i): Piece(self.answered[number].trajectory(i), [i]) for i in two}
            joined = held | both
            if row and sum(piece.trajectory.total for piece in joined.values()) > self.row_tokens:
                yield row, held
                row, joined = [], both
            row.append(p)
            held = joined
        if row:
            yield row, held

    def row(self, row: Sequence[int], held: Held, whole: int) -> dict[str, Tensor | float]:
        """Backward of one row; its sums, as `gradients` names them."""
        model = self.learner.model
        logp_B2 = self.log_probs(row, held)
        start_B2 = self.reference_P2[list(row)].to(logp_B2.device)
        mean, margins_B = dpo_loss(logp_B2, start_B2, self.beta)
        loss = mean * (len(row) / whole)
        # DPO alone may lower the likelihood of both answers of a pair.
        if self.nll:
            pairs = [self.pairs[p] for p in row]
            lengths = [self.answered[pair.problem].answers[pair.chosen].tokens for pair in pairs]
            loss = loss - self.nll * (logp_B2[:, 0] / torch.tensor(lengths).to(logp_B2)).sum() / whole

        # Every parameter takes part whatever the row holds, so that
        # all processes exchange the same gradients.
        (loss + model.vision_anchor()).backward()
        chosen, rejected = (logp_B2.detach() - start_B2).double().sum(0)
        tokens = sum(piece.trajectory.total for piece in held.values())
        sums = (loss.detach(), margins_B.sum(), (margins_B > 0).sum(), chosen, rejected, tokens, len(row))
        return dict(zip(SUMS, sums))
