"""KDA cases of `earlyfusion bench kernels`: the shapes and the four gate regimes of every public benchmark,
and the ones those leave out.

Regimes: R1 bounded gate -5 sigmoid(e^A (f + bias)) (what public tables use), R2 a freshly initialised
unbounded layer, R3 checkpoint-like (A log-uniform to 200, heavy-tailed gate inputs, unbounded), R4 slow
decay, about 1e-3 nats a token.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.bench.case import Case, Setting, Side, case_of
from earlyfusion.pipeline.bench.timing import Work

# Kernels that are quick in one regime may overflow in another.
REGIMES = ("R1", "R2", "R3", "R4")
MIXED = (1300, 547, 2048, 963, 271, 3063)
# Text, captions and image documents in one row.
LENGTHS: dict[str, tuple[int, ...]] = {
    "mixed": MIXED,
    "multimodal": (4096, 1, 778, 290, 2048, 64, 1110, 3, 1500, 606, 5888),
    "check": (70, 1, 66),
}
SHAPES = """
B1 T8192 H96: 8192, 96 x 128
B2 T16384 H16: 16384 * 2, 16 x 128
B4 T2048 H16: 2048 * 4, 16 x 128
B4 T4096 H64: 4096 * 4, 64 x 128
B8 T2048 H32 D256: 2048 * 8, 32 x 256
B8 T1024 H8 D64: 1024 * 8, 8 x 64
T8192 H64: 8192, 64 x 128
mixed 6 H64: mixed, 64 x 128
8 x 1024 H64: 1024 * 8, 64 x 128
mixed 6 H96: mixed, 96 x 128
8 x 1024 H96: 1024 * 8, 96 x 128
B8 T4096 H32: 4096 * 8, 32 x 128
B1 T32768 H32: 32768, 32 x 128
multimodal H32: multimodal, 32 x 128
"""
"""Label, document lengths, heads x head dim."""
CPU_SHAPES = "T2048 H4 D32: 2048, 4 x 32\nT2048 H2 D128: 2048, 2 x 128"
# A full chunk and a rest twice, one token alone: what an interpreter finishes in seconds.
CHECK_SHAPES = "T70 + 1 + 66 H2 D128: check, 2 x 128"
# Per token, head and K V, chunk 64; backward with the forward again: 445 kFLOP.
FORWARD_FLOPS, BACKWARD_FLOPS = 166.6e3 / 128**2, 445e3 / 128**2


def gate(
    regime: str, tokens: int, heads: int, dim: int, setting: Setting
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """(f, A_log, dt_bias, lower bound) of a regime."""
    f = setting.randn(tokens, heads, dim, dtype=torch.float32)

    # The initialisation of the layer: time steps log-uniform between 0.001 and 0.1.
    dt = torch.exp(setting.rand(heads, dim) * math.log(100) + math.log(1e-3))
    bias, rate = dt + torch.log(-torch.expm1(-dt)), (1 + 15 * setting.rand(heads)).log()
    bound = None
    if regime == "R1":
        rate, bias, bound = rate * 0, bias * 0, -5.0
    elif regime == "R3":  # Student's t with two degrees of freedom: normal over the root of an exponential
        f = f / (-torch.log(setting.rand(tokens, heads, dim).clamp_min(1e-6))).sqrt()
        rate = setting.rand(heads) * math.log(200)
    elif regime == "R4":
        f, rate, bias = f * 0.1, rate * 0, bias * 0 - 6.9
    return f.to(setting.dtype), rate, bias, bound


def fla_kda(segments: Segments, device: torch.device, bound: float | None, safe: bool) -> Side:
    """fla's kernel as its users call it in a training step: documents of one length as a real batch [B, T],
    others packed behind one `cu_seqlens` tensor, for which fla keeps the index it has once built (ours keeps
    its plan alike)."""
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    from fla.ops.kda import chunk_kda

    # Equal lengths need no index: a batch is what fla is quickest with.
    batch, cu = segments.num, None
    if len(set(segments.lengths)) > 1:
        batch, cu = 1, segments.cu_seqlens(device).long()

    def run(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        o, _ = chunk_kda(
            *(x.unflatten(0, (batch, -1)) for x in (q, k, v, f, b)),
            A_log=A_log,
            dt_bias=dt_bias.flatten(),
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=safe,
            lower_bound=bound,
            cu_seqlens=cu,
        )
        return o.flatten(0, 1)

    return run


def transformers_kda(bound: float | None) -> Side:
    """transformers' pure-torch chunk form, with the gate and beta as its layer computes them."""
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    chunk: Any = inspect.unwrap(modeling.chunk_kimi_delta_attention)

    def run(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        rate = A_log.float().exp()[:, None]
        if bound is None:
            g = -rate * F.softplus(f.float() + dt_bias)
        else:
            g = bound * torch.sigmoid(rate * (f.float() + dt_bias))
        beta = b.float().sigmoid()
        rows = (x[None] for x in (q, k, v))
        return chunk(*rows, g=g[None], beta=beta[None], use_qk_l2norm_in_kernel=True)[0][0]

    return run


def kda_case(
    shape: tuple[str, Sequence[int], int, int], regime: str, setting: Setting, **options: Any
) -> Case:
    """One shape (label, document lengths, heads, head dim) in one regime."""
    label, lengths, heads, dim = shape
    segments = Segments.from_lengths(lengths)
    tokens = segments.total
    f, A_log, dt_bias, bound = gate(regime, tokens, heads, dim, setting)
    q, k, v = (setting.randn(tokens, heads, dim) for _ in range(3))

    # Least work: every tensor read or written once, and the products of one chunk.
    size, work = q.element_size(), tokens * heads
    case = case_of(
        "kda",
        f"{label} {regime}",
        setting,
        [x.requires_grad_() for x in (q, k, v, f, setting.randn(tokens, heads), A_log, dt_bias)],
        segments,
        lower_bound=bound,
        forward=Work(work * (size * 5 * dim + size), work * FORWARD_FLOPS * dim * dim),
        backward=Work(work * (size * 9 * dim + 2 * size), work * BACKWARD_FLOPS * dim * dim),
        wide=2e-4,
        **options,
    )

    # Peers: those of a GPU and those of a CPU.
    if setting.gpu:
        # Looked up, not imported: an import may fail without a GPU.
        if "fla" in setting.against and find_spec("fla") is None:
            case.skipped["fla"] = "not installed: pip install fla-core==0.6.0"
        elif "fla" in setting.against:
            case.sides["fla"] = fla_kda(segments, setting.device, bound, False)
            if bound is not None:  # fla's safe gate asks for a bound
                case.sides["fla safe"] = fla_kda(segments, setting.device, bound, True)
        return case
    if "transformers" in setting.against and segments.num == 1:
        case.sides["transformers"] = transformers_kda(bound)
    if "recurrence" in setting.against:
        case.sides["recurrence"] = case.law
    return case


def conv(setting: Setting) -> Iterator[Case]:
    """The short convolution."""
    lengths, channels = setting.pick(((70, 1, 33), 96), (MIXED, 12288), ((2048,), 384))
    segments = Segments.from_lengths(lengths)
    x, taps = setting.leaf(segments.total, channels), setting.leaf(channels, 4, dtype=torch.float32)
    label = f"short convolution T {segments.total} C {channels}"
    forward, backward = Work(2.0 * x.nbytes, 16.0 * x.numel()), Work(3.0 * x.nbytes, 32.0 * x.numel())
    yield case_of("short_conv", label, setting, [x, taps], segments, forward=forward, backward=backward)


def kda(setting: Setting) -> Iterator[Case]:
    """The layer in all shapes and regimes, a decode step of a batch, the short convolution."""
    for line in setting.pick(CHECK_SHAPES, SHAPES, CPU_SHAPES).strip().splitlines():
        label, documents, heads, dim = re.split(": |, | x (?=[0-9]+$)", line)
        length, _, count = documents.partition(" * ")
        lengths = LENGTHS.get(length) or (int(length),) * int(count or 1)
        for regime in setting.pick(REGIMES, REGIMES, ("R2",)):
            yield kda_case((label, lengths, int(heads), int(dim)), regime, setting)

    # The floor of a decode step is reading and writing the states, which stay float32 in every backend.
    batch, heads, dim = setting.pick((5, 3, 128), (64, 32, 128), (8, 4, 32))
    f, A_log, dt_bias, bound = gate("R1", batch, heads, dim, setting)
    q, k, v = (setting.randn(batch, heads, dim) for _ in range(3))
    state = setting.randn(batch, heads, dim, dim, dtype=torch.float32)
    yield case_of(
        "kda_step",
        f"decode step B {batch} H {heads} D {dim}",
        setting,
        [q, k, v, f, setting.randn(batch, heads), A_log, dt_bias, state],
        lower_bound=bound,
        forward=Work(8.0 * state.numel() + 5.0 * q.nbytes, 6.0 * state.numel()),
        wide=2e-4,
    )
    yield from conv(setting)
