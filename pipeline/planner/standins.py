"""Operations as a plan sees them: the shapes that go in and come out, what a kernel keeps for its backward
pass, and what it holds while it runs. Nothing is computed.

A step is rehearsed on tensors without storage (rehearsal.py). Most of the model runs there as it is. The
operations below cannot, because they ask for values (how many rows an expert gets), or would take thousands
of small steps; experts and labels are taken as balanced and complete. On a GPU Triton's KDA keeps its inputs
alone, on a CPU the C++ keeps states, too: `Target.gpu` says which is rehearsed.

Times are arithmetic at a share of what matrix products reach. The shares of Triton's kernels come from a
model of one SM that runs their machine code, not from a GPU; torch's are those of one CPU.

Legend: T tokens, H heads, K, V head dims, C tokens of a KDA chunk, D hidden, E experts, J experts a token, F
expert width, N = T J pairs, W vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from earlyfusion.kernels.attnres import two_phase
from earlyfusion.kernels.dispatch import REGISTRY, register
from earlyfusion.kernels.kda.recurrent import TIME
from earlyfusion.kernels.products import accumulate_dtype, compute_dtype
from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.parallel.experts import Exchange

OPS = (
    "kda",
    "short_conv",
    "attention",
    "max_logit",
    "attnres_phase1",
    "moe_experts",
    "linear_cross_entropy",
)
FP32 = 4  # bytes
LOGITS = 2048
"""Rows of logits that stand in memory at once on a GPU."""

SHARES = {
    True: {"kda": (0.06, 0.04), "attention": (0.5, 0.4), "moe": (0.45, 0.37), "loss": (0.47, 1.0)},
    False: {"kda": (0.4, 0.4), "attention": (0.6, 0.6), "moe": (0.8, 0.8), "loss": (0.8, 1.0)},
}
"""GPU or not -> operation -> share of the rate of products, forward and backward."""
MOVES = {True: {"conv": (0.5, 0.15), "mix": (0.4, 0.4)}, False: {"conv": (0.3, 0.2), "mix": (0.2, 0.2)}}
"""The same of operations that move memory: share of the rate of copies."""


@dataclass
class Target:
    """Whose kernels are rehearsed, and who counts their time."""

    gpu: bool = True
    clock: Any = None

    def spend(self, op: str, backward: bool, work: float) -> None:
        """work: FLOPs of an operation of SHARES, bytes of one of MOVES."""
        if self.clock is None:
            return
        if op in MOVES[self.gpu]:
            self.clock.add(0.0, work / MOVES[self.gpu][op][backward])
        elif work:
            rate = self.clock.machine.products * SHARES[self.gpu][op][backward]
            self.clock.add(work / rate, 0.0, work)


TARGET = Target()


@dataclass(frozen=True)
class Spec:
    """One operation. out: (shape, dtype) of every result; saved: indices of inputs that are kept, and
    results: whether the results are; keep, forward, backward: bytes beside them, kept, and while it runs;
    work: FLOPs or bytes (see Target.spend), forward and backward."""

    op: str
    work: tuple[float, float]
    out: Sequence[tuple[Sequence[int], torch.dtype]]
    saved: Sequence[int]
    results: bool = False
    keep: int = 0
    forward: int = 0
    backward: int = 0


class Standin(torch.autograd.Function):
    """Results, and in the backward pass gradients of every floating input, without values."""

    @staticmethod
    def forward(ctx: Any, spec: Spec, *inputs: Tensor) -> tuple[Tensor, ...]:
        like = inputs[0]
        TARGET.spend(spec.op, False, spec.work[0])
        held = [like.new_empty(size, dtype=torch.uint8) for size in (spec.keep, spec.forward) if size]
        out = tuple(like.new_empty(shape, dtype=dtype) for shape, dtype in spec.out)
        ctx.save_for_backward(*(inputs[i] for i in spec.saved), *(out if spec.results else ()))
        ctx.spec, ctx.kept = spec, held[:1] if spec.keep else []
        ctx.like = [(x.shape, x.dtype) if x.is_floating_point() else None for x in inputs]
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        TARGET.spend(ctx.spec.op, True, ctx.spec.work[1])
        _, held = ctx.saved_tensors, grad.new_empty(ctx.spec.backward, dtype=torch.uint8)
        wants = zip(ctx.like, ctx.needs_input_grad[1:])
        grads = [grad.new_empty(like[0], dtype=like[1]) if like and want else None for like, want in wants]
        ctx.kept = []
        del held
        return None, *grads


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    segments: Segments,
    *,
    initial_state_NGKV: Tensor | None = None,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """kernels/kda: Triton's keeps its inputs; C++'s a delta [H V] a token and a state of every 32nd too."""
    (tokens, heads, value), key = v.shape, q.shape[2]
    rows = -(-tokens // 64) * 64
    # Of Triton's form, the prepared operands in 16 bit.
    keep, forward, backward = 0, rows * heads * 2 * (4 * key), rows * heads * 2 * (6 * key + 2 * value)
    if not TARGET.gpu:
        states = sum(-(-length // TIME) for length in segments.lengths)
        keep, forward = heads * value * FP32 * (tokens + key * states), 0
        backward = tokens * heads * (3 * key + value) * FP32
    out: list[tuple[Sequence[int], torch.dtype]] = [(v.shape, v.dtype)]
    final = None
    inputs = (q, k, v, f, b, A_log, dt_bias)
    # Chunks of 64 tokens, full squares (docs/kernels.md).
    flops = 10.2 * tokens * heads * key * value, 27.2 * tokens * heads * key * value
    spec = Spec("kda", flops, out, range(len(inputs)), keep=keep, forward=forward, backward=backward)
    (o,) = Standin.apply(spec, *inputs)  # type: ignore[no-untyped-call]
    if output_final_state:
        # (Through the output, so that its gradient has a way back.)
        final = o.float().sum() + v.new_zeros((segments.num, heads, key, value), dtype=torch.float32)
    return o, final


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    segments: Segments,
    *,
    initial_taps_NCW1: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """kernels/kda/conv.py: the input is kept."""
    inputs = (x_TC, weight_CW, *(() if initial_taps_NCW1 is None else (initial_taps_NCW1,)))
    size = x_TC.numel() * x_TC.element_size()
    spec = Spec("conv", (2.0 * size, 3.0 * size), [(x_TC.shape, x_TC.dtype)], range(len(inputs)))
    (y,) = Standin.apply(spec, *inputs)  # type: ignore[no-untyped-call]
    return y, None


def attnres_phase1(sources: Sequence[Tensor], qw_SD: Tensor, eps: float) -> tuple[Any, Any, Any]:
    """kernels/attnres: finished sources for all sub-layers of a block; the sources are kept."""
    base, queries = sources[0], qw_SD.shape[0]
    size = base.numel() * base.element_size()
    work = (len(sources) + queries) * size, (2 * len(sources) + queries) * size
    out = [((queries, *base.shape), base.dtype), ((queries, len(base)), torch.float32)]
    spec = Spec("mix", work, out, range(len(sources) + 1))
    o_STD, lse_ST = Standin.apply(spec, qw_SD, *sources)  # type: ignore[no-untyped-call]
    return o_STD.unbind(), lse_ST.unbind(), tuple(sources)


def merge(o1_TD: Tensor, lse1_T: Tensor, partial_TD: Tensor, qw_D: Tensor, eps: float) -> Tensor:
    """kernels/attnres: a row of phase 1 with the block's sum; torch's form has float32 copies for a while."""
    size = partial_TD.numel() * partial_TD.element_size()
    held = 0 if TARGET.gpu else partial_TD.numel() * FP32
    out = [(partial_TD.shape, partial_TD.dtype)]
    work = (4 * size, 6 * size) if TARGET.gpu else (6 * size, 14 * size)
    spec = Spec("mix", work, out, range(4), forward=held, backward=3 * held)
    (h_TD,) = Standin.apply(spec, o1_TD, lse1_T, partial_TD, qw_D)  # type: ignore[no-untyped-call]
    return h_TD


def attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    """kernels/attention: q, k, v, the output and its log-sum-exps are kept."""
    heads = q.shape[:2]
    out = [((*heads, v.shape[2]), q.dtype), (heads, torch.float32)]
    pairs = sum(length * (length + 1) / 2 if causal else length * length for length in segments.lengths)
    forward = 2 * pairs * q.shape[1] * (q.shape[2] + v.shape[2])
    spec = Spec("attention", (forward, 2.5 * forward), out, (0, 1, 2), results=True)
    return Standin.apply(spec, q, k, v)  # type: ignore[no-untyped-call]


def max_logit(q: Tensor, k: Tensor, lse_TH: Tensor, *_: Any, **__: Any) -> Tensor:
    """kernels/attention: the usual way, without a second look."""
    return lse_TH.amax(dim=0).float()


def moe_experts(
    x_TD: Tensor, ids_TJ: Tensor, weights_TJ: Tensor, gate_up: Tensor, down: Tensor, situ: object = None
) -> Tensor:
    """kernels/moe: the input and the pre-activations [N, 2F] of balanced experts are kept."""
    pairs, hidden, width = ids_TJ.numel(), x_TD.shape[1], down.shape[2]
    dtype = compute_dtype(x_TD, gate_up, down)
    size, wide = dtype.itemsize, accumulate_dtype(dtype).itemsize
    # In torch's form rows are gathered; Triton's products, without SiTU, read them where they lie. Weights
    # are cast once.
    fused = TARGET.gpu and situ is None
    cast = (gate_up.numel() + down.numel()) * size if dtype != gate_up.dtype else 0
    gathered = 0 if fused else pairs * hidden * size
    forward = cast + gathered + pairs * (width * (size if fused else 2 * wide) + hidden * size)
    backward = cast + 2 * gathered + pairs * (3 * width * (size if fused else 2 * wide) + hidden * size)
    work = 6.0 * pairs * hidden * width
    spec = Spec(
        "moe",
        (work, 2 * work),
        [(x_TD.shape, dtype)],
        (0, 2),
        keep=pairs * 2 * width * size,
        forward=forward,
        backward=backward,
    )
    (y,) = Standin.apply(spec, x_TD, ids_TJ, weights_TJ, gate_up, down)  # type: ignore[no-untyped-call]
    return y


def linear_cross_entropy(
    h_TD: Tensor, weight_WD: Tensor, labels_T: Tensor, loss_weights_T: Tensor
) -> tuple[Tensor, Tensor]:
    """kernels/loss: both gradients are made in the forward pass, logits of some rows at a time."""
    dtype = compute_dtype(h_TD, weight_WD)
    wide = accumulate_dtype(dtype)
    rows = LOGITS if TARGET.gpu else min(len(h_TD), max(32, (1 << 20) // len(weight_WD)))
    cast = weight_WD.numel() * dtype.itemsize if dtype != weight_WD.dtype else 0
    logits = rows * len(weight_WD) * (wide.itemsize + dtype.itemsize)
    keep = h_TD.numel() * h_TD.element_size() + weight_WD.numel() * wide.itemsize
    out = [((), wide), ((len(h_TD),), wide)]
    work = 6.0 * h_TD.numel() * len(weight_WD)
    spec = Spec("loss", (work, 0.0), out, (), keep=keep, forward=cast + logits)
    loss, nll_T = Standin.apply(spec, h_TD, weight_WD)  # type: ignore[no-untyped-call]
    return loss, nll_T


def balanced(self: Exchange, ids_N: Tensor, own: int) -> tuple[list[int], list[int]]:
    """In place of `Exchange.counts`: as many rows to every rank as come from it."""
    share, rest = divmod(len(ids_N), self.ranks)
    leaving = [share + (rank < rest) for rank in range(self.ranks)]
    sizes_E = torch.empty(self.ranks, dtype=torch.int64)
    dist.all_to_all_single(torch.empty_like(sizes_E), sizes_E, group=self.group)
    return leaving, list(leaving)


@contextmanager
def shapes_alone(gpu: bool, clock: Any) -> Iterator[None]:
    """Inside, the operations above take the places of the real ones, and plans of packed rows, which want
    values, are made outside of the rehearsal."""
    before = {op: dict(REGISTRY[op]) for op in OPS}
    counts, cached = Exchange.counts, Segments.cached
    TARGET.gpu, TARGET.clock = gpu, clock

    def on_host(self: Segments, key: Any, build: Any) -> Any:
        with unset_fake_temporarily():
            return cached(self, key, build)

    mixing = two_phase.phase1, two_phase.merge
    for op in OPS:
        REGISTRY[op].clear()
        register(op, "naive", f"{__name__}:{op}")
    # (The block form calls both by their names in its module.)
    two_phase.phase1, two_phase.merge = attnres_phase1, merge
    Exchange.counts, Segments.cached = balanced, on_host  # type: ignore[method-assign]
    try:
        yield
    finally:
        for op in OPS:
            REGISTRY[op].clear()
            REGISTRY[op].update(before[op])
        two_phase.phase1, two_phase.merge = mixing
        Exchange.counts, Segments.cached = counts, cached  # type: ignore[method-assign]
