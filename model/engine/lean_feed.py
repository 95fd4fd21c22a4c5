"""Feed-forward sub-layers for inference on a CPU in full precision; see lean_parts.py.

Shapes: T tokens, D hidden, E experts, J chosen ones, P = T J rows, F expert width.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.products import add_product_, product_of_few
from earlyfusion.model.engine.lean_weights import Scratch, add_product, joined, norm_weight, unit
from earlyfusion.model.mlp import SwiGLU
from earlyfusion.model.moe import FEWEST_ROWS, MixtureOfExperts
from earlyfusion.model.norm import RMSNorm


class LeanMlp:
    """SwiGLU and its pre-norm."""

    def __init__(self, norm: RMSNorm, layer: SwiGLU, scratch: Scratch) -> None:
        self.norm, self.layer, self.scratch = norm, layer, scratch
        self.refresh()

    def refresh(self) -> None:
        layer = self.layer
        self.gate_up = joined(norm_weight(self.norm), layer.gate_proj.weight, layer.up_proj.weight)
        self.down = layer.down_proj.weight.detach().T

    def __call__(self, x: Tensor, into: Tensor | None) -> Tensor:
        gate, up = self.scratch.product(unit(x, self.norm.eps), self.gate_up).chunk(2, dim=-1)
        return add_product(F.silu(gate, inplace=True).mul_(up), self.down, into)


class LeanMoe:
    """MixtureOfExperts and its pre-norm: router and shared experts are one product, an expert's rows are
    computed together.

    A token's result does not depend on the others, bit for bit (from four rows in all): an expert with fewer
    rows than FEWEST_ROWS takes its neighbours' along and drops what comes of them.
    """

    def __init__(self, norm: RMSNorm, layer: MixtureOfExperts, scratch: Scratch) -> None:
        self.norm, self.layer, self.scratch = norm, layer, scratch
        self.refresh()

    def refresh(self) -> None:
        layer, experts = self.layer, self.layer.experts
        weights, self.shared_down = [layer.gate.weight.detach()], None
        if layer.shared_experts is not None:
            shared = layer.shared_experts
            weights += [shared.gate_proj.weight.detach(), shared.up_proj.weight.detach()]
            self.shared_down = shared.down_proj.weight.detach().T
        self.norm_D = norm_weight(self.norm)
        self.joint = torch.cat(weights).T
        self.up = [weight.T for weight in experts.gate_up_proj.detach()]
        self.down = [weight.T for weight in experts.down_proj.detach()]

    def _route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights [T, J], as `Router.forward`."""
        gate = self.layer.gate
        scores_TE = logits_TE.sigmoid()
        biased = scores_TE + gate.e_score_correction_bias
        ids_TJ = torch.topk(biased, gate.top_k, dim=-1, sorted=False)[1]
        if gate.recorded is not None:
            gate.recorded.append(ids_TJ)
        weights_TJ = scores_TE.gather(1, ids_TJ)
        if gate.renormalize:
            weights_TJ = weights_TJ.div_(weights_TJ.sum(-1, keepdim=True).add_(1e-20))
        return ids_TJ, weights_TJ if gate.scaling == 1.0 else weights_TJ.mul_(gate.scaling)

    def __call__(self, x: Tensor, into: Tensor | None) -> Tensor:
        x = unit(x, self.norm.eps).mul_(self.norm_D)
        wide = self.scratch.product(x, self.joint)
        experts = self.layer.gate.num_experts
        ids_TJ, weights_TJ = self._route(wide[:, :experts])
        out = self._experts(x, ids_TJ, weights_TJ)
        into = out if into is None else into.add_(out)
        if self.shared_down is not None:
            gate, up = wide[:, experts:].chunk(2, dim=-1)
            add_product_(into, F.silu(gate, inplace=True).mul_(up), self.shared_down)
        return into

    def _experts(self, x: Tensor, ids_TJ: Tensor, weights_TJ: Tensor) -> Tensor:
        flat_P = ids_TJ.flatten().numpy()  # numpy: a fifth of torch's time for a few rows
        order = np.argsort(flat_P, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(order.shape[0])
        parts, start, rows = [], 0, order.shape[0]
        for expert, count in enumerate(np.bincount(flat_P, minlength=len(self.up)).tolist()):
            if count:
                low = max(0, min(start, rows - FEWEST_ROWS))
                parts.append((expert, start, count, low, max(start + count, low + FEWEST_ROWS)))
                start += count
        order_P = torch.from_numpy(order)
        h_PX = grouped(x.index_select(0, order_P // ids_TJ.shape[1]), self.up, parts)
        gate, up = h_PX.chunk(2, dim=-1)
        act_PF = (
            F.silu(gate, inplace=True)
            .mul_(up)
            .mul_(weights_TJ.flatten().index_select(0, order_P).to(x.dtype).unsqueeze(1))
        )
        y_PD = grouped(act_PF, self.down, parts)
        return y_PD.index_select(0, torch.from_numpy(place)).view(*ids_TJ.shape, -1).sum(1)


def grouped(x_PA: Tensor, weights: list[Tensor], parts: list[tuple[int, int, int, int, int]]) -> Tensor:
    """[P, B]: rows start .. start + count - 1 times the expert's weight, computed over rows low .. high -
    1."""
    out_PB = x_PA.new_empty(x_PA.shape[0], weights[0].shape[1])
    multiply = product_of_few(max((high - low for *_, low, high in parts), default=0), x_PA, weights[0])
    for expert, start, count, low, high in parts:
        if high - low == count:
            multiply(x_PA.narrow(0, start, count), weights[expert], out=out_PB.narrow(0, start, count))
        else:
            wide = multiply(x_PA.narrow(0, low, high - low), weights[expert])
            out_PB.narrow(0, start, count).copy_(wide.narrow(0, start - low, count))
    return out_PB
