"""Attention inside every document of a packed row, without a mask over the whole row.

Three ways, one result (see :mod:`earlyfusion.kernels.attention.naive` for the equations):

* CUDA, half precision: torch's variable-length flash attention (``torch.nn.attention.varlen``).
* CPU, float32 or a long document: buckets of equally long documents through torch's CPU flash kernel.
* otherwise: buckets of nearly equally long documents, in tiles of some documents times some query rows,
  through batched products with the backward in closed form,

      dV = P^T dO      dS = P (dO V^T - sum_j P dO V^T)      dQ = scale dS K      dK = scale dS^T Q

  Logits and the softmax are float32; P is recomputed in the backward pass and exists for one tile only. Under
  a causal mask a tile stops at the last key its rows can see, which skips up to half of the work. In bfloat16
  on a CPU this is several times quicker than the backward pass of the flash kernel.

Padding stands after a document, so under a causal mask no real query sees it; without one, padded keys get
-inf. Saved for the backward pass are the packed q, k, v, o and lse, never a padded copy.

Legend: T tokens, H query heads, G key/value heads, n = H / G, D key dim, V value dim, B documents, L padded
length, R query rows of a tile, M keys of a tile.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.attention import cpu_flash
from earlyfusion.kernels.attention.buckets import Bucket, buckets
from earlyfusion.kernels.attention.checks import check_attention
from earlyfusion.kernels.precision import (
    accumulate_dtype,
    compute_dtype,
    softmax_with_lse,
    wide_bmm,
    without_autocast,
)
from earlyfusion.kernels.segments import Segments

try:
    from torch.nn.attention import varlen as _varlen
except ImportError:  # builds of torch without it still have the buckets
    _varlen = None  # type: ignore[assignment]

# Measured on one core; larger tiles fall out of its second-level cache and take longer.
TILE_ELEMENTS = 1 << 20  # float32 logits alive at once: 4 MB, about a core's cache
CPU_HALF_MULTIPLE = 64  # see _multiple
CAUSAL_ROWS = (
    128  # query rows of a causal tile: fewer skip more of the hidden half, more make larger products
)


def _multiple(q_THD: Tensor) -> int:
    """To which multiple padded lengths are rounded up.

    On a CPU, oneDNN compiles a half-precision product anew for every shape it has not seen (about half a
    millisecond, ten times the product itself). Rounded lengths keep the set of shapes small from batch to
    batch.
    """
    half_on_cpu = q_THD.device.type == "cpu" and q_THD.dtype in (torch.bfloat16, torch.float16)
    return CPU_HALF_MULTIPLE if half_on_cpu else 1


class _Tile(NamedTuple):
    """Some documents of a bucket, some of their query rows, and the keys those rows can see."""

    documents: slice
    rows: slice
    keys: slice


def _tiles(bucket: Bucket, heads: int, causal: bool) -> Iterator[_Tile]:
    # Rows of a tile shrink with the number of keys, so that its logits stay in the cache.
    most_rows = max(1, TILE_ELEMENTS // (heads * bucket.length))
    step = min(bucket.length, most_rows, CAUSAL_ROWS if causal else bucket.length)
    # Short documents share a tile, or every product would be tiny.
    most_documents = max(1, TILE_ELEMENTS // (heads * bucket.length * step))
    first = 0
    while first < bucket.documents:  # in powers of two: few distinct shapes, as for the lengths
        batch = 1 << (min(most_documents, bucket.documents - first).bit_length() - 1)
        for low in range(0, bucket.length, step):
            high = min(low + step, bucket.length)
            yield _Tile(
                slice(first, first + batch), slice(low, high), slice(0, high if causal else bucket.length)
            )
        first += batch


def _group(x_BRHD: Tensor, groups: int) -> Tensor:
    """[B, R, H, D] -> [B * G, n * R, D]: the query heads of a group stacked along the rows."""
    batch, rows, heads, width = x_BRHD.shape
    # Heads that share keys become rows of one product.
    x = x_BRHD.view(batch, rows, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    return x.reshape(batch * groups, (heads // groups) * rows, width)


def _ungroup(x: Tensor, batch: int, groups: int, rows: int) -> Tensor:
    """[B * G, n * R, D] -> [B, R, H, D]."""
    return x.view(batch, groups, -1, rows, x.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)


class _Masks:
    """What is added to the logits of a bucket's tiles: -inf above the diagonal, or at padded keys."""

    def __init__(self, bucket: Bucket, groups: int, causal: bool, dtype: torch.dtype) -> None:
        self.groups, self.triangle_RR, self.bias_BL = groups, None, None
        if causal:
            # A tile's last keys are its own rows: the triangle is the same for all tiles.
            side = min(CAUSAL_ROWS, bucket.length)
            square_RR = torch.full((side, side), float("-inf"), dtype=dtype, device=bucket.lengths_B.device)
            self.triangle_RR = square_RR.triu_(1)
        else:
            self.bias_BL = bucket.key_bias(dtype)

    def add_(self, logits: Tensor, tile: _Tile) -> None:
        """In place on [B * G, n * R, M]."""
        if self.triangle_RR is not None:
            # Only the tile's own rows stand on the diagonal; earlier keys are all visible.
            rows = tile.rows.stop - tile.rows.start
            logits.unflatten(1, (-1, rows))[..., tile.rows] += self.triangle_RR[:rows, :rows]
        elif self.bias_BL is not None:
            logits += self.bias_BL[tile.documents].repeat_interleave(self.groups, dim=0)[:, None]


def _forward_bucket(
    bucket: Bucket, q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Padded output [B, L, H, V] and log-sum-exp [B, L, H]."""
    heads, groups = q_THD.shape[1], k_TGD.shape[1]
    q_BLHD, k_BLGD, v_BLGV = (bucket.pad(x) for x in (q_THD, k_TGD, v_TGV))
    wide = accumulate_dtype(q_THD.dtype)
    masks = _Masks(bucket, groups, causal, wide)
    o_BLHV = q_THD.new_empty(*q_BLHD.shape[:3], v_TGV.shape[-1])
    lse_BLH = q_THD.new_empty(q_BLHD.shape[:3], dtype=wide)
    for tile in _tiles(bucket, heads, causal):
        documents, rows, keys = tile
        shape = documents.stop - documents.start, groups, rows.stop - rows.start
        q = _group(q_BLHD[documents, rows], groups)
        k, v = _group(k_BLGD[documents, keys], groups), _group(v_BLGV[documents, keys], groups)
        logits = wide_bmm(q, k.transpose(1, 2), scale)
        masks.add_(logits, tile)
        # The log-sum-exp costs next to nothing here and saves the backward a pass.
        p, lse = softmax_with_lse(logits)
        o_BLHV[documents, rows] = _ungroup(torch.bmm(p.to(v.dtype), v), *shape)
        lse_BLH[documents, rows] = _ungroup(lse[..., None], *shape)[..., 0]
    return o_BLHV, lse_BLH


def _backward_bucket(
    bucket: Bucket, saved: tuple[Tensor, ...], do_THV: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Padded gradients of q [B, L, H, D] in its dtype, of k and v summed over tiles in accumulation
    precision."""
    q_THD, k_TGD, v_TGV = saved[:3]
    heads, groups = q_THD.shape[1], k_TGD.shape[1]
    q_BLHD, k_BLGD, v_BLGV, do_BLHV = (bucket.pad(x) for x in (q_THD, k_TGD, v_TGV, do_THV))
    dtype, wide = q_THD.dtype, accumulate_dtype(q_THD.dtype)
    masks = _Masks(bucket, groups, causal, wide)
    dq_BLHD = torch.empty_like(q_BLHD)
    # Keys are met by several tiles: their gradients are summed in full precision.
    dk_BLGD, dv_BLGV = torch.zeros_like(k_BLGD, dtype=wide), torch.zeros_like(v_BLGV, dtype=wide)
    for tile in _tiles(bucket, heads, causal):
        documents, rows, keys = tile
        batch, length = documents.stop - documents.start, rows.stop - rows.start
        q, do = _group(q_BLHD[documents, rows], groups), _group(do_BLHV[documents, rows], groups)
        k, v = _group(k_BLGD[documents, keys], groups), _group(v_BLGV[documents, keys], groups)
        logits = wide_bmm(q, k.transpose(1, 2), scale)
        masks.add_(logits, tile)
        # Recomputed: P of all tiles would be the memory that flash attention saves.
        p = torch.softmax(logits, dim=-1)
        dp = wide_bmm(
            do, v.transpose(1, 2), scale
        )  # the scale of the logits, applied here once for dq and dk
        ds = torch._softmax_backward_data(dp, p, -1, wide).to(dtype)
        dq_BLHD[documents, rows] = _ungroup(torch.bmm(ds, k), batch, groups, length)
        dk_BLGD[documents, keys] += _ungroup(torch.bmm(ds.transpose(1, 2), q), batch, groups, keys.stop)
        dv_BLGV[documents, keys] += _ungroup(
            torch.bmm(p.to(dtype).transpose(1, 2), do), batch, groups, keys.stop
        )
    return dq_BLHD, dk_BLGD, dv_BLGV


class _BucketedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, segments: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        tokens, heads = q_THD.shape[:2]
        o_THV = q_THD.new_empty(tokens, heads, v_TGV.shape[-1])
        lse_TH = q_THD.new_empty(tokens, heads, dtype=accumulate_dtype(q_THD.dtype))
        with without_autocast(q_THD):
            for bucket in buckets(segments, q_THD.device, _multiple(q_THD)):
                run = cpu_flash.forward_bucket if cpu_flash.suits(bucket, q_THD) else _forward_bucket
                o_BLHV, lse_BLH = run(bucket, q_THD, k_TGD, v_TGV, causal, scale)
                bucket.unpad_into(o_THV, o_BLHV)
                bucket.unpad_into(lse_TH, lse_BLH)
        ctx.save_for_backward(q_THD, k_TGD, v_TGV, o_THV, lse_TH)
        ctx.settings = segments, causal, scale
        ctx.mark_non_differentiable(lse_TH)
        return o_THV, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        segments, causal, scale = ctx.settings
        gradients = [torch.empty_like(x) for x in saved[:3]]
        with without_autocast(do_THV):
            for bucket in buckets(segments, do_THV.device, _multiple(saved[0])):
                # Chosen as in the forward, from what was saved.
                run = cpu_flash.backward_bucket if cpu_flash.suits(bucket, saved[0]) else _backward_bucket
                for gradient, padded in zip(gradients, run(bucket, saved, do_THV, causal, scale)):
                    bucket.unpad_into(gradient, padded)
        return *gradients, None, None, None


# ---- CUDA ----


def varlen_available(q_THD: Tensor, v_TGV: Tensor) -> bool:
    """Whether torch's own variable-length attention takes these tensors."""
    if _varlen is None or q_THD.device.type != "cuda" or q_THD.dtype not in (torch.bfloat16, torch.float16):
        return False
    width = max(q_THD.shape[-1], v_TGV.shape[-1])
    return width <= 256 and width % 8 == 0 and q_THD.shape[0] > 0


def _varlen_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, segments: Segments, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Flash attention over cumulative lengths; the narrower of key and value dim is zero-padded."""
    assert _varlen is not None
    # Asked of the installed torch instead of its version.
    accepted = inspect.signature(_varlen.varlen_attn).parameters
    # torch's kernel wants one dim for q, k and v.
    width, value_dim = max(q_THD.shape[-1], v_TGV.shape[-1]), v_TGV.shape[-1]
    q, k, v = (
        F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q_THD, k_TGD, v_TGV)
    )
    options: dict[str, Any] = {"scale": scale, "return_aux": _varlen.AuxRequest(lse=True)}
    # the way to ask for a causal mask and for grouped heads changed between torch releases
    options |= (
        {"window_size": (-1, 0 if causal else -1)} if "window_size" in accepted else {"is_causal": causal}
    )
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and "enable_gqa" in accepted:
        options["enable_gqa"] = True
    elif repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    cu, longest = segments.cu_seqlens(q.device), segments.max_length
    o_THV, lse = _varlen.varlen_attn(q, k, v, cu, cu, longest, longest, **options)
    return o_THV[..., :value_dim], lse.detach().T  # the kernel's own layout is [H, T]


def attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention, documents isolated from each other; differentiable in q, k and v.

    Any head dims, H a multiple of G, V may differ from D. Under autocast the products run in its dtype.

    Returns:
        ``(o_THV, lse_TH)``: the output in the compute dtype (see :mod:`earlyfusion.kernels.precision`) and,
        if ``return_lse``, the natural-log softmax normaliser in float32 (float64 for float64 inputs),
        detached.
    Raises:
        ValueError: head counts or dims do not fit, or the row does not match ``segments``.
    """
    check_attention(q_THD, k_TGD, v_TGV, segments)
    dtype = compute_dtype(q_THD, k_TGD, v_TGV)
    q_THD, k_TGD, v_TGV = q_THD.to(dtype), k_TGD.to(dtype), v_TGV.to(dtype)
    if varlen_available(q_THD, v_TGV):
        o_THV, lse_TH = _varlen_attention(q_THD, k_TGD, v_TGV, segments, causal, scale)
    else:
        o_THV, lse_TH = _BucketedAttention.apply(q_THD, k_TGD, v_TGV, segments, causal, scale)
    return o_THV, lse_TH if return_lse else None
