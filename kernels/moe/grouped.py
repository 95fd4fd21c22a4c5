"""SwiGLU experts on tokens sorted by expert: two grouped products forward, four backward, nothing of size [T, E].

Every (token, choice) pair is one row. Rows are sorted by expert, so that an expert sees a contiguous slice:

    h = x W_gate_up^T        a = w * silu(h_gate) * h_up        y_row = a W_down^T        y_t = sum of its J rows

The router weight is applied to the F-wide activation instead of the D-wide output (the product is linear in it). The
backward pass saves x, h and the routing; activations are recomputed from h. Row order inside an expert is token order
(stable sort) and sums over a token's rows run in choice order, so results do not depend on threads or atomics.

Legend: T tokens, D hidden, J experts per token, R = T * J rows, E experts, F expert width, C = 2F.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.moe.naive import check_experts
from earlyfusion.kernels.precision import accumulate_dtype, compute_dtype, without_autocast


class _Groups:
    """Products over contiguous row groups, one group per expert.

    On CUDA with bfloat16 and 16-byte rows, ``F.grouped_mm`` reads the group ends on the device. Elsewhere the counts
    come to the host (free on a CPU; one sync on CUDA) and every expert with rows gets its own matmul.
    """

    def __init__(self, counts_E: Tensor, dtype: torch.dtype, widths: tuple[int, ...]) -> None:
        on_gpu = counts_E.device.type == "cuda" and hasattr(F, "grouped_mm")
        self.fused = on_gpu and dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)
        self.ends_E = counts_E.cumsum(0).to(torch.int32)
        if not self.fused:
            ends = [0, *self.ends_E.tolist()]
            self.slices = [(e, slice(*ends[e : e + 2])) for e in range(len(ends) - 1) if ends[e] < ends[e + 1]]

    def rows_by_weight(self, rows_RA: Tensor, weight_EBA: Tensor) -> Tensor:
        """[R, B]: every row times the transposed [B, A] weight of its expert."""
        if self.fused:
            return F.grouped_mm(rows_RA.contiguous(), weight_EBA.transpose(1, 2), offs=self.ends_E)
        out_RB = rows_RA.new_empty(rows_RA.shape[0], weight_EBA.shape[1])
        for expert, rows in self.slices:
            torch.mm(rows_RA[rows], weight_EBA[expert].T, out=out_RB[rows])
        return out_RB

    def rows_by_rows(self, left_RB: Tensor, right_RA: Tensor) -> Tensor:
        """[E, B, A]: left^T right over the rows of every expert; zeros for an expert without rows."""
        if self.fused:
            product = F.grouped_mm(left_RB.contiguous().T, right_RA.contiguous(), offs=self.ends_E)
            starts_E = F.pad(self.ends_E[:-1], (1, 0))
            return product.masked_fill((starts_E == self.ends_E)[:, None, None], 0)
        out_EBA = left_RB.new_zeros(self.ends_E.shape[0], left_RB.shape[1], right_RA.shape[1])
        for expert, rows in self.slices:
            torch.mm(left_RB[rows].T, right_RA[rows], out=out_EBA[expert])
        return out_EBA


def _activation(h_RC: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gate, up, sigmoid(gate) and silu(gate) * up, all [R, F]."""
    gate_RF, up_RF = h_RC.to(wide).chunk(2, dim=-1)
    sigmoid_RF = torch.sigmoid(gate_RF)
    return gate_RF, up_RF, sigmoid_RF, gate_RF * sigmoid_RF * up_RF


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, ids_TJ: Tensor, weights_TJ: Tensor, gate_up_ECD: Tensor, down_EDF: Tensor
    ) -> Tensor:
        tokens, choices = ids_TJ.shape
        experts, hidden, width = down_EDF.shape
        dtype = compute_dtype(x_TD, gate_up_ECD, down_EDF)
        wide = accumulate_dtype(dtype)
        with without_autocast(x_TD):
            order_R = ids_TJ.flatten().argsort(stable=True)
            slot_R = torch.empty_like(order_R)  # where the row of (token, choice) went
            slot_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
            counts_E = torch.zeros(experts, dtype=torch.int64, device=ids_TJ.device)
            counts_E.scatter_add_(0, ids_TJ.flatten(), torch.ones_like(order_R))
            groups = _Groups(counts_E, dtype, (hidden, width))
            token_R = order_R // choices if choices > 1 else order_R
            h_RC = groups.rows_by_weight(x_TD[token_R].to(dtype), gate_up_ECD.to(dtype))
            *_, act_RF = _activation(h_RC, wide)
            act_RF = (act_RF * weights_TJ.flatten()[order_R, None]).to(dtype)
            y_RD = groups.rows_by_weight(act_RF, down_EDF.to(dtype))
            y_TD = _sum_choices(y_RD, slot_R, choices, wide)
        ctx.save_for_backward(x_TD, order_R, slot_R, weights_TJ, gate_up_ECD, down_EDF, h_RC)
        ctx.groups, ctx.shape, ctx.dtypes = groups, (tokens, choices), (dtype, wide)
        return y_TD.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, order_R, slot_R, weights_TJ, gate_up_ECD, down_EDF, h_RC = ctx.saved_tensors
        groups, choices, (dtype, wide) = ctx.groups, ctx.shape[1], ctx.dtypes
        with without_autocast(x_TD):
            token_R = order_R // choices if choices > 1 else order_R
            dy_RD = dy_TD.to(dtype)[token_R]
            weight_R1 = weights_TJ.flatten()[order_R, None].to(wide)
            gate_RF, up_RF, sigmoid_RF, act_RF = _activation(h_RC, wide)
            dact_RF = groups.rows_by_weight(dy_RD, down_EDF.to(dtype).transpose(1, 2)).to(wide)
            dweights_TJ = (dact_RF * act_RF).sum(dim=-1)[slot_R].view_as(weights_TJ)
            ddown_EDF = groups.rows_by_rows(dy_RD, (act_RF * weight_R1).to(dtype))
            dact_RF = dact_RF * weight_R1
            silu_RF = gate_RF * sigmoid_RF
            dgate_RF = dact_RF * up_RF * (sigmoid_RF + silu_RF * (1 - sigmoid_RF))
            dh_RC = torch.cat([dgate_RF, dact_RF * silu_RF], dim=-1).to(dtype)
            dgate_up_ECD = groups.rows_by_rows(dh_RC, x_TD.to(dtype)[token_R])
            dx_RD = groups.rows_by_weight(dh_RC, gate_up_ECD.to(dtype).transpose(1, 2))
            dx_TD = _sum_choices(dx_RD, slot_R, choices, wide)
        return (
            dx_TD.to(x_TD.dtype),
            None,
            dweights_TJ.to(weights_TJ.dtype),
            dgate_up_ECD.to(gate_up_ECD.dtype),
            ddown_EDF.to(down_EDF.dtype),
        )


def _sum_choices(rows_RD: Tensor, slot_R: Tensor, choices: int, wide: torch.dtype) -> Tensor:
    """[T, D]: the sum of every token's J rows, in choice order."""
    slot_TJ = slot_R.view(-1, choices)
    total_TD = rows_RD[slot_TJ[:, 0]].to(wide)
    for choice in range(1, choices):
        total_TD += rows_RD[slot_TJ[:, choice]]
    return total_TD


def moe_experts(
    x_TD: Tensor, expert_ids_TJ: Tensor, weights_TJ: Tensor, gate_up_ECD: Tensor, down_EDF: Tensor
) -> Tensor:
    """Expert mixture y_TD, dropless: every (token, choice) pair is computed, whatever the load of its expert.

    Args:
        expert_ids_TJ: int64 in [0, E), J >= 1.
        weights_TJ: router weights, usually float32; differentiable.
        gate_up_ECD: the first F of the C = 2F rows are the gate.
    Returns:
        y_TD in the compute dtype of x and the expert weights (see :mod:`earlyfusion.kernels.precision`).
    Raises:
        ValueError: shapes do not belong together.
    """
    check_experts(x_TD, expert_ids_TJ, weights_TJ, gate_up_ECD, down_EDF)
    return _Experts.apply(x_TD, expert_ids_TJ, weights_TJ, gate_up_ECD, down_EDF)
