"""The largest attention logit per head without asking the host; see max_logit.py for the rule.

The gate is read on the device: programs whose rows cannot hold a head's maximum, and all of them while no
head exceeds tau, leave before they load a query. So where nothing is clipped a layer costs a few small
launches over the log-sum-exps, and the host goes on. Every program writes one partial maximum: no atomics.

Legend: T tokens, H query heads, G key heads, D key dim, P query tiles, BM query rows, BN keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from earlyfusion.kernels.attention import max_logit as gate
from earlyfusion.kernels.attention.triton.flash import (
    launch_sizes,
    load_halves,
    operands,
    query_tiles,
    scores,
    tile_of,
)
from earlyfusion.kernels.checks import check_shapes, check_tensors
from earlyfusion.kernels.launch import on_device, power_of_two
from earlyfusion.kernels.segments import Segments


@triton.jit
def largest_logits(
    q, k, lse, bound_H, floor_H, best_PH, tiles, scale, tau, strides, S: tl.constexpr, HP: tl.constexpr
):
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, begin, end = tile_of(tiles)
    heads = tl.arange(0, HP)
    bounds = tl.load(bound_H + heads, mask=heads < S.H, other=float("-inf"))
    row = first + tl.arange(0, S.BM)
    sums = tl.load(lse + row * S.H + head, mask=row < end, other=float("-inf"))
    # A row can hold the maximum only if its log-sum-exp reaches the floor; and nobody needs it below tau.
    wanted = (sums >= tl.load(floor_H + head)) & (tl.max((bounds > tau).to(tl.int32), axis=0) > 0)
    queries = load_halves(q + head * strides.q_h, row, strides.q_t, wanted, S.K)
    k += head // S.REPEAT * strides.k_g
    BM: tl.constexpr = S.BM
    best = tl.full([BM], float("-inf"), tl.float32)

    # A tile of which no row is wanted walks over no key.
    stop = tl.minimum(first + BM, end) if S.CAUSAL else end
    stop = tl.where(tl.max(wanted.to(tl.int32), axis=0) > 0, stop, begin)
    for n in range(begin, stop, S.BN):
        key = n + tl.arange(0, S.BN).to(tl.int64)
        ok = key < end
        s = scores(queries, k, key, strides.k_t, ok, S) * scale
        visible = ok[None, :] & wanted[:, None]
        if S.CAUSAL:
            visible = visible & (key[None, :] <= row[:, None])
        best = tl.maximum(best, tl.max(tl.where(visible, s, float("-inf")), axis=1))
    tl.store(best_PH + tile.to(tl.int64) * S.H + head, tl.max(best, axis=0))


@torch.no_grad()
def max_logit(
    q_THD: Tensor,
    k_TGD: Tensor,
    lse_TH: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
    tau: float,
) -> Tensor:
    """As :func:`earlyfusion.kernels.attention.max_logit.max_logit`, without its host sync.

    An empty row goes to that form.

    Raises:
        ValueError: the row does not match ``segments``, the log-sum-exp is not float32 [T, H], or a head dim
            is over 256.
    """
    check_shapes("max_logit", {"T": segments.total}, q_THD=q_THD, k_TGD=k_TGD, lse_TH=lse_TH)
    q, k = operands(q_THD=q_THD, k_TGD=k_TGD)
    if segments.total == 0:
        return gate.max_logit(q, k, lse_TH, segments, causal=causal, scale=scale, tau=tau)
    check_tensors("max_logit", q, (torch.float32,), "any", lse_TH=lse_TH)
    # From here on nothing asks the host.
    lse_TH = lse_TH.contiguous()
    bound_H, floor_H = lse_TH.amax(dim=0), gate.floors(lse_TH, segments, causal)
    sizes, strides, options = launch_sizes(q, k, k, causal, segments.max_length)
    tiles = query_tiles(segments, sizes.BM, q.device)
    best_PH = lse_TH.new_empty(tiles.first.shape[0], sizes.H)
    padded = power_of_two(sizes.H)
    with on_device(q):
        largest_logits[best_PH.shape](
            q, k, lse_TH, bound_H, floor_H, best_PH, tiles, scale, tau, strides, S=sizes, HP=padded, **options
        )
    # Below tau the bound is the answer: QK-Clip only compares.
    return torch.where((bound_H > tau).any(), best_PH.amax(dim=0), bound_H)
