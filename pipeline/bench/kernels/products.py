"""Cases whose work is matrix products: attention of decoder and towers, RoPE, decode, experts, Muon."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.dispatch import REGISTRY, load
from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.bench.kernels.case import Case, Setting, Side, leaf, ours
from earlyfusion.pipeline.bench.timing import Work

# label, document lengths, heads, key dim, value dim, causal
ATTENTION = (
    ("MLA 192/128", (4096,) * 4, 32, 192, 128, True),
    ("MLA 192/128 packed", (1300, 547, 2048, 963, 271, 3063), 32, 192, 128, True),
    ("tower 72, 448 px", (1024,) * 8, 16, 72, 72, False),
    ("tower 128, 896 px", (4096,) * 2, 12, 128, 128, False),
)
CPU_ATTENTION = (("MLA 48/32", (512,) * 4, 4, 48, 32, True), ("tower 24", (256,) * 8, 4, 24, 24, False))


def _tolerance(setting: Setting) -> float:
    return 0.03 if setting.dtype == torch.bfloat16 else 1e-4


def _sdpa(segments: Segments, causal: bool, scale: float) -> Side:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for start, length in zip(segments.offsets, segments.lengths):
            rows = slice(start, start + length)
            a, b, c = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
            outs.append(
                F.scaled_dot_product_attention(a, b, c, is_causal=causal, scale=scale)[0].transpose(0, 1)
            )
        return torch.cat(outs)

    return run


def attention_case(
    label: str,
    lengths: tuple[int, ...],
    heads: int,
    key_dim: int,
    value_dim: int,
    causal: bool,
    setting: Setting,
) -> Case:
    """Attention inside documents; FLOPs count visible pairs only."""
    segments, scale = Segments.from_lengths(lengths), key_dim**-0.5
    tokens = segments.total
    leaves = [leaf(setting.randn(tokens, heads, d)) for d in (key_dim, key_dim, value_dim)]
    first = lambda op: lambda *x: op(*x, segments, causal=causal, scale=scale)[0]
    sides = {name: first(op) for name, op in ours("attention", setting).items()}
    if "eager" in setting.against:
        sides["SDPA per document"] = _sdpa(segments, causal, scale)
    pairs = sum(n * (n + 1) / 2 if causal else n * n for n in lengths) * heads
    moved = tokens * heads * leaves[0].element_size() * 2 * (key_dim + value_dim)
    return Case(
        "attention",
        f"{label} T {tokens}",
        leaves,
        [setting.randn(tokens, heads, value_dim)],
        sides,
        Work(moved, 2 * pairs * (key_dim + value_dim)),
        Work(2 * moved, 2 * pairs * (3 * key_dim + 2 * value_dim)),
        law=first(load(REGISTRY["attention"]["naive"])),
        tolerance=_tolerance(setting),
    )


def rope_case(tokens: int, heads: int, dim: int, setting: Setting) -> Case:
    """qkv split and 2-D RoPE."""
    angles = torch.rand(tokens, dim // 2, generator=setting.generator, device=setting.device)
    turns = torch.polar(torch.ones_like(angles), angles)
    leaves = [leaf(setting.randn(tokens, 3, heads, dim))]
    sides = {name: (lambda x, op=op: op(x, turns)) for name, op in ours("qkv_rope", setting).items()}
    unit = tokens * heads * dim * leaves[0].element_size()
    law = load(REGISTRY["qkv_rope"]["naive"])
    return Case(
        "rope",
        f"T {tokens} H {heads} D {dim}",
        leaves,
        [setting.randn(tokens, heads, dim) for _ in range(3)],
        sides,
        Work(4.0 * unit, 0.0),
        Work(6.0 * unit, 0.0),
        law=lambda x: law(x, turns),
        tolerance=_tolerance(setting),
    )


def decode_case(batch: int, heads: int, length: int, setting: Setting) -> Case:
    """One absorbed decode step over paged latents (forward only)."""
    rank, width, page = (512, 576, 64) if setting.gpu else (32, 48, 16)
    count = -(-length // page)
    pages = setting.randn(batch * count, page, width)
    table = (
        torch.randperm(batch * count, generator=setting.generator, device=setting.device)
        .int()
        .view(batch, count)
    )
    lengths = torch.full((batch,), length, dtype=torch.int32, device=setting.device)
    scale = width**-0.5
    call = lambda op: lambda q, rows: op(q, rows, table, lengths, rank, scale)[0]
    law = call(load(REGISTRY["mla_decode"]["naive"]))
    sides = {name: call(op) for name, op in ours("mla_decode", setting).items()}
    if setting.gpu and "torch" in setting.against:
        sides["gathered"] = law
    query = setting.randn(batch, heads, width)
    return Case(
        "decode",
        f"B {batch} H {heads} length {length}",
        [query, pages],
        [setting.randn(batch, heads, rank)],
        sides,
        Work(pages.numel() * pages.element_size(), 2.0 * batch * heads * length * (width + rank)),
        None,
        law=law,
        tolerance=_tolerance(setting),
    )


def moe_case(tokens: int, choices: int, experts: int, hidden: int, width: int, setting: Setting) -> Case:
    """Routed SwiGLU experts with uneven loads."""
    skew = torch.linspace(0, 2, experts, device=setting.device)
    scores = setting.randn(tokens, experts, dtype=torch.float32) + skew
    ids = scores.topk(choices, dim=1).indices
    weights = torch.full((tokens, choices), 1 / choices, device=setting.device)
    leaves = [
        leaf(setting.randn(tokens, hidden)),
        leaf(weights),
        leaf(setting.randn(experts, 2 * width, hidden, scale=hidden**-0.5)),
        leaf(setting.randn(experts, hidden, width, scale=width**-0.5)),
    ]
    call = lambda op: lambda x, w, g, d: op(x, ids, w, g, d)
    sides = {name: call(op) for name, op in ours("moe_experts", setting).items()}
    law = call(load(REGISTRY["moe_experts"]["naive"]))
    if "eager" in setting.against:
        sides["loop over experts"] = law
    flops, size = 6.0 * tokens * choices * hidden * width, leaves[0].element_size()
    moved = size * (3.0 * experts * hidden * width + 2 * tokens * hidden)
    return Case(
        "moe",
        f"T {tokens} top {choices} of {experts}, {hidden} x {width}",
        leaves,
        [setting.randn(tokens, hidden)],
        sides,
        Work(moved, flops),
        Work(2 * moved, 2 * flops),
        law=law,
        tolerance=_tolerance(setting),
    )


def muon_case(count: int, rows: int, columns: int, setting: Setting) -> Case:
    """One Muon step (momentum, orthogonalisation, update) of a stack of expert matrices."""
    weight, gradient = (setting.randn(count, rows, columns, dtype=torch.float32) for _ in range(2))
    momentum = torch.zeros_like(weight)
    rate = 0.2 * max(rows, columns) ** 0.5

    def stacked(op: Side) -> Side:
        def run(gradient: Tensor) -> Tensor:
            momentum.mul_(0.95).add_(gradient)
            weight.add_(op(gradient.add(momentum, alpha=0.95)), alpha=-1e-4 * rate)
            return weight

        return run

    sides = {name: stacked(op) for name, op in ours("newton_schulz", setting).items()}
    if "muon" in setting.against:
        parameters = [torch.nn.Parameter(x.clone()) for x in weight]
        for parameter, slope in zip(parameters, gradient):
            parameter.grad = slope
        optimizer = torch.optim.Muon(parameters, lr=1e-4, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        sides["torch.optim.Muon"] = lambda gradient: optimizer.step()
    short, long = min(rows, columns), max(rows, columns)
    flops = count * (14.0 * short**3 + 6.0 * short**2 * long)  # Gram form with symmetric halves, five steps
    moved = 4.0 * count * rows * columns * 5
    return Case("muon", f"{count} x [{rows}, {columns}]", [gradient], [], sides, Work(moved, flops), None)


def ns_case(count: int, rows: int, columns: int, setting: Setting) -> Case:
    """Newton-Schulz alone, for its error against the float64 polynomial."""
    law = load(REGISTRY["newton_schulz"]["naive"])
    gradient = setting.randn(count, rows, columns, dtype=torch.float32)
    return Case(
        "muon",
        f"Newton-Schulz {count} x [{rows}, {columns}]",
        [gradient],
        [gradient],
        ours("newton_schulz", setting),
        Work(8.0 * gradient.numel(), 0.0),
        None,
        law=law,
        tolerance=0.1,
    )


def cases(setting: Setting, quick: bool) -> Iterator[partial[Case]]:
    """All cases of this file for this device."""
    if setting.check:
        yield partial(attention_case, "MLA", (130, 1, 70), 4, 192, 128, True, setting)
        yield partial(attention_case, "tower", (64, 17), 2, 72, 72, False, setting)
        yield partial(rope_case, 70, 3, 72, setting)
        yield partial(decode_case, 3, 20, 300, setting)
        yield partial(moe_case, 120, 3, 8, 96, 64, setting)
        yield partial(ns_case, 3, 128, 320, setting)
        return
    attention = ATTENTION if setting.gpu else CPU_ATTENTION
    for shape in attention[:1] if quick else attention:
        label, lengths, heads, key_dim, value_dim, causal = shape
        yield partial(attention_case, label, lengths, heads, key_dim, value_dim, causal, setting)
    yield partial(rope_case, *((16384, 16, 72) if setting.gpu else (4096, 4, 24)), setting)
    yield partial(decode_case, *((64, 32, 8192) if setting.gpu else (8, 4, 512)), setting)
    yield partial(moe_case, *((8192, 8, 256, 2304, 1024) if setting.gpu else (2048, 4, 16, 128, 64)), setting)
    yield partial(muon_case, *((128, 1024, 2304) if setting.gpu else (16, 64, 160)), setting)
