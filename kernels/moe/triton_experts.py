"""SwiGLU experts on a GPU without a host sync: gather, product and activation in one kernel, grouped
products, combine.

(token, choice) pairs are sorted by expert with a stable sort. A table made on the device maps every row tile
to its expert and its rows; the grid has room for one partly filled tile per expert, and programs without rows
leave at once. So the host never learns the loads.

    h = x[token] W_gate_up^T, a = w silu(h_gate) h_up    one kernel: rows are gathered while they are
                                                         multiplied
    y_row = a W_down^T                                    grouped product (torch's where it exists, else
                                                          Triton)
    y_t = sum_j y_row(t, j)                               in choice order, float32
    backward: the activation, its gradient and the router weight's are one pass over rows; weight gradients
    are torch's grouped products of gathered rows, or, where it has none, one program per output tile
    that gathers while it walks over the expert's rows

A row's result depends on its own entries and the tile sizes only: other tokens of the batch cannot change it.
An expert id outside [0, E) gives NaN for its token, never a read outside the weights.

Legend: T tokens, D hidden, J experts per token, R = T * J rows, E experts, F expert width, C = 2F.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from earlyfusion.kernels.attention.triton.flash import dot
from earlyfusion.kernels.launch import check_blocks, on_device, power_of_two
from earlyfusion.kernels.moe import grouped
from earlyfusion.kernels.moe.naive import Situ
from earlyfusion.kernels.products import compute_dtype
from earlyfusion.kernels.segments import FLOATS, check_experts, check_tensors

CLEARED = 1 << 16  # entries that a program of `clear_idle` sets


# It travels into the kernels whole.
class Plan(NamedTuple):
    """Rows sorted by expert, and the device-side table of row tiles."""

    pair_R: Tensor  # flat (token, choice) index of every row
    slot_R: Tensor  # its inverse
    ends_E: Tensor
    weight_R: Tensor
    tile_expert: Tensor
    tile_start: Tensor
    tile_stop: Tensor
    rows_tile: int
    choices: int


@triton.jit
def tile_of(plan):
    """(expert, first row, last row + 1) of this program's row tile."""
    tile = tl.program_id(1)
    start, stop = tl.load(plan.tile_start + tile), tl.load(plan.tile_stop + tile)
    return tl.load(plan.tile_expert + tile).to(tl.int64), start, stop


@triton.jit
def gate_up_swiglu(
    x,
    plan,
    gate_up,
    h,
    act,
    D: constexpr,
    FW: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
):
    """h [R, 2 F] and the weighted activation [R, F] of rows that are gathered from x [T, D]."""
    # The grid has room for the worst loads; programs without rows leave at once.
    expert, start, stop = tile_of(plan)
    if start < stop:
        row = start.to(tl.int64) + tl.arange(0, BM)
        ok_M = row < stop
        col = tl.program_id(0) * BN + tl.arange(0, BN)
        ok_N = col < FW
        token = tl.load(plan.pair_R + row, mask=ok_M, other=0) // plan.choices
        gate, up = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        # Gate rows first, up rows FW behind them: both products read x once.
        weights = gate_up + expert * (2 * FW * D)
        for k in range(0, D, BK):
            at = k + tl.arange(0, BK)
            ok_K = at < D
            rows = tl.load(
                x + token[:, None] * D + at[None, :], mask=ok_M[:, None] & ok_K[None, :], other=0.0
            )
            here, keep = weights + col[None, :] * D + at[:, None], ok_N[None, :] & ok_K[:, None]
            gate = dot(rows, tl.load(here, mask=keep, other=0.0), gate)
            up = dot(rows, tl.load(here + FW * D, mask=keep, other=0.0), up)
        keep = ok_M[:, None] & ok_N[None, :]
        out = h + row[:, None] * (2 * FW) + col[None, :]
        tl.store(out, gate.to(h.dtype.element_ty), mask=keep)
        tl.store(out + FW, up.to(h.dtype.element_ty), mask=keep)
        w = tl.load(plan.weight_R + row, mask=ok_M, other=0.0)
        weighted = gate * tl.sigmoid(gate) * up * w[:, None]
        tl.store(act + row[:, None] * FW + col[None, :], weighted.to(act.dtype.element_ty), mask=keep)


@triton.jit
def grouped_product(
    rows_A,
    plan,
    weight_E,
    out_RB,
    stride_e,
    stride_b,
    stride_a,
    A: constexpr,
    B: constexpr,
    GATHER: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
):
    """out[r, b] = sum_a rows[r or its token, a] weight[expert, a, b]."""
    expert, start, stop = tile_of(plan)
    if start < stop:
        row = start.to(tl.int64) + tl.arange(0, BM)
        ok_M = row < stop
        col = tl.program_id(0) * BN + tl.arange(0, BN)
        ok_N = col < B
        source = row
        if GATHER:
            source = tl.load(plan.pair_R + row, mask=ok_M, other=0) // plan.choices
        acc = tl.zeros([BM, BN], tl.float32)
        weights = weight_E + expert * stride_e
        for k in range(0, A, BK):
            at = k + tl.arange(0, BK)
            ok_K = at < A
            x_at, w_at = source[:, None] * A + at[None, :], at[:, None] * stride_a + col[None, :] * stride_b
            x = tl.load(rows_A + x_at, mask=ok_M[:, None] & ok_K[None, :], other=0.0)
            acc = dot(x, tl.load(weights + w_at, mask=ok_K[:, None] & ok_N[None, :], other=0.0), acc)
        out = out_RB + row[:, None] * B + col[None, :]
        tl.store(out, acc.to(out_RB.dtype.element_ty), mask=ok_M[:, None] & ok_N[None, :])


@triton.jit
def grouped_outer(
    left,
    right,
    plan,
    out_EBA,
    B: constexpr,
    A: constexpr,
    GATHER_LEFT: constexpr,
    BN: constexpr,
    BA: constexpr,
    BK: constexpr,
):
    """out[e, b, a] = sum over the expert's rows of left[row, b] right[row, a]; the other side than left is
    gathered."""
    expert = tl.program_id(2).to(tl.int64)
    stop = tl.load(plan.ends_E + expert).to(tl.int64)
    start = tl.load(plan.ends_E + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    b, a = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(0) * BA + tl.arange(0, BA)
    # One program walks over all rows of its expert: no atomics, one order.
    acc = tl.zeros([BN, BA], tl.float32)
    for first in range(start, stop, BK):
        row = first + tl.arange(0, BK)
        ok = row < stop
        token = tl.load(plan.pair_R + row, mask=ok, other=0) // plan.choices
        left_row, right_row = row, token
        if GATHER_LEFT:
            left_row, right_row = token, row
        left_at, right_at = left_row[None, :] * B + b[:, None], right_row[:, None] * A + a[None, :]
        x = tl.load(left + left_at, mask=ok[None, :] & (b < B)[:, None], other=0.0)
        y = tl.load(right + right_at, mask=ok[:, None] & (a < A)[None, :], other=0.0)
        acc = dot(x, y, acc)
    out = out_EBA + expert * (B * A) + b[:, None] * A + a[None, :]
    tl.store(out, acc.to(out_EBA.dtype.element_ty), mask=(b < B)[:, None] & (a < A)[None, :])


@triton.jit
def clear_idle(out, ends_E, SIZE, BLOCK: constexpr):
    """Zeros in the matrices of experts without rows; the others' programs leave at once."""
    expert = tl.program_id(0).to(tl.int64)
    start = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
    if start == tl.load(ends_E + expert):
        at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + expert * SIZE + at, tl.zeros([BLOCK], out.dtype.element_ty), mask=at < SIZE)


@triton.jit
def swiglu_backward(h_RC, dact_RF, weight_R, dh_RC, act_RF, dweight_R, FW: constexpr, BF: constexpr):
    """dh, the weighted activation (for the down gradient) and the gradient of the row's router weight."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight_R + row)
    along = tl.zeros([BF], tl.float32)
    for start in range(0, FW, BF):
        col = start + tl.arange(0, BF)
        ok = col < FW
        gate = tl.load(h_RC + row * 2 * FW + col, mask=ok, other=0.0).to(tl.float32)
        up = tl.load(h_RC + row * 2 * FW + FW + col, mask=ok, other=0.0).to(tl.float32)
        d = tl.load(dact_RF + row * FW + col, mask=ok, other=0.0).to(tl.float32)
        # The activation again from h: cheaper than a third tensor of its size.
        s = tl.sigmoid(gate)
        silu = gate * s
        along += d * silu * up
        d *= w
        dgate = d * up * (s + silu * (1 - s))
        tl.store(dh_RC + row * 2 * FW + col, dgate.to(dh_RC.dtype.element_ty), mask=ok)
        tl.store(dh_RC + row * 2 * FW + FW + col, (d * silu).to(dh_RC.dtype.element_ty), mask=ok)
        tl.store(act_RF + row * FW + col, (silu * up * w).to(act_RF.dtype.element_ty), mask=ok)
    tl.store(dweight_R + row, tl.sum(along, axis=0))


@triton.jit
def combine(rows_RD, slot_TJ, y_TD, J: constexpr, D: constexpr, BD: constexpr):
    """y[t] = sum_j rows[slot[t, j]], in choice order."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros([BD], tl.float32)
    for j in range(J):
        row = tl.load(slot_TJ + token * J + j)
        acc += tl.load(rows_RD + row * D + col, mask=col < D, other=0.0).to(tl.float32)
    tl.store(y_TD + token * D + col, acc.to(y_TD.dtype.element_ty), mask=col < D)


def make_plan(ids_TJ: Tensor, weights_TJ: Tensor, experts: int) -> Plan:
    """Sort the pairs by expert; everything stays on the device."""
    # Bad ids are computed like good ones: an assertion would be a sync.
    ids_R = ids_TJ.flatten()
    inside_R = (ids_R >= 0) & (ids_R < experts)
    order_R, slot_R, counts_E = grouped.sort_by_expert(ids_R.where(inside_R, 0), experts)
    ends_E = counts_E.cumsum(0)

    # Tiles of about the mean load. Only the device knows how many each expert needs: the table has room for
    # one partly filled tile per expert, and those that are not used have no rows.
    rows = ids_R.shape[0]
    tile = min(128, max(16, power_of_two(rows // max(1, experts))))
    tiles_E = (counts_E + tile - 1) // tile
    last_E = tiles_E.cumsum(0)
    most = min(rows, rows // tile + experts)
    check_blocks("moe_experts", f"tiles of {tile} rows", most)
    index = torch.arange(most, device=ids_R.device)
    expert = torch.searchsorted(last_E, index, right=True)
    used = expert < experts
    expert = expert.clamp(max=experts - 1)
    start = (ends_E - counts_E)[expert] + (index - (last_E - tiles_E)[expert]) * tile
    stop = torch.where(used, torch.minimum(start + tile, ends_E[expert]), start)

    # An id outside the experts was sent to the first one: NaN keeps that from passing for an answer.
    weight_R = weights_TJ.flatten().float().where(inside_R, torch.nan)[order_R]
    table = expert.int(), start.int(), stop.int()
    return Plan(order_R, slot_R, ends_E.int(), weight_R, *table, tile, ids_TJ.shape[1])


def _tiles(width: int, depth: int, dtype: torch.dtype) -> dict[str, int]:
    # float32 operands are split into parts and need twice the room.
    most = 128 if dtype.itemsize == 2 else 64
    return {"BN": min(most, max(16, power_of_two(width))), "BK": min(most // 2, max(16, power_of_two(depth)))}


def _launch(
    kernel: Any, plan: Plan, columns: int, sizes: dict[str, int], *tensors: Any, **constants: Any
) -> None:
    """Over blocks of columns and the row tiles of a plan."""
    grid = triton.cdiv(columns, sizes["BN"]), plan.tile_expert.shape[0]
    warps = 8 if plan.rows_tile == 128 else 4
    kernel[grid](*tensors, **constants, BM=plan.rows_tile, **sizes, num_warps=warps, num_stages=3)


def _grouped_mm(rows: Tensor, *widths: int) -> bool:
    """Whether torch's grouped product takes them; it is the quicker one for rows that need no gather."""
    aligned = rows.dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)
    return rows.is_cuda and aligned and hasattr(F, "grouped_mm")


def _product(rows: Tensor, weight_EBA: Tensor, plan: Plan, gather: bool) -> Tensor:
    """[R, B]: rows [R or T, A] times the transposed [B, A] matrix of their expert (a view of any layout)."""
    _, width, depth = weight_EBA.shape
    if not gather and _grouped_mm(rows, width, depth):
        return F.grouped_mm(rows, weight_EBA.transpose(1, 2), offs=plan.ends_E)
    out_RB, sizes = rows.new_empty(plan.pair_R.shape[0], width), _tiles(width, depth, rows.dtype)
    tensors = rows, plan, weight_EBA, out_RB, *weight_EBA.stride()
    _launch(grouped_product, plan, width, sizes, *tensors, A=depth, B=width, GATHER=gather)
    return out_RB


def _outer(left: Tensor, right: Tensor, plan: Plan, gather_left: bool) -> Tensor:
    """[E, B, A]: left^T right over the rows of every expert; one of the two is indexed by token."""
    experts, width, depth = plan.ends_E.shape[0], left.shape[1], right.shape[1]
    if _grouped_mm(left, width, depth):
        token_R = plan.pair_R // plan.choices
        # Twice the speed of a kernel that gathers while it multiplies, for one copy of the rows.
        left = left.index_select(0, token_R) if gather_left else left
        right = right if gather_left else right.index_select(0, token_R)
        out_EBA = F.grouped_mm(left.T, right, offs=plan.ends_E)
        # It leaves an expert without rows as it found the memory.
        clear_idle[(experts, triton.cdiv(width * depth, CLEARED))](
            out_EBA, plan.ends_E, width * depth, BLOCK=CLEARED
        )
        return out_EBA
    out_EBA = left.new_empty(experts, width, depth)
    wide, deep = (_tiles(size, size, left.dtype)["BN"] for size in (width, depth))
    sizes = {"B": width, "A": depth, "GATHER_LEFT": gather_left, "BN": wide, "BA": deep, "BK": 32}
    warps = 8 if wide * deep >= 128 * 128 else 4
    grouped_outer[(triton.cdiv(depth, deep), triton.cdiv(width, wide), experts)](
        left, right, plan, out_EBA, **sizes, num_warps=warps, num_stages=3
    )
    return out_EBA


def _combine(rows_RD: Tensor, plan: Plan, tokens: int) -> Tensor:
    width = rows_RD.shape[1]
    y_TD, tile = rows_RD.new_empty(tokens, width), min(1024, power_of_two(width))
    combine[(tokens, triton.cdiv(width, tile))](rows_RD, plan.slot_R, y_TD, J=plan.choices, D=width, BD=tile)
    return y_TD


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, ids_TJ: Tensor, weights_TJ: Tensor, gate_up_ECD: Tensor, down_EDF: Tensor
    ) -> Tensor:
        experts, hidden, width = down_EDF.shape
        dtype = compute_dtype(x_TD, gate_up_ECD, down_EDF)
        x, gate_up, down = (t.to(dtype).contiguous() for t in (x_TD, gate_up_ECD, down_EDF))
        with on_device(x):
            plan = make_plan(ids_TJ, weights_TJ, experts)
            rows = plan.pair_R.shape[0]
            h_RC, act_RF = x.new_empty(rows, 2 * width), x.new_empty(rows, width)
            sizes = _tiles(width, hidden, dtype)
            if dtype.itemsize == 2:
                sizes["BN"] = min(64, sizes["BN"])  # two accumulators
            _launch(gate_up_swiglu, plan, width, sizes, x, plan, gate_up, h_RC, act_RF, D=hidden, FW=width)
            y_TD = _combine(_product(act_RF, down, plan, gather=False), plan, x.shape[0])
        ctx.save_for_backward(x_TD, weights_TJ, gate_up_ECD, down_EDF, h_RC)
        ctx.plan, ctx.dtype = plan, dtype
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TJ, gate_up_ECD, down_EDF, h_RC = ctx.saved_tensors
        plan, dtype = ctx.plan, ctx.dtype
        dy, x, gate_up, down = (t.to(dtype).contiguous() for t in (dy_TD, x_TD, gate_up_ECD, down_EDF))
        with on_device(dy):
            # dy is gathered while it is multiplied: no [R, D] copy of it.
            dact_RF = _product(dy, down.transpose(1, 2), plan, gather=True)
            dh_RC, act_RF = torch.empty_like(h_RC), torch.empty_like(dact_RF)
            dweight_R = torch.empty_like(plan.weight_R)
            rows, width = act_RF.shape
            tile = min(1024, power_of_two(width))
            swiglu_backward[(rows,)](
                h_RC, dact_RF, plan.weight_R, dh_RC, act_RF, dweight_R, FW=width, BF=tile
            )
            ddown_EDF = _outer(dy, act_RF, plan, gather_left=True)
            dgate_up_ECD = _outer(dh_RC, x, plan, gather_left=False)
            dx_TD = _combine(_product(dh_RC, gate_up.transpose(1, 2), plan, gather=False), plan, dy.shape[0])
        return (
            dx_TD.to(x_TD.dtype),
            None,
            # Back from the order of experts to that of choices.
            dweight_R[plan.slot_R].view_as(weights_TJ).to(weights_TJ.dtype),
            dgate_up_ECD.to(gate_up_ECD.dtype),
            ddown_EDF.to(down_EDF.dtype),
        )


def moe_experts(
    x_TD: Tensor,
    expert_ids_TJ: Tensor,
    weights_TJ: Tensor,
    gate_up_ECD: Tensor,
    down_EDF: Tensor,
    situ: Situ | None = None,
) -> Tensor:
    """Expert mixture y_TD, dropless; see :func:`earlyfusion.kernels.moe.naive.moe_experts`.

    Empty inputs, and SiTU, go to the plain torch form.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
    """
    check_experts(x_TD, expert_ids_TJ, weights_TJ, gate_up_ECD, down_EDF)
    if expert_ids_TJ.numel() == 0 or situ is not None:
        return grouped.moe_experts(x_TD, expert_ids_TJ, weights_TJ, gate_up_ECD, down_EDF, situ)
    floats = {"x_TD": x_TD, "weights_TJ": weights_TJ, "gate_up_ECD": gate_up_ECD, "down_EDF": down_EDF}
    check_tensors("moe_experts", x_TD, FLOATS, "any", **floats)
    check_tensors("moe_experts", x_TD, (torch.int64,), "any", expert_ids_TJ=expert_ids_TJ)
    return _Experts.apply(x_TD, expert_ids_TJ, weights_TJ, gate_up_ECD, down_EDF)
