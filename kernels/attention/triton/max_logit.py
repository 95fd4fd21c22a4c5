"""The largest attention logit per head without asking the host; see max_logit.py for the rule.

The gate is read on the device: programs whose rows cannot hold a head's maximum, and all of them while no
head exceeds tau, leave before they load a query. So where nothing is clipped a layer costs a few small
launches over the log-sum-exps, and the host goes on. Every program writes one partial maximum: no atomics.

Legend: T tokens, H query heads, G key heads, D key dim, P query tiles, BM query rows, BN keys of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from earlyfusion.kernels.aot import Variant
from earlyfusion.kernels.attention import max_logit as gate
from earlyfusion.kernels.attention.triton.flash import _load, _scores, query_tiles, split_dim, tile_sizes
from earlyfusion.kernels.launch import FLOATS, arch, on_device, power_of_two
from earlyfusion.kernels.precision import compute_dtype
from earlyfusion.kernels.segments import Segments, check_packed


@triton.jit
def largest_logits(
    q_THD,
    k_TGD,
    lse_TH,
    bound_H,
    floor_H,
    best_PH,
    tile_first,
    tile_begin,
    tile_end,
    scale,
    tau,
    sq_t,
    sq_h,
    sk_t,
    sk_g,
    H: tl.constexpr,
    HP: tl.constexpr,
    REPEAT: tl.constexpr,
    D: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(tile_first + tile).to(tl.int64)
    begin, end = tl.load(tile_begin + tile).to(tl.int64), tl.load(tile_end + tile).to(tl.int64)
    heads = tl.arange(0, HP)
    bounds = tl.load(bound_H + heads, mask=heads < H, other=float("-inf"))
    row = first + tl.arange(0, BM)
    lse = tl.load(lse_TH + row * H + head, mask=row < end, other=float("-inf"))
    wanted = (lse >= tl.load(floor_H + head)) & (tl.max((bounds > tau).to(tl.int32), axis=0) > 0)
    q, k = q_THD + head * sq_h, k_TGD + head // REPEAT * sk_g
    q_a = _load(q, row, sq_t, wanted, 0, DA, D)
    q_b = q_a
    if DB > 0:
        q_b = _load(q, row, sq_t, wanted, DA, DB, D)
    best = tl.full([BM], float("-inf"), tl.float32)
    stop = tl.minimum(first + BM, end) if CAUSAL else end
    stop = tl.where(tl.max(wanted.to(tl.int32), axis=0) > 0, stop, begin)
    for n in range(begin, stop, BN):
        key = n + tl.arange(0, BN).to(tl.int64)
        ok = key < end
        s = _scores(q_a, q_b, k, key, sk_t, ok, D, DA, DB, BM, BN) * scale
        visible = ok[None, :] & wanted[:, None]
        if CAUSAL:
            visible = visible & (key[None, :] <= row[:, None])
        best = tl.maximum(best, tl.max(tl.where(visible, s, float("-inf")), axis=1))
    tl.store(best_PH + tile.to(tl.int64) * H + head, tl.max(best, axis=0))


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

    float64, head dims over 256 and an empty row go to that form.

    Raises:
        ValueError: the row does not match ``segments``, or the log-sum-exp is not float32 [T, H].
    """
    dtype = compute_dtype(q_THD, k_TGD)
    if dtype not in FLOATS or q_THD.shape[2] > 256 or segments.total == 0:
        return gate.max_logit(q_THD, k_TGD, lse_TH, segments, causal=causal, scale=scale, tau=tau)
    check_packed("max_logit", q_THD, segments)
    tokens, heads, dim = q_THD.shape
    if lse_TH.dtype != torch.float32 or lse_TH.shape != (tokens, heads):
        raise ValueError(
            f"max_logit: lse_TH is {lse_TH.dtype} {tuple(lse_TH.shape)}; expected float32 {(tokens, heads)}"
        )
    q, k = (x.to(dtype) for x in (q_THD, k_TGD))
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    lse_TH = lse_TH.contiguous()
    bound_H, floor_H = lse_TH.amax(dim=0), gate.floors(lse_TH, segments, causal)
    sizes, warps = tile_sizes(dtype, dim, segments.max_length, False, arch(q.device))
    tiles = query_tiles(segments, sizes["BM"], q.device)
    best_PH = lse_TH.new_empty(tiles[0].shape[0], heads)
    da, db = split_dim(dim)
    with on_device(q):
        largest_logits[(tiles[0].shape[0], heads)](
            q,
            k,
            lse_TH,
            bound_H,
            floor_H,
            best_PH,
            *tiles,
            scale,
            tau,
            *q.stride()[:2],
            *k.stride()[:2],
            H=heads,
            HP=power_of_two(heads),
            REPEAT=heads // k.shape[1],
            D=dim,
            DA=da,
            DB=db,
            CAUSAL=causal,
            **sizes,
            num_warps=warps,
            num_stages=2,
        )
    return torch.where((bound_H > tau).any(), best_PH.amax(dim=0), bound_H)


def aot_variants() -> list[Any]:
    """The kernel compiled ahead of time for MLA 192, causal."""
    strides = ("sq_t", "sq_h", "sk_t", "sk_g")
    types = {
        **dict.fromkeys(("q_THD", "k_TGD"), "*bf16"),
        **dict.fromkeys(("lse_TH", "bound_H", "floor_H", "best_PH"), "*fp32"),
        **dict.fromkeys(("tile_first", "tile_begin", "tile_end"), "*i32"),
        **dict.fromkeys(strides, "i32"),
        "scale": "fp32",
        "tau": "fp32",
    }
    variants = []
    for capability in (90, 80):
        sizes, warps = tile_sizes(torch.bfloat16, 192, 4096, False, capability)
        constants = {"H": 32, "HP": 32, "REPEAT": 1, "D": 192, "DA": 128, "DB": 64, "CAUSAL": True, **sizes}
        variants.append(
            Variant("largest_logits 192", largest_logits, types, constants, warps, 2, strides, capability)
        )
    return variants
