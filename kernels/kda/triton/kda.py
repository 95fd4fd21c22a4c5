"""Kimi Delta Attention in Triton: two launches forward, three backward, for any gate.

Forward: token-parallel preparation (kernels/kda/triton/prep.py), then scan and output in residual form
(kernels/kda/triton/scan.py). Backward: the preparation again, both scans in one launch, then every gradient
of a chunk in one (kernels/kda/triton/grad.py). Saved in between: the inputs, and with segments their first
states. Where documents times heads are too few to fill the device, each direction gets two more launches that
make segments of a document independent.

Definition: kernels/kda/naive.py. Legend: T tokens, D documents, J runs, N chunks, C tokens per chunk, H
query/key heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.kda.checks import check_row
from earlyfusion.kernels.kda.gate import check_lower_bound
from earlyfusion.kernels.kda.triton.grad import chunk_gradients
from earlyfusion.kernels.kda.triton.plan import (
    CHUNKS,
    Runs,
    Tiles,
    auto_segments,
    is_crowded,
    is_hopper,
    padded_dim,
    plan_runs,
    tiles,
)
from earlyfusion.kernels.kda.triton.prep import prep
from earlyfusion.kernels.kda.triton.scan import combine, dual_scan, forward_scan, transition
from earlyfusion.kernels.launch import check_blocks, on_device
from earlyfusion.kernels.segments import Segments
from earlyfusion.kernels.triton_support import (
    as_triton,
    check_floats,
    check_no_nan,
    check_same_dtype,
    check_shape,
    dot_dtype,
    interpreted,
    require_triton,
)


class Options(NamedTuple):
    """What shapes a call besides its tensors."""

    lower_bound: float | None
    scale: float
    runs: Runs
    tiles: Tiles
    output_final: bool


class Prepared(NamedTuple):
    """What the first launch wrote, in the order the scans take it."""

    q_hat: Tensor
    k_hat: Tensor
    k_tail: Tensor
    carry: Tensor
    P: Tensor
    T: Tensor


class Shape(NamedTuple):
    T: int
    H: int
    G: int
    K: int
    V: int


def _shape(q: Tensor, v: Tensor) -> Shape:
    return Shape(q.shape[0], q.shape[1], v.shape[1], q.shape[2], v.shape[2])


def _precision(dtype: torch.dtype, kernel: Any) -> dict[str, Any]:
    """DOT and PREC: float32 operands are split into three tensor core passes, 16 bit operands are taken as
    they are."""
    return {"DOT": as_triton(dot_dtype(dtype, kernel)), "PREC": "ieee" if interpreted(kernel) else "tf32x3"}


def _strides(q: Tensor, k: Tensor, f: Tensor, b: Tensor) -> tuple[int, ...]:
    return (q.stride(0), q.stride(1), k.stride(0), k.stride(1), f.stride(0), f.stride(1), b.stride(0))


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, opts: Options
) -> Prepared:
    import triton.language as tl

    shape, runs, C = _shape(q, v), opts.runs, opts.tiles.chunk
    dtype = dot_dtype(q.dtype, prep)
    new = lambda *sizes, dtype=dtype: torch.empty(*sizes, dtype=dtype, device=q.device)
    keys, pairs = (shape.T, shape.G, shape.K), (shape.T, shape.G, C)
    carry = new(runs.num_chunks, shape.G, shape.K, dtype=torch.float32)
    made = Prepared(new(*keys), new(*keys), new(*keys), carry, new(*pairs), new(*pairs))
    prep[(runs.num_chunks, shape.G)](
        q,
        k,
        f,
        b,
        A_log,
        dt_bias,
        runs.chunk_start_N,
        runs.chunk_length_N,
        *made,
        opts.scale,
        opts.lower_bound or 0.0,
        *_strides(q, k, f, b),
        shape.G,
        shape.K,
        C.bit_length() - 1,
        GROUP=shape.G // shape.H,
        K=shape.K,
        C=C,
        BOUNDED=opts.lower_bound is not None,
        INV=tl.float32 if dtype == torch.float32 else tl.float16,
        **_precision(q.dtype, prep),
        **opts.tiles.prep,
    )
    return made


def _segment_edges(
    made: Prepared, v: Tensor, b: Tensor, edge: Tensor | None, shape: Shape, opts: Options, reverse: bool
) -> Tensor:
    """Incoming state of every run [J, G, K, V] from those of the documents; reverse: gradients, with v
    standing for dO."""
    runs, move, join = opts.runs, opts.tiles.move, opts.tiles.join
    new = lambda *sizes: torch.empty(*sizes, dtype=torch.float32, device=v.device)
    moves, entry = (
        new(runs.num, shape.G, shape.K, shape.V + shape.K),
        new(runs.num, shape.G, shape.K, shape.V),
    )
    precision = _precision(v.dtype, transition)
    transition[((shape.V + shape.K) // move["BV"], runs.num, shape.G)](
        *made,
        v,
        b,
        moves,
        runs.start_J,
        runs.end_J,
        runs.first_chunk_J,
        v.stride(0),
        v.stride(1),
        b.stride(0),
        shape.G,
        K=shape.K,
        V=shape.V,
        C=opts.tiles.chunk,
        REVERSE=reverse,
        **precision,
        **move,
    )
    combine[(shape.V // join["BV"], runs.document_run_D1.numel() - 1, shape.G)](
        moves,
        edge,
        entry,
        runs.document_run_D1,
        shape.G,
        K=shape.K,
        V=shape.V,
        HAS_EDGE=edge is not None,
        REVERSE=reverse,
        PREC=precision["PREC"],
        **join,
    )
    return entry


def _forward(
    made: Prepared, v: Tensor, b: Tensor, entry: Tensor | None, shape: Shape, opts: Options
) -> tuple[Tensor, Tensor | None]:
    runs, scan = opts.runs, opts.tiles.scan
    o = torch.empty(shape.T, shape.G, shape.V, dtype=v.dtype, device=v.device)
    final = None
    if opts.output_final:
        final = torch.empty(runs.num, shape.G, shape.K, shape.V, dtype=torch.float32, device=v.device)
    forward_scan[(shape.V // scan["BV"], runs.num, shape.G)](
        *made,
        v,
        b,
        entry,
        o,
        final,
        runs.start_J,
        runs.end_J,
        runs.first_chunk_J,
        v.stride(0),
        v.stride(1),
        b.stride(0),
        shape.G,
        K=shape.K,
        V=shape.V,
        C=opts.tiles.chunk,
        HAS_INITIAL=entry is not None,
        HAS_FINAL=final is not None,
        **_precision(v.dtype, forward_scan),
        **scan,
    )
    if final is not None and runs.split:
        final = final.index_select(0, runs.last_run_D)
    return o, final


class _Scanned(NamedTuple):
    """What both scans of the backward wrote: S before and dS' after every chunk, R, E."""

    states: Tensor
    residual: Tensor
    dstates: Tensor
    E: Tensor


def _dual(
    made: Prepared,
    v: Tensor,
    b: Tensor,
    entry: Tensor | None,
    do: Tensor,
    dexit: Tensor | None,
    shape: Shape,
    opts: Options,
    want_dinitial: bool,
) -> tuple[_Scanned, Tensor | None]:
    runs, dual = opts.runs, opts.tiles.dual
    dtype = dot_dtype(v.dtype, dual_scan)
    new = lambda *sizes, dtype=dtype: torch.empty(*sizes, dtype=dtype, device=v.device)
    state, value = (runs.num_chunks, shape.G, shape.K, shape.V), (shape.T, shape.G, shape.V)
    scanned = _Scanned(new(*state), new(*value), new(*state), new(*value))
    dinitial = new(runs.num, *state[1:], dtype=torch.float32) if want_dinitial else None
    columns = shape.V // dual["BV"]
    dual_scan[(2 * columns, runs.num, shape.G)](
        *made,
        v,
        b,
        entry,
        do,
        dexit,
        *scanned,
        dinitial,
        runs.start_J,
        runs.end_J,
        runs.first_chunk_J,
        v.stride(0),
        v.stride(1),
        b.stride(0),
        shape.G,
        K=shape.K,
        V=shape.V,
        C=opts.tiles.chunk,
        COLUMNS=columns,
        HAS_INITIAL=entry is not None,
        HAS_DFINAL=dexit is not None,
        HAS_DINITIAL=want_dinitial,
        **_precision(v.dtype, dual_scan),
        **dual,
    )
    if dinitial is not None and runs.split:
        dinitial = dinitial.index_select(0, runs.first_run_D)
    return scanned, dinitial


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    do: Tensor,
    scanned: _Scanned,
    opts: Options,
) -> tuple[Tensor, ...]:
    """Gradients of the seven inputs, in their order."""
    shape, runs, C = _shape(q, v), opts.runs, opts.tiles.chunk
    group = shape.G // shape.H
    new = lambda *sizes, dtype: torch.empty(*sizes, dtype=dtype, device=q.device)
    # value heads that share a query/key head each leave their part; the parts are added in float32
    key_dtype = q.dtype if group == 1 else torch.float32
    dq, dk = (new(shape.T, shape.G, shape.K, dtype=key_dtype) for _ in range(2))
    dv, df, db = new(*v.shape, dtype=v.dtype), new(*f.shape, dtype=f.dtype), new(*b.shape, dtype=b.dtype)
    dA_NG = new(runs.num_chunks, shape.G, dtype=torch.float32)
    ddt_NGK = new(runs.num_chunks, shape.G, shape.K, dtype=torch.float32)
    chunk_gradients[(runs.num_chunks, shape.G)](
        q,
        k,
        f,
        b,
        A_log,
        dt_bias,
        runs.chunk_start_N,
        runs.chunk_length_N,
        do,
        *scanned,
        dq,
        dk,
        dv,
        df,
        db,
        dA_NG,
        ddt_NGK,
        opts.scale,
        opts.lower_bound or 0.0,
        *_strides(q, k, f, b),
        shape.G,
        shape.K,
        shape.V,
        C.bit_length() - 1,
        GROUP=group,
        K=shape.K,
        V=shape.V,
        C=C,
        BOUNDED=opts.lower_bound is not None,
        **_precision(q.dtype, chunk_gradients),
        **opts.tiles.grad,
    )
    if group > 1:
        dq, dk = (x.view(shape.T, shape.H, group, shape.K).sum(2).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, df, db, dA_NG.sum(0).to(A_log.dtype), ddt_NGK.sum(0).to(dt_bias.dtype)


class _TritonKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        initial: Tensor | None,
        opts: Options,
    ) -> tuple[Tensor, Tensor | None]:
        shape = _shape(q, v)
        with on_device(q):
            made = _prepare(q, k, v, f, b, A_log, dt_bias, opts)
            entry = initial
            if opts.runs.split:
                entry = _segment_edges(made, v, b, initial, shape, opts, reverse=False)
            o, final = _forward(made, v, b, entry, shape, opts)
        ctx.save_for_backward(q, k, v, f, b, A_log, dt_bias, initial, entry if opts.runs.split else None)
        ctx.opts = opts
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, f, b, A_log, dt_bias, initial, entry = ctx.saved_tensors
        opts: Options = ctx.opts
        shape = _shape(q, v)
        do = do.contiguous()
        dexit = None if dfinal is None else dfinal.float().contiguous()
        with on_device(q):
            made = _prepare(q, k, v, f, b, A_log, dt_bias, opts)
            if opts.runs.split:
                dexit = _segment_edges(made, do, b, dexit, shape, opts, reverse=True)
            entry = initial if entry is None else entry
            scanned, dinitial = _dual(made, v, b, entry, do, dexit, shape, opts, initial is not None)
            del made
            grads = _gradients(q, k, v, f, b, A_log, dt_bias, do, scanned, opts)
        return *grads, dinitial, None


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    segments: Segments,
    initial: Tensor | None,
) -> None:
    """Everything the kernels take for granted; ValueError naming the argument."""
    check_row(q, k, v, f, b, segments)
    check_shape("kda", "A_log", A_log, v.shape[1:2], "[G]")
    check_shape("kda", "dt_bias", dt_bias, f.shape[1:], "[G, K]")
    check_floats("kda", q, q=q, k=k, v=v, f=f, b=b, A_log=A_log, dt_bias=dt_bias, initial_state=initial)
    check_same_dtype("kda", q=q, k=k, v=v)
    if initial is not None:
        expected = (segments.num, *v.shape[1:2], q.shape[2], v.shape[2])
        check_shape("kda", "initial_state", initial, expected, "[N, G, K, V]")
        if initial.dtype != torch.float32:
            raise ValueError(
                f"kda: initial_state is {initial.dtype}; expected float32, the dtype of all states"
            )
    check_no_nan("kda", f=f, A_log=A_log, dt_bias=dt_bias, b=b)


def _pad(x: Tensor, *missing: int) -> Tensor:
    """Zeros after the last axis (and the one before, if two numbers are given)."""
    return F.pad(x, [side for size in missing for side in (0, size)]) if any(missing) else x


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
    scale: float | None = None,
    initial_state_NGKV: Tensor | None = None,
    output_final_state: bool = False,
    chunk: int | None = None,
    segment_chunks: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA over packed documents; arguments and results as in :func:`earlyfusion.kernels.kda.naive.kda`.

    Differentiable once, in every tensor. q, k, v in one dtype of float32, bfloat16, float16; the state is
    float32. Only last axes need be dense: slices of a joint projection are read in place. K and V up to 256;
    those other than 32, 64, 128, 256 are padded with zeros. NaN is looked for off CUDA, or with
    EF_KERNEL_CHECKS=1 (costs a host sync).

    Args:
        chunk: 16, 32 or 64 tokens; by default from a table.
        segment_chunks: cut documents into segments of that many chunks, scanned in parallel; 0 never, None
        when
            documents times heads would leave most of the device idle.

    Raises:
        ValueError: a wrong shape, dtype, device or stride, NaN, or an unknown chunk, naming the argument.
        ImportError: triton is not installed.
    """
    require_triton("kda")
    _check(q_THK, k_THK, v_TGV, f_TGK, b_TG, A_log_G, dt_bias_GK, segments, initial_state_NGKV)
    check_lower_bound(lower_bound)
    if chunk is not None and chunk not in CHUNKS:
        raise ValueError(f"kda: chunk={chunk}; expected one of {CHUNKS}, or None for the default")
    key_dim, value_dim = q_THK.shape[2], v_TGV.shape[2]
    if segments.total == 0:
        states = v_TGV.new_zeros((0, v_TGV.shape[1], key_dim, value_dim), dtype=torch.float32)
        return v_TGV.clone(), states if output_final_state else None
    more_K, more_V = padded_dim("q", key_dim) - key_dim, padded_dim("v", value_dim) - value_dim
    heads, device = v_TGV.shape[1], q_THK.device
    crowded = is_crowded(segments, heads, value_dim + more_V, device)
    tile = tiles(
        key_dim + more_K, value_dim + more_V, q_THK.dtype == torch.float32, crowded, is_hopper(device), chunk
    )
    if segment_chunks is None:
        segment_chunks = auto_segments(segments, heads, value_dim + more_V, tile, device)
    runs = plan_runs(segments, tile.chunk, segment_chunks, device)
    check_blocks("kda", "documents (or segments of them)", runs.num)
    options = Options(
        lower_bound=lower_bound,
        scale=key_dim**-0.5 if scale is None else scale,
        runs=runs,
        tiles=tile,
        output_final=output_final_state,
    )
    initial = None if initial_state_NGKV is None else _pad(initial_state_NGKV, more_V, more_K).contiguous()
    o_TGV, final = _TritonKDA.apply(
        _pad(q_THK, more_K),
        _pad(k_THK, more_K),
        _pad(v_TGV, more_V),
        _pad(f_TGK, more_K),
        b_TG,
        A_log_G.contiguous(),
        _pad(dt_bias_GK, more_K).contiguous(),
        initial,
        options,
    )
    if more_V:
        o_TGV = o_TGV[..., :value_dim]
    return o_TGV, None if final is None else final[..., :key_dim, :value_dim]
