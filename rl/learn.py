"""Gradients of the policy: packed rows, log-probabilities, the objective.

Equal answers to one prompt are computed once (their log-probabilities are the same numbers) and their losses
added up; a picture is encoded once for all answers of its group that stand in a row. Both change nothing in
the result: on short answers they save most of the work. The output of a tool stands in the row as context: it
is no token of an answer, so it enters neither the loss nor a ratio, a length or the entropy.

Legend: T tokens of a packed row, U tokens of its distinct answers, M tokens of all its answers, N answers of
a minibatch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.kernels.dispatch import resolve
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.engine import pack_prompts
from earlyfusion.model.engine.requests import TokenPrompt
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.rl.objectives.losses import Totals, fresh, importance_weights, policy_loss
from earlyfusion.rl.recipe import RLConfig, temperature
from earlyfusion.rl.rollouts.experience import Experience
from earlyfusion.rl.rollouts.packing import Trajectory, pack, used_experts

SUMMED = ("loss", "tokens", "outside", "k3", "ptx", "touched")


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

    def reduced(self, runtime: Runtime) -> dict[str, float]:
        """Sums over processes by name, and `largest` of all."""
        return runtime.sum_dict(self.values) | {"largest": float(runtime.max(self.largest))}


@dataclass
class Piece:
    """A distinct answer to a prompt: what is computed once. answers: those that are it, by their number
    in N."""

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


def distinct(experience: Experience, groups: Iterable[int]) -> list[Piece]:
    """The distinct answers of these groups that have tokens; routing and the versions of the weights that
    wrote them included in what makes two equal."""
    pieces: dict[tuple, Piece] = {}
    for g in groups:
        for n, trajectory in enumerate(experience.groups[g].trajectories, experience.bounds[g][0]):
            if trajectory.ids:
                # Old weights and other experts give the same words another probability.
                done = trajectory.completion
                routing = None if done.routing is None else done.routing.tobytes()
                key = (g, tuple(done.ids), tuple(done.versions), trajectory.inserted, routing)
                pieces.setdefault(key, Piece(trajectory, [])).answers.append(n)
    return list(pieces.values())


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
    update.
    """

    def __init__(
        self, config: RLConfig, model: NativeFusion, runtime: Runtime, silent: Sequence[int] = ()
    ) -> None:
        self.config, self.model, self.runtime = config, model, runtime
        self.silent_S = torch.tensor(sorted(silent), dtype=torch.int64, device=runtime.device)
        # A nucleus has holes: the probability of a token outside it is 0, its gradient without bound.
        whole = config.rollout.top_p == 1.0 and config.rollout.min_p == 0.0
        self.own_old = config.train.old_policy == "trainer" or config.correction.mode != "none" or not whole
        self._old: dict[int, Tensor] = {}

    # ------------------------------------------------------------------------------------ forward passes

    def temperatures(self, row: Sequence[Piece]) -> Tensor:
        """float32 [U]: the temperature every token was drawn at. The schedule is a function of the update,
        and the update is the version that stands beside every token, so a partial rollout has as many
        temperatures as versions."""
        versions = [version for piece in row for version in piece.versions]
        return torch.tensor([temperature(self.config.temperature, version) for version in versions])

    def log_probs(self, row: Sequence[Piece], temperature_U: Tensor, replay: bool) -> Tensor:
        """Log-probabilities of the answers' tokens at their temperatures, [U] in nats, differentiable.

        replay: with the experts that the engine used, where they were captured.
        """
        found: Tensor = self.model.within(self._log_probs, row, temperature_U, replay)
        return found

    def _log_probs(self, row: Sequence[Piece], temperature_U: Tensor, replay: bool) -> Tensor:
        # One picture for all answers to a prompt: the tower is most of the work of a short answer.
        model = self.model
        packed, places = pack(model, [piece.trajectory for piece in row], share_pictures=True)
        experts = used_experts(model, places) if replay else nullcontext()
        with experts, self.runtime.accelerator.autocast():
            x_TD = model.embed(packed, feature_of_M=places.feature_of_F)
            hidden_TD = model.decoder(x_TD, packed.segments, None, counted_T=packed.ids >= 0)
            logp_T = hidden_TD.new_zeros(hidden_TD.shape[0], dtype=torch.float32)

            # One pass a temperature: only labelled positions cost, so several cost as much as one.
            for degree in temperature_U.unique().tolist():
                chosen_U = (temperature_U == degree).to(places.ids_M.device)
                labels_T = torch.full_like(packed.ids, -100)
                labels_T[places.positions_M[chosen_U]] = places.ids_M[chosen_U]
                part_T, _ = resolve("token_log_probs", hidden_TD)(
                    hidden_TD, model.decoder.head_weight(), labels_T, temperature=degree
                )
                logp_T = logp_T + part_T  # 0 where there is no label
        logp_U = logp_T.index_select(0, places.positions_M)
        if not self.silent_S.numel():
            return logp_U

        # Over what the sampler may draw: log pi(id) - log(1 - pi(silent ids)). The softmax's normaliser comes
        # from the chosen token's own logit, so only a few columns of the vocabulary are needed.
        hidden_UD = hidden_TD.index_select(0, places.positions_M).float()
        head_VD, temperature_U = model.decoder.head_weight(), temperature_U.to(logp_U)
        own_U = (hidden_UD * head_VD.index_select(0, places.ids_M).float()).sum(1) / temperature_U
        silent_US = hidden_UD @ head_VD.index_select(0, self.silent_S).float().T / temperature_U.unsqueeze(1)
        mass_U = (silent_US - (own_U - logp_U).unsqueeze(1)).exp().sum(1)
        return logp_U - torch.log1p(-mass_U.clamp(max=1 - 1e-6))

    def even(self, own: list[list[Piece]]) -> list[list[Piece]]:
        """Rows of this process; where the policy is sharded as many as any process has, empty ones behind:
        every row gathers weights from all."""
        longest = self.runtime.agree(len(own)) if self.runtime.layout.sharded else len(own)
        return own + [[] for _ in range(longest - len(own))]

    def nothing(self) -> Tensor:
        """A pass over a row without answers: a scalar 0."""
        row = pack_prompts(self.model, [TokenPrompt(torch.tensor([self.model.config.text.bos_token_id]))])
        with self.runtime.accelerator.autocast():
            return 0.0 * self.model.decoder(self.model.embed(row), row.segments).sum()

    @torch.no_grad()
    def prepare(self, experience: Experience) -> float:
        """Log-probabilities of the trainer's own old policy, where the objective or the correction asks for
        them before the first update. Returns the largest |trainer - engine|."""
        self._old, largest = {}, 0.0
        if not self.own_old:
            return largest
        pieces = distinct(experience, range(len(experience.groups)))
        for row in self.even([*rows(pieces, self.config.train.row_tokens)]):
            if not row:
                self.model.within(self.nothing)
                continue
            replay = self.config.rollout.replay_routing
            logp_U = self.log_probs(row, self.temperatures(row), replay).cpu()
            for piece, logp in zip(row, logp_U.split([piece.length for piece in row])):
                largest = max(largest, float((logp - _sampler_logp(piece)).abs().max()))
                self._old.update(dict.fromkeys(piece.answers, logp))
        return largest

    # ----------------------------------------------------------------------------------------- gradients

    def gradients(self, experience: Experience, groups: Iterable[int], version: int, sums: Sums) -> None:
        """Add the gradients of the objective over these groups of this process (and the others' shares of the
        same minibatch: every process calls it); none where no token of any process is trained. version: of
        the weights that are trained, for stale tokens."""
        pieces = distinct(experience, groups)

        # Which tokens of every answer are trained: not cut off by overlong filtering, not too stale.
        masks: dict[int, Tensor] = {}
        for piece in pieces:
            versions_M = torch.tensor(piece.versions)
            fresh_M = fresh(self.config.stale, versions_M, version)
            masks |= {n: fresh_M & experience.trained_N[n] for n in piece.answers}

        # The loss is divided by what all processes train.
        tokens = sum(float(mask.sum()) for mask in masks.values())
        answers = float(sum(bool(mask.any()) for mask in masks.values()))
        total = Totals(*self.runtime.sum(torch.tensor([tokens, answers])))
        if not total.tokens:
            return
        # After the totals: what is not computed still counts in what the loss is divided by.
        pieces = [piece for piece in pieces if not self._settled(experience, piece, version)]
        for row in self.even([*rows(pieces, self.config.train.row_tokens)]):
            if row:
                self._row_loss(experience, row, masks, total, sums).backward()
            else:
                self.model.within(self.nothing).backward()

    def _settled(self, experience: Experience, piece: Piece, version: int) -> bool:
        """Whether nothing in this piece has a gradient: every advantage is 0 and the policy is still the one
        that sampled, so that the squared log ratio is at its bottom. Its tokens stay in the totals. In a
        solved task that is most of the work."""
        train, own_term = self.config.train, self.config.objective.loss is not None
        if train.epochs * train.minibatches > 1 or self.own_old or own_term:
            return False
        taught = bool(experience.advantages_N[piece.answers].any())
        return not taught and all(written == version for written in piece.versions)

    def _row_loss(
        self,
        experience: Experience,
        row: Sequence[Piece],
        masks: dict[int, Tensor],
        total: Totals,
        sums: Sums,
    ) -> Tensor:
        config, device = self.config, self.runtime.device
        logp_U = self.log_probs(row, self.temperatures(row), config.rollout.replay_routing)

        # From distinct answers to all of them: where the tokens of each stand among the U.
        numbers, lengths, logp, engine = [], [], [], []
        for piece, logp_of_piece in zip(row, logp_U.split([piece.length for piece in row])):
            numbers += piece.answers
            lengths += [piece.length] * len(piece.answers)
            logp += [logp_of_piece] * len(piece.answers)
            engine += [_sampler_logp(piece)] * len(piece.answers)
        segments = Segments.from_lengths(lengths)
        # K2.5 takes the sampler itself for pi_old.
        old_M = engine_M = torch.cat(engine).to(device)
        mask_M = torch.cat([masks[n] for n in numbers]).to(device)
        if self.own_old:
            old_M = torch.cat([self._old[n] for n in numbers]).to(device)
        weight_M = None
        if config.correction.mode != "none":
            weight_M, touched = importance_weights(config.correction, old_M, engine_M, segments, mask_M)
            sums.add(touched=touched)

        out = policy_loss(
            config.objective,
            torch.cat(logp),
            old_M,
            experience.advantages_N[numbers].to(device),
            segments,
            mask_T=mask_M,
            weight_T=weight_M,
            batch=total,
        )
        sums.add(loss=out.loss.detach(), tokens=out.tokens, outside=out.outside, k3=out.k3)
        sums.largest = max(sums.largest, float(out.log_ratio_max))
        # Every parameter takes part whatever the row holds, so that all processes exchange the same
        # gradients.
        return out.loss + self.model.vision_anchor()

    def ptx_gradients(self, batches: Sequence[PackedBatch], coef: float, sums: Sums) -> float:
        """Add the gradients of coef * -sum w log pi / sum w on curated rows (K2), divided by their own
        weights over all processes: more or longer rollouts in the batch do not dilute it. Returns the mean
        loss in nats, without coef."""
        # The weights of all processes: a mean of means would favour processes with few tokens.
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
        return float(self.runtime.sum(loss_sum)) / coef


def _sampler_logp(piece: Piece) -> Tensor:
    """fp32 log-probabilities of the answer's tokens under the distribution they were drawn from."""
    return torch.tensor(piece.trajectory.completion.logprobs, dtype=torch.float32)
