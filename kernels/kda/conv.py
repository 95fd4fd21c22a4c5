"""Depthwise causal convolution over packed documents, fused with SiLU, in token-major layout [T, C].

A kernel of W taps is W shifted multiply-adds over contiguous rows; no transpose to [C, T] and no padding per
document. The pass over the row ignores documents. The few rows that would look over a document's edge (the
first W - 1 of each) are left out of it and computed from gathered windows instead, so nothing of a neighbour
ever enters a document, not even as a product with zero. The backward recomputes the pre-activation; only x
and the weight are kept.

Definition: ``short_conv`` in kernels/kda/naive.py. Legend: T tokens, C channels, W taps, N documents, E edge
rows (tokens with fewer than W - 1 predecessors in their document).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.products import wide_dtype
from earlyfusion.kernels.segments import Segments, check_conv


class _Windows(NamedTuple):
    """Rows of outputs and where the inputs that each reads come from: a row of x, or, outside the document, a
    row of the initial taps laid out as [N * (W - 1), C]."""

    rows_E: Tensor
    # Both indices are always valid, so that a gather never reads outside; `inside` says which of the two
    # counts.
    inside_EW1: Tensor
    x_EW: Tensor
    tap_EW: Tensor

    def read(self, x_TC: Tensor, taps_NCW1: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[E, W, C]."""
        windows_EWC = x_TC[self.x_EW].to(dtype)
        if taps_NCW1 is None:
            # Filled, not multiplied by zero: a neighbour's NaN must not come through.
            return windows_EWC.masked_fill_(~self.inside_EW1, 0.0)
        taps_RC = taps_NCW1.transpose(1, 2).reshape(-1, x_TC.shape[1])
        return torch.where(self.inside_EW1, windows_EWC, taps_RC[self.tap_EW].to(dtype))


def _windows(segments: Segments, width: int, ends: bool, device: torch.device) -> _Windows:
    """Of the edge rows, W inputs each; ends: of the tokens after the documents, W - 1 inputs before each."""

    def build() -> _Windows:
        starts = torch.tensor(segments.offsets, dtype=torch.int64)
        if ends:
            # Where a document is shorter than the taps, the rest comes from its own initial taps.
            document_E, rows_E, reach = torch.arange(segments.num), starts[1:], torch.arange(width - 1)
            place_E = starts.diff()
        else:
            position_T, reach = segments.position().long(), torch.arange(width)
            rows_E = (position_T < width - 1).nonzero().view(-1)
            document_E, place_E = segments.ids().long()[rows_E], position_T[rows_E]
        # Places inside the document; negative ones stand before it.
        place_EW = place_E.unsqueeze(1) + reach - (width - 1)
        tap_EW = document_E.unsqueeze(1) * (width - 1) + (place_EW + width - 1).clamp(max=width - 2)
        x_EW = starts[document_E].unsqueeze(1) + place_EW.clamp(min=0)
        plan = rows_E, (place_EW >= 0).unsqueeze(2), x_EW, tap_EW
        return _Windows._make(x.to(device) for x in plan)

    return segments.cached(("kda.conv", width, ends, str(device)), build)


def _pass(x_TC: Tensor, weight_WC: Tensor) -> Tensor:
    """Pre-activations, documents ignored. Rows before 0 count as zero."""
    width = weight_WC.shape[0]
    x_TC = x_TC.to(weight_WC.dtype)
    out_TC = x_TC * weight_WC[width - 1]
    # One multiply-add per tap over contiguous rows.
    for shift in range(1, min(width, len(x_TC))):
        out_TC[shift:].addcmul_(x_TC[:-shift], weight_WC[width - 1 - shift])
    return out_TC


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_CW: Tensor, taps_NCW1: Tensor | None, segments: Segments
    ) -> Tensor:
        dtype = wide_dtype(x_TC, weight_CW)
        width = weight_CW.shape[1]
        weight_WC = weight_CW.to(dtype).t().contiguous()
        edges = _windows(segments, width, False, x_TC.device)
        y_TC = F.silu(_pass(x_TC, weight_WC)).to(x_TC.dtype)
        if len(edges.rows_E):
            z_EC = (edges.read(x_TC, taps_NCW1, dtype) * weight_WC).sum(1)
            # The pass has read over document borders for these rows: they are written again.
            y_TC.index_copy_(0, edges.rows_E, F.silu(z_EC).to(y_TC.dtype))
        # The pre-activation is computed again: half the memory for a few multiply-adds.
        ctx.save_for_backward(x_TC, weight_CW, taps_NCW1)
        ctx.segments = segments
        return y_TC

    @staticmethod
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TC, weight_CW, taps_NCW1 = ctx.saved_tensors
        dtype = wide_dtype(x_TC, weight_CW)
        channels, width = weight_CW.shape
        weight_WC = weight_CW.to(dtype).t().contiguous()
        edges = _windows(ctx.segments, width, False, x_TC.device)
        wide_TC, dy = x_TC.to(dtype), dy_TC.to(dtype)
        # Of all rows as if they were one document.
        dz_TC = torch.ops.aten.silu_backward(dy, _pass(x_TC, weight_WC))
        # Edge rows get their gradients from their windows, below.
        dz_TC.index_fill_(0, edges.rows_E, 0.0)
        dx_TC = dz_TC * weight_WC[width - 1]
        dweight_WC = torch.zeros_like(weight_WC)
        dweight_WC[width - 1] = (dz_TC * wide_TC).sum(0)
        for shift in range(1, min(width, len(x_TC))):
            dx_TC[:-shift].addcmul_(dz_TC[shift:], weight_WC[width - 1 - shift])
            dweight_WC[width - 1 - shift] = (dz_TC[shift:] * wide_TC[:-shift]).sum(0)
        dx_TC = dx_TC.to(x_TC.dtype)

        # The edge rows, from their windows; what they read before the document is the taps'.
        inside, windows_EWC = edges.inside_EW1, edges.read(x_TC, taps_NCW1, dtype)
        z_EC = (windows_EWC * weight_WC).sum(1)
        dz_EC = torch.ops.aten.silu_backward(dy[edges.rows_E], z_EC)
        dweight_WC += (windows_EWC * dz_EC.unsqueeze(1)).sum(0)
        dwindows_EWC = dz_EC.unsqueeze(1) * weight_WC
        to_x = dwindows_EWC.masked_fill(~inside, 0.0).view(-1, channels)
        dx_TC.index_add_(0, edges.x_EW.view(-1), to_x.to(dx_TC.dtype))
        dtaps_NCW1 = None
        if taps_NCW1 is not None:
            dtaps_NWC = dweight_WC.new_zeros(taps_NCW1.shape[0], width - 1, channels)
            to_taps = dwindows_EWC.masked_fill(inside, 0.0).view(-1, channels)
            dtaps_NWC.view(-1, channels).index_add_(0, edges.tap_EW.view(-1), to_taps)
            dtaps_NCW1 = dtaps_NWC.transpose(1, 2).to(taps_NCW1.dtype)
        return dx_TC, dweight_WC.t().to(weight_CW.dtype), dtaps_NCW1, None


def final_taps(x_TC: Tensor, taps_NCW1: Tensor | None, segments: Segments, width: int) -> Tensor:
    """The last W - 1 inputs of every document, [N, C, W - 1], oldest first."""

    ends = _windows(segments, width, True, x_TC.device)
    return ends.read(x_TC, taps_NCW1, x_TC.dtype).transpose(1, 2)


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    segments: Segments,
    *,
    initial_taps_NCW1: Tensor | None = None,
    output_taps: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution and SiLU per document: y_t = silu(sum_w weight[:, w] * x_{t - (W - 1) +
    w}).

    Sums run in float32 (float64 for float64 inputs); y has the dtype of x. Differentiable in x, weight and
    the taps.

    Args:
        x_TC: packed inputs. weight_CW: one row of W taps per channel, the newest input last.
        segments: documents of the row.
        initial_taps_NCW1: inputs before each document, oldest first; zero by default.
        output_taps: also return the last W - 1 inputs of each document, for decoding.

    Returns:
        (y_TC, taps_NCW1 or None).

    Raises:
        ValueError: sizes do not fit, or the kernel has fewer than 2 taps.
    """
    check_conv(x_TC, weight_CW, initial_taps_NCW1, segments)
    y_TC = _ShortConv.apply(x_TC, weight_CW, initial_taps_NCW1, segments)
    taps = final_taps(x_TC, initial_taps_NCW1, segments, weight_CW.shape[1]) if output_taps else None
    return y_TC, taps
