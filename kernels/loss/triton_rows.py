"""The logits of one chunk on a GPU: one pass for the softmax statistics, one for the gradient, in place.

``statistics`` keeps a running maximum and rescaled sums, so a row is read once. ``gradient`` overwrites the
float32 logits with dlogits = slope * (exp(logit - lse) - onehot); in half precision the result takes the
first half of each row's bytes, so that a chunk needs one float32 [R, V] and nothing else. A program owns a
row: it reads a tile, waits for all its threads, and writes behind what it has read.

Traffic per logit: 4 B read, then 4 B read and 2 B written, against 8 B written and read by the product that
made it.

Legend: R rows of a chunk, V vocabulary, BV columns of a tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from earlyfusion.kernels.launch import on_device
from earlyfusion.kernels.loss import chunked_ce
from earlyfusion.kernels.loss.chunked_ce import Rows, Statistics

# A vocabulary of 163,840 takes forty turns.
TILE = 4096
WARPS = 8


@triton.jit
def row_statistics(logits_RV, labels_R, lse_R, picked_R, mean_R, V, BV: tl.constexpr, MEAN: tl.constexpr):
    # Rows times vocabulary passes 2^31.
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BV], float("-inf"), tl.float32)
    total, weighted = tl.zeros([BV], tl.float32), tl.zeros([BV], tl.float32)
    # Every lane keeps its own running softmax; they are joined once, at the end.
    for start in range(0, V, BV):
        col = start + tl.arange(0, BV)
        x = tl.load(logits_RV + row * V + col, mask=col < V, other=float("-inf"))
        # A lane that has seen only -inf must not subtract it from itself.
        new = tl.maximum(top, x)
        base = tl.where(new == float("-inf"), 0.0, new)
        scale, p = tl.exp(top - base), tl.exp(x - base)
        total = total * scale + p
        if MEAN:
            weighted = weighted * scale + tl.where(p > 0, p * x, 0.0)
        top = new
    # Lanes join: each is rescaled to the common maximum.
    best = tl.max(top, axis=0)
    scale = tl.exp(top - best)
    whole = tl.sum(total * scale, axis=0)
    label = tl.load(labels_R + row)
    tl.store(lse_R + row, best + tl.log(whole))
    # a label outside the vocabulary gives NaN, not a read outside the tensor
    inside = (label >= 0) & (label < V)
    tl.store(picked_R + row, tl.load(logits_RV + row * V + label, mask=inside, other=float("nan")))
    if MEAN:
        tl.store(mean_R + row, tl.sum(weighted * scale, axis=0) / whole)


@triton.jit
def row_gradient(logits_RV, out_RV, labels_R, lse_R, slope_R, V, out_stride, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label, lse = tl.load(labels_R + row), tl.load(lse_R + row)
    slope = tl.load(slope_R + row)
    for start in range(0, V, BV):
        col = start + tl.arange(0, BV)
        x = tl.load(logits_RV + row * V + col, mask=col < V, other=float("-inf"))
        tl.debug_barrier()  # the store may cover logits that other threads of this row are still reading
        g = slope * tl.exp(x - lse) - tl.where(col == label, slope, 0.0)
        tl.store(out_RV + row * out_stride + col, g.to(out_RV.dtype.element_ty), mask=col < V)


def _tile(vocabulary: int) -> int:
    return min(TILE, triton.next_power_of_2(vocabulary))


def _statistics(logits_RV: Tensor, labels_R: Tensor, with_mean: bool) -> Statistics:
    rows, vocabulary = logits_RV.shape
    lse_R, picked_R, mean_R = (logits_RV.new_empty(rows) for _ in range(3))
    with on_device(logits_RV):
        row_statistics[(rows,)](
            logits_RV,
            labels_R,
            lse_R,
            picked_R,
            mean_R,
            vocabulary,
            BV=_tile(vocabulary),
            MEAN=with_mean,
            num_warps=WARPS,
        )
    return Statistics(lse_R, picked_R, mean_R if with_mean else None, logits_RV)


def _gradient(
    kept_RV: Tensor, lse_R: Tensor, labels_R: Tensor, slope_R: Tensor, dtype: torch.dtype
) -> Tensor:
    rows, vocabulary = kept_RV.shape
    # The narrower gradient lies over the first bytes of each row's logits.
    out_RV = kept_RV.view(dtype)[:, :vocabulary]
    with on_device(kept_RV):
        row_gradient[(rows,)](
            kept_RV,
            out_RV,
            labels_R,
            lse_R,
            slope_R.contiguous(),
            vocabulary,
            out_RV.stride(0),
            BV=_tile(vocabulary),
            num_warps=WARPS,
        )
    return out_RV


TRITON_ROWS = Rows(_statistics, _gradient)

linear_cross_entropy = partial(chunked_ce.linear_cross_entropy, rows=TRITON_ROWS)
token_log_probs = partial(chunked_ce.token_log_probs, rows=TRITON_ROWS)
