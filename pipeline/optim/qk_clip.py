"""QK-Clip: keep every attention head's largest logit at or below tau by shrinking its query and key weights.

After an optimizer step, for each head with S = max over the step's visible pairs of scale * q_i . k_j,

    gamma = min(1, tau / S)    (1 for S <= 0, for -inf = nothing measured, and for non-finite S)
    W_q rows without position *= sqrt(gamma),   W_q rows with position *= gamma,   key rows of W_kvb *=
                                                sqrt(gamma)

so the logits of that head shrink by gamma. The shared positional key (in kv_a) and the values are not
touched, nor is any head with gamma = 1: its weights stay bit-identical. With a query low-rank pair only the
second matrix is scaled. Source: Kimi K2 (arXiv 2507.20534) section 2.1, the MLA case. (KDA normalises q and
k, so it has nothing to clip.)

S comes from the attention modules' `max_logit` buffers, which collect it in the forward passes of all
micro-batches.

Shapes: L layers, H heads, N rows of a head without position, R rows with position, V value rows, C columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from earlyfusion.pipeline.optim.groups import clean_name
from earlyfusion.pipeline.optim.plan import is_sharded, local_part

_NEEDED = ("max_logit", "num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_b_proj")


def _is_latent_attention(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _NEEDED) and (
        hasattr(module, "q_proj") or hasattr(module, "q_b_proj")
    )


def head_factors(S_H: Tensor, tau: float) -> Tensor:
    """gamma per head, fp32; exactly 1 where S <= tau or S is not finite."""
    S_H = S_H.float()
    return torch.where((S_H > tau) & S_H.isfinite(), tau / S_H, 1.0)


class QKClip:
    """Clips the latent-attention layers of `model`; usable beside any optimizer: `QKClip(model,
    tau).attach(opt)`.

    Layers are recognised by their attributes: max_logit [H], num_heads, qk_nope_head_dim, qk_rope_head_dim,
    v_head_dim, kv_b_proj, and q_proj or q_b_proj. Weights are looked up at each call, so a swapped parameter
    is found. Frozen weights (requires_grad False) are left alone.

    Raises:
        ValueError: tau is not positive, or the model has no such layer.
    """

    def __init__(self, model: nn.Module, tau: float = 100.0) -> None:
        if not tau > 0:
            raise ValueError(f"QK-Clip needs a positive tau, got {tau}; leave it out (None) to clip nothing")
        self.tau = float(tau)
        self.layers: dict[str, Any] = {
            clean_name(name): module for name, module in model.named_modules() if _is_latent_attention(module)
        }
        if not self.layers:
            raise ValueError(
                f"QK-Clip found no attention layer with {', '.join(_NEEDED)} in {type(model).__name__}; "
                "turn it off (qk_clip = None) for models without multi-head latent attention"
            )
        for module in self.layers.values():
            module.track_max_logit = True
            module.qk_clip_tau = self.tau
        self._last: Tensor | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Run after every step of `optimizer`; remove the returned handle to stop."""
        return optimizer.register_step_post_hook(lambda *_: self.apply())

    @torch.no_grad()
    def apply(self) -> None:
        """Clip, then start a new measurement. One all-reduce for all layers if torch.distributed is
        initialised.

        On an accelerator nothing waits for the host: factors stay on the device and heads to keep are
        multiplied by 1.
        """
        # The largest logits of all ranks, in one message for all layers.
        modules = list(self.layers.values())
        S = torch.cat([module.max_logit.float() for module in modules])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(S, op=dist.ReduceOp.MAX)
        self._last = S
        if S.device.type != "cpu" or bool((S > self.tau).any()):
            for module, S_H in zip(modules, S.split([module.num_heads for module in modules]), strict=True):
                self._scale(module, head_factors(S_H, self.tau))
        self.reset()

    def reset(self) -> None:
        """Forget what was measured; call it for a step that is skipped, so that a bad batch does not clip the
        next."""
        for module in self.layers.values():
            module.max_logit.fill_(float("-inf"))

    def _scale(self, module: Any, gamma_H: Tensor) -> None:
        # Query and key share the factor; the part with position has a key that all heads share.
        root_H, one_H = gamma_H.sqrt(), torch.ones_like(gamma_H)
        query = module.q_b_proj if hasattr(module, "q_b_proj") else module.q_proj
        nope, rope, value = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
        _scale_rows(query.weight, _per_row([(root_H, nope), (gamma_H, rope)]))
        _scale_rows(module.kv_b_proj.weight, _per_row([(root_H, nope), (one_H, value)]))

    def metrics(self) -> dict[str, Any]:
        """Of the last step, with a host sync: `max_logit` {layer: [S per head]} and `clipped_heads`.

        A layer is named by its index in the stack if its name holds one, else by its name. Layers that
        measured nothing are left out of `max_logit` and counted in `unmeasured_layers`.
        """
        if self._last is None:
            return {}
        values = self._last.tolist()
        found: dict[str, list[float]] = {}
        start = 0
        for name, module in self.layers.items():
            heads = values[start : start + module.num_heads]
            start += module.num_heads
            if max(heads) > float("-inf"):
                found[next((part for part in name.split(".") if part.isdigit()), name)] = heads
        clipped = sum(self.tau < s < float("inf") for s in values)
        return {
            "max_logit": found,
            "clipped_heads": clipped,
            "unmeasured_layers": len(self.layers) - len(found),
        }


def _per_row(parts: list[tuple[Tensor, int]]) -> Tensor:
    """Row factors [H * sum(rows), 1] from per-head factors and their row counts inside a head."""
    return torch.cat([factor_H[:, None].expand(-1, rows) for factor_H, rows in parts], dim=1).reshape(-1, 1)


def _scale_rows(weight: Tensor, factors_R1: Tensor) -> None:
    """weight [R, C] *= factors in place; a shard along dim 0 takes its own rows' factors."""
    if not weight.requires_grad:
        return
    # A shard scales the rows that it holds.
    local = local_part(weight)
    if is_sharded(weight):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
        factors_R1 = factors_R1[offset[0] : offset[0] + shape[0]]
    local.mul_(factors_R1)
