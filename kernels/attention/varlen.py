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

How the documents of a packed row are batched: a few padded rectangles instead of many small products.

Documents of equal length share a bucket; only short ones are padded, at the end, to share one with slightly
longer ones (with longer ones padding costs more than it saves: their products are large enough on their own).
Building a plan needs only host lengths; it is made once per packed row and device and shared by all layers
(``Segments.cached``).

Legend: T tokens, H heads, D key dim, V value dim, B documents, L padded
length, R query rows of a tile, M keys of a tile.

Splitting a packed qkv projection and turning q and k by a 2-D RoPE, as one operation.

    q_t = turn(qkv_t[0]), k_t = turn(qkv_t[1]), v_t = qkv_t[2];    turn: (x_2c + i x_2c+1) * turns_tc

Adjacent channels are a pair (pair 2i carries the column, pair 2i + 1 the row of a patch; the turns already
say so).

Legend: T tokens (patches), H heads, D head dim, C = D / 2 pairs.

The largest attention logit per head from the softmax normaliser: what QK-Clip needs, at no cost until it
clips.

A row with c visible keys satisfies  max_j s_ij <= lse_i <= max_j s_ij + log c.  Hence

* if no lse exceeds tau, no logit does: the largest lse is an upper bound that leaves QK-Clip inactive;
* otherwise S_h >= floor_h = max_i (lse_i - log c_i), and only rows with lse_i >= floor_h can hold S_h. Those
  rows are multiplied with the keys of their document again, which gives S_h exactly, mask included.

Legend: T tokens, H heads, D key dim, C candidate rows, L keys of a document.
"""

import inspect
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.products import (
    accumulate_dtype,
    compute_dtype,
    softmax_with_lse,
    wide_bmm,
    without_autocast,
)
from earlyfusion.kernels.segments import Segments, check_attention, check_qkv, check_shapes

try:
    from torch.nn.attention import varlen as _varlen
except ImportError:  # builds of torch without it still have the buckets
    _varlen = None  # type: ignore[assignment]

# A launch costs about as much as the square of so many tokens.
SLACK = 32**2  # L^2 work of padding that costs less than issuing one more bucket


@dataclass(frozen=True)
class Bucket:
    """B documents padded to L tokens.

    ``rows`` are their tokens in the packed row and ``slots`` the places of those tokens in the flattened [B *
    L] rectangle. When the documents are adjacent and unpadded, ``span`` is their part of the row and the
    rectangle a view.
    """

    documents: int
    length: int
    rows: Tensor
    slots: Tensor
    span: slice | None
    lengths_B: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...], zeros after the end of every document."""
        shape = (self.documents, self.length, *x.shape[1:])
        # Documents of one length next to each other, as pictures of one size are: no copy at all.
        if self.span is not None:
            return x[self.span].reshape(shape)
        # Zeros, not garbage: padded keys get -inf, but 0 times NaN is NaN.
        padded = x.new_zeros(self.documents * self.length, *x.shape[1:])
        return padded.index_copy_(0, self.slots, x.index_select(0, self.rows)).view(shape)

    def unpad_into(self, out: Tensor, x: Tensor) -> None:
        """Write the real tokens of [B, L, ...] to their places in ``out`` [T, ...]."""
        flat = x.reshape(self.documents * self.length, *x.shape[2:])
        if self.span is not None:
            out[self.span] = flat
        else:
            out.index_copy_(0, self.rows, flat.index_select(0, self.slots).to(out.dtype))

    def key_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B, L]: 0 for tokens, -inf for padding; None if nothing is padded."""
        if self.slots.shape[0] == self.documents * self.length:
            return None
        device = self.lengths_B.device
        # Under a causal mask nobody asks for this: padding stands behind every token.
        padding_BL = torch.arange(self.length, device=device) >= self.lengths_B[:, None]
        return torch.zeros(padding_BL.shape, dtype=dtype, device=device).masked_fill_(
            padding_BL, float("-inf")
        )


def padded_length(length: int, multiple: int) -> int:
    """``length`` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def group_lengths(lengths: Sequence[int], multiple: int, slack: int = SLACK) -> list[list[int]]:
    """Indices of documents per bucket, longest first, so that padding wastes at most ``slack`` per bucket.

    Rounding up to ``multiple`` is not counted as waste.
    """
    groups: list[list[int]] = []
    useful = longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # Work of a document is the square of its length.
        work = padded_length(lengths[index], multiple) ** 2
        if groups and (len(groups[-1]) + 1) * longest <= useful + work + slack:
            groups[-1].append(index)
            useful += work
        else:
            groups.append([index])
            useful = longest = work
    return groups


def _bucket(segments: Segments, group: list[int], multiple: int, device: torch.device) -> Bucket:
    group = sorted(group)
    lengths, starts = [segments.lengths[i] for i in group], [segments.offsets[i] for i in group]
    length, total = padded_length(max(lengths), multiple), sum(lengths)
    lengths_B = torch.tensor(lengths)
    # Positions inside each document, then their places in the row and in the rectangle.
    within = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.repeat_interleave(torch.tensor(starts), lengths_B) + within
    slots = torch.repeat_interleave(torch.arange(len(group)) * length, lengths_B) + within
    # Equal and next to each other: the rectangle is a view of the row.
    adjacent = min(lengths) == length and starts == list(range(starts[0], starts[0] + total, length))
    span = slice(starts[0], starts[0] + total) if adjacent else None
    return Bucket(len(group), length, rows.to(device), slots.to(device), span, lengths_B.to(device))


def buckets(segments: Segments, device: torch.device, multiple: int = 1) -> tuple[Bucket, ...]:
    """The cached plan of this packed row on this device, lengths rounded up to ``multiple``; empty for an
    empty row.

    Without gradients on a CPU no document is padded to its neighbours' length: what it gets is then the same
    bits whatever shares its row (a longer sum is split otherwise).
    """
    # Part of the key: a plan made for training must not serve an evaluation.
    slack = SLACK if torch.is_grad_enabled() or device.type != "cpu" else 0

    def build() -> tuple[Bucket, ...]:
        groups = group_lengths(segments.lengths, multiple, slack)
        return tuple(_bucket(segments, group, multiple, device) for group in groups)

    return segments.cached(("attention.buckets", multiple, slack, str(device)), build)


# ---- batched products ----

# Measured on one core; larger tiles fall out of its second-level cache and take longer.
TILE_ELEMENTS = 1 << 20  # float32 logits alive at once: 4 MB, about a core's cache
CPU_HALF_MULTIPLE = 64  # see _multiple
# Query rows of a causal tile: fewer skip more of the hidden half, more make larger products.
CAUSAL_ROWS = 128
FLASH_LENGTH = 1024  # padded length from which torch's flash kernel beats these products in half precision


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
    heads: int

    def cut(self, x_BLHD: Tensor, part: slice) -> Tensor:
        """The tile's part of [B, L, H, D] as [B * H, R, D]."""
        return x_BLHD[self.documents, part].transpose(1, 2).flatten(0, 1)

    def back(self, x: Tensor) -> Tensor:
        """[B * H, R, D] -> [B, R, H, D]."""
        return x.unflatten(0, (-1, self.heads)).transpose(1, 2)


def _tiles(
    bucket: Bucket, q_BLHD: Tensor, k_BLHD: Tensor, causal: bool, scale: float
) -> Iterator[tuple[_Tile, Tensor, Tensor, Tensor]]:
    """Tiles of a bucket with their queries, keys and logits [B * H, R, M]."""
    documents, length, heads = q_BLHD.shape[:3]
    wide = accumulate_dtype(q_BLHD.dtype)
    # Rows of a tile shrink with the number of keys, so that its logits stay in the cache.
    step = min(length, max(1, TILE_ELEMENTS // (heads * length)), CAUSAL_ROWS if causal else length)
    # Short documents share a tile, or every product would be tiny.
    most = max(1, TILE_ELEMENTS // (heads * length * step))
    # A tile's last keys are its own rows: the triangle is the same for all tiles.
    triangle_RR = torch.full((step, step), float("-inf"), dtype=wide, device=q_BLHD.device).triu_(1)
    bias_BL = None if causal else bucket.key_bias(wide)

    first = 0
    while first < documents:  # in powers of two: few distinct shapes, as for the lengths
        batch = 1 << (min(most, documents - first).bit_length() - 1)
        for low in range(0, length, step):
            high = min(low + step, length)
            keys = slice(0, high if causal else length)
            tile = _Tile(slice(first, first + batch), slice(low, high), keys, heads)
            q, k = tile.cut(q_BLHD, tile.rows), tile.cut(k_BLHD, keys)
            logits = wide_bmm(q, k.transpose(1, 2), scale)
            if causal:
                # Only the tile's own rows stand on the diagonal; earlier keys are all visible.
                rows = high - low
                logits[..., tile.rows] += triangle_RR[:rows, :rows]
            elif bias_BL is not None:
                logits += bias_BL[tile.documents].repeat_interleave(heads, dim=0)[:, None]
            yield tile, q, k, logits
        first += batch


def _forward_bucket(
    bucket: Bucket, q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Padded output [B, L, H, V] and log-sum-exp [B, L, H]."""
    q_BLHD, k_BLHD, v_BLHV = (bucket.pad(x) for x in (q_THD, k_THD, v_THV))
    o_BLHV = q_THD.new_empty(*q_BLHD.shape[:3], v_THV.shape[-1])
    lse_BLH = q_THD.new_empty(q_BLHD.shape[:3], dtype=accumulate_dtype(q_THD.dtype))
    for tile, _, _, logits in _tiles(bucket, q_BLHD, k_BLHD, causal, scale):
        v = tile.cut(v_BLHV, tile.keys)
        # The log-sum-exp costs next to nothing here and saves the backward a pass.
        p, lse = softmax_with_lse(logits)
        o_BLHV[tile.documents, tile.rows] = tile.back(torch.bmm(p.to(v.dtype), v))
        lse_BLH[tile.documents, tile.rows] = tile.back(lse[..., None])[..., 0]
    return o_BLHV, lse_BLH


def _backward_bucket(
    bucket: Bucket, saved: tuple[Tensor, ...], do_THV: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Padded gradients of q [B, L, H, D] in its dtype, of k and v summed over tiles in accumulation
    precision."""
    q_BLHD, k_BLHD, v_BLHV, do_BLHV = (bucket.pad(x) for x in (*saved[:3], do_THV))
    dtype, wide = q_BLHD.dtype, accumulate_dtype(q_BLHD.dtype)
    dq_BLHD = torch.empty_like(q_BLHD)
    # Keys are met by several tiles: their gradients are summed in full precision.
    dk_BLHD, dv_BLHV = torch.zeros_like(k_BLHD, dtype=wide), torch.zeros_like(v_BLHV, dtype=wide)
    for tile, q, k, logits in _tiles(bucket, q_BLHD, k_BLHD, causal, scale):
        documents, rows, keys, _ = tile
        do, v = tile.cut(do_BLHV, rows), tile.cut(v_BLHV, keys)
        # Recomputed: P of all tiles would be the memory that flash attention saves.
        p = torch.softmax(logits, dim=-1)
        # The scale of the logits is applied here, once for dq and dk.
        dp = wide_bmm(do, v.transpose(1, 2), scale)
        ds = torch._softmax_backward_data(dp, p, -1, wide).to(dtype)
        dq_BLHD[documents, rows] = tile.back(torch.bmm(ds, k))
        dk_BLHD[documents, keys] += tile.back(torch.bmm(ds.transpose(1, 2), q))
        dv_BLHV[documents, keys] += tile.back(torch.bmm(p.to(dtype).transpose(1, 2), do))
    return dq_BLHD, dk_BLHD, dv_BLHV


# ---- torch's CPU flash kernel: quickest in float32 and for long documents ----

# It wants one head dim for q, k and v, and as many key heads as query heads in its backward pass; both are
# arranged by zero-filling and by repeating, whose gradients are a cut and a sum.


def suits_flash(bucket: Bucket, q_THD: Tensor) -> bool:
    """Whether this kernel is the quicker way for the bucket; False off the CPU."""
    if q_THD.device.type != "cpu":
        return False
    return q_THD.dtype in (torch.float32, torch.float64) or bucket.length >= FLASH_LENGTH


def _widened(*tensors: Tensor) -> list[Tensor]:
    """Zero channels up to the widest: they change neither logits nor sums, and are cut off again."""
    width = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


def _flash_operands(bucket: Bucket, causal: bool, *packed: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """[B, heads, L, dim] views of the padded tensors, filled up to one dim, and the additive key mask."""
    padded = _widened(*map(bucket.pad, packed))
    bias_BL = None if causal else bucket.key_bias(packed[0].dtype)
    return [y.transpose(1, 2) for y in padded], None if bias_BL is None else bias_BL[:, None, None, :]


def _flash_forward(
    bucket: Bucket, q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Padded output [B, L, H, V] and log-sum-exp [B, L, H]."""
    (q, k, v), mask = _flash_operands(bucket, causal, q_THD, k_THD, v_THV)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return o.transpose(1, 2)[..., : v_THV.shape[-1]], lse.transpose(1, 2)


def _flash_backward(
    bucket: Bucket, saved: tuple[Tensor, ...], do_THV: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Padded gradients [B, L, heads, dim] of q, k, v; ``saved`` is (q, k, v, o, lse)."""
    q_THD, k_THD, v_THV, o_THV, lse_TH = saved
    (q, k, v, o, do), mask = _flash_operands(bucket, causal, q_THD, k_THD, v_THV, o_THV, do_THV)
    lse = bucket.pad(lse_TH).transpose(1, 2)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq[..., : q_THD.shape[-1]], dk[..., : k_THD.shape[-1]], dv[..., : v_THV.shape[-1]]


class _BucketedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, segments: Segments, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        tokens, heads = q_THD.shape[:2]
        o_THV = q_THD.new_empty(tokens, heads, v_THV.shape[-1])
        lse_TH = q_THD.new_empty(tokens, heads, dtype=accumulate_dtype(q_THD.dtype))
        with without_autocast(q_THD):
            for bucket in buckets(segments, q_THD.device, _multiple(q_THD)):
                run = _flash_forward if suits_flash(bucket, q_THD) else _forward_bucket
                o_BLHV, lse_BLH = run(bucket, q_THD, k_THD, v_THV, causal, scale)
                bucket.unpad_into(o_THV, o_BLHV)
                bucket.unpad_into(lse_TH, lse_BLH)
        ctx.save_for_backward(q_THD, k_THD, v_THV, o_THV, lse_TH)
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
                run = _flash_backward if suits_flash(bucket, saved[0]) else _backward_bucket
                for gradient, padded in zip(gradients, run(bucket, saved, do_THV, causal, scale)):
                    bucket.unpad_into(gradient, padded)
        return *gradients, None, None, None


# ---- CUDA ----


def varlen_available(q_THD: Tensor, v_THV: Tensor) -> bool:
    """Whether torch's own variable-length attention takes these tensors."""
    if _varlen is None or q_THD.device.type != "cuda" or q_THD.dtype not in (torch.bfloat16, torch.float16):
        return False
    width = max(q_THD.shape[-1], v_THV.shape[-1])
    return width <= 256 and width % 8 == 0 and q_THD.shape[0] > 0


def _varlen_attention(
    q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, segments: Segments, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Flash attention over cumulative lengths; the narrower of key and value dim is zero-padded."""
    assert _varlen is not None
    # Asked of the installed torch instead of its version.
    accepted = inspect.signature(_varlen.varlen_attn).parameters
    # torch's kernel wants one dim for q, k and v, and here one key head for each query head.
    q, k, v = _widened(q_THD, k_THD, v_THV)
    options: dict[str, Any] = {"is_causal": causal}
    # The way to ask for a causal mask changed between torch releases.
    if "window_size" in accepted:
        options = {"window_size": (-1, 0 if causal else -1)}
    options |= {"scale": scale, "return_aux": _varlen.AuxRequest(lse=True)}
    cu, longest = segments.cu_seqlens(q.device), segments.max_length
    o_THV, lse = _varlen.varlen_attn(q, k, v, cu, cu, longest, longest, **options)
    return o_THV[..., : v_THV.shape[-1]], lse.detach().T  # the kernel's own layout is [H, T]


def attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention, documents isolated from each other; differentiable in q, k and v.

    Any head dims, H a multiple of G, V may differ from D. Under autocast the products run in its dtype.

    Returns:
        ``(o_THV, lse_TH)``: the output in the compute dtype (see :mod:`earlyfusion.kernels.products`) and
        the natural-log softmax normaliser in float32 (float64 for float64 inputs), detached.
    Raises:
        ValueError: head counts or dims do not fit, or the row does not match ``segments``.
    """
    check_attention(q_THD, k_THD, v_THV, segments)
    dtype = compute_dtype(q_THD, k_THD, v_THV)
    q_THD, k_THD, v_THV = q_THD.to(dtype), k_THD.to(dtype), v_THV.to(dtype)
    if varlen_available(q_THD, v_THV):
        return _varlen_attention(q_THD, k_THD, v_THV, segments, causal, scale)
    return _BucketedAttention.apply(q_THD, k_THD, v_THV, segments, causal, scale)


# ---- split and turn of a projection ----


def qkv_rope(qkv_T3HD: Tensor, turns_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(q_THD, k_THD, v_THD)`` through one complex product; float32 inside, the dtype of qkv outside.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_qkv(qkv_T3HD, turns_TC)
    qk, v = qkv_T3HD.split((2, 1), dim=1)  # split and unbind: their backward is one concatenation
    wide = torch.promote_types(qkv_T3HD.dtype, torch.float32)
    # q and k in one product.
    pairs = torch.view_as_complex(qk.to(wide).unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * turns_TC[:, None, None]).flatten(-2).to(qkv_T3HD.dtype)
    q, k = turned.unbind(1)
    return q, k, v.squeeze(1)


# ---- the largest logit ----

# Too large a slack only costs some rows; too small a one would miss the maximum.
LSE_SLACK = 1e-2  # relative; covers a kernel's error: 7e-3 in torch's bfloat16 CPU flash kernel
LOGITS_AT_ONCE = 1 << 22  # elements of the recomputed [H, C, L]


def floors(lse_TH: Tensor, segments: Segments, causal: bool) -> Tensor:
    """Lower bound [H] of every head's largest logit, less what the log-sum-exp may be wrong by."""

    def build() -> Tensor:
        if causal:
            visible_T = segments.position(lse_TH.device) + 1
        else:
            # Without a mask every row sees its whole document.
            visible_T = torch.tensor(segments.lengths, device=lse_TH.device)[
                segments.ids(lse_TH.device).long()
            ]
        return visible_T.to(lse_TH.dtype).log()[:, None]

    # The same for all layers of a row.
    log_T1 = segments.cached(("max_logit.visible", causal, lse_TH.dtype, str(lse_TH.device)), build)
    floor_H = (lse_TH - log_T1).amax(dim=0)
    return floor_H - LSE_SLACK * (1 + floor_H.abs())


@torch.no_grad()
def max_logit(
    q_THD: Tensor,
    k_THD: Tensor,
    lse_TH: Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float,
    tau: float,
) -> Tensor:
    """Largest scaled logit over visible pairs, float32 [H], exact whenever some head could exceed ``tau``.

    Args:
        lse_TH: from :func:`earlyfusion.kernels.attention.varlen.attention` . Rows set to -inf are left out
            of the maximum (filler).
        tau: the clipping threshold.
    Returns:
        If no head's largest log-sum-exp exceeds tau: that log-sum-exp, an upper bound of S_h that is <= tau.
        Otherwise S_h of every head. ``-inf`` for an empty row.
    Raises:
        ValueError: the row does not match ``segments``.

    One host sync (the comparison with tau); a second one for the row list only when it
    opens.
    """
    check_shapes("max_logit", {"T": segments.total}, q_THD=q_THD, k_THD=k_THD, lse_TH=lse_TH)
    if segments.total == 0:
        return torch.full((q_THD.shape[1],), float("-inf"), device=q_THD.device)
    bound_H = lse_TH.amax(dim=0)
    # The one look at the device; mostly it ends here.
    if not bool((bound_H > tau).any()):
        return bound_H.float()
    rows = (lse_TH >= floors(lse_TH, segments, causal)).any(dim=1).nonzero()[:, 0].tolist()
    dtype = compute_dtype(q_THD, k_THD)  # the operands attention multiplied, under autocast too
    wide = accumulate_dtype(dtype)
    q_THD = q_THD.to(dtype)
    # Only rows that can hold a maximum are multiplied again, document by document.
    best_H = torch.full_like(bound_H, float("-inf"))
    # Long rows in pieces: the logits of all candidates could be large.
    step = max(1, LOGITS_AT_ONCE // (q_THD.shape[1] * segments.max_length))
    with without_autocast(q_THD):
        for start, length in zip(segments.offsets, segments.lengths):
            k_LHD = k_THD[start : start + length].to(dtype).to(wide)
            mine = rows[bisect_left(rows, start) : bisect_left(rows, start + length)]
            for low in range(0, len(mine), step):
                index_C = torch.tensor(mine[low : low + step], device=q_THD.device)
                logits_HCL = torch.einsum("chd,lhd->hcl", q_THD[index_C].to(wide), k_LHD) * scale
                if causal:
                    hidden_CL = torch.arange(length, device=q_THD.device) > (index_C - start)[:, None]
                    logits_HCL = logits_HCL.masked_fill(hidden_CL, float("-inf"))
                found_H = logits_HCL.flatten(1).amax(dim=1)
                best_H = torch.maximum(best_H, found_H.to(best_H.dtype))
    return best_H.float()
