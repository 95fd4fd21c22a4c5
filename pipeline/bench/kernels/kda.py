"""KDA cases: the shapes and the four gate regimes of every public benchmark, and the ones those leave out.

Regimes: R1 bounded gate -5 sigmoid(e^A (f + bias)) (what public tables use), R2 a freshly initialised
unbounded layer, R3 checkpoint-like (A log-uniform to 200, heavy-tailed gate inputs, unbounded), R4 slow
decay, about 1e-3 nats a token.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.dispatch import REGISTRY, load
from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.bench.kernels.case import Case, Setting, Side, leaf, ours
from earlyfusion.pipeline.bench.timing import Work

REGIMES = ("R1", "R2", "R3", "R4")
MIXED = (1300, 547, 2048, 963, 271, 3063)
MULTIMODAL = (
    4096,
    1,
    778,
    290,
    2048,
    64,
    1110,
    3,
    1500,
    606,
    5888,
)  # text, captions and image documents in one row
# label, document lengths, heads, head dim
SHAPES: tuple[tuple[str, tuple[int, ...], int, int], ...] = (
    ("B1 T8192 H96", (8192,), 96, 128),
    ("B2 T16384 H16", (16384,) * 2, 16, 128),
    ("B4 T2048 H16", (2048,) * 4, 16, 128),
    ("B4 T4096 H64", (4096,) * 4, 64, 128),
    ("B8 T2048 H32 D256", (2048,) * 8, 32, 256),
    ("B8 T1024 H8 D64", (1024,) * 8, 8, 64),
    ("T8192 H64", (8192,), 64, 128),
    ("mixed 6 H64", MIXED, 64, 128),
    ("8 x 1024 H64", (1024,) * 8, 64, 128),
    ("mixed 6 H96", MIXED, 96, 128),
    ("8 x 1024 H96", (1024,) * 8, 96, 128),
    ("B8 T4096 H32", (4096,) * 8, 32, 128),
    ("B1 T32768 H32", (32768,), 32, 128),
    ("multimodal H32", MULTIMODAL, 32, 128),
)
CPU_SHAPES = (("T2048 H4 D32", (2048,), 4, 32), ("T2048 H2 D128", (2048,), 2, 128))
CHECK_SHAPE = ("T300 + 1 + 211 H4 D128", (300, 1, 211), 4, 128)
FORWARD_FLOPS = (
    166.6e3 / 128**2
)  # per token, head and K V, chunk 64; backward with the forward again: 445 kFLOP
BACKWARD_FLOPS = 445e3 / 128**2


def gate(
    regime: str, tokens: int, heads: int, dim: int, setting: Setting
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """(f, A_log, dt_bias, lower bound) of a regime."""
    uniform = lambda *shape: torch.rand(*shape, generator=setting.generator, device=setting.device)
    f = setting.randn(tokens, heads, dim, dtype=torch.float32)
    dt = torch.exp(uniform(heads, dim) * math.log(100) + math.log(1e-3))
    bias, rate = dt + torch.log(-torch.expm1(-dt)), (1 + 15 * uniform(heads)).log()
    if regime == "R1":
        return f.to(setting.dtype), torch.zeros(heads, device=setting.device), bias * 0, -5.0
    if regime == "R2":
        return f.to(setting.dtype), rate, bias, None
    if regime == "R3":  # Student's t with two degrees of freedom: normal over the root of an exponential
        tail = f / (-torch.log(uniform(tokens, heads, dim).clamp_min(1e-6))).sqrt()
        return tail.to(setting.dtype), uniform(heads) * math.log(200), bias, None
    return (f * 0.1).to(setting.dtype), rate * 0, bias * 0 - 6.9, None


def _fla(
    segments: Segments,
    device: torch.device,
    lower_bound: float | None,
    safe: bool,
    state_v_first: bool = False,
) -> Side:
    """fla's kernel as its users call it in a training step: documents of one length as a real batch [B, T],
    others packed behind one `cu_seqlens` tensor, for which fla keeps the index it has once built (ours keeps
    its plan alike)."""
    import os

    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    from fla.ops.kda import chunk_kda

    batch = segments.num if len(set(segments.lengths)) == 1 else 1
    cu = segments.cu_seqlens(device).long() if batch != segments.num else None

    def run(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        packed = [x.unflatten(0, (batch, -1)) for x in (q, k, v, f, b)]
        o, _ = chunk_kda(
            *packed,
            A_log=A_log,
            dt_bias=dt_bias.flatten(),
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=safe,
            lower_bound=lower_bound,
            cu_seqlens=cu,
            state_v_first=state_v_first,
        )
        return o.flatten(0, 1)

    return run


def _transformers(lower_bound: float | None) -> Side:
    """transformers' pure-torch chunk form, with the gate and beta as its layer computes them."""
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    chunk: Any = inspect.unwrap(modeling.chunk_kimi_delta_attention)

    def run(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        rate = A_log.float().exp()[:, None]
        if lower_bound is None:
            g = -rate * F.softplus(f.float() + dt_bias)
        else:
            g = lower_bound * torch.sigmoid(rate * (f.float() + dt_bias))
        o, _ = chunk(
            q[None], k[None], v[None], g=g[None], beta=b.float().sigmoid()[None], use_qk_l2norm_in_kernel=True
        )
        return o[0]

    return run


def case(label: str, lengths: Sequence[int], heads: int, dim: int, regime: str, setting: Setting) -> Case:
    """One shape in one regime."""
    segments = Segments.from_lengths(lengths)
    tokens = segments.total
    f, A_log, dt_bias, bound = gate(regime, tokens, heads, dim, setting)
    q, k, v = (setting.randn(tokens, heads, dim) for _ in range(3))
    leaves = [leaf(x) for x in (q, k, v, f, setting.randn(tokens, heads), A_log, dt_bias)]
    first = lambda op: lambda *x: op(*x, segments, lower_bound=bound)[0]
    sides = {name: first(op) for name, op in ours("kda", setting).items()}
    law = load(REGISTRY["kda"]["naive"])
    skipped = {}
    if setting.gpu and "fla" in setting.against:
        if find_spec("fla") is None:
            skipped["fla"] = "not installed: pip install fla-core==0.6.0"
        else:
            fla = partial(_fla, segments, setting.device, bound)
            sides |= {"fla": fla(False), "fla v-first": fla(False, True)}
            if bound is not None:  # fla's safe gate asks for a bound
                sides["fla safe"] = fla(True)
    if not setting.gpu and "transformers" in setting.against and segments.num == 1:
        sides["transformers"] = _transformers(bound)
    if not setting.gpu and "recurrence" in setting.against:
        sides["recurrence"] = first(law)
    size, work = q.element_size(), tokens * heads
    return Case(
        "kda",
        f"{label} {regime}",
        leaves,
        [setting.randn(tokens, heads, dim)],
        sides,
        Work(work * (size * 5 * dim + size), work * FORWARD_FLOPS * dim * dim),
        Work(work * (size * 9 * dim + 2 * size), work * BACKWARD_FLOPS * dim * dim),
        law=first(law),
        tolerance=0.03 if setting.dtype == torch.bfloat16 else 1e-3,
        skipped=skipped,
    )


def step_case(batch: int, heads: int, dim: int, setting: Setting) -> Case:
    """One decode step of a batch of sequences; its floor is reading and writing the float32 states."""
    f, A_log, dt_bias, _ = gate("R1", batch, heads, dim, setting)
    state = setting.randn(batch, heads, dim, dim, dtype=torch.float32)
    leaves = [
        *(setting.randn(batch, heads, dim) for _ in range(3)),
        f,
        setting.randn(batch, heads),
        A_log,
        dt_bias,
        state,
    ]
    call = lambda op: lambda *x: op(*x, lower_bound=-5.0)[0]
    # a kernel may update the state in place: every call starts from its own copy of the check's state
    guard = (lambda op: lambda *x: call(op)(*x[:7], x[7].clone())) if setting.check else call
    sides = {name: guard(op) for name, op in ours("kda_step", setting).items()}
    moved = 8.0 * state.numel() + 5.0 * batch * heads * dim * leaves[0].element_size()
    return Case(
        "kda",
        f"decode step B {batch} H {heads} D {dim}",
        leaves,
        [setting.randn(batch, heads, dim)],
        sides,
        Work(moved, 6.0 * state.numel()),
        None,
        law=call(load(REGISTRY["kda_step"]["naive"])),
        tolerance=0.03,
    )


def conv_case(lengths: Sequence[int], channels: int, setting: Setting) -> Case:
    """Short causal convolution with SiLU over packed documents."""
    segments = Segments.from_lengths(lengths)
    x, weight = (
        leaf(setting.randn(segments.total, channels)),
        leaf(setting.randn(channels, 4, dtype=torch.float32)),
    )
    call = lambda op: lambda x, weight: op(x, weight, segments)[0]
    sides = {name: call(op) for name, op in ours("short_conv", setting).items()}
    unit = x.numel() * x.element_size()
    return Case(
        "kda",
        f"short convolution T {segments.total} C {channels}",
        [x, weight],
        [setting.randn(segments.total, channels)],
        sides,
        Work(2.0 * unit, 16.0 * x.numel()),
        Work(3.0 * unit, 32.0 * x.numel()),
        law=call(load(REGISTRY["short_conv"]["naive"])),
        tolerance=0.03,
    )


def cases(setting: Setting, quick: bool) -> Iterator[partial[Case]]:
    """All KDA cases of this device, made one at a time."""
    if setting.check:
        for regime in REGIMES:
            yield partial(case, *CHECK_SHAPE, regime, setting)
        yield partial(step_case, 5, 3, 128, setting)
        yield partial(conv_case, (70, 1, 33), 96, setting)
        return
    shapes = SHAPES if setting.gpu else CPU_SHAPES
    for shape in shapes[:2] if quick else shapes:
        for regime in REGIMES if setting.gpu else REGIMES[1:2]:
            yield partial(case, *shape, regime, setting)
    yield partial(step_case, *((64, 32, 128) if setting.gpu else (8, 4, 32)), setting)
    lengths, channels = (MIXED, 12288) if setting.gpu else ((2048,), 384)
    yield partial(conv_case, lengths, channels, setting)
