"""One update of the policy: packed rows, log-probabilities, the objective, gradients of all processes.

Equal answers to one prompt are computed once (their log-probabilities are the same numbers) and their losses
added up; a picture is encoded once for all answers of its group that stand in a row. Both change nothing in
the result: on short answers they save most of the work. What a tool said stands in the row as context: it is
no token of an answer, so it enters neither the loss nor a ratio, a length or the entropy.

Legend: T tokens of a packed row, U tokens of its distinct answers, M tokens of all its answers, N answers of
a minibatch, F image features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.requests import TokenPrompt
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.generate import Row
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.objectives.corrections import fresh, importance_weights
from earlyfusion.rl.objectives.losses import policy_loss, ptx_loss
from earlyfusion.rl.objectives.sequences import Totals, sequence_sums
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.experience import Experience
from earlyfusion.rl.rollouts.packing import Trajectory, pack, used_experts
from earlyfusion.rl.rollouts.sampling import temperature


@dataclass
class Piece:
    """A distinct answer to a prompt: what is computed once. answers: those that are it, by their number
    in N."""

    group: int
    trajectory: Trajectory
    answers: list[int]


@dataclass
class Sums:
    """Sums over the trained tokens of an update, of this process until `reduced`; see
    objectives.PolicyLoss."""

    values: Tensor = field(default_factory=lambda: torch.zeros(7, dtype=torch.float64))
    largest: float = 0.0

    NAMES = ("loss", "tokens", "outside", "k3", "log_ratio", "ptx", "touched")

    def add(self, **parts: Any) -> None:
        """Add to the named sums."""
        for name, value in parts.items():
            self.values[self.NAMES.index(name)] += float(value)

    def reduced(self, runtime: Runtime) -> dict[str, float]:
        """Sums over processes by name, with `largest` the largest |log ratio|."""
        total = runtime.sum(self.values).tolist()
        return dict(zip(self.NAMES, total)) | {"largest": float(runtime.max(self.largest))}


def distinct(seen: Experience, groups: Sequence[int]) -> list[Piece]:
    """The distinct answers of these groups that have tokens; routing and the versions of the weights that
    wrote them included in what makes two equal."""
    pieces = []
    for g in groups:
        start, end = seen.bounds[g]
        found: dict[Any, Piece] = {}
        for n, trajectory in zip(range(start, end), seen.groups[g].trajectories):
            if not trajectory.ids:
                continue
            routing, versions = trajectory.completion.routing, tuple(trajectory.completion.versions)
            key = (
                tuple(trajectory.ids),
                versions,
                trajectory.inserted,
                None if routing is None else routing.tobytes(),
            )
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
        self._ref: dict[int, Tensor] = {}

    # ------------------------------------------------------------------------------------------ forward
    # passes

    def heat(self, row: Sequence[Piece]) -> Tensor:
        """float32 [U]: the temperature every token was drawn at. The schedule is a function of the update,
        and the update is the version that stands beside every token, so a partial rollout has as many
        temperatures as versions."""
        versions = [version for piece in row for version in piece.trajectory.completion.versions]
        return torch.tensor([temperature(self.config.temperature, version) for version in versions])

    def log_probs(self, model: NativeFusion, row: Sequence[Piece], heat_U: Tensor, replay: bool) -> Tensor:
        """Log-probabilities of the answers' tokens at their temperatures, [U] in nats, differentiable."""
        prompts = {p.group: p.trajectory.prompt for p in row}
        bare = [_without_patches(p.trajectory) for p in row]
        packed, places = pack(model, bare)
        with used_experts(model, places) if replay else nullcontext(), self.runtime.accelerator.autocast():
            x_TD = self._embed(model, row, packed, prompts)
            hidden_TD = model.decoder(x_TD, packed.segments, None, counted_T=packed.ids >= 0)
            logp_T = hidden_TD.new_zeros(hidden_TD.shape[0], dtype=torch.float32)
            for (
                degree
            ) in heat_U.unique().tolist():  # only labelled rows cost, so several passes cost as much as one
                chosen_U = (heat_U == degree).nonzero().flatten().to(places.positions_M.device)
                labels_T = torch.full_like(packed.ids, -100)
                labels_T[places.positions_M.index_select(0, chosen_U)] = places.ids_M.index_select(
                    0, chosen_U
                )
                part_T, _ = resolve("token_log_probs", hidden_TD.device)(
                    hidden_TD, model.decoder.head_weight(), labels_T, temperature=degree
                )
                logp_T = logp_T + part_T  # 0 where there is no label
        hidden_UD = hidden_TD.index_select(0, places.positions_M)
        logp_U = logp_T.index_select(0, places.positions_M)
        return self._without_silent(model, hidden_UD, places.ids_M, logp_U, heat_U.to(logp_U))

    def _without_silent(
        self, model: NativeFusion, hidden_UD: Tensor, ids_U: Tensor, logp_U: Tensor, heat_U: Tensor
    ) -> Tensor:
        """log pi(id) - log(1 - pi(silent ids)): over what the sampler may draw. The softmax's normaliser
        comes from the chosen token's own logit, so only a few columns of the vocabulary are needed."""
        if not self.silent_S.numel():
            return logp_U
        head_VD = model.decoder.head_weight()
        own_U = (hidden_UD.float() * head_VD.index_select(0, ids_U).float()).sum(1) / heat_U
        silent_US = hidden_UD.float() @ head_VD.index_select(0, self.silent_S).float().T / heat_U.unsqueeze(1)
        mass_U = (silent_US - (own_U - logp_U).unsqueeze(1)).exp().sum(1)
        return logp_U - torch.log1p(-mass_U.clamp(max=1 - 1e-6))

    @staticmethod
    def _embed(model: NativeFusion, row: Sequence[Piece], packed: Row, prompts: dict[int, Any]) -> Tensor:
        """Decoder input [T, D]; every group's pictures are encoded once and their features put into all its
        answers."""
        device = packed.ids.device
        x_TD = model.decoder.embed_tokens(packed.ids)
        seen = {
            g: prompt for g, prompt in prompts.items() if prompt.patches is not None and len(prompt.grids)
        }
        if not seen:
            return x_TD
        patches = torch.cat([prompt.patches for prompt in seen.values()]).to(device)
        grids = [(t, h, w) for prompt in seen.values() for t, h, w in prompt.grids]
        features_FD = model.encode_images(patches, grids)
        starts, start = {}, 0
        for g, prompt in seen.items():
            count = len(torch.as_tensor(prompt.media_positions))
            starts[g] = torch.arange(start, start + count)
            start += count
        if start != features_FD.shape[0]:
            raise ValueError(
                f"the pictures give {features_FD.shape[0]} features, the prompts hold {start} places"
            )
        index_F = torch.cat([starts[piece.group] for piece in row if piece.group in starts]).to(device)
        return x_TD.index_copy(0, packed.media_positions, features_FD.index_select(0, index_F).to(x_TD.dtype))

    @torch.no_grad()
    def prepare(self, seen: Experience) -> float:
        """Log-probabilities that must be known before the first update: of the trainer's own old policy,
        where the objective or the correction asks for it, and of the reference. Returns the largest |trainer
        - engine|."""
        self._old, self._ref, largest = {}, {}, 0.0
        wanted: list[tuple[NativeFusion, dict[int, Tensor]]] = (
            [(self.model, self._old)] if self.own_old else []
        )
        if self.config.objective.kl_coef and self.reference is not None:
            wanted.append((self.reference, self._ref))
        for model, kept in wanted:
            for row in rows(distinct(seen, range(len(seen.groups))), self.config.train.row_tokens):
                logp_U = self.log_probs(model, row, self.heat(row), self.replay and model is self.model)
                for piece, part in zip(row, logp_U.cpu().split([len(p.trajectory.ids) for p in row])):
                    kept.update(dict.fromkeys(piece.answers, part))
                    if model is self.model:
                        engine = _sampler_logp(piece.trajectory)
                        largest = max(largest, float((part - engine).abs().max()))
        return largest

    # ------------------------------------------------------------------------------------------------
    # gradients

    def gradients(self, seen: Experience, groups: Sequence[int], version: int, sums: Sums) -> None:
        """Add the gradients of the objective over these groups of this process (and the others' shares of the
        same minibatch: every process calls it); none where no token of any process is trained. version: of
        the weights that are trained, for stale tokens."""
        pieces = distinct(seen, groups)
        mask, tokens, answers = self._masks(seen, pieces, version)
        counts = self.runtime.sum(torch.tensor([tokens, answers], dtype=torch.float64))
        total = Totals(counts[0], counts[1])
        if not float(total.tokens):
            return
        pieces = [piece for piece in pieces if not self._settled(seen, piece, version)]
        for row in rows(pieces, self.config.train.row_tokens):
            loss = self._row_loss(seen, row, mask, total, sums)
            if loss.requires_grad:
                loss.backward()

    def _settled(self, seen: Experience, piece: Piece, version: int) -> bool:
        """Whether nothing in this piece has a gradient: every advantage is 0 and the policy is still the one
        that sampled, so that the squared log ratio is at its bottom. Its tokens stay in the totals. In a
        solved task that is most of the work."""
        train = self.config.train
        on_policy = (
            train.epochs * train.minibatches == 1 and not self.own_old and not self.config.objective.kl_coef
        )
        if not on_policy or bool(seen.advantages_N[piece.answers].any()):
            return False
        return all(written == version for written in piece.trajectory.completion.versions)

    def _masks(
        self, seen: Experience, pieces: Sequence[Piece], version: int
    ) -> tuple[dict[int, Tensor], float, float]:
        """bool tokens of every answer that are trained (not cut off by overlong filtering, not too stale),
        how many they are, and in how many answers."""
        answers = [(n, piece.trajectory.completion.versions) for piece in pieces for n in piece.answers]
        if not answers:
            return {}, 0.0, 0.0
        numbers, lengths = [n for n, _ in answers], [len(versions) for _, versions in answers]
        segments = Segments.from_lengths(lengths)
        versions_M = torch.tensor([written for _, versions in answers for written in versions])
        trained_M = seen.trained_N[numbers].repeat_interleave(torch.tensor(lengths))
        mask_M = fresh(self.config.stale, versions_M, version, segments) & trained_M
        told = sequence_sums(mask_M.float(), segments) > 0
        return dict(zip(numbers, mask_M.split(lengths))), float(mask_M.sum()), float(told.sum())

    def _row_loss(
        self, seen: Experience, row: Sequence[Piece], mask: dict[int, Tensor], total: Totals, sums: Sums
    ) -> Tensor:
        logp_U = self.log_probs(self.model, row, self.heat(row), self.replay)
        device = logp_U.device
        order = [(piece, n) for piece in row for n in piece.answers]
        starts, start = {}, 0
        for piece in row:
            starts[id(piece)] = torch.arange(start, start + len(piece.trajectory.ids))
            start += len(piece.trajectory.ids)
        index_M = torch.cat([starts[id(piece)] for piece, _ in order]).to(device)
        segments = Segments.from_lengths([len(piece.trajectory.ids) for piece, _ in order])
        numbers = [n for _, n in order]
        flat = [t for g in seen.groups for t in g.trajectories]
        engine_M = torch.cat([_sampler_logp(flat[n]) for n in numbers]).to(device)
        mask_M = torch.cat([mask[n] for n in numbers]).to(device)
        logp_M, weight_M = logp_U.index_select(0, index_M), None
        old_M = torch.cat([self._old[n] for n in numbers]).to(device) if self.own_old else engine_M
        if self.config.correction.mode != "none":
            correction = importance_weights(self.config.correction, old_M, engine_M, segments, mask_M)
            weight_M = correction.weight_T
            sums.add(touched=correction.touched)
        ref_M = torch.cat([self._ref[n] for n in numbers]).to(device) if self._ref else None
        out = policy_loss(
            self.config.objective,
            logp_M,
            old_M,
            seen.advantages_N[numbers],
            segments,
            mask_T=mask_M,
            weight_T=weight_M,
            ref_logp_T=ref_M,
            batch=total,
        )
        sums.add(
            loss=out.loss.detach(), tokens=out.tokens, outside=out.outside, k3=out.k3, log_ratio=out.log_ratio
        )
        sums.largest = max(sums.largest, float(out.log_ratio_max))
        # Every parameter takes part whatever the row holds, so that all processes exchange the same
        # gradients.
        return out.loss + self.model.vision_tower.zero_anchor() + self.model.mm_projector.zero_anchor()

    def ptx_gradients(self, batches: Sequence[Any], coef: float, sums: Sums) -> float:
        """Add coef times the gradients of the language-model loss on curated rows, divided by their own
        weights over all processes (ptx_loss); returns that mean loss in nats, without coef."""
        local = torch.stack([b.loss_weights[b.labels >= 0].double().sum().cpu() for b in batches]).sum()
        whole = self.runtime.sum(local)
        loss_sum = 0.0
        for batch in batches:
            with self.runtime.accelerator.autocast():
                hidden_TD = self.model.hidden(batch)
                logp_T, _ = resolve("token_log_probs", hidden_TD.device)(
                    hidden_TD, self.model.decoder.head_weight(), batch.labels
                )
            weights_T = torch.where(batch.labels >= 0, batch.loss_weights, 0.0)
            loss = ptx_loss(logp_T, weights_T, coef, total_weight=whole)
            (loss + self.model.vision_tower.zero_anchor() + self.model.mm_projector.zero_anchor()).backward()
            loss_sum += float(loss.detach())
        mean = float(self.runtime.sum(loss_sum)) / max(coef, 1e-12)
        sums.add(ptx=loss_sum)
        return mean


def _without_patches(trajectory: Trajectory) -> Trajectory:
    """The same with a prompt whose places for features stay and whose pixels do not."""
    prompt = trajectory.prompt
    places = tuple(int(i) for i in torch.as_tensor(prompt.media_positions).tolist())
    return replace(trajectory, prompt=TokenPrompt(torch.as_tensor(prompt.ids), None, (), places))


def _sampler_logp(trajectory: Trajectory) -> Tensor:
    """fp32 log-probabilities of the answer's tokens under the distribution they were drawn from."""
    return torch.tensor(trajectory.completion.logprobs, dtype=torch.float32)


def minibatches(count: int, parts: int, order: Callable[[int], list[int]]) -> list[list[int]]:
    """`count` groups in a mixed order, shared out over `parts` as evenly as possible (a part may be
    empty)."""
    mixed = order(count)
    return [mixed[part::parts] for part in range(parts)]
