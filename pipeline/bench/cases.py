"""The cases of `earlyfusion bench kernels` and of the doctor: KDA, AttnRes, the loss head, and products:
attention of decoder and towers, RoPE, decoding, experts, Muon.

KDA: the shapes and the four gate regimes of every public benchmark, and the ones those leave out. R1 bounded
gate -5 sigmoid(e^A (f + bias)) (what public tables use), R2 a freshly initialised unbounded layer, R3
checkpoint-like (A log-uniform to 200, heavy-tailed gate inputs, unbounded), R4 slow decay, about 1e-3 nats a
token.

AttnRes: the residual path of a model with N blocks of S sub-layers, every sub-layer's output given: per block
one phase 1 over the finished sources, then between two sub-layers sum, merge and pre-norm. Outputs are the
inputs every sub-layer sees. Sides: ours (two fused operations), the torch form of the same schedule.
"""

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.attnres.two_phase import SubLayer
from earlyfusion.kernels.dispatch import REGISTRY, load
from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.bench.case import Case, Setting, Side, case_of

Cases = Callable[[Setting], Iterator[Case]]
CASES: dict[str, Cases] = {}
"""Group -> its cases, made one at a time."""
EPS = 1e-5


def group(cases: Cases) -> Cases:
    """Register a function under its name."""
    CASES[cases.__name__] = cases
    return cases


# ---- KDA.

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
    # Equal lengths need no index: a batch is what fla is quickest with.
    batch, cu = segments.num, None
    if len(set(segments.lengths)) > 1:
        batch, cu = 1, segments.cu_seqlens(device).long()

    def run(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        # Imported by the side that is run: where it fails, the others are measured still.
        from fla.ops.kda import chunk_kda

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
    label: str, lengths: Sequence[int], heads: int, dim: int, regime: str, setting: Setting, **options: Any
) -> Case:
    """One shape (document lengths, heads, head dim) in one regime."""
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
        work=[
            (work * size * (5 * dim + 1), work * FORWARD_FLOPS * dim * dim),
            (work * size * (9 * dim + 2), work * BACKWARD_FLOPS * dim * dim),
        ],
        wide=2e-4,
        **options,
    )

    # Peers: those of a GPU and those of a CPU.
    if setting.gpu and "fla" in setting.against:
        case.sides["fla"] = fla_kda(segments, setting.device, bound, False)
        if bound is not None:  # fla's safe gate asks for a bound
            case.sides["fla safe"] = fla_kda(segments, setting.device, bound, True)
    elif not setting.gpu and "transformers" in setting.against and segments.num == 1:
        case.sides["transformers"] = transformers_kda(bound)
    return case


def conv(setting: Setting) -> Iterator[Case]:
    """The short convolution."""
    lengths, channels = setting.pick(((70, 1, 33), 96), (MIXED, 12288), ((2048,), 384))
    segments = Segments.from_lengths(lengths)
    x, taps = setting.leaf(segments.total, channels), setting.leaf(channels, 4, dtype=torch.float32)
    label = f"short convolution T {segments.total} C {channels}"
    work = [(2.0 * x.nbytes, 16.0 * x.numel()), (3.0 * x.nbytes, 32.0 * x.numel())]
    yield case_of("short_conv", label, setting, [x, taps], segments, work=work)


@group
def kda(setting: Setting) -> Iterator[Case]:
    """The layer in all shapes and regimes, a decode step of a batch, the short convolution."""
    shapes, regimes = setting.pick((CHECK_SHAPES, REGIMES), (SHAPES, REGIMES), (CPU_SHAPES, ["R2"]))
    for line in shapes.strip().splitlines():
        label, documents, heads, dim = re.split(": |, | x (?=[0-9]+$)", line)
        length, _, count = documents.partition(" * ")
        lengths = LENGTHS.get(length) or (int(length),) * int(count or 1)
        for regime in regimes:
            yield kda_case(label, lengths, int(heads), int(dim), regime, setting)

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
        work=[(8.0 * state.numel() + 5.0 * q.nbytes, 6.0 * state.numel())],
        wide=2e-4,
    )
    yield from conv(setting)


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
            work=[
                (unit * (sources + blocks * (6 * size - 3)), 0),
                (unit * (3 * sources + blocks * (7 * size - 3)), 0),
            ],
        )


# ---- The loss head.


def full_logits_loss(h: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> list[Tensor]:
    """What everybody writes."""
    nll = F.cross_entropy(F.linear(h, weight).float(), labels, reduction="none")
    return [(nll * weights).sum(), nll.detach()]


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
        work=[(once, flops), (2 * once, 2 * flops)],
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
            work=[
                (moved, 2 * pairs * (key_dim + value_dim)),
                (2 * moved, 2 * pairs * (3 * key_dim + 2 * value_dim)),
            ],
        )
        # It has no normalisers to check.
        if "eager" in setting.against and not setting.check:
            case.sides["SDPA per document"] = sdpa(segments, causal, scale)
        yield case


@group
def rope(setting: Setting) -> Iterator[Case]:
    """qkv split and 2-D RoPE."""
    tokens, heads, dim = setting.pick((70, 3, 72), (16384, 16, 72), (4096, 4, 24))
    angles, x = setting.rand(tokens, dim // 2), setting.leaf(tokens, 3, heads, dim)
    turns = torch.polar(torch.ones_like(angles), angles)
    label, work = f"T {tokens} H {heads} D {dim}", [(x.nbytes * 4 / 3, 0), (x.nbytes * 2, 0)]
    yield case_of("qkv_rope", label, setting, [x], turns, work=work)


@group
def decode(setting: Setting) -> Iterator[Case]:
    """One absorbed decode step over paged latents (forward only)."""
    shape = setting.pick((3, 20, 300, 32, 48, 16), (64, 32, 8192, 512, 576, 64), (8, 4, 512, 32, 48, 16))
    batch, heads, length, rank, width, page = shape

    # The latents are shared by all heads: reading them is the floor.
    count = -(-length // page)
    pages = setting.randn(batch * count, page, width)
    table = torch.randperm(batch * count, generator=setting.generator, device=setting.device)
    lengths = length - torch.arange(batch, dtype=torch.int32, device=setting.device)
    yield case_of(
        "mla_decode",
        f"B {batch} H {heads} length {length}",
        setting,
        [setting.randn(batch, heads, width), pages],
        table.int().view(batch, count),
        lengths,
        rank,
        width**-0.5,
        work=[(pages.nbytes, 2.0 * batch * heads * length * (width + rank))],
    )


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
        work=[(moved, flops), (2 * moved, 2 * flops)],
    )
    if "eager" in setting.against:
        case.sides["loop over experts"] = case.law
    yield case


def torch_muon(gradient: Tensor) -> Tensor:
    """torch's orthogonalisation (bfloat16, coefficients of its own), one matrix after the other."""
    from torch.optim import _muon as torch_muon

    coefficients = torch_muon.DEFAULT_A, torch_muon.DEFAULT_B, torch_muon.DEFAULT_C
    done = [torch_muon._zeropower_via_newtonschulz(G, coefficients, 5, 1e-7) for G in gradient]
    return torch.stack(done)


@group
def muon(setting: Setting) -> Iterator[Case]:
    """The orthogonalisation of a stack of expert matrices."""
    count, rows, columns = setting.pick((3, 128, 320), (128, 1024, 2304), (16, 64, 160))
    gradient = setting.randn(count, rows, columns)
    short, long = min(rows, columns), max(rows, columns)

    # The law iterates in float64; bfloat16 ends anywhere near the polar factor.
    def iterate(op: Side) -> Side:
        return lambda G: op(G, dtype=max(setting.dtype, G.dtype, key=lambda dtype: dtype.itemsize))

    # Gram form with symmetric halves, five steps.
    work = [(8.0 * gradient.numel(), count * (14.0 * short**3 + 6.0 * short**2 * long))]
    label = f"Newton-Schulz {count} x [{rows}, {columns}]"
    case = case_of("newton_schulz", label, setting, [gradient], around=iterate, work=work)
    case.tolerance = max(case.tolerance, 0.1 * (setting.dtype == torch.bfloat16))
    if "muon" in setting.against:
        case.sides["torch.optim.Muon"] = torch_muon
    yield case


# ---- What only the check looks at: the operations that no group above times.


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
    """The operations of the registry that no group above runs."""
    if not setting.check:
        return
    segments, newest = Segments.from_lengths((37, 1, 64, 11)), Segments.from_lengths((5, 1, 20, 11))
    tokens = segments.total
    leaf, randn = setting.leaf, setting.randn

    # Parts of attention for the engine and for QK-Clip.
    q, k, v = randn(tokens, 4, 24), randn(tokens, 4, 24), randn(tokens, 4, 16)
    rows = [randn(newest.total, 4, 24), k, v]
    yield case_of("attention_append", "newest tokens", setting, rows, newest, segments, scale=0.2)
    law = load(REGISTRY["attention"]["naive"])
    lse = law(q, k, v, segments, causal=True, scale=0.2)[1]
    yield case_of(
        "max_logit", "largest logits", setting, [q, k, lse], segments, tau=-1e4, causal=True, scale=0.2
    )

    # A block of AttnRes as a model without the two-phase schedule calls it; norms and the log-probabilities.
    rows = [leaf(3, tokens, 20), leaf(4, 20), leaf(4, 20)]
    yield case_of("attnres_block", "four sub-layers", setting, rows, around=scaled_block)
    rows = [leaf(tokens, 20), leaf(20), leaf(tokens, 20)]
    yield case_of("rms_norm", "gated", setting, rows, EPS)
    head, labels = [leaf(tokens, 16), leaf(67, 16)], labels_of(tokens, 67, setting)
    yield case_of("token_log_probs", "of some tokens", setting, [*head, labels], temperature=0.7)
