"""The cases of `earlyfusion bench kernels` and of the doctor: AttnRes, the loss head, and products: attention
of decoder and towers, RoPE, decoding, experts, Muon; KDA's are those of kda_cases.py.

AttnRes: the residual path of a model with N blocks of S sub-layers, every sub-layer's output given: per block
one phase 1 over the finished sources, then between two sub-layers sum, merge and pre-norm. Outputs are the
inputs every sub-layer sees. Sides: ours (two fused operations), the torch form of the same schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.attnres.two_phase import SubLayer
from earlyfusion.kernels.dispatch import REGISTRY, load
from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.bench.case import Case, Setting, Side, case_of
from earlyfusion.pipeline.bench.kda_cases import MIXED, kda, kda_case
from earlyfusion.pipeline.bench.timing import Work

Cases = Callable[[Setting], Iterator[Case]]
CASES: dict[str, Cases] = {"kda": kda}
"""Group -> its cases, made one at a time."""
EPS = 1e-5


def group(cases: Cases) -> Cases:
    """Register a function under its name."""
    CASES[cases.__name__] = cases
    return cases


# ---- AttnRes: (label, blocks, sub-layers a block, hidden, tokens).

PATHS = (
    ("48B, 54 sub-layers, d 2304", 9, 6, 2304, 8192),
    ("32 layers, d 4096", 8, 8, 4096, 4096),
    ("K3, 186 sub-layers, d 7168", 8, 24, 7168, 1024),
)
CPU_PATHS = (("12 sub-layers, d 256", 2, 6, 256, 2048),)
CHECK_PATHS = (("12 sub-layers, d 2304", 2, 6, 2304, 37),)


def two_phase(blocks: int, size: int, open_block: Side, step: Side) -> Side:
    """The schedule with our two operations."""

    def run(embedding: Tensor, outs_LTD: Tensor, qw_LD: Tensor, norms_LD: Tensor) -> list[Tensor]:
        sources, outs, inputs = (embedding,), outs_LTD.unbind(), []
        for first in range(0, blocks * size, size):
            # Phase 1: all sub-layers of the block look at the finished sources.
            o, lse, sources = open_block(sources, qw_LD[first : first + size], EPS)
            wide = torch.promote_types(o[0].dtype, torch.float32)
            inputs.append(F.rms_norm(o[0].to(wide), o[0].shape[1:], norms_LD[first], EPS).to(o[0].dtype))

            # Phase 2: each adds what the block has made so far.
            partial_TD, out = outs[first], None
            for s in range(1, size):
                at = first + s
                partial_TD, x = step(o[s], lse[s], partial_TD, out, qw_LD[at], norms_LD[at], EPS, EPS)
                inputs.append(x)
                out = outs[at]
            sources = (*sources, partial_TD if out is None else partial_TD + out)
        return [*inputs, sources[-1]]

    return run


@group
def attnres(setting: Setting) -> Iterator[Case]:
    """Residual paths of whole models.

    Least traffic of the two-phase schedule, a unit being one [T, D]: per block n + S units for phase 1, 6 per
    sub-layer around it; backward 3 n + S and 6.
    """
    for label, blocks, size, hidden, tokens in setting.pick(CHECK_PATHS, PATHS, CPU_PATHS):
        count, wide = blocks * size, torch.float32
        norms = 1 + setting.randn(count, hidden, scale=0.1, dtype=wide)
        leaves = [
            setting.leaf(tokens, hidden),
            setting.leaf(count, tokens, hidden),
            setting.leaf(count, hidden, scale=hidden**-0.5, dtype=wide),
            norms.requires_grad_(),
        ]

        # What the two-phase schedule must move, whoever computes it: block n has n + 1 sources.
        sources, unit = blocks * (blocks + 1) / 2, leaves[0].nbytes
        yield case_of(
            "attnres_phase1 attnres_step",
            f"{label}, T {tokens}",
            setting,
            leaves,
            around=partial(two_phase, blocks, size),
            forward=Work(unit * (sources + blocks * (6 * size - 3))),
            backward=Work(unit * (3 * sources + blocks * (7 * size - 3))),
        )


# ---- The loss head.


def full_logits_loss(h: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """What everybody writes."""
    nll = F.cross_entropy(F.linear(h, weight).float(), labels, reduction="none")
    return (nll * weights).sum()


def labels_of(tokens: int, vocabulary: int, setting: Setting) -> Tensor:
    """Random token ids [T]."""
    return (setting.rand(tokens) * vocabulary).long()


@group
def loss(setting: Setting) -> Iterator[Case]:
    """The loss head: hidden states to the summed loss."""
    tokens, hidden, vocabulary = setting.pick((200, 256, 5000), (8192, 2304, 163840), (2048, 128, 8192))
    h, weight = setting.leaf(tokens, hidden), setting.leaf(vocabulary, hidden, scale=hidden**-0.5)

    # The floor reads hidden states and head once, and never sees the logits.
    flops, once = 2.0 * tokens * hidden * vocabulary, h.nbytes + weight.nbytes
    case = case_of(
        "linear_cross_entropy",
        f"T {tokens} d {hidden} vocabulary {vocabulary}",
        setting,
        [h, weight, labels_of(tokens, vocabulary, setting), torch.ones(tokens, device=setting.device)],
        forward=Work(once, flops),
        backward=Work(2 * once, 2 * flops),
    )
    if "eager" in setting.against:
        case.sides["logits in full"] = full_logits_loss
    yield case


# ---- Products: (label, document lengths, heads, key dim, value dim, causal).

ATTENTION = (
    ("MLA 192/128", (4096,) * 4, 32, 192, 128, True),
    ("MLA 192/128 packed", MIXED, 32, 192, 128, True),
    ("tower 72, 448 px", (1024,) * 8, 16, 72, 72, False),
    ("tower 128, 896 px", (4096,) * 2, 12, 128, 128, False),
)
CPU_ATTENTION = (("MLA 48/32", (512,) * 4, 4, 48, 32, True), ("tower 24", (256,) * 8, 4, 24, 24, False))
CHECK_ATTENTION = (("MLA", (130, 1, 70), 4, 192, 128, True), ("tower", (64, 17), 2, 72, 72, False))


def sdpa(segments: Segments, causal: bool, scale: float) -> Side:
    """torch's attention, called for every document."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for parts in zip(*(x.split(segments.lengths) for x in (q, k, v))):
            a, b, c = (part.transpose(0, 1)[None] for part in parts)
            outs.append(F.scaled_dot_product_attention(a, b, c, is_causal=causal, scale=scale)[0])
        return torch.cat(outs, dim=1).transpose(0, 1)

    return run


@group
def attention(setting: Setting) -> Iterator[Case]:
    """Attention inside documents; FLOPs count visible pairs only."""
    for shape in setting.pick(CHECK_ATTENTION, ATTENTION, CPU_ATTENTION):
        label, lengths, heads, key_dim, value_dim, causal = shape
        segments, scale = Segments.from_lengths(lengths), key_dim**-0.5
        leaves = [setting.leaf(segments.total, heads, dim) for dim in (key_dim, key_dim, value_dim)]

        # A causal kernel does half of the products; pairs it cannot see do not count.
        pairs = heads * sum(n * n for n in lengths)
        if causal:
            pairs = (pairs + heads * segments.total) / 2
        moved = leaves[0].nbytes * 2 * (1 + value_dim / key_dim)
        case = case_of(
            "attention",
            f"{label} T {segments.total}",
            setting,
            leaves,
            segments,
            causal=causal,
            scale=scale,
            forward=Work(moved, 2 * pairs * (key_dim + value_dim)),
            backward=Work(2 * moved, 2 * pairs * (3 * key_dim + 2 * value_dim)),
        )
        if "eager" in setting.against:
            case.sides["SDPA per document"] = sdpa(segments, causal, scale)
        yield case


@group
def rope(setting: Setting) -> Iterator[Case]:
    """qkv split and 2-D RoPE."""
    tokens, heads, dim = setting.pick((70, 3, 72), (16384, 16, 72), (4096, 4, 24))
    angles, x = setting.rand(tokens, dim // 2), setting.leaf(tokens, 3, heads, dim)
    turns = torch.polar(torch.ones_like(angles), angles)
    work = Work(x.nbytes * 4 / 3), Work(2.0 * x.nbytes)
    label = f"T {tokens} H {heads} D {dim}"
    yield case_of("qkv_rope", label, setting, [x], turns, forward=work[0], backward=work[1])


@group
def decode(setting: Setting) -> Iterator[Case]:
    """One absorbed decode step over paged latents (forward only)."""
    batch, heads, length = setting.pick((3, 20, 300), (64, 32, 8192), (8, 4, 512))

    # The latents are shared by all heads: reading them is the floor.
    rank, width, page = (512, 576, 64) if setting.gpu else (32, 48, 16)
    count = -(-length // page)
    pages = setting.randn(batch * count, page, width)
    table = torch.randperm(batch * count, generator=setting.generator, device=setting.device)
    lengths = length - torch.arange(batch, dtype=torch.int32, device=setting.device)
    case = case_of(
        "mla_decode",
        f"B {batch} H {heads} length {length}",
        setting,
        [setting.randn(batch, heads, width), pages],
        table.int().view(batch, count),
        lengths,
        rank,
        width**-0.5,
        forward=Work(pages.nbytes, 2.0 * batch * heads * length * (width + rank)),
    )
    if setting.gpu and "torch" in setting.against:
        case.sides["gathered"] = case.law
    yield case


@group
def moe(setting: Setting) -> Iterator[Case]:
    """Routed SwiGLU experts with uneven loads."""
    shape = setting.pick((120, 3, 8, 96, 64), (8192, 8, 256, 2304, 1024), (2048, 4, 16, 128, 64))
    tokens, choices, experts, hidden, width = shape

    # Real routers are uneven, and an even load would flatter grouped products.
    skew = torch.linspace(0, 2, experts, device=setting.device)
    scores = setting.randn(tokens, experts, dtype=torch.float32) + skew
    x, gate_up = setting.leaf(tokens, hidden), setting.leaf(experts, 2 * width, hidden, scale=hidden**-0.5)
    down = setting.leaf(experts, hidden, width, scale=width**-0.5)
    weights = torch.full((tokens, choices), 1 / choices, device=setting.device).requires_grad_()
    flops, moved = 6.0 * tokens * choices * hidden * width, gate_up.nbytes + down.nbytes + 2.0 * x.nbytes
    case = case_of(
        "moe_experts",
        f"T {tokens} top {choices} of {experts}, {hidden} x {width}",
        setting,
        [x, scores.topk(choices, dim=1).indices, weights, gate_up, down],
        forward=Work(moved, flops),
        backward=Work(2 * moved, 2 * flops),
    )
    if "eager" in setting.against:
        case.sides["loop over experts"] = case.law
    yield case


@group
def muon(setting: Setting) -> Iterator[Case]:
    """One Muon step (momentum, orthogonalisation, update) of a stack of expert matrices; the check looks at
    the orthogonalisation alone."""
    count, rows, columns = setting.pick((3, 128, 320), (128, 1024, 2304), (16, 64, 160))
    gradient = setting.randn(count, rows, columns, dtype=torch.float32)
    if setting.check:
        # The law iterates in float64; bfloat16 ends anywhere near the polar factor.
        def iterate(op: Side) -> Side:
            return lambda G: op(G, dtype=max(setting.dtype, G.dtype, key=lambda dtype: dtype.itemsize))

        label = f"Newton-Schulz {count} x [{rows}, {columns}]"
        case = case_of("newton_schulz", label, setting, [gradient.to(setting.dtype)], around=iterate)
        case.tolerance = max(case.tolerance, 0.1 * (setting.dtype == torch.bfloat16))
        yield case
        return

    weight = setting.randn(count, rows, columns, dtype=torch.float32)
    momentum = torch.zeros_like(weight)
    short, long = min(rows, columns), max(rows, columns)

    def step(orthogonalise: Side, gradient: Tensor) -> Tensor:
        momentum.mul_(0.95).add_(gradient)
        return weight.add_(orthogonalise(gradient.add(momentum, alpha=0.95)), alpha=-1e-4 * 0.2 * long**0.5)

    # Gram form with symmetric halves, five steps.
    work = Work(20.0 * gradient.numel(), count * (14.0 * short**3 + 6.0 * short**2 * long))
    label = f"{count} x [{rows}, {columns}]"
    case = case_of(
        "newton_schulz", label, setting, [gradient], around=lambda op: partial(step, op), forward=work
    )
    case.law = None  # every side has weights and a momentum of its own
    if "muon" in setting.against:
        # torch takes a list of matrices, one launch after the other.
        parameters = [torch.nn.Parameter(x.clone()) for x in weight]
        for parameter, slope in zip(parameters, gradient):
            parameter.grad = slope
        optimizer = torch.optim.Muon(parameters, lr=1e-4, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        case.sides["torch.optim.Muon"] = lambda gradient: optimizer.step()
    yield case


# ---- What only the check looks at: the operations and outputs that no group above times.


def in_lists(op: Side) -> Side:
    """Operations of AttnRes that take their sources as a list, from one stacked tensor."""
    return lambda stacked, qw: op(list(stacked.unbind()), qw, EPS)


def scaled_block(op: Side) -> Side:
    """A block of AttnRes whose sub-layers scale what they get."""

    def run(stacked: Tensor, qw: Tensor, scales: Tensor) -> Any:
        layers = []
        for scale in scales:
            layers.append(SubLayer(torch.nn.RMSNorm(scale.shape, EPS).to(scale), scale.mul))
        return op(list(stacked.unbind()), layers, qw, EPS)

    return run


@group
def others(setting: Setting) -> Iterator[Case]:
    """Further operations of the registry, and what others return on request."""
    if not setting.check:
        return
    segments, newest = Segments.from_lengths((37, 1, 64, 11)), Segments.from_lengths((5, 1, 20, 11))
    tokens = segments.total
    leaf, randn = setting.leaf, setting.randn
    q, k, v = leaf(tokens, 4, 24), leaf(tokens, 2, 24), leaf(tokens, 2, 16)

    # States and normalisers, from which a next chunk starts.
    yield kda_case(("with its state", segments.lengths, 2, 16), "R1", setting, output_final_state=True)
    taps = [leaf(tokens, 20), leaf(20, 4, dtype=torch.float32)]
    yield case_of("short_conv", "with its taps", setting, taps, segments, output_taps=True)
    options: dict[str, Any] = {"causal": True, "scale": 0.2}

    # Parts of attention for the engine and for QK-Clip.
    rows = [randn(newest.total, 4, 24), k.detach(), v.detach()]
    yield case_of("attention_append", "newest tokens", setting, rows, newest, segments, scale=0.2)
    law = load(REGISTRY["attention"]["naive"])
    lse = law(q, k, v, segments, **options)[1].detach()
    rows = [q.detach(), k.detach(), lse]
    yield case_of("max_logit", "largest logits", setting, rows, segments, tau=-1e4, **options)

    # AttnRes piece by piece, as the engine and the model call it.
    stacked, qw = leaf(3, tokens, 20), leaf(4, 20)
    yield case_of("attnres_phase1", "three sources", setting, [stacked, qw], around=in_lists)
    rows = [leaf(tokens, 20), leaf(tokens, dtype=torch.float32), *(leaf(tokens, 20) for _ in range(2))]
    yield case_of("attnres_step", "a partial sum", setting, [*rows, leaf(20), leaf(20)], EPS, EPS)
    rows = [stacked, qw, leaf(4, 20)]
    yield case_of("attnres_block", "four sub-layers", setting, rows, around=scaled_block)

    # Norms with and without a gate; losses where some positions have none.
    rows = [leaf(tokens, 20), leaf(20)]
    yield case_of("rms_norm", "plain", setting, rows, None, EPS)
    yield case_of("rms_norm", "gated", setting, [*rows, leaf(tokens, 20)], EPS)
    head, labels = [leaf(tokens, 16), leaf(67, 16)], labels_of(tokens, 67, setting)
    yield case_of("token_log_probs", "of some tokens", setting, [*head, labels], temperature=0.7)
    weights = (labels % 7 + 1).float() / 7
    kept = labels.masked_fill(labels % 5 == 0, -100)
    yield case_of("linear_cross_entropy", "weighted, some skipped", setting, [*head, kept, weights])
