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

All losses here see the generated tokens of N responses packed one after the other
(`kernels.segments.Segments`), with a mask of the tokens that are trained. Sums over a response use a
segmented reduction, so they do not depend on what stands beside it in the row and repeat bit for bit on a
GPU. Values of tokens outside the mask are replaced, never multiplied by zero: padding may hold NaN.

Legend: T packed tokens, N responses, G groups (prompts).

Tokens that another policy made get weights for the engine's gap to the trainer, and masks where they are
stale. With mu the policy that sampled (the engine), pi_old the trainer's policy at the start of the
iteration and pi the one being trained, pi / mu = (pi_old / mu) * (pi / pi_old): the engine's gap
times the staleness. An objective either takes mu for pi_old (K2.5 does, and then there is nothing to
weigh), or is corrected by a weight from pi_old / mu. The weight is a constant for the gradient; otherwise
the estimator would
differentiate its own correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import Record, function_at
from earlyfusion.kernels.segments import Segments, check_shapes
from earlyfusion.pipeline.config.schema import Section


class Groups(NamedTuple):
    """index_N: group of every response, 0..num-1, in the order of the ids that were given."""

    index_N: Tensor
    num: int

    def sums(self, values_N: Tensor) -> Tensor:
        """Sum of every group, [G]."""
        return values_N.new_zeros(self.num).index_add_(0, self.index_N, values_N)

    def means(self, values_N: Tensor) -> Tensor:
        """Mean of every group, [G]."""
        return self.sums(values_N) / self.sums(torch.ones_like(values_N))

    def extreme(self, values_N: Tensor, which: str) -> Tensor:
        """Smallest ("amin") or largest ("amax") value of every group, [G]."""
        zeros_G = values_N.new_zeros(self.num)
        return zeros_G.scatter_reduce(0, self.index_N, values_N, which, include_self=False)

    def spread(self, values_G: Tensor) -> Tensor:
        """The value of its group for every response, [N]."""
        return values_G[self.index_N]


def group(groups_N: Tensor) -> Groups:
    """Number the groups. groups_N: any integers, one a response; equal ids need not stand together."""
    # Bins and problems have ids with gaps; sums need numbers without.
    ids_G, index_N = torch.unique(groups_N, return_inverse=True)
    return Groups(index_N, ids_G.numel())


def wide(values: Tensor) -> Tensor:
    """float32 of anything narrower; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def only(mask_T: Tensor, values_T: Tensor) -> Tensor:
    """`values_T` where the mask holds, 0 elsewhere; no gradient and no NaN comes from the rest."""
    return torch.where(mask_T, values_T, values_T.new_zeros(()))


def sequence_sums(values_T: Tensor, segments: Segments) -> Tensor:
    """Sum over the tokens of every response, [N]; differentiable. Raises ValueError where they do not fit."""
    check_shapes("sequence_sums", {"T": segments.total}, values_T=values_T)
    if segments.num == 0:
        return values_T.new_zeros(0)
    device = values_T.device
    # Kept with the segments: one row is summed many times.
    lengths_N = segments.cached(
        ("rl.lengths", str(device)), lambda: torch.tensor(segments.lengths, dtype=torch.int64, device=device)
    )
    # In float64, one token after the other: in float32 the rounding of a hundred thousand small log ratios
    # would show in their ratio.
    return torch.segment_reduce(values_T.double(), "sum", lengths=lengths_N, unsafe=True).to(values_T.dtype)


def spread(values_N: Tensor, segments: Segments) -> Tensor:
    """The value of its response for every token, [T]; meant for constants (no gradient is asked of it)."""
    return values_N.detach().index_select(0, segments.ids(values_N.device).long())


class Totals(NamedTuple):
    """What a batch is divided by, 0-d float64: trained tokens, and responses with at least one of them.

    A batch may be worked off in pieces, on several ranks: add up the totals of all pieces first (over
    ranks by an all-reduce), hand them to every piece, and the pieces' losses and gradients sum to those of
    the whole batch.
    """

    tokens: Tensor
    sequences: Tensor


def totals(mask_T: Tensor, segments: Segments) -> Totals:
    """Totals of one packed row; responses without a trained token (padding) do not count."""
    counts_N = sequence_sums(mask_T.double(), segments)
    return Totals(counts_N.sum(), (counts_N > 0).sum().double())


class CorrectionConfig(Section):
    """Importance weights for the gap between the engine that sampled and the trainer's own old policy."""

    mode: Literal["none", "tis", "mis", "reject"] = "none"
    """tis: weight cut off at `high`; mis: weight inside [low, high], else 0; reject: 1 inside, else 0."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of a token, of the whole answer (product), or its geometric mean over the answer."""
    low: NonNegativeFloat = 0.0
    """Smallest ratio that is kept (mis, reject)."""
    high: PositiveFloat = 2.0
    """Largest ratio."""
    max_k3: PositiveFloat | None = None
    """Also leave out answers whose mean k3 divergence is above this; "null" for no limit."""

    @model_validator(mode="after")
    def _check(self) -> CorrectionConfig:
        if not self.low <= 1 <= self.high:
            raise ValueError(
                f"low={self.low}, high={self.high}: equal policies have ratio 1, which must lie between"
            )
        return self


class StaleConfig(Section):
    """Which tokens of a partial rollout are still trained, by the age of the weights that made them."""

    max_lag: NonNegativeInt | None = None
    """Most updates between making a token and training it; 0 trains only this iteration's, "null" all. Stale
    ones stay in the row as context."""


@torch.no_grad()
def importance_weights(
    config: CorrectionConfig,
    old_logp_T: Tensor,
    sampler_logp_T: Tensor,
    segments: Segments,
    mask_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Truncated (TIS), masked (MIS) or rejecting importance weights from w = pi_old / mu: the constant factor
    of every token's policy term [T], 0 outside the mask, and how many trained tokens were cut off or set to 0
    (0-d).

    level: w of the token; of the answer, exp(sum log w); or exp(mean log w), which does not grow with its
    length. tis: min(w, high); mis: w inside [low, high], else 0; reject: 1 inside, else 0. max_k3 sets
    answers with a larger mean of w - 1 - log w to 0 besides. Tokens outside the mask take no part in an
    answer's ratio. Token weights are biased for sequences (the state distribution stays mu's); those of whole
    answers are not, but vary more the longer they are. Divide the loss by the same totals as without: nothing
    is normalised by the weights.
    """
    # Log ratios of trained tokens alone; the rest of a row may hold NaN.
    log_T = only(mask_T, old_logp_T) - only(mask_T, sampler_logp_T)
    counts_N = sequence_sums(mask_T.to(log_T.dtype), segments).clamp(min=1)

    # A ratio of the answer stands at every token of it.
    level_T = log_T
    if config.level != "token":
        level_N = sequence_sums(log_T, segments)
        if config.level == "geometric":
            level_N = level_N / counts_N
        level_T = spread(level_N, segments)

    # Compared as logarithms: no product of ratios overflows.
    # (A ratio of a long answer is e to the power of hundreds.)
    top, bottom = math.log(config.high), math.log(config.low) if config.low > 0 else -math.inf
    weight_T, touched_T = level_T.clamp(max=top).exp(), level_T > top
    if config.mode != "tis":
        touched_T = touched_T | (level_T < bottom)
        kept_T = weight_T if config.mode == "mis" else torch.ones_like(weight_T)
        weight_T = only(~touched_T, kept_T)
    if config.max_k3 is not None:
        k3_N = sequence_sums(torch.expm1(log_T) - log_T, segments) / counts_N
        far_T = spread(k3_N > config.max_k3, segments)
        weight_T, touched_T = only(~far_T, weight_T), touched_T | far_T
    return only(mask_T, weight_T), (touched_T & mask_T).sum()


def fresh(config: StaleConfig, versions_T: Tensor, current: int) -> Tensor:
    """bool [T]: the token may be trained at weight version `current`.

    versions_T: integer [T], the version of the weights that made each token. In a partial rollout the
    segments of one answer have different versions; stale ones stay in the row as context for the others.
    """
    if config.max_lag is None:
        return torch.ones_like(versions_T, dtype=torch.bool)
    return current - versions_T <= config.max_lag


STD_EPS = 1e-6  # rewards differ by far more, or not at all: groups of equal rewards are set to 0 before
MAX_LOG_RATIO = 20.0
"""e^20 = 5e8: beyond it a ratio no longer moves, which keeps products with 0 from becoming NaN."""

Term: TypeAlias = "Callable[[ObjectiveConfig, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]"
"""(options, log_ratio_X, advantages_X, logp_X) -> (policy term [X] to be minimised, bool [X]: outside the
trust region). log_ratio_X and logp_X are differentiable; an answer without a trained token has zeros."""

PRESETS: dict[str, Record] = {}
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
    weight_high: float = Field(5.0, ge=1)
    """CISPO: largest importance weight."""
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
        # What stands beside the name wins over its preset.
        return {**PRESETS[name], **given}

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        # Bounds on the ratio itself, 0.8 and 1.2, are an easy mistake here.
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
        needs_tau = self.ratio == "sequence_sum" or self.baseline == "log_mean_exp"
        if self.tau == 0 and needs_tau:
            raise ValueError(f"tau=0: term {self.term!r} with baseline {self.baseline!r} needs tau above 0")
        if self.tau > 0 and self.ratio == "sequence_mean" and not needs_tau:
            raise ValueError(f"tau={self.tau}: the squared term is per token; ratio 'sequence_mean' has none")
        self.equation()  # a term that cannot be imported is told before the run begins
        return self

    def equation(self) -> Term:
        """The function of the policy term. Raises UserError for a `loss` that cannot be imported."""
        if self.loss is None:
            return TERMS[self.term][0]
        return function_at(self.loss, "objective.loss")


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
    """PPO: -min(rho A, clip(rho) A)."""
    # Clamped before the exponential: inf * 0 would be NaN in the branch that is not taken.
    ratio_X = log_ratio_X.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = 1 - options.clip_low, 1 + options.clip_high
    outside_X = ((advantages_X > 0) & (ratio_X > high)) | ((advantages_X < 0) & (ratio_X < low))
    clipped_X = ratio_X.clamp(low, high) * advantages_X
    return -torch.minimum(ratio_X * advantages_X, clipped_X), outside_X


@objective("cispo", ratio="token", normaliser="tokens", baseline="mean", divide_by_std=True)
@term("weight", "token")
def weight(
    options: ObjectiveConfig, log_ratio_T: Tensor, advantages_T: Tensor, logp_T: Tensor
) -> tuple[Tensor, Tensor]:
    """-constant(clip(rho)) A log pi: the weight is clipped, no gradient is lost."""
    # A constant: REINFORCE with an importance weight, so every token keeps a gradient.
    fixed_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    outside_T = fixed_T > options.weight_high
    return -fixed_T.clamp(max=options.weight_high) * advantages_T * logp_T, outside_T


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
    # Half of the square, so that its derivative is tau L.
    terms_N = -advantages_N * log_ratio_N + 0.5 * options.tau * log_ratio_N.square()
    return terms_N, torch.zeros_like(log_ratio_N, dtype=torch.bool)


@objective("k2", ratio="sequence_sum", normaliser="sequences", baseline="mean", divide_by_std=False, tau=0.1)
@term("squared", "sequence_sum")
def squared(
    options: ObjectiveConfig, log_ratio_N: Tensor, advantages_N: Tensor, logp_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(A - tau L)^2."""
    # The same minimum as k1.5, reached as a regression.
    terms_N = (advantages_N - options.tau * log_ratio_N).square()
    return terms_N, torch.zeros_like(log_ratio_N, dtype=torch.bool)


class PolicyLoss(NamedTuple):
    """loss: 0-d, to be minimised. The rest are constants, sums over the trained tokens (0-d), to be divided
    by `tokens` after adding up pieces and ranks: outside (tokens whose policy gradient is masked or clipped,
    or whose weight is), k3 (divergence rho - 1 - l of the old policy from the new, nats); log_ratio_max is
    the largest |l|."""

    loss: Tensor
    tokens: Tensor
    outside: Tensor
    k3: Tensor
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
    batch: Totals | None = None,
) -> PolicyLoss:
    """The loss of `options` on N responses packed in T tokens, all tensors on one device.

    logp_T: log-probabilities under the policy being trained (differentiable); old_logp_T under the one the
    objective calls old. mask_T: bool, tokens that are trained (all if None); the others, which may hold NaN,
    neither count nor get a gradient. weight_T: constants of `corrections.importance_weights` on the policy
    term; the squared term keeps all tokens. k1.5, K2 and GSPO have one term for each answer and use the mean
    weight over it. batch: totals of the whole batch when this is a piece of it. No trained token: loss 0,
    gradient 0. Raises ValueError for tensors that do not fit the segments.
    """
    # Nothing but trained tokens from here on.
    if mask_T is None:
        mask_T = torch.ones_like(logp_T, dtype=torch.bool)
    if weight_T is None:
        # One code for runs with and without a correction.
        weight_T = torch.ones_like(logp_T)
    logp_T = only(mask_T, logp_T)
    log_T, weight_T = logp_T - only(mask_T, old_logp_T.detach()), only(mask_T, weight_T.detach())

    # Divided by the totals of the whole batch, of which this row may be a piece.
    counts_N = sequence_sums(mask_T.to(log_T.dtype), segments)
    trained_N = counts_N.clamp(min=1)
    tokens, answers = totals(mask_T, segments) if batch is None else batch
    tokens, answers = tokens.to(log_T).clamp(min=1), answers.to(log_T).clamp(min=1)

    # The policy term: of every token, or of every answer that has a trained one.
    equation = options.equation()
    if options.ratio == "token":
        advantages_T = only(mask_T, spread(advantages_N, segments))
        terms_T, outside_T = equation(options, log_T, advantages_T, logp_T)
        terms_T = weight_T * terms_T + options.tau * log_T.square()
        if options.normaliser == "tokens":
            loss = terms_T.sum() / tokens
        elif options.normaliser == "constant":
            loss = terms_T.sum() / (answers * (options.constant_tokens or 1))
        else:
            loss = (sequence_sums(terms_T, segments) / trained_N).sum() / answers
    else:
        log_N = sequence_sums(log_T, segments)
        if options.ratio == "sequence_mean":
            log_N = log_N / trained_N
        advantages_N = only(counts_N > 0, advantages_N)
        terms_N, outside_N = equation(options, log_N, advantages_N, sequence_sums(logp_T, segments))
        loss = (sequence_sums(weight_T, segments) / trained_N * terms_N).sum() / answers
        outside_T = spread(outside_N, segments)

    # What the log shows, over the trained tokens.
    log_T = log_T.detach()
    k3 = (torch.expm1(log_T.clamp(max=MAX_LOG_RATIO)) - log_T).sum()
    largest = torch.cat([log_T.abs(), log_T.new_zeros(1)]).amax()
    return PolicyLoss(loss, mask_T.sum(), (outside_T & mask_T).sum(), k3, largest)


def advantages(options: ObjectiveConfig, rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """How much better an answer is than the others to the same prompt: A_N = r - baseline of its group, over
    the group's standard deviation if the objective says so. No value network: a step that is wrong and later
    repaired should not be punished (k1.5 2.3.2).

    Baselines: mean (all answers), leave_one_out (the others), log_mean_exp (tau log mean exp(r / tau), the
    exact tau log Z of k1.5; it tends to the mean for large tau), none. The deviation is that of a sample (n -
    1). A group of equal rewards, and so a group of one, has advantage exactly 0, except with baseline "none".
    """
    groups = group(groups_N)
    count_N = groups.spread(groups.sums(torch.ones_like(rewards_N)))
    mean_N = groups.spread(groups.means(rewards_N))
    if options.baseline == "none":
        centred_N = rewards_N
    elif options.baseline == "mean":
        centred_N = rewards_N - mean_N
    elif options.baseline == "leave_one_out":
        others_N = groups.spread(groups.sums(rewards_N)) - rewards_N
        centred_N = rewards_N - others_N / (count_N - 1).clamp(min=1)
    else:
        # The largest is taken off before the exponential, so that it cannot overflow.
        top_N = groups.spread(groups.extreme(rewards_N, "amax"))
        mean_G = groups.means(((rewards_N - top_N) / options.tau).exp())
        centred_N = rewards_N - (top_N + options.tau * groups.spread(mean_G.log()))

    # A group whose answers all earn the same says nothing about any of them, whatever their mean rounds to.
    if options.baseline != "none":
        centred_N = centred_N.masked_fill(~informative(rewards_N, groups_N), 0.0)
    if not options.divide_by_std:
        return centred_N
    squares_N = groups.spread(groups.sums((rewards_N - mean_N).square()))
    return centred_N / ((squares_N / (count_N - 1).clamp(min=1)).sqrt() + STD_EPS)


def informative(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """bool [N]: the response belongs to a group whose rewards differ. Equal rewards teach nothing; DAPO's
    dynamic sampling leaves such groups out and draws other prompts in their place."""
    groups = group(groups_N)
    return groups.spread(groups.extreme(rewards_N, "amax") > groups.extreme(rewards_N, "amin"))
