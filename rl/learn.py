"""Gradients of the policy: packed rows, log-probabilities, the objective.

Equal answers to one prompt are computed once (their log-probabilities are the same numbers) and their losses
added up; a picture is encoded once for all answers of its group that stand in a row. Both change nothing in
the result: on short answers they save most of the work. The output of a tool stands in the row as context: it
is no token of an answer, so it enters neither the loss nor a ratio, a length or the entropy.

Legend: T tokens of a packed row, U tokens of its distinct answers, M tokens of all its answers, N answers of
a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from earlyfusion.data.loading.pack import PackedBatch
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.objectives.corrections import fresh, importance_weights
from earlyfusion.rl.objectives.losses import policy_loss
from earlyfusion.rl.objectives.sequences import Totals
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.curriculum import temperature
from earlyfusion.rl.rollouts.experience import Experience
from earlyfusion.rl.rollouts.packing import Trajectory, pack, used_experts

SUMMED = ("loss", "tokens", "outside", "k3", "log_ratio", "ptx", "touched")


@dataclass
class Sums:
    """Sums over the trained tokens of an update, of this process until `reduced`; see losses.PolicyLoss.
    largest: the largest |log ratio|."""

    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0.0))
    largest: float = 0.0

    def add(self, **parts: Tensor | float) -> None:
        """Add to the named sums."""
        for name, value in parts.items():
            self.values[name] += float(value)

    def merge(self, other: Sums) -> None:
        """Add those of another update."""
        self.add(**other.values)
        self.largest = max(self.largest, other.largest)

    def reduced(self, runtime: Runtime) -> dict[str, float]:
        """Sums over processes by name, and `largest` of all."""
        return runtime.sum_dict(self.values) | {"largest": float(runtime.max(self.largest))}


@dataclass
class Piece:
    """A distinct answer to a prompt: what is computed once. answers: those that are it, by their number
    in N."""

    group: int
    trajectory: Trajectory
    answers: list[int]

    @property
    def length(self) -> int:
        """Generated tokens."""
        return len(self.trajectory.ids)

    @property
    def versions(self) -> list[int]:
        """Of the weights that wrote each token."""
        return self.trajectory.completion.versions


def distinct(experience: Experience, groups: Sequence[int]) -> list[Piece]:
    """The distinct answers of these groups that have tokens; routing and the versions of the weights that
    wrote them included in what makes two equal."""
    pieces = []
    for g in groups:
        found: dict[Any, Piece] = {}
        for n, trajectory in enumerate(experience.groups[g].trajectories, experience.bounds[g][0]):
            if not trajectory.ids:
                continue
            routing = trajectory.completion.routing
            experts = None if routing is None else routing.tobytes()
            versions = tuple(trajectory.completion.versions)
            key = (tuple(trajectory.ids), versions, trajectory.inserted, experts)
            found.setdefault(key, Piece(g, trajectory, [])).answers.append(n)
        pieces += list(found.values())
    return pieces


def rows(pieces: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces in order, in rows of at most `limit` tokens (one that is longer makes its own)."""
    row: list[Piece] = []
    tokens = 0
    for piece in pieces:
        if row and tokens + piece.trajectory.total > limit:
            yield row
            row, tokens = [], 0
        row.append(piece)
        tokens += piece.trajectory.total
    if row:
        yield row


def minibatches(order: Sequence[int], parts: int) -> list[list[int]]:
    """Groups in their order, shared out over `parts` as evenly as possible (a part may be empty)."""
    return [list(order[part::parts]) for part in range(parts)]


class Learner:
    """Computes gradients of `model` from experience.

    The policy in the loss is the one that sampled: every token at the temperature of the update that drew it,
    over the tokens that may be drawn (`silent` ids never are). With top_p or min_p the sampler's distribution
    has holes that a gradient must not see: then pi_old is the trainer's own, from a pass before the first
    update. reference: a frozen model for objective.kl_coef, or None.
    """

    def __init__(
        self,
        config: RLConfig,
        model: NativeFusion,
        runtime: Runtime,
        reference: NativeFusion | None = None,
        silent: Sequence[int] = (),
    ) -> None:
        self.config, self.model, self.runtime, self.reference = config, model, runtime, reference
        self.silent_S = torch.tensor(sorted(silent), dtype=torch.int64, device=runtime.device)
        whole = config.rollout.top_p == 1.0 and config.rollout.min_p == 0.0
        self.own_old = config.train.old_policy == "trainer" or config.correction.mode != "none" or not whole
        self.replay = config.rollout.replay_routing
        self._old: dict[int, Tensor] = {}
        self._reference: dict[int, Tensor] = {}

    # ------------------------------------------------------------------------------------ forward passes

    def temperatures(self, row: Sequence[Piece]) -> Tensor:
        """float32 [U]: the temperature every token was drawn at. The schedule is a function of the update,
        and the update is the version that stands beside every token, so a partial rollout has as many
        temperatures as versions."""
        versions = [version for piece in row for version in piece.versions]
        return torch.tensor([temperature(self.config.temperature, version) for version in versions])

    def log_probs(
        self, model: NativeFusion, row: Sequence[Piece], temperature_U: Tensor, replay: bool
    ) -> Tensor:
        """Log-probabilities of the answers' tokens at their temperatures, [U] in nats, differentiable.

        replay: with the experts that the engine used, where they were captured.
        """
        packed, places = pack(model, [piece.trajectory for piece in row], share_pictures=True)
        experts = used_experts(model, places) if replay else nullcontext()
        with experts, self.runtime.accelerator.autocast():
            x_TD = model.embed(packed, feature_of_M=places.feature_of_F)
            hidden_TD = model.decoder(x_TD, packed.segments, None, counted_T=packed.ids >= 0)
            logp_T = hidden_TD.new_zeros(hidden_TD.shape[0], dtype=torch.float32)

            # One pass a temperature: only labelled positions cost, so several cost as much as one.
            for degree in temperature_U.unique().tolist():
                chosen_U = (temperature_U == degree).nonzero().flatten().to(places.positions_M.device)
                at_U, ids_U = (part.index_select(0, chosen_U) for part in (places.positions_M, places.ids_M))
                labels_T = torch.full_like(packed.ids, -100).index_copy(0, at_U, ids_U)
                part_T, _ = resolve("token_log_probs", hidden_TD.device)(
                    hidden_TD, model.decoder.head_weight(), labels_T, temperature=degree
                )
                logp_T = logp_T + part_T  # 0 where there is no label
        hidden_UD = hidden_TD.index_select(0, places.positions_M)
        logp_U = logp_T.index_select(0, places.positions_M)
        return self._without_silent(model, hidden_UD, places.ids_M, logp_U, temperature_U.to(logp_U))

    def _without_silent(
        self, model: NativeFusion, hidden_UD: Tensor, ids_U: Tensor, logp_U: Tensor, temperature_U: Tensor
    ) -> Tensor:
        """log pi(id) - log(1 - pi(silent ids)): over what the sampler may draw. The softmax's normaliser
        comes from the chosen token's own logit, so only a few columns of the vocabulary are needed."""
        if not self.silent_S.numel():
            return logp_U
        head_VD, hidden_UD = model.decoder.head_weight(), hidden_UD.float()
        own_U = (hidden_UD * head_VD.index_select(0, ids_U).float()).sum(1) / temperature_U
        silent_US = hidden_UD @ head_VD.index_select(0, self.silent_S).float().T / temperature_U.unsqueeze(1)
        mass_U = (silent_US - (own_U - logp_U).unsqueeze(1)).exp().sum(1)
        return logp_U - torch.log1p(-mass_U.clamp(max=1 - 1e-6))

    @torch.no_grad()
    def prepare(self, experience: Experience) -> float:
        """Log-probabilities that must be known before the first update: of the trainer's own old policy,
        where the objective or the correction asks for it, and of the reference. Returns the largest |trainer
        - engine|."""
        self._old, self._reference, largest = {}, {}, 0.0
        if self.own_old:
            self._old = self._all_log_probs(self.model, experience, self.replay)
            answers = experience.answers
            for n, logp in self._old.items():
                largest = max(largest, float((logp - _sampler_logp(answers[n])).abs().max()))
        if self.config.objective.kl_coef and self.reference is not None:
            self._reference = self._all_log_probs(self.reference, experience, replay=False)
        return largest

    def _all_log_probs(self, model: NativeFusion, experience: Experience, replay: bool) -> dict[int, Tensor]:
        """Log-probabilities of every answer that has tokens, by its number in N."""
        found: dict[int, Tensor] = {}
        for row in rows(distinct(experience, range(len(experience.groups))), self.config.train.row_tokens):
            logp_U = self.log_probs(model, row, self.temperatures(row), replay)
            for piece, logp in zip(row, logp_U.cpu().split([piece.length for piece in row])):
                found.update({n: logp for n in piece.answers})
        return found

    # ----------------------------------------------------------------------------------------- gradients

    def gradients(self, experience: Experience, groups: Sequence[int], version: int, sums: Sums) -> None:
        """Add the gradients of the objective over these groups of this process (and the others' shares of the
        same minibatch: every process calls it); none where no token of any process is trained. version: of
        the weights that are trained, for stale tokens."""
        pieces = distinct(experience, groups)
        masks = self._masks(experience, pieces, version)
        counts = {
            "tokens": sum(float(mask.sum()) for mask in masks.values()),
            "answers": float(sum(bool(mask.any()) for mask in masks.values())),
        }
        counts = self.runtime.sum_dict(counts)
        if not counts["tokens"]:
            return
        total = Totals(*torch.tensor([counts["tokens"], counts["answers"]], dtype=torch.float64))
        pieces = [piece for piece in pieces if not self._settled(experience, piece, version)]
        for row in rows(pieces, self.config.train.row_tokens):
            loss = self._row_loss(experience, row, masks, total, sums)
            if loss.requires_grad:
                loss.backward()

    def _settled(self, experience: Experience, piece: Piece, version: int) -> bool:
        """Whether nothing in this piece has a gradient: every advantage is 0 and the policy is still the one
        that sampled, so that the squared log ratio is at its bottom. Its tokens stay in the totals. In a
        solved task that is most of the work."""
        train, kl_coef = self.config.train, self.config.objective.kl_coef
        on_policy = train.epochs * train.minibatches == 1 and not self.own_old and not kl_coef
        if not on_policy or self.config.objective.loss is not None:
            return False
        if bool(experience.advantages_N[piece.answers].any()):
            return False
        return all(written == version for written in piece.versions)

    def _masks(self, experience: Experience, pieces: Sequence[Piece], version: int) -> dict[int, Tensor]:
        """bool tokens of every answer that are trained: not cut off by overlong filtering, not too stale."""
        answers = [(n, piece.versions) for piece in pieces for n in piece.answers]
        if not answers:
            return {}
        numbers, lengths = [n for n, _ in answers], [len(versions) for _, versions in answers]
        versions_M = torch.tensor([written for _, versions in answers for written in versions])
        fresh_M = fresh(self.config.stale, versions_M, version, Segments.from_lengths(lengths))
        mask_M = fresh_M & experience.trained_N[numbers].repeat_interleave(torch.tensor(lengths))
        return dict(zip(numbers, mask_M.split(lengths)))

    def _row_loss(
        self,
        experience: Experience,
        row: Sequence[Piece],
        masks: dict[int, Tensor],
        total: Totals,
        sums: Sums,
    ) -> Tensor:
        logp_U = self.log_probs(self.model, row, self.temperatures(row), self.replay)
        device = logp_U.device

        # From distinct answers to all of them: where the tokens of each stand among the U.
        numbers, index, lengths, engine, start = [], [], [], [], 0
        for piece in row:
            numbers += piece.answers
            lengths += [piece.length] * len(piece.answers)
            index += [torch.arange(start, start + piece.length)] * len(piece.answers)
            engine += [_sampler_logp(piece.trajectory)] * len(piece.answers)
            start += piece.length
        segments = Segments.from_lengths(lengths)
        logp_M, engine_M = logp_U.index_select(0, torch.cat(index).to(device)), torch.cat(engine).to(device)
        mask_M = torch.cat([masks[n] for n in numbers]).to(device)
        old_M, reference_M, weight_M = engine_M, None, None
        if self.own_old:
            old_M = torch.cat([self._old[n] for n in numbers]).to(device)
        if self._reference:
            reference_M = torch.cat([self._reference[n] for n in numbers]).to(device)
        if self.config.correction.mode != "none":
            correction = importance_weights(self.config.correction, old_M, engine_M, segments, mask_M)
            weight_M = correction.weight_T
            sums.add(touched=correction.touched)

        out = policy_loss(
            self.config.objective,
            logp_M,
            old_M,
            experience.advantages_N[numbers],
            segments,
            mask_T=mask_M,
            weight_T=weight_M,
            ref_logp_T=reference_M,
            batch=total,
        )
        sums.add(loss=out.loss.detach(), tokens=out.tokens, outside=out.outside)
        sums.add(k3=out.k3, log_ratio=out.log_ratio)
        sums.largest = max(sums.largest, float(out.log_ratio_max))
        # Every parameter takes part whatever the row holds, so that
        # all processes exchange the same gradients.
        return out.loss + self.model.vision_tower.zero_anchor() + self.model.mm_projector.zero_anchor()

    def ptx_gradients(self, batches: Sequence[PackedBatch], coef: float, sums: Sums) -> float:
        """Add the gradients of coef * -sum w log pi / sum w on curated rows (K2), divided by their own
        weights over all processes: more or longer rollouts in the batch do not dilute it. Returns the mean
        loss in nats, without coef."""
        weights = [batch.loss_weights[batch.labels >= 0].double().sum().cpu() for batch in batches]
        total = self.runtime.sum(torch.stack(weights).sum()).clamp_min(1e-12)
        loss_sum = 0.0
        for batch in batches:
            with self.runtime.accelerator.autocast():
                out = self.model(batch)
            loss = coef * out.loss_sum / total.to(out.loss_sum)
            loss.backward()
            loss_sum += float(loss.detach())
        sums.add(ptx=loss_sum)
        return float(self.runtime.sum(loss_sum)) / max(coef, 1e-12)


def _sampler_logp(trajectory: Trajectory) -> Tensor:
    """fp32 log-probabilities of the answer's tokens under the distribution they were drawn from."""
    return torch.tensor(trajectory.completion.logprobs, dtype=torch.float32)
