"""SwiGLU experts on tokens sorted by expert: two grouped products forward, four backward, nothing of size [T,
E].

Every (token, choice) pair is one row. Rows are sorted by expert, so that an expert sees a contiguous slice:

    h = x W_gate_up^T        a = w * silu(h_gate) * h_up        y_row = a W_down^T        y_t = sum of its J
                             rows

The router weight is applied to the F-wide activation instead of the D-wide output (the product is linear in
it). The backward pass needs x, h and the routing; activations are recomputed from h. Row order inside an
expert is token order (stable sort) and sums over a token's rows run in choice order, so results do not depend
on threads or atomics.

Legend: T tokens, D hidden, J experts per token, R = T * J pairs, P rows (R plus filling), E experts, F expert
width, C = 2F.

SwiGLU experts for inference on a CPU: a token's result does not depend, bit for bit, on the others (from
four rows in all).

A CPU's matrix product sums in another order for one, two or three rows than for more. So an expert with so
few takes its neighbours' rows along and drops what comes of them.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.moe.naive import Situ, activate
from earlyfusion.kernels.products import (
    accumulate_dtype,
    compute_dtype,
    in_steps,
    operand,
    product,
    product_over_rows,
    without_autocast,
)
from earlyfusion.kernels.rowwise import Swiglued, serves, swiglu_rows, swiglu_rows_back
from earlyfusion.kernels.segments import check_experts

# Coarse enough that a training run meets all shapes in its first steps.
CPU_ROW_MULTIPLE = 128  # see _row_multiple


def _row_multiple(rows: int, experts: int, dtype: torch.dtype, device: torch.device) -> int:
    """To which multiple an expert's rows are filled up.

    On a CPU, oneDNN compiles a half-precision product anew for every shape it has not seen (about half a
    millisecond), and loads differ from step to step; a coarse grid of row counts keeps the set of shapes
    small. 1 elsewhere.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return 1
    return min(CPU_ROW_MULTIPLE, 1 << max(3, (rows // (4 * experts)).bit_length()))


def sort_by_expert(ids_R: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(pair of every sorted row, its inverse, rows of every expert); nothing leaves the device."""
    # Stable: inside an expert rows keep the order of their tokens, whatever the number of threads.
    order_R = ids_R.argsort(stable=True)
    slot_R = torch.empty_like(order_R).index_copy_(0, order_R, torch.arange(len(ids_R), device=ids_R.device))
    counts_E = torch.zeros(experts, dtype=torch.int64, device=ids_R.device)
    return order_R, slot_R, counts_E.scatter_add_(0, ids_R, torch.ones_like(ids_R))


class _Groups:
    """Rows sorted by expert, and products over the contiguous rows of each expert.

    On CUDA with bfloat16 and 16-byte rows, ``F.grouped_mm`` reads the group ends on the device. Elsewhere the
    counts come to the host (free on a CPU; one sync on CUDA) and every expert with rows gets its own matmul.

    ``pair_P`` is the flat (token, choice) index of every row, ``slot_R`` its inverse, ``real_P`` is False for
    rows that only fill up an expert's share (None if there are none). Filling rows repeat pair 0 and must get
    weight 0.
    """

    def __init__(
        self, ids_R: Tensor, experts: int, dtype: torch.dtype, widths: tuple[int, ...], operands: torch.dtype
    ) -> None:
        device, self.dtype = ids_R.device, dtype
        self.fused = (
            device.type == "cuda"
            and hasattr(F, "grouped_mm")
            and dtype == torch.bfloat16
            and all(width % 8 == 0 for width in widths)
        )
        self.pair_P, self.slot_R, counts_E = sort_by_expert(ids_R, experts)
        self.real_P: Tensor | None = None
        multiple = _row_multiple(ids_R.shape[0], experts, operands, device)
        if multiple > 1:
            # Filling rows repeat pair 0 with weight 0: they cost a product's rows and change nothing.
            filled_E = (counts_E + multiple - 1) // multiple * multiple
            self.slot_R += ((filled_E - counts_E).cumsum(0) - (filled_E - counts_E))[ids_R]
            total, pairs_R = int(filled_E.sum()), torch.arange(len(ids_R), device=device)
            self.pair_P = pairs_R.new_zeros(total).index_copy_(0, self.slot_R, pairs_R)
            self.real_P = torch.zeros(total, dtype=torch.bool, device=device)
            self.real_P.index_fill_(0, self.slot_R, True)
            counts_E = filled_E
        self.ends_E = counts_E.cumsum(0).to(torch.int32)
        # The one look at the loads: free on a CPU.
        self.slices: list[tuple[int, slice]] = []
        if not self.fused:
            ends = [0, *self.ends_E.tolist()]
            for expert, (start, stop) in enumerate(pairwise(ends)):
                if start < stop:
                    self.slices.append((expert, slice(start, stop)))

    def weights(self, weights_TJ: Tensor, dtype: torch.dtype) -> Tensor:
        """Router weight of every row [P, 1]."""
        weight_P = weights_TJ.flatten().to(dtype)
        # A row of no tokens has nothing that filling rows could repeat.
        if weights_TJ.numel():
            weight_P = weight_P[self.pair_P]
        if self.real_P is not None:
            weight_P = weight_P * self.real_P
        return weight_P[:, None]

    def rows_by_weight(self, rows_PA: Tensor, weight_EBA: Tensor) -> Tensor:
        """[P, B]: every row times the transposed [B, A] weight of its expert."""
        if self.fused:
            return F.grouped_mm(rows_PA.contiguous(), weight_EBA.transpose(1, 2), offs=self.ends_E)
        # Every row belongs to exactly one expert, so every row is written. What is rounded for the products
        # (products.py) is rounded once for all experts.
        multiply = product if rows_PA.dtype == self.dtype else in_steps
        weight_EBA = weight_EBA.to(rows_PA.dtype)
        out_PB = rows_PA.new_empty(rows_PA.shape[0], weight_EBA.shape[1])
        for expert, rows in self.slices:
            multiply(rows_PA[rows], weight_EBA[expert].T, out=out_PB[rows])
        return out_PB.to(self.dtype)

    def rows_by_rows(self, left_PB: Tensor, right_PA: Tensor) -> Tensor:
        """[E, B, A]: left^T right over the rows of every expert; zeros for an expert without rows."""
        if self.fused:
            sums_EBA = F.grouped_mm(left_PB.contiguous().T, right_PA.contiguous(), offs=self.ends_E)
            # The grouped product leaves an expert without rows as it found the memory.
            starts_E = F.pad(self.ends_E[:-1], (1, 0))
            return sums_EBA.masked_fill((starts_E == self.ends_E)[:, None, None], 0)
        shape = self.ends_E.shape[0], left_PB.shape[1], right_PA.shape[1]
        out_EBA, right_PA = left_PB.new_zeros(shape, dtype=self.dtype), right_PA.to(left_PB.dtype)
        for expert, rows in self.slices:
            product_over_rows(left_PB[rows], right_PA[rows], out=out_EBA[expert])
        return out_EBA


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        ids_TJ: Tensor,
        weights_TJ: Tensor,
        gate_up_ECD: Tensor,
        down_EDF: Tensor,
        situ: Situ | None,
    ) -> Tensor:
        choices = ids_TJ.shape[1]
        experts, hidden, width = down_EDF.shape
        dtype, ctx.given = compute_dtype(x_TD, gate_up_ECD, down_EDF), x_TD.dtype
        wide = accumulate_dtype(dtype)
        with without_autocast(x_TD):
            # Rounded, if at all, before it is gathered: half of the bytes.
            x_TD = operand(x_TD.to(dtype), ids_TJ.numel() * width * hidden // experts)
            groups = _Groups(ids_TJ.flatten(), experts, dtype, (hidden, width), x_TD.dtype)
            x_PD = x_TD.index_select(0, groups.pair_P // choices)
            h_PC = groups.rows_by_weight(x_PD, gate_up_ECD.to(dtype))
            gate_PF, up_PF = h_PC.to(wide).chunk(2, dim=-1)
            # The router weight on the F-wide activation: the product after it is linear.
            weight_P1 = groups.weights(weights_TJ, wide)
            if situ is None and serves(gate_PF):
                act_PF = swiglu_rows(gate_PF, up_PF, weight_P1)
            else:
                act_PF = activate(gate_PF, up_PF, situ).mul_(weight_P1)
            y_PD = groups.rows_by_weight(act_PF.to(x_TD.dtype), down_EDF.to(dtype))
            y_TD = _sum_choices(y_PD, groups.slot_R, choices, wide)
        ctx.save_for_backward(x_TD, weights_TJ, gate_up_ECD, down_EDF, h_PC)
        ctx.groups, ctx.dtypes, ctx.situ = groups, (dtype, wide), situ
        return y_TD.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TJ, gate_up_ECD, down_EDF, h_PC = ctx.saved_tensors
        groups, choices, (dtype, wide) = ctx.groups, weights_TJ.shape[1], ctx.dtypes
        token_P = groups.pair_P // choices
        with without_autocast(x_TD):
            dy_PD = dy_TD.to(x_TD.dtype).index_select(0, token_P)
            weight_P1 = groups.weights(weights_TJ, wide)
            gate_PF, up_PF = h_PC.to(wide).chunk(2, dim=-1)
            dact_PF = groups.rows_by_weight(dy_PD, down_EDF.to(dtype).transpose(1, 2)).to(wide)
            act_PF, dh_PC, dweight_P = _slopes(gate_PF, up_PF, weight_P1, dact_PF, ctx.situ, x_TD.dtype)
            dweights_TJ = dweight_P.flatten()[groups.slot_R].view_as(weights_TJ)
            ddown_EDF = groups.rows_by_rows(dy_PD, act_PF.to(x_TD.dtype))
            dgate_up_ECD = groups.rows_by_rows(dh_PC, x_TD.index_select(0, token_P))
            dx_PD = groups.rows_by_weight(dh_PC, gate_up_ECD.to(dtype).transpose(1, 2))
            dx_TD = _sum_choices(dx_PD, groups.slot_R, choices, wide)
        return (
            dx_TD.to(ctx.given),
            None,
            dweights_TJ.to(weights_TJ.dtype),
            dgate_up_ECD.to(gate_up_ECD.dtype),
            ddown_EDF.to(down_EDF.dtype),
            None,
        )


def activated(gate: Tensor, up: Tensor, situ: Situ | None) -> Tensor:
    """`activate`; by C++ where it serves, and then differentiable once."""
    dense = gate.dim() == 2 and gate.is_contiguous() and up.is_contiguous()
    if situ is None and dense and torch.is_grad_enabled() and serves(gate, up):
        return Swiglued.apply(gate, up)
    return activate(gate, up, situ)


def _slopes(
    gate_PF: Tensor, up_PF: Tensor, weight_P1: Tensor, dact_PF: Tensor, situ: Situ | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted activation once more, the gradients of gate and up side by side in `dtype` [P, 2 F], and
    of the weights [P]."""
    if situ is None and serves(gate_PF, dact_PF):
        act_PF, dh_PC, dweight_P1 = swiglu_rows_back(gate_PF, up_PF, weight_P1, dact_PF)
        assert dweight_P1 is not None
        return act_PF, dh_PC.to(dtype), dweight_P1
    silu_PF = F.silu(gate_PF) if situ is None else None
    act_PF = activate(gate_PF, up_PF, situ) if silu_PF is None else silu_PF * up_PF
    # Before the weight is multiplied in.
    dweight_P = torch.linalg.vecdot(dact_PF, act_PF)
    dact_PF = dact_PF * weight_P1
    if silu_PF is None:
        slopes = _situ_slopes(gate_PF, up_PF, dact_PF, situ)
    else:
        slopes = torch.ops.aten.silu_backward(dact_PF * up_PF, gate_PF), silu_PF.mul_(dact_PF)
    return act_PF.mul_(weight_P1), torch.cat([slope.to(dtype) for slope in slopes], dim=-1), dweight_P


def _situ_slopes(gate: Tensor, up: Tensor, dact: Tensor, situ: Situ | None) -> tuple[Tensor, ...]:
    """Gradients of gate and up."""
    with torch.enable_grad():
        given = gate.detach().requires_grad_(), up.detach().requires_grad_()
        return torch.autograd.grad(activate(*given, situ), given, dact)


def _sum_choices(rows_PD: Tensor, slot_R: Tensor, choices: int, wide: torch.dtype) -> Tensor:
    """[T, D]: the sum of every token's J rows, in choice order."""
    # In choice order, so that a token's sum does not depend on how rows were sorted.
    slot_TJ = slot_R.view(-1, choices)
    total_TD = rows_PD.index_select(0, slot_TJ[:, 0]).to(wide)
    for choice in range(1, choices):
        total_TD += rows_PD.index_select(0, slot_TJ[:, choice])
    return total_TD


def moe_experts(
    x_TD: Tensor,
    expert_ids_TJ: Tensor,
    weights_TJ: Tensor,
    gate_up_ECD: Tensor,
    down_EDF: Tensor,
    situ: Situ | None = None,
) -> Tensor:
    """Expert mixture y_TD, dropless: every (token, choice) pair is computed, whatever the load of its expert.

    Args:
        expert_ids_TJ: int64 in [0, E), J >= 1.
        weights_TJ: router weights, usually float32; differentiable.
        gate_up_ECD: the first F of the C = 2F rows are the gate.
        situ: see :mod:`earlyfusion.kernels.moe.naive`.
    Returns:
        y_TD in the compute dtype of x and the expert weights (see :mod:`earlyfusion.kernels.products`).
    Raises:
        ValueError: shapes do not belong together.
    """
    check_experts(x_TD, expert_ids_TJ, weights_TJ, gate_up_ECD, down_EDF)
    return _Experts.apply(x_TD, expert_ids_TJ, weights_TJ, gate_up_ECD, down_EDF, situ)


# ---- inference on a CPU ----

FEWEST_ROWS = 4
"""From so many rows on, a row of a float32 product has the same bits whatever the number of rows."""

Part = tuple[int, slice, slice]
"""An expert, its rows, and the rows its product is computed over."""


def moe_experts_alone(
    x_TD: Tensor,
    expert_ids_TJ: Tensor,
    weights_TJ: Tensor,
    gate_up_ECD: Tensor,
    down_EDF: Tensor,
    situ: Situ | None = None,
) -> Tensor:
    """See :func:`earlyfusion.kernels.moe.naive.moe_experts`; no gradient."""
    if not x_TD.shape[0] or x_TD.dtype != down_EDF.dtype:
        return moe_experts(x_TD, expert_ids_TJ, weights_TJ, gate_up_ECD, down_EDF, situ)
    (experts, _, width), choices = down_EDF.shape, expert_ids_TJ.shape[1]

    # Sort the rows by expert. numpy: a fifth of torch's time for a few rows.
    # The loads are needed on the host, where they already are.
    flat_R = expert_ids_TJ.flatten().numpy()
    order = np.argsort(flat_R, kind="stable")
    parts: list[Part] = []
    start, rows = 0, flat_R.shape[0]
    for expert, count in enumerate(np.bincount(flat_R, minlength=experts).tolist()):
        if count:
            # The window slides to where there are enough rows, before or behind.
            low = max(0, min(start, rows - FEWEST_ROWS))
            window = slice(low, max(start + count, low + FEWEST_ROWS))
            parts.append((expert, slice(start, start + count), window))
        start += count

    # Gate, activation and output product of every expert's rows; the router weight goes into the activation.
    order_R = torch.from_numpy(order)
    h_RC = _grouped(x_TD.index_select(0, order_R // choices), gate_up_ECD, parts)
    weight_R1 = weights_TJ.flatten().index_select(0, order_R).to(x_TD.dtype).unsqueeze(1)
    act_RF = activate(h_RC[:, :width], h_RC[:, width:], situ).mul_(weight_R1)
    y_RD = _grouped(act_RF, down_EDF, parts)

    # Back into the order of the tokens, and the sum over each token's choices.
    place = np.empty_like(order)
    place[order] = np.arange(rows)
    return y_RD.index_select(0, torch.from_numpy(place)).view(*expert_ids_TJ.shape, -1).sum(1)


def _grouped(x_RA: Tensor, weight_EBA: Tensor, parts: list[Part]) -> Tensor:
    """[R, B]: rows of every part times the transposed weight of its expert."""
    out_RB = x_RA.new_empty(x_RA.shape[0], weight_EBA.shape[1])
    for expert, rows, window in parts:
        if window == rows:
            product(x_RA[rows], weight_EBA[expert].T, out=out_RB[rows])
        else:
            wide = product(x_RA[window], weight_EBA[expert].T)
            out_RB[rows] = wide[rows.start - window.start : rows.stop - window.start]
    return out_RB
