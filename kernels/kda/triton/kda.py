"""Kimi Delta Attention in Triton: three launches forward, four backward, for any gate.

Forward: preparation of tokens and scores of pairs (kernels/kda/triton/prep.py), then scan and output in
residual form (kernels/kda/triton/scan.py). Backward: the preparation again, both scans in one launch, then
the gradients of chunks in two (kernels/kda/triton/gradients.py). Saved in between: inputs and output, P and T
of the pairs, and with segments their first states. Where documents times heads are too few to fill the
device, each direction gets two more launches that make segments of a document independent.

Definition: kernels/kda/naive.py. Legend: T tokens, D documents, J runs, N chunks, C tokens per chunk, H
query/key heads, G value heads, K key dim, V value dim.

Host plans of the Triton KDA kernels: the chunks and runs of a packed row, and the tiles a shape is
launched with.

A *run* is a stretch of chunks scanned one after the other: a whole document, or a segment of it when
documents times heads are too few to fill the device. Tiles come from a fixed table, so that no call is ever
autotuned.

Legend: T tokens, C tokens per chunk, N chunks, J runs, D documents, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from earlyfusion.kernels.kda.triton.gradients import chunk_gradients, pair_gradients
from earlyfusion.kernels.kda.triton.prep import BLOCK, pair_scores, prep
from earlyfusion.kernels.kda.triton.scan import combine, dual_scan, forward_scan, transition
from earlyfusion.kernels.launch import check_blocks, constant, dot_dtype, hardware, interpreted, on_device
from earlyfusion.kernels.segments import FLOATS, Inputs, Segments, check_kda, check_shapes, check_tensors

FP32 = torch.float32


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
    LEVELS: int  # C = 2^LEVELS
    GROUP: int  # value heads per query/key head
    BOUNDED: bool
    BLOCKS: bool  # pairs inside a block of 16 tokens meet in one product, and decays are clamped for it
    DOT: Any  # dtype of the operands of products
    INV: Any  # and of those inside the triangular inverse
    PREC: Any  # how operands in float32 are multiplied


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


class Decays(NamedTuple):
    """Of every token: G, in float32, and 1 / |q|, 1 / |k|."""

    sums: Tensor
    norm_q: Tensor
    norm_k: Tensor


class Scores(NamedTuple):
    """Of the pairs of every chunk: what queries read, and the inverse of what keys do."""

    P: Tensor
    T: Tensor


class Scanned(NamedTuple):
    """What both scans of the backward write: S before and dS' after every chunk, R, E."""

    states: Tensor
    dstates: Tensor
    residual: Tensor
    E: Tensor


class Pairs(NamedTuple):
    """What the gradients of all key channels need of the values: of every pair of a chunk, and per token."""

    dP: Tensor
    dA: Tensor
    blocks: Tensor | None  # [T, G, 4, BLOCK]: dP, dP^T, dA, dA^T inside a block
    same: Tensor
    along_q: Tensor
    along_k: Tensor


def precision(dtype: torch.dtype) -> tuple[Any, Any]:
    """DOT and PREC: float32 operands are split into three tensor core passes, 16 bit operands are taken as
    they are."""
    prec = constant("ieee" if interpreted(prep) else "tf32x3", prep)
    return getattr(tl, str(dot_dtype(dtype, prep)).removeprefix("torch.")), prec


class _Launches:
    """The launches of one call on the tensors of a row."""

    def __init__(self, x: Inputs, options: Options) -> None:
        self.x, self.runs, self.tiles, (_, self.G, value_dim) = x, options.runs, options.tiles, x.v.shape
        # What lies between launches is stored as the products take it.
        self.dtype = dot_dtype(x.q.dtype, prep)
        dot, prec = precision(x.q.dtype)
        # Entries of the inverse lie in [-1, 1], where float16 has the mantissa of tf32.
        inverse = tl.float32 if self.dtype == FP32 else tl.float16

        # Constants of the compiled kernels; whatever else differs is an argument.
        (_, heads, key_dim), chunk = x.q.shape, options.tiles.chunk
        # Powers of two as far apart as a block's need bfloat16.
        blocks, bound = self.dtype == torch.bfloat16, options.lower_bound
        dims = key_dim, value_dim, chunk, chunk.bit_length() - 1, self.G // heads
        self.sizes = Sizes(*dims, bound is not None, blocks, dot, inverse, prec)
        self.gate = options.scale, bound or 0.0
        rows = [stride for tensor in (x.q, x.k, x.v, x.f) for stride in tensor.stride()[:2]]
        self.strides = Strides._make([*rows, x.b.stride(0)])

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.x.q.device)

    def states(self, count: int, dtype: torch.dtype | None = FP32) -> Tensor:
        return self.new(count, self.G, self.sizes.K, self.sizes.V, dtype=dtype)

    def per_chunk(
        self, kernel: Any, *tensors: Any, bounds: tuple[int, ...], slabs: int = 1, **options: int
    ) -> None:
        """A launch with one program for every chunk, slab and value head; bounds: of its loops."""
        rest = *self.gate, self.strides, self.G, *bounds
        grid = self.runs.num_chunks * slabs, self.G
        kernel[grid](self.x, *tensors, self.runs.chunks, *rest, S=self.sizes, **options)

    def per_run(self, kernel: Any, columns: int, *tensors: Any, options: dict[str, Any]) -> None:
        """A launch with one program for every run, value head and block of columns."""
        grid = columns // options["BV"], self.runs.num, self.G
        kernel[grid](*tensors, self.runs.stretches, self.strides, self.G, S=self.sizes, **options)

    def prepare(self) -> tuple[Prepared, Decays]:
        tokens, K = self.x.q.shape[0], self.sizes.K
        made = [self.new(tokens, self.G, K) for _ in range(3)]
        # The decay of a whole chunk multiplies the float32 state.
        prepared = Prepared._make([*made, self.new(self.runs.num_chunks, self.G, K, dtype=FP32)])
        norms = [self.new(tokens, self.G, dtype=FP32) for _ in range(2)]
        decays = Decays(self.new(tokens, self.G, K, dtype=FP32), *norms)
        self.per_chunk(prep, prepared, decays, bounds=(K,), **self.tiles.prep)
        return prepared, decays

    def scores(self, decays: Decays) -> Scores:
        made = Scores._make([self.new(self.x.q.shape[0], self.G, self.sizes.C) for _ in range(2)])
        bounds = self.sizes.K, self.sizes.LEVELS
        self.per_chunk(pair_scores, decays, made, bounds=bounds, **self.tiles.prep)
        return made

    def edges(self, made: Prepared, scores: Scores, v: Tensor, edge: Tensor | None, reverse: bool) -> Tensor:
        """Incoming state of every run [J, G, K, V] from those of the documents; reverse: gradients, with v
        standing for dO. Without segments they are the documents' own."""
        runs, sizes, join = self.runs, self.sizes, self.tiles.join
        # V columns for what a run adds, K for what it makes of the incoming state.
        wide = sizes.V + sizes.K
        moves, entry = self.new(runs.num, self.G, sizes.K, wide, dtype=FP32), self.states(runs.num)
        options = {**self.tiles.move, "REVERSE": reverse}
        self.per_run(transition, wide, made, scores, v, self.x.b, moves, options=options)
        index = runs.document_run_D1
        combine[(sizes.V // join["BV"], index.numel() - 1, self.G)](
            moves, edge, entry, index, self.G, S=sizes, REVERSE=reverse, **join
        )
        return entry

    def of_documents(self, states: Tensor | None, last: bool) -> Tensor | None:
        """States of the last, or the first, run of every document."""
        if states is None or not self.runs.split:
            return states
        index = self.runs.document_run_D1.long()
        return states.index_select(0, index[1:] - 1 if last else index[:-1])

    def forward(
        self, made: Prepared, scores: Scores, entry: Tensor | None, output_final: bool
    ) -> tuple[Tensor, Tensor | None]:
        x, o = self.x, torch.empty_like(self.x.v, memory_format=torch.contiguous_format)
        final = self.states(self.runs.num) if output_final else None
        options = self.tiles.scan if output_final or entry is not None else self.tiles.alone
        self.per_run(forward_scan, self.sizes.V, made, scores, x.v, x.b, entry, o, final, options=options)
        return o, self.of_documents(final, last=True)

    def scan_both(
        self,
        made: Prepared,
        scores: Scores,
        entry: Tensor | None,
        do: Tensor,
        dexit: Tensor | None,
        want_dinitial: bool,
    ) -> tuple[Scanned, Tensor | None]:
        # In 16 bit: these are read by products alone.
        states = [self.states(self.runs.num_chunks, dtype=None) for _ in range(2)]
        kept = Scanned._make([*states, self.new(*do.shape), self.new(*do.shape)])
        dinitial = self.states(self.runs.num) if want_dinitial else None
        tensors = made, scores, self.x.v, self.x.b, entry, do, dexit, kept, dinitial
        self.per_run(dual_scan, 2 * self.sizes.V, *tensors, options=self.tiles.dual)
        return kept, self.of_documents(dinitial, last=False)

    def gradients(self, decays: Decays, o: Tensor, do: Tensor, kept: Scanned) -> Inputs:
        x, sizes, tokens, chunks = self.x, self.sizes, self.x.q.shape[0], self.runs.num_chunks
        slabs = sizes.K // self.tiles.grad["BK"]

        # Value heads that share a query/key head each leave their part; the parts are added in float32.
        key_dtype = x.q.dtype if sizes.GROUP == 1 else FP32
        keys = [self.new(tokens, self.G, sizes.K, dtype=key_dtype) for _ in range(2)]
        rows = [self.new(*part.shape, dtype=part.dtype) for part in (x.v, x.f, x.b)]
        shares = self.new(chunks * slabs, self.G, dtype=FP32), self.new(chunks, self.G, sizes.K, dtype=FP32)
        into = Inputs._make([*keys, *rows, *shares])

        # First what needs the values, then slabs of key channels, each a program.
        square = [self.new(tokens, self.G, sizes.C) for _ in range(2)]
        along = [self.new(tokens, self.G, dtype=FP32) for _ in range(3)]
        own = self.new(tokens, self.G, 4, BLOCK.value) if sizes.BLOCKS else None
        pairs = Pairs._make([*square, own, *along])
        values = o, do, kept.residual, kept.E
        self.per_chunk(pair_gradients, *values, pairs, into.v, into.b, bounds=(sizes.V,), **self.tiles.pair)
        given, bounds = (decays, do, kept, pairs, into), (sizes.V, sizes.LEVELS)
        self.per_chunk(chunk_gradients, *given, bounds=bounds, slabs=slabs, **self.tiles.grad)

        if sizes.GROUP > 1:
            keys = [part.unflatten(1, (-1, sizes.GROUP)).sum(2).to(x.q.dtype) for part in keys]
        # One partial sum a program, added here in a fixed order: the same bits in every run.
        return Inputs(*keys, *rows, *(share.sum(0).to(x.A_log.dtype) for share in shares))


class _TritonKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: Options, initial: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x, split, entry = Inputs(*tensors), options.runs.split, initial
        call = _Launches(x, options)
        with on_device(x.q):
            made, decays = call.prepare()
            scores = call.scores(decays)
            if split:
                entry = call.edges(made, scores, x.v, initial, reverse=False)
            o, final = call.forward(made, scores, entry, options.output_final)
        # Without segments the entries are the initial states, which are saved anyway.
        ctx.save_for_backward(initial, entry if split else None, o, *scores, *x)
        ctx.options = options
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor | None) -> Any:  # type: ignore[override]
        initial, entry, o, P, T, *tensors = ctx.saved_tensors
        scores = Scores(P, T)
        call = _Launches(Inputs(*tensors), ctx.options)
        # Gradients may come expanded; kernels read rows of them.
        do, dexit = do.contiguous(), None
        if dfinal is not None:
            dexit = dfinal.float().contiguous()
        with on_device(do):
            made, decays = call.prepare()
            if ctx.options.runs.split:
                dexit = call.edges(made, scores, do, dexit, reverse=True)
            # Saved only with segments.
            entry = initial if entry is None else entry
            kept, dinitial = call.scan_both(made, scores, entry, do, dexit, initial is not None)
            del made  # as large as the inputs, and read for the last time
            gradients = call.gradients(decays, o, do, kept)
        return None, dinitial, *gradients


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
    those other than 32, 64, 128, 256 are padded with zeros.

    Args:
        chunk: 16, 32 or 64 tokens; by default from a table.
        segment_chunks: cut documents into segments of that many chunks, scanned in parallel; 0 never, None
            when documents times heads would leave most of the device idle.

    Raises:
        ValueError: a wrong shape, dtype, device or stride, or an unknown chunk, naming the argument.
    """
    x, initial = Inputs(q_THK, k_THK, v_TGV, f_TGK, b_TG, A_log_G, dt_bias_GK), initial_state_NGKV
    sizes = check_kda("kda", x, segments.total, lower_bound) | {"N": segments.num}
    check_shapes("kda", sizes, initial_state_NGKV=initial)
    check_tensors("kda", x.q, FLOATS, "rows", **x._asdict())
    # One dtype for all operands of a product.
    check_tensors("kda", x.q, (x.q.dtype,), "rows", k=x.k, v=x.v)
    check_tensors("kda", x.q, (FP32,), "rows", initial_state=initial)
    if chunk is not None and chunk not in CHUNKS:
        raise ValueError(f"kda: chunk={chunk}; expected one of {CHUNKS}, or None for the default")
    heads, key_dim, value_dim, device = sizes["G"], sizes["K"], sizes["V"], q_THK.device
    if segments.total == 0:
        states = v_TGV.new_zeros((0, heads, key_dim, value_dim), dtype=FP32)
        return v_TGV.clone(), states if output_final_state else None

    # Dims the kernels are compiled for, then tiles and runs for the whole call.
    padded_K, padded_V = padded_dim("q", key_dim), padded_dim("v", value_dim)
    more_K, more_V, about = padded_K - key_dim, padded_V - value_dim, hardware(device)
    # Would 64 value columns per program still give most multiprocessors one?
    crowded = 4 * segments.num * heads * max(padded_V // 64, 1) >= 3 * about.multiprocessors
    tile = tiles(padded_K, padded_V, q_THK.dtype == FP32, crowded, about.arch >= 90, chunk)
    if segment_chunks is None:
        segment_chunks = auto_segments(segments, heads, padded_V, tile, device)
    runs = plan_runs(segments, tile.chunk, segment_chunks, device)
    check_blocks("kda", "documents (or segments of them)", runs.num)

    if initial is not None:
        initial = _pad(initial, more_V, more_K).contiguous()
    o_TGV, final = _TritonKDA.apply(
        Options(lower_bound, key_dim**-0.5, runs, tile, output_final_state),
        initial,
        *(_pad(part, more_K) for part in (q_THK, k_THK)),
        _pad(v_TGV, more_V),
        _pad(f_TGK, more_K),
        b_TG,
        A_log_G.contiguous(),
        _pad(dt_bias_GK, more_K).contiguous(),
    )
    if more_V:
        o_TGV = o_TGV[..., :value_dim]
    return o_TGV, None if final is None else final[..., :key_dim, :value_dim]


# ---- chunks, runs and tiles ----

# Few dims, so that few kernels are compiled; a padded channel costs its share of the products.
DIMS = (32, 64, 128, 256)  # key and value dims the kernels are compiled for; others are padded with zeros
CHUNKS = (16, 32, 64)
MIN_SEGMENT = 8  # chunks; shorter segments would spend more on their transition than they gain


# Named tuples travel into the kernels as they are.
class Chunks(NamedTuple):
    """First token of every chunk and how many it has, 1..C."""

    start: Tensor
    length: Tensor


class Stretches(NamedTuple):
    """First and last + 1 token of every run, and its first chunk."""

    start: Tensor
    end: Tensor
    first_chunk: Tensor


@dataclass(frozen=True)
class Runs:
    """Index tensors (int32) of one packed row, each chunk inside one document."""

    chunks: Chunks
    stretches: Stretches
    document_run_D1: Tensor  # first run of every document, then J
    num_chunks: int
    num: int
    split: bool  # does any document have more than one run?


def plan_runs(segments: Segments, chunk: int, segment_chunks: int, device: torch.device) -> Runs:
    """Runs of at most ``segment_chunks`` chunks (0: one run per document); built once per row and kept."""

    def build() -> Runs:
        chunks: list[tuple[int, int]] = []
        runs: list[tuple[int, int, int]] = []
        document_run = [0]
        for start, length in zip(segments.offsets, segments.lengths):
            end = start + length
            # Without segments a run is the whole document.
            step = chunk * (segment_chunks or -(-length // chunk))
            for first in range(start, end, step):
                runs.append((first, min(first + step, end), len(chunks) + (first - start) // chunk))
            document_run.append(len(runs))
            # The last chunk of a document may be short; none reaches into the next.
            chunks += [(first, min(chunk, end - first)) for first in range(start, end, chunk)]

        # One copy to the device for each table, not one for each column.
        tables = (torch.tensor(rows, dtype=torch.int32) for rows in (chunks, runs, document_run))
        by_chunk, by_run, index = (table.transpose(0, -1).contiguous().to(device) for table in tables)
        split = len(runs) > segments.num
        return Runs(Chunks(*by_chunk), Stretches(*by_run), index, len(chunks), len(runs), split)

    return segments.cached(("kda.triton.runs", chunk, segment_chunks, str(device)), build)


@dataclass(frozen=True)
class Tiles:
    """Constants of one launch each: slab widths, warps and pipeline stages."""

    chunk: int
    prep: dict[str, int]  # BK, num_warps, num_stages; also of the scores of pairs
    scan: dict[str, int]  # BV, ...
    alone: dict[str, int]  # of a scan with no states before and after it, which takes fewer registers
    dual: dict[str, int]
    move: dict[str, int]  # transition
    join: dict[str, int]  # combine: BV, BK, ...
    pair: dict[str, int]  # BV, ...
    grad: dict[str, int]  # BK, BV, ...


def _launch(warps: int, stages: int = 1, **blocks: int) -> dict[str, int]:
    return dict(blocks, num_warps=warps, num_stages=stages)


def tiles(key_dim: int, value_dim: int, wide: bool, crowded: bool, hopper: bool, chunk: int | None) -> Tiles:
    """The tile table; tests/kernels/test_aot.py holds its default entries to no spills.

    Args:
        wide: products of float32 operands: three tensor core passes, each operand held twice. Meant for
            checking; K of 128 and more spills a few registers.
        crowded: enough documents times heads to fill the device with wide value blocks, which read less.
        hopper: sm_90 or later (a warp group's products read both operands from shared memory).
    """
    # float32 is there for checking: small tiles that fit, not fast ones.
    if wide:
        eight, prep = _launch(8, BV=16), _launch(4, BK=32)
        join, grad = _launch(4, BV=16, BK=16), _launch(8, BK=16, BV=16)
        return Tiles(chunk or 16, prep, eight, eight, eight, eight, join, eight, grad)
    # Value columns of a program: more of them share what is read of the keys, and need registers.
    columns = min(value_dim, 32)
    pair = _launch(4, BV=columns)
    # Without warp-group products operands live in registers: smaller chunks.
    if key_dim == 256 or not hopper:
        prep = _launch(2 if chunk == 16 else 4, BK=32)  # tiles of 16 x 32: four warps spill with Triton 3.6
        scan, dual = _launch(8, BV=16 if key_dim == 256 else columns), _launch(8, BV=columns)
        join, grad = _launch(8, BV=32, BK=32), _launch(8, BK=32, BV=columns)
        return Tiles(chunk or 32, prep, scan, scan, dual, _launch(8, BV=16), join, pair, grad)
    # Wide blocks read the prepared keys half as often, if enough programs are left.
    scan = alone = _launch(4, 3, BV=columns)
    if crowded and value_dim >= 64:
        scan, alone = _launch(8, 2, BV=64), _launch(4 if value_dim <= 128 else 8, 2, BV=64)
    join = _launch(4, BV=32, BK=32)
    grad = _launch(4 if chunk in (None, 64) else 8, BK=32, BV=min(value_dim, 64))
    return Tiles(chunk or 64, _launch(4, BK=32), scan, alone, scan, _launch(4, BV=16), join, pair, grad)


def auto_segments(segments: Segments, heads: int, value_dim: int, tile: Tiles, device: torch.device) -> int:
    """Chunks per segment that fill the device, 0 where documents times heads already do (and always off
    CUDA)."""
    # What runs at the same time without segments.
    programs = segments.num * heads * max(value_dim // tile.scan["BV"], 1)
    chunks = -(-segments.max_length // tile.chunk)
    wanted = hardware(device).multiprocessors // programs
    # The transitions cost the scan's work (K + V) / V times over at
    # half the rate: splitting pays from about 4 ways on.
    if wanted < 4 or chunks < 4 * MIN_SEGMENT:
        return 0
    return max(-(-chunks // wanted), MIN_SEGMENT)


def padded_dim(name: str, size: int) -> int:
    """The smallest compiled dim that holds ``size``.

    Raises:
        ValueError: it is larger than 256.
    """
    for dim in DIMS:
        if size <= dim:
            return dim
    raise ValueError(
        f"kda: {name} is {size} wide; the Triton kernels hold at most {DIMS[-1]} (EF_KERNELS=torch has no"
        " limit)"
    )
