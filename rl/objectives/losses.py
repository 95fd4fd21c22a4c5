"""Policy losses: the Moonshot line and its peers as members of one family.

    A_N = advantages(options, rewards_N, groups_N)
    out = policy_loss(options, logp_T, old_logp_T, A_N, segments, mask_T=trained_T)
    out.loss.backward()

An objective is a term (an equation below) with a preset of its parts, registered over it by `@objective`; a
recipe names it, and any part may be given beside the name:

    ObjectiveConfig(name="k2.5")        ObjectiveConfig(name="dapo", clip_high=0.3, tau=1e-3)

With l = log pi(token) - log pi_old(token), rho = e^l, n the trained tokens of an answer, L = sum l over the
answer, S answers and M trained tokens in the batch, what is minimised and its derivative by log pi of a
token:

    k1.5        mean over answers of  -A L + (tau/2) L^2                     -(A - tau L) / S
    k2          mean over answers of  (A - tau L)^2                          2 tau times that of k1.5
    k2.5, k3    1/M sum  -[alpha <= l <= beta] rho A + tau l^2               -([inside] rho A - 2 tau l) / M
    grpo        mean over answers of 1/n sum -min(rho A, clip(rho) A)        -[active] rho A / (n S)
    dr_grpo     the same, n replaced by a constant for all answers
    dapo        1/M sum, other bounds
    gspo        mean over answers of -min(s A, clip(s) A), s = e^{L/n}       -[active] s A / (n S)
    cispo       1/M sum  -constant(clip(rho)) A log pi                       -clip(rho) A / M

with A = r - mean of the group, over its standard deviation for grpo, dapo, gspo and cispo.

The window of K2.5 is a mask of the gradient, not a clamp of the ratio: it does not ask for the advantage's
sign (PPO masks one side for each sign), and the squared term acts on every token, masked or not, so that a
token outside is pulled back. `pi_old` is whoever sampled: for K2.5 the engine itself. Moonshot publishes
neither alpha, beta nor tau: the numbers here are ours. Sources: Kimi k1.5 2.3.2, Kimi K2 3.2.3, Kimi K2.5
4.4.2 eq. 1, Kimi K3 4.1.2, DeepSeekMath, 2503.20783, 2503.14476, 2507.18071, 2506.13585.

A term of your own, `objective.loss = "package.module:function"`, has the signature of those below.

Legend: T packed tokens, N responses; X is T or N, whichever the objective has a ratio of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from earlyfusion.data.errors import DataError
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.places import function_at
from earlyfusion.kernels.segments import Segments, check_packed
from earlyfusion.pipeline.config.schema import Section
from earlyfusion.rl.objectives.sequences import Totals, only, sequence_sums, spread, token_mask, totals, wide

MAX_LOG_RATIO = 20.0
"""e^20 = 5e8: beyond it a ratio no longer moves, which keeps products with 0 from becoming NaN."""

Term: TypeAlias = "Callable[[ObjectiveConfig, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]"
"""(options, log_ratio_X, advantages_X, logp_X) -> (policy term [X] to be minimised, bool [X]: outside the
trust region). log_ratio_X and logp_X are differentiable; an answer without a trained token has zeros."""

PRESETS: dict[str, dict[str, Any]] = {}
"""Objective -> its parts."""
TERMS: dict[str, tuple[Term, tuple[str, ...]]] = {}
"""Term -> (equation, ratios it works with)."""


def term(name: str, *ratios: str) -> Callable[[Term], Term]:
    """Register an equation that works with these kinds of ratio."""

    def register(function: Term) -> Term:
        TERMS[name] = function, ratios
        return function

    return register


def objective(*names: str, **parts: Any) -> Callable[[Term], Term]:
    """Register presets of the decorated term; parts: fields of ObjectiveConfig."""

    def register(function: Term) -> Term:
        chosen = next(name for name, (known, _) in TERMS.items() if known is function)
        PRESETS.update({name: {"term": chosen, **parts} for name in names})
        return function

    return register


class ObjectiveConfig(Section):
    """The loss of the policy; parts that are not given come from the preset `name`."""

    loss: str | None = None
    """A term of yours in place of `term`: package.module:function; "null" for none."""
    name: str = "k2.5"
    """Preset: k1.5, k2, k2.5, k3, grpo, dr_grpo, dapo, gspo or cispo."""
    term: Literal["window", "clip", "weight", "linear", "squared"] = "window"
    """window: K2.5 gradient mask; clip: PPO; weight: CISPO; linear: k1.5; squared: K2."""
    ratio: Literal["token", "sequence_mean", "sequence_sum"] = "token"
    """Of one token, the geometric mean over the answer, or of the whole answer."""
    normaliser: Literal["tokens", "sequences", "sequence_means", "constant"] = "tokens"
    """Divide by trained tokens; by answers; by answers with each first divided by its tokens; by answers x
    constant_tokens."""
    baseline: Literal["mean", "leave_one_out", "log_mean_exp", "none"] = "mean"
    """What is taken off the reward: mean of the group, of the others in it, tau log mean exp(r/tau), or
    nothing."""
    divide_by_std: bool = False
    """Divide advantages by the group's standard deviation."""
    tau: NonNegativeFloat = 0.0
    """Weight of the squared log ratio."""
    log_low: float = -0.7
    """alpha: smallest log ratio with a policy gradient (window). Must be below 0."""
    log_high: float = 0.7
    """beta: largest log ratio with a policy gradient (window). Must be above 0."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """PPO clip below 1."""
    clip_high: PositiveFloat = 0.2
    """PPO clip above 1."""
    clip_negative: float | None = Field(None, gt=1)
    """Largest ratio that counts for a negative advantage (two-sided clip); "null" for none."""
    weight_low: NonNegativeFloat = 0.0
    """CISPO: smallest importance weight."""
    weight_high: PositiveFloat = 5.0
    """CISPO: largest importance weight."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the k3 divergence from a reference policy."""
    constant_tokens: PositiveInt | None = None
    """Tokens that every answer counts as when normaliser is "constant" (dr_grpo): the longest answer allowed.
    """
    reset_optimizer: bool = False
    """Forget the optimizer's moments at every iteration: k1.5 sees a new reference as a new problem."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("name", "k2.5")
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown objective {name!r}; {did_you_mean(str(name), PRESETS)}")
        return {**PRESETS[name], **given}

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        if not self.log_low < 0 < self.log_high:
            raise ValueError(
                f"log_low={self.log_low}, log_high={self.log_high}: the window is on the LOG ratio and must"
                " hold 0 inside, log_low < 0 < log_high; for bounds on the ratio itself give their"
                " logarithms"
            )
        ratios = TERMS[self.term][1]
        if self.loss is None and self.ratio not in ratios:
            raise ValueError(f"term {self.term!r} works with ratio {' or '.join(ratios)}, not {self.ratio}")
        if (self.ratio == "token") == (self.normaliser == "sequences"):
            raise ValueError(
                f"normaliser {self.normaliser!r} does not fit ratio {self.ratio!r}: token ratios take tokens,"
                " sequence_means or constant; ratios of answers take sequences"
            )
        if self.normaliser == "constant" and self.constant_tokens is None:
            raise ValueError(
                "normaliser 'constant' (dr_grpo) needs constant_tokens, the longest answer allowed"
            )
        if self.weight_low > min(1.0, self.weight_high) or self.weight_high < 1:
            raise ValueError(
                f"weight_low={self.weight_low}, weight_high={self.weight_high}: 1 must lie between them"
            )
        self._check_tau()
        self.equation()  # a term that cannot be imported is told before the run begins
        return self

    def equation(self) -> Term:
        """The function of the policy term. Raises UserError for a `loss` that cannot be imported."""
        if self.loss is None:
            return TERMS[self.term][0]
        return function_at(self.loss, "objective.loss")

    def _check_tau(self) -> None:
        whole = self.ratio == "sequence_sum"
        if self.tau == 0 and (whole or self.baseline == "log_mean_exp"):
            raise ValueError(f"tau=0: term {self.term!r} with baseline {self.baseline!r} needs tau above 0")
        if self.tau > 0 and self.ratio == "sequence_mean" and self.baseline != "log_mean_exp":
            raise ValueError(
                f"tau={self.tau}: the squared term is per token; ratio 'sequence_mean' has none, use kl_coef"
            )
        if whole and self.kl_coef:
            raise ValueError(
                f"kl_coef={self.kl_coef}: term {self.term!r} holds its own divergence (tau); leave it 0"
            )


@objective("k2.5", "k3", ratio="token", normaliser="tokens", baseline="mean", divide_by_std=False, tau=1e-3)
@term("window", "token")
def window(
    options: ObjectiveConfig, log_ratio_T: Tensor, advantages_T: Tensor, logp_T: Tensor
) -> tuple[Tensor, Tensor]:
    """-[alpha <= l <= beta] rho A."""
    fixed_T = log_ratio_T.detach()
    inside_T = (fixed_T >= options.log_low) & (fixed_T <= options.log_high)
    # The ratio is taken of the inside only: a masked token may be so far out that e^l is not finite.
    return -only(inside_T, only(inside_T, log_ratio_T).exp() * advantages_T), ~inside_T


@objective("grpo", ratio="token", normaliser="sequence_means", baseline="mean", divide_by_std=True)
@objective("dr_grpo", ratio="token", normaliser="constant", baseline="mean", divide_by_std=False)
@objective("dapo", ratio="token", normaliser="tokens", baseline="mean", divide_by_std=True, clip_high=0.28)
@objective(
    "gspo",
    ratio="sequence_mean",
    normaliser="sequences",
    baseline="mean",
    divide_by_std=True,
    clip_low=3e-4,
    clip_high=4e-4,
)
@term("clip", "token", "sequence_mean")
def clip(
    options: ObjectiveConfig, log_ratio_X: Tensor, advantages_X: Tensor, logp_X: Tensor
) -> tuple[Tensor, Tensor]:
    """PPO: -min(rho A, clip(rho) A); with clip_negative, rho is first cut off there where A < 0
    (INTELLECT-2)."""
    ratio_X = log_ratio_X.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = 1 - options.clip_low, 1 + options.clip_high
    bound_X, fixed_X = ratio_X.clamp(low, high), ratio_X.detach()
    better_X, worse_X = advantages_X > 0, advantages_X < 0
    outside_X = (better_X & (fixed_X > high)) | (worse_X & (fixed_X < low))
    if options.clip_negative is not None:
        outside_X = outside_X | (worse_X & (fixed_X > options.clip_negative))
        ratio_X = torch.where(worse_X, ratio_X.clamp(max=options.clip_negative), ratio_X)
    return -torch.minimum(ratio_X * advantages_X, bound_X * advantages_X), outside_X


@objective("cispo", ratio="token", normaliser="tokens", baseline="mean", divide_by_std=True)
@term("weight", "token")
def weight(
    options: ObjectiveConfig, log_ratio_T: Tensor, advantages_T: Tensor, logp_T: Tensor
) -> tuple[Tensor, Tensor]:
    """-constant(clip(rho)) A log pi: the weight is clipped, no gradient is lost."""
    fixed_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    outside_T = (fixed_T < options.weight_low) | (fixed_T > options.weight_high)
    return -fixed_T.clamp(options.weight_low, options.weight_high) * advantages_T * logp_T, outside_T


@objective(
    "k1.5",
    ratio="sequence_sum",
    normaliser="sequences",
    baseline="mean",
    divide_by_std=False,
    tau=0.1,
    reset_optimizer=True,
)
@term("linear", "sequence_sum")
def linear(
    options: ObjectiveConfig, log_ratio_N: Tensor, advantages_N: Tensor, logp_N: Tensor
) -> tuple[Tensor, Tensor]:
    """-A L + (tau/2) L^2."""
    terms_N = -advantages_N * log_ratio_N + 0.5 * options.tau * log_ratio_N.square()
    return terms_N, torch.zeros_like(log_ratio_N, dtype=torch.bool)


@objective("k2", ratio="sequence_sum", normaliser="sequences", baseline="mean", divide_by_std=False, tau=0.1)
@term("squared", "sequence_sum")
def squared(
    options: ObjectiveConfig, log_ratio_N: Tensor, advantages_N: Tensor, logp_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(A - tau L)^2."""
    terms_N = (advantages_N - options.tau * log_ratio_N).square()
    return terms_N, torch.zeros_like(log_ratio_N, dtype=torch.bool)


class PolicyLoss(NamedTuple):
    """loss: 0-d, to be minimised. The rest are constants, sums over the trained tokens (0-d), to be divided
    by `tokens` after adding up pieces and ranks: outside (tokens whose policy gradient is masked or clipped,
    or whose weight is), k3 (divergence rho - 1 - l of the old policy from the new, nats), log_ratio;
    log_ratio_max is the largest |l|."""

    loss: Tensor
    tokens: Tensor
    outside: Tensor
    k3: Tensor
    log_ratio: Tensor
    log_ratio_max: Tensor


def policy_loss(
    options: ObjectiveConfig,
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_N: Tensor,
    segments: Segments,
    *,
    mask_T: Tensor | None = None,
    weight_T: Tensor | None = None,
    ref_logp_T: Tensor | None = None,
    batch: Totals | None = None,
) -> PolicyLoss:
    """The loss of `options` on N responses packed in T tokens.

    logp_T: log-probabilities under the policy being trained (differentiable); old_logp_T under the one the
    objective calls old; ref_logp_T under a reference, for kl_coef. mask_T: tokens that are trained (all if
    None); the others, which may hold NaN, neither count nor get a gradient. weight_T: constants of
    `corrections.importance_weights` on the policy term; squared and KL terms keep all tokens. k1.5, K2 and
    GSPO have one term for each answer and use the mean weight over it. batch: totals of the whole batch when
    this is a piece of it. No trained token: loss 0, gradient 0.

    float32 inside, float64 if given. Raises ValueError for tensors that do not fit the segments, DataError
    without the reference that kl_coef needs.
    """
    # Everything packed alike, and nothing but trained tokens from here on.
    for name, values in (("logp_T", logp_T), ("old_logp_T", old_logp_T), ("weight_T", weight_T)):
        if values is not None:
            check_packed(name, values, segments)
    mask_T = token_mask(mask_T, segments, logp_T.device)
    logp_T, old_T = only(mask_T, wide(logp_T)), only(mask_T, wide(old_logp_T.detach()).to(logp_T.device))
    log_T = logp_T - old_T
    advantages_N = wide(advantages_N.detach()).to(logp_T.device)
    if advantages_N.shape != (segments.num,):
        raise ValueError(
            f"{tuple(advantages_N.shape)} advantages for {segments.num} responses; give one for each"
        )
    weight_T = torch.ones_like(old_T) if weight_T is None else wide(weight_T.detach()).to(old_T.device)
    weight_T = only(mask_T, weight_T)
    batch = totals(mask_T, segments) if batch is None else batch
    batch = Totals(*(total.to(log_T) for total in batch))
    # Divided by the totals of the whole batch, of which this row may be a piece.
    counts_N = sequence_sums(mask_T.to(log_T.dtype), segments)
    equation, constant = options.equation(), options.constant_tokens

    # The policy term: of every token, or of every answer that has a trained one.
    if options.ratio == "token":
        advantages_T = only(mask_T, spread(advantages_N, segments))
        terms_T, outside_T = equation(options, log_T, advantages_T, logp_T)
        terms_T = weight_T * terms_T + options.tau * log_T.square()
        loss = _reduce(options.normaliser, terms_T, counts_N, segments, batch, constant)
    else:
        log_N, trained_N = sequence_sums(log_T, segments), counts_N.clamp(min=1)
        if options.ratio == "sequence_mean":
            log_N = log_N / trained_N
        advantages_N = only(counts_N > 0, advantages_N)
        terms_N, outside_N = equation(options, log_N, advantages_N, sequence_sums(logp_T, segments))
        loss = (sequence_sums(weight_T, segments) / trained_N * terms_N).sum() / batch.sequences.clamp(min=1)
        outside_T = spread(outside_N, segments)

    if options.kl_coef:
        style = "sequence_means" if options.ratio != "token" else options.normaliser
        kl_T = _reference_kl(logp_T, ref_logp_T, mask_T, segments)
        loss = loss + options.kl_coef * _reduce(style, kl_T, counts_N, segments, batch, constant)

    # What the log shows, over the trained tokens.
    log_T = log_T.detach()
    k3 = (torch.expm1(log_T.clamp(max=MAX_LOG_RATIO)) - log_T).sum()
    largest = torch.cat([log_T.abs(), log_T.new_zeros(1)]).amax()
    return PolicyLoss(loss, mask_T.sum(), (outside_T & mask_T).sum(), k3, log_T.sum(), largest)


def _reference_kl(logp_T: Tensor, ref_logp_T: Tensor | None, mask_T: Tensor, segments: Segments) -> Tensor:
    """k3 estimator e^d - 1 - d of KL(pi || ref), d = log ref - log pi: never negative, gradient 1 - e^d by
    log pi."""
    if ref_logp_T is None:
        raise DataError(
            "kl_coef is above 0 but no reference log-probabilities were given; pass ref_logp_T or set it 0"
        )
    check_packed("ref_logp_T", ref_logp_T, segments)
    d_T = only(mask_T, wide(ref_logp_T.detach()).to(logp_T.device)) - logp_T
    return torch.expm1(d_T.clamp(max=MAX_LOG_RATIO)) - d_T


def _reduce(
    normaliser: str,
    terms_T: Tensor,
    counts_N: Tensor,
    segments: Segments,
    batch: Totals,
    constant: int | None,
) -> Tensor:
    """Terms of the trained tokens (0 elsewhere) to one number."""
    if normaliser == "tokens":
        return terms_T.sum() / batch.tokens.clamp(min=1)
    if normaliser == "constant":
        return terms_T.sum() / (batch.sequences.clamp(min=1) * (constant or 1))
    return (sequence_sums(terms_T, segments) / counts_N.clamp(min=1)).sum() / batch.sequences.clamp(min=1)
