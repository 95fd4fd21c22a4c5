"""AdamW over lists of tensors: one fused call per device and dtype.

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

m and v are fp32 (fp64 for fp64 parameters) whatever the parameter's dtype. Parameters of 16 bits are updated
in fp32 and rounded once. Source: Loshchilov and Hutter, arXiv 1711.05101; identical to torch.optim.AdamW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from earlyfusion.pipeline.config.schema import OptimSection
from earlyfusion.pipeline.optim.qk_clip import QKClip
from earlyfusion.pipeline.optim.registry import optimizer, param_groups

# Decays of the two moments, those of GPT-3 (arXiv 2005.14165, appendix B) and most that came after it.
BETAS = (0.9, 0.95)

State = dict[str, Tensor]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of optimizer state for a parameter: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fresh_state(param: Tensor) -> State:
    """Zero moments with the parameter's layout (a DTensor for a DTensor) and a step count on its device."""
    dtype = state_dtype(param.dtype)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=param.device),
        "exp_avg": torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format),
    }


def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Advance local (unsharded) tensors in place; `states` as made by `fresh_state`, local as well."""
    kinds: dict[Any, list[int]] = defaultdict(list)
    for index, param in enumerate(params):
        kinds[(param.device, param.dtype)].append(index)
    for (_, dtype), indices in kinds.items():
        weights, wide = [params[i] for i in indices], state_dtype(dtype)
        steps = [states[i]["step"] for i in indices]
        # Every parameter counts its own steps: one that was frozen begins its bias correction late.
        torch._foreach_add_(steps, 1)

        # 16-bit weights are updated in fp32 and rounded once, at the end.
        working = [weight.to(wide) for weight in weights]
        torch._fused_adamw_(
            working,
            [grads[i].to(wide) for i in indices],
            [states[i]["exp_avg"] for i in indices],
            [states[i]["exp_avg_sq"] for i in indices],
            [],
            steps,
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        if wide != dtype:
            torch._foreach_copy_(weights, working)


@optimizer("adamw", matrices="adamw")
def adamw(options: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    """torch's AdamW for everything, with QK-Clip after every step where the recipe asks for it."""
    made = torch.optim.AdamW(param_groups(options, model), betas=BETAS, eps=options.eps)
    if options.qk_clip is not None:
        # After the step, as in MuonClip: the weights that are clipped are the new ones.
        clip = QKClip(model, options.qk_clip)
        made.register_step_post_hook(lambda *_: clip.apply())
        made.qk_clip = clip  # type: ignore[attr-defined]  # the same attribute as MuonClip's
    return made
