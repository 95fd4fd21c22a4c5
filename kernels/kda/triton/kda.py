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
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.checks import FLOATS, check_no_nan, check_shapes, check_tensors
from earlyfusion.kernels.kda.checks import Inputs, check_kda
from earlyfusion.kernels.kda.gate import check_lower_bound
from earlyfusion.kernels.kda.triton.grad import chunk_gradients
from earlyfusion.kernels.kda.triton.plan import (
    CHUNKS,
    Runs,
    Tiles,
    auto_segments,
    is_crowded,
    padded_dim,
    plan_runs,
    tiles,
)
from earlyfusion.kernels.kda.triton.prep import prep
from earlyfusion.kernels.kda.triton.scan import combine, dual_scan, forward_scan, transition
from earlyfusion.kernels.launch import check_blocks, dot_dtype, hardware, interpreted, on_device
from earlyfusion.kernels.segments import Segments


class Options(NamedTuple):
    """What shapes a call besides its tensors."""

    lower_bound: float | None
    scale: float
    runs: Runs
    tiles: Tiles
    output_final: bool


class Sizes(NamedTuple):
    """Constants of a call, which its kernels are compiled for."""

    K: int
    V: int
    C: int
    GROUP: int  # value heads per query/key head
    BOUNDED: bool
    DOT: Any  # dtype of the operands of products
    INV: Any  # and of those inside the triangular inverse
    PREC: str  # how operands in float32 are multiplied


class Strides(NamedTuple):
    """Elements from token to token and from head to head: q, k, v, f may be slices of wider tensors."""

    q_t: int
    q_h: int
    k_t: int
    k_h: int
    v_t: int
    v_h: int
    f_t: int
    f_h: int
    b: int


class Prepared(NamedTuple):
    """What the first launch writes."""

    q_hat: Tensor
    k_hat: Tensor
    k_tail: Tensor
    carry: Tensor
    P: Tensor
    T: Tensor


class Scanned(NamedTuple):
    """What both scans of the backward write: S before and dS' after every chunk, R, E."""

    states: Tensor
    residual: Tensor
    dstates: Tensor
    E: Tensor


def precision(dtype: torch.dtype) -> tuple[Any, str]:
    """DOT and PREC: float32 operands are split into three tensor core passes, 16 bit operands are taken as
    they are."""
    prec = "ieee" if interpreted(prep) else "tf32x3"
    return getattr(tl, str(dot_dtype(dtype, prep)).removeprefix("torch.")), prec


class _Launches:
    """The launches of one call on the tensors of a row."""

    def __init__(self, x: Inputs, options: Options) -> None:
        self.x, self.options, self.runs, self.tiles = x, options, options.runs, options.tiles
        (self.tokens, self.heads, key_dim), (_, self.G, value_dim) = x.q.shape, x.v.shape
        # What lies between launches is stored as the products take it.
        self.dtype = dot_dtype(x.q.dtype, prep)
        dot, prec = precision(x.q.dtype)
        # Entries of the inverse lie in [-1, 1], where float16 has the mantissa of tf32.
        inverse = tl.float32 if self.dtype == torch.float32 else tl.float16
        # Constants of the compiled kernels; whatever else differs is an argument.
        bounded, group = options.lower_bound is not None, self.G // self.heads
        self.sizes = Sizes(key_dim, value_dim, options.tiles.chunk, group, bounded, dot, inverse, prec)
        rows = [stride for tensor in (x.q, x.k, x.v, x.f) for stride in tensor.stride()[:2]]
        self.strides = Strides._make([*rows, x.b.stride(0)])

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.x.q.device)

    def prepare(self) -> Prepared:
        keys, pairs = (self.tokens, self.G, self.sizes.K), (self.tokens, self.G, self.sizes.C)
        # The decay of a whole chunk multiplies the float32 state.
        carry = self.new(self.runs.num_chunks, self.G, self.sizes.K, dtype=torch.float32)
        new = self.new
        made = Prepared(new(*keys), new(*keys), new(*keys), carry, new(*pairs), new(*pairs))
        prep[(self.runs.num_chunks, self.G)](
            self.x,
            made,
            self.runs.chunks,
            self.options.scale,
            self.options.lower_bound or 0.0,
            self.strides,
            self.G,
            self.sizes.K,
            self.sizes.C.bit_length() - 1,
            S=self.sizes,
            **self.tiles.prep,
        )
        return made

    def edges(self, made: Prepared, v: Tensor, edge: Tensor | None, reverse: bool) -> Tensor:
        """Incoming state of every run [J, G, K, V] from those of the documents; reverse: gradients, with v
        standing for dO."""
        runs, move, join, sizes = self.runs, self.tiles.move, self.tiles.join, self.sizes
        # V columns for what a run adds, K for what it makes of the incoming state.
        wide = sizes.V + sizes.K
        moves = self.new(runs.num, self.G, sizes.K, wide, dtype=torch.float32)
        entry = self.new(runs.num, self.G, sizes.K, sizes.V, dtype=torch.float32)
        transition[(wide // move["BV"], runs.num, self.G)](
            made, v, self.x.b, moves, runs.stretches, self.strides, self.G, S=sizes, REVERSE=reverse, **move
        )
        combine[(sizes.V // join["BV"], runs.document_run_D1.numel() - 1, self.G)](
            moves, edge, entry, runs.document_run_D1, self.G, S=sizes, REVERSE=reverse, **join
        )
        return entry

    def forward(self, made: Prepared, entry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x, runs, sizes = self.x, self.runs, self.sizes
        o, final = self.new(*x.v.shape, dtype=x.v.dtype), None
        if self.options.output_final:
            final = self.new(runs.num, self.G, sizes.K, sizes.V, dtype=torch.float32)
        forward_scan[(sizes.V // self.tiles.scan["BV"], runs.num, self.G)](
            made,
            x.v,
            x.b,
            entry,
            o,
            final,
            runs.stretches,
            self.strides,
            self.G,
            S=sizes,
            **self.tiles.scan,
        )
        # Of a document's runs only the last one ends it.
        if final is not None and runs.split:
            final = final.index_select(0, runs.last_run_D)
        return o, final

    def scan_both(
        self, made: Prepared, entry: Tensor | None, do: Tensor, dexit: Tensor | None, want_dinitial: bool
    ) -> tuple[Scanned, Tensor | None]:
        runs, sizes = self.runs, self.sizes
        # In 16 bit: these are read by products alone.
        state = runs.num_chunks, self.G, sizes.K, sizes.V
        kept = Scanned(self.new(*state), self.new(*do.shape), self.new(*state), self.new(*do.shape))
        dinitial = None
        if want_dinitial:
            dinitial = self.new(runs.num, *state[1:], dtype=torch.float32)
        dual_scan[(2 * sizes.V // self.tiles.dual["BV"], runs.num, self.G)](
            made,
            self.x.v,
            self.x.b,
            entry,
            do,
            dexit,
            kept,
            dinitial,
            runs.stretches,
            self.strides,
            self.G,
            S=sizes,
            **self.tiles.dual,
        )
        # And only the first begins it.
        if dinitial is not None and runs.split:
            dinitial = dinitial.index_select(0, runs.first_run_D)
        return kept, dinitial

    def gradients(self, do: Tensor, kept: Scanned) -> Inputs:
        x, sizes, chunks = self.x, self.sizes, self.runs.num_chunks
        keys = self.tokens, self.G, sizes.K
        # Value heads that share a query/key head each leave their part; the parts are added in float32.
        key_dtype = x.q.dtype if sizes.GROUP == 1 else torch.float32
        into = Inputs(
            self.new(*keys, dtype=key_dtype),
            self.new(*keys, dtype=key_dtype),
            self.new(*x.v.shape, dtype=x.v.dtype),
            self.new(*x.f.shape, dtype=x.f.dtype),
            self.new(*x.b.shape, dtype=x.b.dtype),
            self.new(chunks, self.G, dtype=torch.float32),
            self.new(chunks, *keys[1:], dtype=torch.float32),
        )
        chunk_gradients[(chunks, self.G)](
            x,
            do,
            kept,
            into,
            self.runs.chunks,
            self.options.scale,
            self.options.lower_bound or 0.0,
            self.strides,
            self.G,
            sizes.K,
            sizes.V,
            sizes.C.bit_length() - 1,
            S=sizes,
            **self.tiles.grad,
        )
        if sizes.GROUP > 1:
            shape = self.tokens, self.heads, sizes.GROUP, sizes.K
            dq, dk = (part.view(shape).sum(2).to(x.q.dtype) for part in (into.q, into.k))
            into = into._replace(q=dq, k=dk)
        # One partial sum a chunk, added here in a fixed order: the same bits in every run.
        dA_log, ddt_bias = into.A_log.sum(0).to(x.A_log.dtype), into.dt_bias.sum(0).to(x.dt_bias.dtype)
        return into._replace(A_log=dA_log, dt_bias=ddt_bias)


class _TritonKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: Options, initial: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x, entry = Inputs(*tensors), initial
        call = _Launches(x, options)
        with on_device(x.q):
            made = call.prepare()
            if options.runs.split:
                entry = call.edges(made, x.v, initial, reverse=False)
            o, final = call.forward(made, entry)
        # Without segments the entries are the initial states, which are saved anyway.
        ctx.save_for_backward(initial, entry if options.runs.split else None, *x)
        ctx.options = options
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor | None) -> Any:  # type: ignore[override]
        initial, entry, *tensors = ctx.saved_tensors
        call = _Launches(Inputs(*tensors), ctx.options)
        # Gradients may come expanded; kernels read rows of them.
        do, dexit = do.contiguous(), None
        if dfinal is not None:
            dexit = dfinal.float().contiguous()
        with on_device(do):
            made = call.prepare()
            if ctx.options.runs.split:
                dexit = call.edges(made, do, dexit, reverse=True)
            # Saved only with segments.
            entry = initial if entry is None else entry
            kept, dinitial = call.scan_both(made, entry, do, dexit, initial is not None)
            del made  # as large as the inputs, and read for the last time
            gradients = call.gradients(do, kept)
        return None, dinitial, *gradients


def _check(x: Inputs, segments: Segments, initial: Tensor | None) -> None:
    """Everything the kernels take for granted; ValueError naming the argument."""
    sizes = check_kda("kda", x, segments.total)
    check_shapes("kda", sizes | {"N": segments.num}, initial_state_NGKV=initial)
    named = x._asdict()
    check_tensors("kda", x.q, FLOATS, "rows", **named)
    # One dtype for all operands of a product.
    check_tensors("kda", x.q, (x.q.dtype,), "rows", k=x.k, v=x.v)
    check_tensors("kda", x.q, (torch.float32,), "rows", initial_state=initial)
    check_no_nan("kda", f=x.f, A_log=x.A_log, dt_bias=x.dt_bias, b=x.b)


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
            when documents times heads would leave most of the device idle.

    Raises:
        ValueError: a wrong shape, dtype, device or stride, NaN, or an unknown chunk, naming the argument.
    """
    x = Inputs(q_THK, k_THK, v_TGV, f_TGK, b_TG, A_log_G, dt_bias_GK)
    _check(x, segments, initial_state_NGKV)
    check_lower_bound(lower_bound)
    if chunk is not None and chunk not in CHUNKS:
        raise ValueError(f"kda: chunk={chunk}; expected one of {CHUNKS}, or None for the default")
    key_dim, (_, heads, value_dim), device = q_THK.shape[2], v_TGV.shape, q_THK.device
    if segments.total == 0:
        states = v_TGV.new_zeros((0, heads, key_dim, value_dim), dtype=torch.float32)
        return v_TGV.clone(), states if output_final_state else None

    # Dims the kernels are compiled for, then tiles and runs for the whole call.
    padded_K, padded_V = padded_dim("q", key_dim), padded_dim("v", value_dim)
    more_K, more_V = padded_K - key_dim, padded_V - value_dim
    crowded = is_crowded(segments, heads, padded_V, device)
    hopper, wide = hardware(device).arch >= 90, q_THK.dtype == torch.float32
    tile = tiles(padded_K, padded_V, wide, crowded, hopper, chunk)
    if segment_chunks is None:
        segment_chunks = auto_segments(segments, heads, padded_V, tile, device)
    runs = plan_runs(segments, tile.chunk, segment_chunks, device)
    check_blocks("kda", "documents (or segments of them)", runs.num)

    initial = initial_state_NGKV
    if initial is not None:
        initial = _pad(initial, more_V, more_K).contiguous()
    o_TGV, final = _TritonKDA.apply(
        Options(lower_bound, key_dim**-0.5, runs, tile, output_final_state),
        initial,
        _pad(q_THK, more_K),
        _pad(k_THK, more_K),
        _pad(v_TGV, more_V),
        _pad(f_TGK, more_K),
        b_TG,
        A_log_G.contiguous(),
        _pad(dt_bias_GK, more_K).contiguous(),
    )
    if more_V:
        o_TGV = o_TGV[..., :value_dim]
    return o_TGV, None if final is None else final[..., :key_dim, :value_dim]
