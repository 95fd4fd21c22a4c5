"""Kimi Delta Attention and its short convolution in C++ (kernels/cpu/recurrent.cpp), with their gradients:
the forms for a CPU.

Definition: kernels/kda/naive.py. They compute in float32; what the C++ cannot do (float64, or no compiler is
there), torch's forms do: chunk.py and conv.py.

Legend: T tokens, N documents, C channels, W taps.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.cpu.program import AT, INT, REAL, call, fields, library
from earlyfusion.kernels.kda import chunk, conv
from earlyfusion.kernels.products import wide_dtype
from earlyfusion.kernels.segments import Inputs, Segments, check_conv, check_kda, check_shapes

TIME = 32
"""Tokens between states that are kept for the backward, as in recurrent.cpp."""


class Recurrence(ctypes.Structure):
    """As in recurrent.cpp."""

    _fields_ = [
        *fields(INT, "documents query_heads heads keys values q_step k_step v_step f_step b_step"),
        ("lower_bound", REAL),
        *fields(AT, "offsets states_begin q k v f b rate bias initial o final states delta d_o d_final"),
        *fields(AT, "dq dk dv df db drate dbias dinitial"),
    ]


def _call(
    back: bool, segments: Segments, lower_bound: float | None, x: Inputs, **tensors: Tensor | None
) -> None:
    """The C++ over all documents and heads, shared out over torch's threads."""
    tokens, heads, values = x.v.shape
    offsets, begins = segments.cached(
        "kda.recurrent",
        lambda: (
            torch.tensor(segments.offsets),
            torch.tensor([0, *(-(-length // TIME) for length in segments.lengths)]).cumsum(0),
        ),
    )
    rate_G, (*rows, _, bias_GK) = x.A_log.exp(), x
    steps = [tensor.stride(0) for tensor in rows]
    made = Recurrence(segments.num, x.q.shape[1], heads, x.q.shape[2], values, *steps, lower_bound or 0.0)
    tensors |= dict(zip("qkvfb", rows)) | {"offsets": offsets, "states_begin": begins}
    # A head of a document is a sequence of its own.
    starts = [
        start * heads + head * length
        for start, length in zip(segments.offsets, segments.lengths)
        for head in range(heads)
    ]
    starts.append(tokens * heads)
    call("recurrent", made, starts, int(back), rate=rate_G, bias=bias_GK, **tensors)


def _dense(tensors: Sequence[Tensor]) -> Inputs:
    """In float32, with dense rows; tokens may lie apart, as parts of a wider tensor do."""

    def dense(tensor: Tensor) -> Tensor:
        tensor = tensor.float()
        return tensor if tensor[0].is_contiguous() else tensor.contiguous()

    return Inputs(*map(dense, tensors[:5]), *(tensor.float().contiguous() for tensor in tensors[5:]))


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lower_bound: float | None,
        segments: Segments,
        keep: bool,
        initial: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x = _dense(tensors)
        state = (x.v.shape[1], x.q.shape[2], x.v.shape[2])
        initial = None if initial is None else initial.float().contiguous()
        # Everything is written by the C++.
        o, final = x.v.new_empty(x.v.shape), x.v.new_empty(segments.num, *state)
        states = delta = None
        # Kept only where there is somebody to come back.
        if keep:
            chunks = sum(-(-length // TIME) for length in segments.lengths)
            states, delta = x.v.new_empty(chunks, *state), x.v.new_empty(x.v.shape)
        _call(False, segments, lower_bound, x, initial=initial, o=o, final=final, states=states, delta=delta)
        ctx.save_for_backward(initial, states, delta, *tensors)
        ctx.settings = lower_bound, segments
        return o.to(tensors[2].dtype), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        initial, states, delta, *given = ctx.saved_tensors
        lower_bound, segments = ctx.settings
        x = _dense(given)
        group = x.v.shape[1] // x.q.shape[1]
        dq, dk, df = (x.f.new_empty(x.f.shape) for _ in range(3))
        dv, db = x.v.new_empty(x.v.shape), x.b.new_empty(x.b.shape)
        drate, dbias = x.b.new_empty(segments.num, x.b.shape[1]), x.f.new_empty(segments.num, *x.f.shape[1:])
        dinitial = None if initial is None else torch.empty_like(initial)
        _call(
            True,
            segments,
            lower_bound,
            x,
            states=states,
            delta=delta,
            d_o=do.float().contiguous(),
            d_final=dfinal.contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            df=df,
            db=db,
            drate=drate,
            dbias=dbias,
            dinitial=dinitial,
        )
        if group > 1:
            # The value heads of a group share one query and one key.
            dq, dk = (each.unflatten(1, (-1, group)).sum(2) for each in (dq, dk))
        # Documents have summed for themselves: their order is fixed, whoever worked on them.
        made = (dq, dk, dv, df, db, drate.sum(0), dbias.sum(0))
        return None, None, None, dinitial, *(each.to(like.dtype) for each, like in zip(made, given))


def kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    f_TGK: Tensor,
    b_TG: Tensor,
    A_log_G: Tensor,
    dt_bias_GK: Tensor,
    segments: Segments,
    *,
    lower_bound: float | None = None,
    initial_state_NGKV: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """KDA over packed documents; arguments and results as in :func:`earlyfusion.kernels.kda.naive.kda`.

    Computes in float32, on a CPU; what the C++ cannot do, :mod:`earlyfusion.kernels.kda.chunk` does.
    Differentiable once, in every tensor.

    Raises:
        ValueError: shapes do not fit each other or the segments.
    """
    x = Inputs(q_THK, k_THK, v_TGV, f_TGK, b_TG, A_log_G, dt_bias_GK)
    if library() is None or wide_dtype(*x) == torch.float64 or not segments.total:
        return chunk.kda(
            *x,
            segments,
            lower_bound=lower_bound,
            initial_state_NGKV=initial_state_NGKV,
            output_final_state=output_final_state,
        )
    sizes = check_kda("kda", x, segments.total, lower_bound) | {"N": segments.num}
    check_shapes("kda", sizes, initial_state_NGKV=initial_state_NGKV)
    # (A function's own flags tell of its inputs alone, not of torch.no_grad.)
    keep = torch.is_grad_enabled()
    o_TGV, final_NGKV = _Recurrent.apply(lower_bound, segments, keep, initial_state_NGKV, *x)
    return o_TGV, final_NGKV if output_final_state else None


# ---- the short convolution ----

ROWS = 256
"""Rows of a document that one thread takes at a time."""


class Convolution(ctypes.Structure):
    """As in recurrent.cpp."""

    _fields_ = [
        *fields(INT, "channels width x_step"),
        *fields(AT, "blocks begins ends documents x weight taps y dy dx dweight dtaps"),
    ]


def _blocks(segments: Segments) -> dict[str, Tensor]:
    """Blocks of at most ROWS rows, none of two documents."""

    def build() -> dict[str, Tensor]:
        rows = [
            (first, start, start + length, document)
            for document, (start, length) in enumerate(zip(segments.offsets, segments.lengths))
            for first in range(start, start + length, ROWS)
        ]
        names = ("blocks", "begins", "ends", "documents")
        made = {name: torch.tensor(column) for name, column in zip(names, zip(*rows))}
        return made | {"blocks": torch.tensor([*(row[0] for row in rows), segments.total])}

    return segments.cached("kda.recurrent.blocks", build)


def _convolve(back: bool, segments: Segments, x_TC: Tensor, weight_WC: Tensor, **tensors: Any) -> None:
    blocks, made = _blocks(segments), Convolution(x_TC.shape[1], len(weight_WC), x_TC.stride(0))
    rows = range(len(blocks["documents"]) + 1)
    call("convolution", made, rows, int(back), x=x_TC, weight=weight_WC, **blocks, **tensors)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_CW: Tensor, taps_NCW1: Tensor | None, segments: Segments
    ) -> Tensor:
        x, weight_WC = x_TC.float(), weight_CW.float().t().contiguous()
        x = x if x.stride(1) == 1 else x.contiguous()
        taps = None if taps_NCW1 is None else taps_NCW1.float().transpose(1, 2).contiguous()
        y_TC = x.new_empty(x.shape)
        _convolve(False, segments, x, weight_WC, taps=taps, y=y_TC)
        ctx.save_for_backward(x_TC, weight_CW, taps_NCW1)
        ctx.segments = segments
        return y_TC.to(x_TC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TC, weight_CW, taps_NCW1 = ctx.saved_tensors
        x, weight_WC = x_TC.float(), weight_CW.float().t().contiguous()
        x = x if x.stride(1) == 1 else x.contiguous()
        taps = None if taps_NCW1 is None else taps_NCW1.float().transpose(1, 2).contiguous()
        dtaps = None if taps is None else torch.empty_like(taps)
        blocks = len(_blocks(ctx.segments)["documents"])
        dx_TC, dweight = x.new_empty(x.shape), x.new_empty(blocks, *weight_WC.shape)
        dy = dy_TC.float().contiguous()
        _convolve(True, ctx.segments, x, weight_WC, taps=taps, dy=dy, dx=dx_TC, dweight=dweight, dtaps=dtaps)
        if taps_NCW1 is not None and dtaps is not None:
            dtaps = dtaps.transpose(1, 2).to(taps_NCW1.dtype)
        return dx_TC.to(x_TC.dtype), dweight.sum(0).t().to(weight_CW.dtype), dtaps, None


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    segments: Segments,
    *,
    initial_taps_NCW1: Tensor | None = None,
    output_taps: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution and SiLU per document: arguments, results and errors as in
    :func:`earlyfusion.kernels.kda.conv.short_conv`; once differentiable."""
    if library() is None or wide_dtype(x_TC, weight_CW) == torch.float64 or not segments.total:
        return conv.short_conv(
            x_TC, weight_CW, segments, initial_taps_NCW1=initial_taps_NCW1, output_taps=output_taps
        )
    check_conv(x_TC, weight_CW, initial_taps_NCW1, segments)
    y_TC = _ShortConv.apply(x_TC, weight_CW, initial_taps_NCW1, segments)
    if not output_taps:
        return y_TC, None
    return y_TC, conv.final_taps(x_TC, initial_taps_NCW1, segments, weight_CW.shape[1])
