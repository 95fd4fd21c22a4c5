"""One optimizer step, the same for pretraining, fine-tuning, reinforcement learning and DPO.

    gradients of all ranks -> frozen ones dropped -> norm, clipped -> guard -> step, or forget it

A step is forgotten as a whole: the optimizer's moments stand, and what the forward passes measured for
QK-Clip and for the balance of experts is dropped, so that a bad batch neither clips heads nor moves routers.

The guard before the optimizer step: what to do with a loss or gradient norm that is not finite or spikes.

A step is bad when its loss or its gradient norm is not finite, or when its loss exceeds mean + SIGMA *
deviation over the last WINDOW good steps (only upwards: a sudden improvement is no fault). Policies:

    stop      end the run before the update
    skip      drop the update, go on with the next batch
    rollback  go back to the last checkpoint; the caller keeps the data cursor, so that the bad batches are
              passed over

Whatever the policy, more than MAX_SKIPS bad steps among the last WINDOW steps stop the run, and so does a
rollback beyond MAX_ROLLBACKS. The decision is a maximum over ranks, so all ranks act alike.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from earlyfusion.kernels.errors import UserError
from earlyfusion.kernels.files import Record
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.model.layers import Router, moe_layers, update_router_biases
from earlyfusion.pipeline.optim.routing import PARTS, names_part
from earlyfusion.pipeline.parallel.shard import clip_grad_norm as shard_grad_norm
from earlyfusion.pipeline.runtime import Runtime

WINDOW, SIGMA = 128, 8.0
MAX_SKIPS, MAX_ROLLBACKS = 10, 3
# Before this many good steps a mean says little; only non-finite values are bad.
MIN_HISTORY = 16
# The deviation counts at least this share of the mean: a very steady run must not stop over a ripple.
DEVIATION_FLOOR = 0.02
ACTIONS = ("go", "skip", "rollback", "stop")


@dataclass(frozen=True)
class Verdict:
    """What to do with this step (one of ACTIONS), and why, in words for the log ("" when all is well)."""

    action: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.action == "go"


class Guard:
    """Watches loss and gradient norm.

    policy: stop, skip or rollback. agree: maximum over ranks of an integer (`Runtime.agree`); the identity
    with one process.
    """

    def __init__(self, policy: str = "skip", agree: Callable[[int], int] = int) -> None:
        self.policy, self.agree = policy, agree
        self.rollbacks = 0
        self.recent_bad: deque[bool] = deque(maxlen=WINDOW)
        self.new_stage()

    def new_stage(self) -> None:
        """Forget the good values: another mixture, or older weights, have another loss. Counters stay."""
        self.history: deque[float] = deque(maxlen=WINDOW)

    def check(self, loss: float, grad_norm: float, *, can_roll_back: bool = True) -> Verdict:
        """Judge one step before its update. Every rank calls it once a step.

        can_roll_back: whether a checkpoint exists; without one, rollback means skip.
        """
        # Every rank calls it in every step, bad or not: a collective must not depend on a value. And a fault
        # that one rank sees is one of all: whoever decides alone would hang the others.
        reason = self._fault(loss, grad_norm)
        bad = bool(self.agree(int(reason != "")))
        self.recent_bad.append(bad)
        if not bad:
            self.history.append(loss)
            return Verdict("go")

        # What the policy makes of it, the strictest choice of all ranks.
        action = self.policy
        if action == "rollback" and not can_roll_back:
            action = "skip"
        too_often = action == "rollback" and self.rollbacks >= MAX_ROLLBACKS
        if sum(self.recent_bad) > MAX_SKIPS or too_often:
            action = "stop"
        action = ACTIONS[self.agree(ACTIONS.index(action))]
        self.rollbacks += action == "rollback"
        reason = reason or "another rank saw a bad step"
        if action == "stop" and self.policy != "stop":
            reason += f" (bad steps lately: {sum(self.recent_bad)}, rollbacks: {self.rollbacks})"
        return Verdict(action, reason)

    def _fault(self, loss: float, grad_norm: float) -> str:
        # A finite norm is no danger whatever its size: gradients are clipped, and a jump in learning raises
        # it for many steps, in which skipping would never end.
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"{name} is {value}"
        history = self.history
        if len(history) < MIN_HISTORY:
            return ""
        mean = math.fsum(history) / len(history)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in history) / len(history))
        limit = mean + SIGMA * max(deviation, DEVIATION_FLOOR * abs(mean))
        if loss <= limit:
            return ""
        return f"loss {loss:.4g} is above {limit:.4g} (mean + {SIGMA:g} deviations)"

    def state_dict(self) -> Record:
        lists = {"history": list(self.history), "recent_bad": list(self.recent_bad)}
        return lists | {"rollbacks": self.rollbacks}

    def load_state_dict(self, state: Record) -> None:
        self.history = deque(state["history"], WINDOW)
        self.recent_bad = deque(state["recent_bad"], WINDOW)
        self.rollbacks = state["rollbacks"]


@dataclass(frozen=True)
class Update:
    """What became of a step. grad_norm: before clipping; expert_load: of `update_router_biases`, {} where
    nothing was balanced."""

    grad_norm: float
    verdict: Verdict
    expert_load: dict[str, Tensor] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        """Whether the guard dropped the step."""
        return not self.verdict.ok

    @property
    def empty(self) -> bool:
        """Whether there was nothing to learn, on any rank."""
        return self.grad_norm == 0


def update(
    model: NativeFusion,
    optimizer: torch.optim.Optimizer,
    guard: Guard,
    runtime: Runtime,
    *,
    loss: float,
    lr: float,
    clip_grad_norm: float | None,
    frozen: Sequence[str] = (),
    balance_experts: bool = True,
    can_roll_back: bool = False,
) -> Update:
    """Take the step of the gradients in `.grad`, which are those of all ranks; they are gone afterwards.

    model: the bare module. loss: what the guard watches, equal on all ranks. clip_grad_norm: None measures
    the norm and clips nothing. frozen: entries of a recipe (`is_frozen`). balance_experts: whether router
    biases move. can_roll_back: see `Guard.check`. Every rank calls it.
    """
    # Frozen parameters have gradients (DDP wants the same ones in every step); they go here.
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    still = [parameter for name, parameter in trained if is_frozen(name, frozen)]
    for parameter in still:
        parameter.grad = None
    # The norm is measured in any case: the guard and the log want it.
    limit = float("inf") if clip_grad_norm is None else clip_grad_norm
    if runtime.layout.sharded:
        grad_norm = shard_grad_norm(model, limit, runtime.layout)
    else:
        grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))

    # A step on zeros would go along an old direction, and the
    # guard, which compares norms, need not hear of it.
    verdict = Verdict("go")
    if grad_norm != 0:
        verdict = guard.check(loss, grad_norm, can_roll_back=can_roll_back)

    load: dict[str, Tensor] = {}
    if grad_norm == 0 or not verdict.ok:
        clip = getattr(optimizer, "qk_clip", None)
        if clip is not None:
            clip.reset()
    else:
        for group in optimizer.param_groups:
            # One for all groups (Moonlight: both families share it), but for parts with a factor.
            group["lr"] = lr * group.get("lr_factor", 1.0)
        with _held(model, still, frozen):
            optimizer.step()
            if balance_experts:
                # By the step's load, summed over ranks.
                reduce = None if runtime.world == 1 else runtime.sum_of_layers
                load = update_router_biases(model, reduce)
    for layer in moe_layers(model):
        layer.reset_counts()
    optimizer.zero_grad(set_to_none=True)
    return Update(grad_norm, verdict, load)


def expert_metrics(load: Mapping[str, Tensor], model: NativeFusion) -> Record:
    """`expert_load` {layer: share per expert} and the largest violation, for a log record."""
    if not load:
        return {}
    # By the layer's number, as the recipe and the report know it.
    # (A pipeline stage holds some of them.)
    layers = [i for i, layer in enumerate(model.decoder.layers) if getattr(layer, "sparse", False)]
    shares = {str(layer): share for layer, share in zip(layers, load["load_share"].tolist(), strict=True)}
    return {"expert_load": shares, "expert_max_violation": float(load["max_violation"].max())}


def is_frozen(name: str, entries: Sequence[str]) -> bool:
    """Whether a parameter's name is frozen by one of: vision, projector, text, or fnmatch patterns."""
    return any(names_part(entry, name) for entry in entries)


def check_frozen(model: nn.Module, frozen_by_key: Mapping[str, Sequence[str]]) -> None:
    """UserError for an entry that matches no parameter. frozen_by_key: the recipe's key -> its entries."""
    names = [name for name, _ in model.named_parameters()]
    for key, entries in frozen_by_key.items():
        for entry in entries:
            if not any(is_frozen(name, [entry]) for name in names):
                raise UserError(
                    f"{key}: {entry!r} matches no parameter; use {', '.join(PARTS)} or a pattern"
                    f" like {names[0]!r}"
                )


@contextmanager
def _held(model: nn.Module, still: Sequence[nn.Parameter], frozen: Sequence[str]) -> Iterator[None]:
    """Around a step: QK-Clip leaves the `still` parameters alone, and frozen routers keep their biases."""
    biases = {}
    for name, module in model.named_modules():
        if not isinstance(module, Router):
            continue
        # Beside adapters no weight of a router learns, so that nothing would go along with its biases.
        if is_frozen(f"{name}.weight", frozen) or not module.weight.requires_grad:
            biases[module] = module.e_score_correction_bias.clone()
    for parameter in still:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in still:
            parameter.requires_grad_(True)
        for router, bias in biases.items():
            router.e_score_correction_bias.copy_(bias)
