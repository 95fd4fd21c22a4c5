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

Shapes: H heads, R rows of a weight, C columns.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from earlyfusion.kernels.files import Record
from earlyfusion.pipeline.optim.routing import is_sharded, local_part


def head_factors(S_H: Tensor, tau: float) -> Tensor:
    """gamma per head, fp32; exactly 1 where S <= tau or S is not finite."""
    S_H = S_H.float()
    return torch.where((S_H > tau) & S_H.isfinite(), tau / S_H, 1.0)


class QKClip:
    """Clips the latent-attention layers of `model` to tau; usable beside any optimizer.

    Layers are the modules with a `max_logit` [H]. Weights are looked up at each call, so a swapped parameter
    is found. Frozen weights (requires_grad False) are left alone. Raises ValueError where there is no such
    layer.
    """

    def __init__(self, model: nn.Module, tau: float) -> None:
        self.tau = tau
        self.layers: Record = {}
        for name, module in model.named_modules():
            if hasattr(module, "max_logit"):
                self.layers[name] = module
                module.track_max_logit, module.qk_clip_tau = True, tau
        # A pipeline stage may have none: its neighbours do.
        if not self.layers and not any(isinstance(module, nn.Identity) for module in model.modules()):
            raise ValueError(
                f"QK-Clip found no latent attention in {type(model).__name__}; turn it off (qk_clip = null)"
            )
        self._last: Tensor | None = None
        self.group: dist.ProcessGroup | None = None
        """Ranks that hold the same layers; None: all."""

    @torch.no_grad()
    def apply(self) -> None:
        """Clip, then start a new measurement. One all-reduce for all layers if torch.distributed is
        initialised."""
        modules = list(self.layers.values())
        if not modules:
            return
        S = torch.cat([module.max_logit.float() for module in modules])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(S, op=dist.ReduceOp.MAX, group=self.group)
        # Kept on the device: who logs asks for it, the step does not wait.
        self._last = S

        # On an accelerator nothing waits for the host: heads to keep are multiplied by 1.
        if S.device.type != "cpu" or self.exceeds(S):
            for module, S_H in zip(modules, S.split([module.num_heads for module in modules]), strict=True):
                self._scale(module, head_factors(S_H, self.tau))
        self.reset()

    def exceeds(self, S: Tensor) -> bool:
        """Whether any head is to be clipped; waits for the device."""
        return bool((S > self.tau).any())

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
        _scale_rows(query.weight, root_H, nope, gamma_H, rope)
        _scale_rows(module.kv_b_proj.weight, root_H, nope, one_H, value)

    def metrics(self) -> Record:
        """Of the last step, with a host sync: `max_logit` {layer: [S per head]} and `clipped_heads`. A layer
        is named by its index in the stack; those that measured nothing are left out."""
        if self._last is None:
            return {}
        found: dict[str, list[float]] = {}
        values = self._last.tolist()
        start = 0
        for name, module in self.layers.items():
            heads = values[start : start + module.num_heads]
            start += module.num_heads
            if max(heads) > float("-inf"):
                found[next((part for part in name.split(".") if part.isdigit()), name)] = heads
        return {"max_logit": found, "clipped_heads": sum(self.tau < s < float("inf") for s in values)}


def _scale_rows(weight: Tensor, first_H: Tensor, rows: int, second_H: Tensor, other_rows: int) -> None:
    """weight [R, C] *= a factor for each head's first rows, and one for its other rows, in place."""
    if not weight.requires_grad:
        return
    # Heads stand one after the other, each with its two kinds of rows.
    parts = [first_H[:, None].expand(-1, rows), second_H[:, None].expand(-1, other_rows)]
    factors_R1 = torch.cat(parts, dim=1).reshape(-1, 1)

    # A shard along dim 0 scales the rows that it holds.
    if is_sharded(weight):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
        factors_R1 = factors_R1[offset[0] : offset[0] + shape[0]]
    local_part(weight).mul_(factors_R1)
