"""What reinforcement learning can be told: objective, corrections, length, schedules, choice of prompts.

The objectives are one family. A `name` is a preset of its parts, and any part may be given beside it:

    ObjectiveConfig(name="k2.5")                      ObjectiveConfig(name="dapo", clip_high=0.3, tau=1e-3)

| name         | term    | ratio         | divided by                              | advantage          |
               trust region |
|--------------|---------|---------------|-----------------------------------------|--------------------|--------------|
| k1.5         | linear  | whole answer  | answers                                 | r - mean           |
               (tau/2) L^2  |
| k2           | squared | whole answer  | answers                                 | r - mean           |
               inside       |
| k2.5, k3     | window  | token         | trained tokens                          | r - mean           | mask
               on log ratio + tau l^2 on all tokens |
| grpo         | clip    | token         | answers, each by its tokens             | (r - mean) / std   | PPO
               clip     |
| dr_grpo      | clip    | token         | answers x `constant_tokens`             | r - mean           | PPO
               clip     |
| dapo         | clip    | token         | trained tokens                          | (r - mean) / std   |
               clip-higher  |
| gspo         | clip    | geometric mean| answers                                 | (r - mean) / std   | clip
               of the answer's ratio |
| cispo        | weight  | token         | trained tokens                          | (r - mean) / std   | the
               weight is clipped, no gradient is lost |

Moonshot publishes neither alpha, beta nor tau: the numbers here are ours. Sources: Kimi k1.5 2.3.2, Kimi K2
3.2.3, Kimi K2.5 4.4.2 eq. 1, Kimi K3 4.1.2, DeepSeekMath, 2503.20783, 2503.14476, 2507.18071, 2506.13585.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.pipeline.config.schema import Section

_K: dict[str, Any] = {"baseline": "mean", "divide_by_std": False}
_CLIP: dict[str, Any] = {"term": "clip", "ratio": "token", "baseline": "mean", "divide_by_std": True}
_WINDOW: dict[str, Any] = {**_K, "term": "window", "ratio": "token", "normaliser": "tokens", "tau": 1e-3}
_WHOLE: dict[str, Any] = {**_K, "ratio": "sequence_sum", "normaliser": "sequences", "tau": 0.1}

PRESETS: dict[str, dict[str, Any]] = {
    "k1.5": {**_WHOLE, "term": "linear", "reset_optimizer": True},
    "k2": {**_WHOLE, "term": "squared"},
    "k2.5": _WINDOW,
    "k3": _WINDOW,
    "grpo": {**_CLIP, "normaliser": "sequence_means"},
    "dr_grpo": {**_CLIP, "normaliser": "constant", "divide_by_std": False},
    "dapo": {**_CLIP, "normaliser": "tokens", "clip_high": 0.28},
    "gspo": {
        **_CLIP,
        "ratio": "sequence_mean",
        "normaliser": "sequences",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    "cispo": {**_CLIP, "term": "weight", "normaliser": "tokens"},
}
"""Name -> parts; see the table above."""

_RATIOS = {
    "window": ("token",),
    "weight": ("token",),
    "clip": ("token", "sequence_mean"),
    "linear": ("sequence_sum",),
    "squared": ("sequence_sum",),
}


class ObjectiveConfig(Section):
    """The loss of the policy; parts that are not given come from the preset `name`."""

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
        if self.ratio not in _RATIOS[self.term]:
            raise ValueError(
                f"term {self.term!r} works with ratio {' or '.join(_RATIOS[self.term])}, not {self.ratio}"
            )
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
        return self

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
    """Most updates between making a token and training it; 0 trains only this iteration's, "null" all."""
    scope: Literal["token", "sequence"] = "token"
    """Leave out the stale tokens, or every answer that holds one."""


class PtxConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Weight of the language-model loss on curated data, which is divided by its own tokens."""


class LengthRewardConfig(Section):
    """k1.5: shorter right answers earn more, longer wrong ones less."""

    weight: NonNegativeFloat = 0.0
    """Weight of the length reward."""
    warmup_updates: NonNegativeInt = 0
    """Updates without it at the start."""


class OverlongConfig(Section):
    """What happens to answers that reach the token limit."""

    mode: Literal["none", "filter", "soft", "hard"] = "none"
    """filter: no loss on cut answers; soft: penalty that grows inside the last `buffer_tokens` (DAPO); hard:
    the whole penalty for every cut answer (K2's budget)."""
    max_tokens: PositiveInt | None = None
    """Where the soft penalty is whole, tokens; "null": rollout.max_new_tokens, beyond which no answer goes.
    """
    buffer_tokens: NonNegativeInt = 128
    """Tokens before the limit over which the soft penalty grows."""
    penalty: NonNegativeFloat = 1.0
    """Taken off the reward."""

    @model_validator(mode="after")
    def _check(self) -> OverlongConfig:
        limit = self.max_tokens
        if self.mode == "soft" and limit is not None and not 0 < self.buffer_tokens < limit:
            raise ValueError(
                f"buffer_tokens={self.buffer_tokens}: the soft penalty needs 1 to max_tokens-1={limit - 1}"
            )
        return self

    def within(self, max_new_tokens: int) -> OverlongConfig:
        """The same with its limit known. Raises ValueError for one that no answer reaches."""
        if (self.max_tokens or 0) > max_new_tokens:
            raise ValueError(
                f"overlong.max_tokens {self.max_tokens} is more than rollout.max_new_tokens {max_new_tokens}:"
                " no answer would ever be overlong; leave it out to use that limit"
            )
        if self.mode != "soft":
            return self
        return OverlongConfig(**{**self.model_dump(), "max_tokens": self.max_tokens or max_new_tokens})


class ToggleConfig(Section):
    """K2.5 Toggle: `every` updates with a budget on prompts that are solved, `every` updates without. Budgets
    are those of problems, so it needs rollout.pool."""

    every: NonNegativeInt = 0
    """Updates of one phase (m); 0 turns Toggle off."""
    percentile: float = Field(50.0, ge=0, le=100)
    """The budget of a prompt: this percentile (rho) of the lengths of its right answers."""
    min_accuracy: float = Field(0.8, ge=0, le=1)
    """The budget holds only for groups with at least this mean reward (lambda), as a share of reward.low to
    reward.high."""


class RepeatConfig(Section):
    """When an answer counts as running in circles."""

    min_repeats: int = Field(4, ge=2)
    """Repetitions of the same tokens at its end."""
    max_period: PositiveInt = 32
    """Longest run of tokens that is repeated."""
    min_tokens: PositiveInt = 32
    """Tokens that the repetitions must cover together."""
    penalty: NonNegativeFloat = 1.0
    """Taken off the reward."""


class TemperatureConfig(Section):
    """Sampling temperature: high first, to explore; lower later."""

    start: PositiveFloat = 1.0
    """Temperature of the first update."""
    end: PositiveFloat = 1.0
    """Temperature from `updates` on."""
    updates: NonNegativeInt = 0
    """Updates from start to end."""
    shape: Literal["linear", "cosine", "exponential"] = "linear"
    """The way between them."""


class CurriculumConfig(Section):
    """Which prompts are drawn, and how often."""

    mode: Literal["uniform", "hard_after_warmup", "easy_to_hard"] = "uniform"
    """hard_after_warmup: all prompts alike, then only those that are seldom solved (k1.5); easy_to_hard: the
    hardest allowed level of the tasks grows evenly from `start_difficulty` to 1."""
    warmup_updates: NonNegativeInt = 0
    """Updates until only hard prompts are left, or until all are allowed."""
    hard_from: float = Field(0.5, ge=0, le=1)
    """Failure rate from which a prompt is hard."""
    start_difficulty: float = Field(0.3, ge=0, le=1)
    """Hardest level at the start of easy_to_hard, as a share of the task's highest."""
    prioritised: bool = False
    """Draw prompts in proportion to 1 - success rate."""
    floor: float = Field(0.05, ge=0, le=1)
    """Smallest weight of a prompt that is allowed, so that no skill is forgotten unseen."""
    prior_trials: PositiveFloat = 2.0
    """Imagined trials, half of them successes, before a prompt was tried."""
    memory_answers: PositiveFloat = 100.0
    """Answers to a prompt (with rollout.pool = 0: of a task entry) after which older ones count 1/e: the
    policy changes."""


def check_together(objective: ObjectiveConfig, correction: CorrectionConfig) -> None:
    """ValueError for a token correction of an objective that has one ratio for the whole answer."""
    if correction.mode != "none" and correction.level == "token" and objective.ratio != "token":
        raise ValueError(
            f"correction.level='token' does not fit objective {objective.name!r}, which has one ratio for"
            " each answer; set correction.level to 'sequence' or 'geometric'"
        )
