"""The other cases of `earlyfusion bench kernels`: AttnRes, the loss head, and products: attention of decoder
and towers, RoPE, decoding, experts, Muon.

AttnRes: the residual path of a model with N blocks of S sub-layers, every sub-layer's output given: per block
one phase 1 over the finished sources, then between two sub-layers sum, merge and pre-norm. Outputs are the
inputs every sub-layer sees. Sides: ours (two fused operations), the torch form of the same schedule, eager
(stack, norm, softmax, sum per sub-layer, as the paper's listing), fla.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.attnres import fused
from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.bench.case import FLA, Case, Setting, Side, add_peer, case_of, ours
from earlyfusion.pipeline.bench.kda_cases import MIXED, kda
from earlyfusion.pipeline.bench.timing import Work

EPS = 1e-5

# ---- AttnRes: (label, blocks, sub-layers a block, hidden, tokens).

PATHS = (
    ("48B, 54 sub-layers, d 2304", 9, 6, 2304, 8192),
    ("32 layers, d 4096", 8, 8, 4096, 4096),
    ("K3, 186 sub-layers, d 7168", 8, 24, 7168, 1024),
)
CPU_PATHS = (("12 sub-layers, d 256", 2, 6, 256, 2048),)
CHECK_PATHS = (("12 sub-layers, d 2304", 2, 6, 2304, 37),)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, weight.shape, weight, EPS).to(x.dtype)


def two_phase(open_block: Side, step: Side, blocks: int, size: int) -> Side:
    """The schedule with our two operations."""

    def run(embedding: Tensor, outs_LTD: Tensor, qw_LD: Tensor, norms_LD: Tensor) -> tuple[Tensor, ...]:
        sources, outs, inputs = (embedding,), outs_LTD.unbind(), []
        queries, norms = qw_LD.unbind(), norms_LD.unbind()
        for first in range(0, blocks * size, size):
            # Phase 1: all sub-layers of the block look at the finished sources.
            o, lse, sources = open_block(sources, qw_LD[first : first + size], EPS)
            inputs.append(_norm(o[0], norms[first]))

            # Phase 2: each adds what the block has made so far.
            partial_TD = outs[first]
            for s in range(1, size):
                at = first + s
                out = outs[at - 1] if s > 1 else None
                partial_TD, x = step(o[s], lse[s], partial_TD, out, queries[at], norms[at], EPS, EPS)
                inputs.append(x)
            sources = (*sources, partial_TD + outs[first + size - 1] if size > 1 else partial_TD)
        return (*inputs, sources[-1])

    return run


def one_phase(mix: Side, blocks: int, size: int) -> Side:
    """Every sub-layer mixes all its sources by itself: ``mix(sources, qw, norm) -> x``."""

    def run(embedding: Tensor, outs_LTD: Tensor, qw_LD: Tensor, norms_LD: Tensor) -> tuple[Tensor, ...]:
        # The sum of the block under way is one more source, from its second sub-layer on.
        finished, inputs = [embedding], []
        block_sum: list[Tensor] = []
        for index, out in enumerate(outs_LTD.unbind()):
            inputs.append(mix([*finished, *block_sum], qw_LD[index], norms_LD[index]))
            block_sum = [block_sum[0] + out] if block_sum else [out]
            if index % size == size - 1:
                finished, block_sum = [*finished, *block_sum], []
        return (*inputs, finished[-1])

    return run


def eager_mix(sources: list[Tensor], qw_D: Tensor, norm_D: Tensor) -> Tensor:
    """The paper's listing."""
    stacked = torch.stack(sources)
    keys = F.rms_norm(stacked, (stacked.shape[-1],), None, EPS)
    weights = torch.einsum("d,ntd->nt", qw_D.to(keys.dtype), keys).softmax(0)
    return F.rms_norm(torch.einsum("nt,ntd->td", weights, stacked), norm_D.shape, norm_D.to(keys.dtype), EPS)


def fla_mix(ones_D: Tensor) -> Side:
    """fla's mixture of one sub-layer; its query and weight come in the sources' dtype (`Case.leaves_of`)."""
    from fla.ops.attnres import fused_attnres

    def mix(sources: list[Tensor], qw_D: Tensor, norm_D: Tensor) -> Tensor:
        if len(sources) == 1:
            return F.rms_norm(sources[0], norm_D.shape, norm_D, EPS)
        return fused_attnres(qw_D, sources, ones_D, norm_D, rms_eps=EPS, checkpoint_level=0)

    return mix


def path_case(path: tuple[str, int, int, int, int], setting: Setting) -> Case:
    """The residual path of one model (label, blocks, sub-layers a block, hidden, tokens).

    Least traffic of the two-phase schedule, a unit being one [T, D]: per block n + S units for phase 1, 6 per
    sub-layer around it; backward 3 n + S and 6.
    """
    label, blocks, size, hidden, tokens = path
    count = blocks * size
    leaves = [
        setting.leaf(tokens, hidden),
        setting.leaf(count, tokens, hidden),
        setting.leaf(count, hidden, scale=hidden**-0.5, dtype=torch.float32),
        (1 + setting.randn(count, hidden, scale=0.1, dtype=torch.float32)).requires_grad_(),
    ]

    # What the two-phase schedule must move, whoever computes it.
    unit = tokens * hidden * leaves[0].element_size()
    forward = sum((block + 1) + size + 5 * (size - 1) + 2 for block in range(blocks))
    backward = sum(3 * (block + 1) + size + 6 * (size - 1) + 3 for block in range(blocks))
    opens, steps = ours("attnres_open", setting), ours("attnres_step", setting)
    case = Case(
        f"{label}, T {tokens}",
        leaves,
        [setting.randn(tokens, hidden)] * (count + 1),
        {name: two_phase(opens[name], steps[name], blocks, size) for name in opens},
        Work(forward * unit),
        Work(backward * unit),
        law=two_phase(fused.open_block_naive, fused.step_naive, blocks, size),
        tolerance=setting.tolerance(),
    )
    if "eager" in setting.against:
        case.sides["eager"] = one_phase(eager_mix, blocks, size)
    if setting.gpu and "fla" in setting.against:
        # fla wants query and weights in the dtype of the sources: cast beforehand, not timed.
        ones_D = torch.ones(hidden, dtype=setting.dtype, device=setting.device)
        add_peer(case, "fla", *FLA, lambda: one_phase(fla_mix(ones_D), blocks, size))
        case.leaves_of["fla"] = [x.detach().to(setting.dtype).requires_grad_() for x in leaves]
    return case


def attnres(setting: Setting) -> Iterator[Case]:
    """AttnRes cases of this device."""
    for path in setting.pick(CHECK_PATHS, PATHS, CPU_PATHS):
        yield path_case(path, setting)


# ---- The loss head.


def full_logits_loss(h: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """What everybody writes."""
    nll = F.cross_entropy(F.linear(h, weight).float(), labels, reduction="none")
    return (nll * weights).sum()


def liger_loss() -> Side:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda h, weight, labels, weights: liger(weight, h, labels)


def loss(setting: Setting) -> Iterator[Case]:
    """The loss head: hidden states to the summed loss."""
    tokens, hidden, vocabulary = setting.pick((200, 256, 5000), (8192, 2304, 163840), (2048, 128, 8192))
    h, weight = setting.leaf(tokens, hidden), setting.leaf(vocabulary, hidden, scale=hidden**-0.5)

    # The floor reads hidden states and head once, and never sees the logits.
    labels = torch.randint(0, vocabulary, (tokens,), generator=setting.generator, device=setting.device)
    flops, once = 2.0 * tokens * hidden * vocabulary, h.element_size() * float(hidden * (tokens + vocabulary))
    case = case_of(
        "linear_cross_entropy",
        f"T {tokens} d {hidden} vocabulary {vocabulary}",
        setting,
        [h, weight, labels, torch.ones(tokens, device=setting.device)],
        [torch.ones((), device=setting.device)],
        forward=Work(once, flops),
        backward=Work(2 * once, 2 * flops),
    )
    if "eager" in setting.against:
        case.sides["logits in full"] = full_logits_loss
    if setting.gpu and "liger" in setting.against:
        add_peer(case, "liger", "liger_kernel", "liger-kernel", liger_loss)
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
        for start, length in zip(segments.offsets, segments.lengths):
            rows = slice(start, start + length)
            a, b, c = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(a, b, c, is_causal=causal, scale=scale)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    return run


def attention(setting: Setting) -> Iterator[Case]:
    """Attention inside documents; FLOPs count visible pairs only."""
    for shape in setting.pick(CHECK_ATTENTION, ATTENTION, CPU_ATTENTION):
        label, lengths, heads, key_dim, value_dim, causal = shape
        segments, scale = Segments.from_lengths(lengths), key_dim**-0.5
        tokens = segments.total
        leaves = [setting.leaf(tokens, heads, dim) for dim in (key_dim, key_dim, value_dim)]

        # A causal kernel does half of the products; pairs it cannot see do not count.
        pairs = sum(n * (n + 1) / 2 if causal else n * n for n in lengths) * heads
        moved = tokens * heads * leaves[0].element_size() * 2 * (key_dim + value_dim)
        case = case_of(
            "attention",
            f"{label} T {tokens}",
            setting,
            leaves,
            [setting.randn(tokens, heads, value_dim)],
            after=(segments,),
            options={"causal": causal, "scale": scale},
            forward=Work(moved, 2 * pairs * (key_dim + value_dim)),
            backward=Work(2 * moved, 2 * pairs * (3 * key_dim + 2 * value_dim)),
        )
        if "eager" in setting.against:
            case.sides["SDPA per document"] = sdpa(segments, causal, scale)
        yield case


def rope(setting: Setting) -> Iterator[Case]:
    """qkv split and 2-D RoPE."""
    tokens, heads, dim = setting.pick((70, 3, 72), (16384, 16, 72), (4096, 4, 24))
    angles = setting.rand(tokens, dim // 2)
    x = setting.leaf(tokens, 3, heads, dim)
    unit = tokens * heads * dim * x.element_size()
    yield case_of(
        "qkv_rope",
        f"T {tokens} H {heads} D {dim}",
        setting,
        [x],
        [setting.randn(tokens, heads, dim) for _ in range(3)],
        after=(torch.polar(torch.ones_like(angles), angles),),
        forward=Work(4.0 * unit),
        backward=Work(6.0 * unit),
    )


def decode(setting: Setting) -> Iterator[Case]:
    """One absorbed decode step over paged latents (forward only)."""
    batch, heads, length = setting.pick((3, 20, 300), (64, 32, 8192), (8, 4, 512))

    # The latents are shared by all heads: reading them is the floor.
    rank, width, page = (512, 576, 64) if setting.gpu else (32, 48, 16)
    count = -(-length // page)
    pages = setting.randn(batch * count, page, width)
    order = torch.randperm(batch * count, generator=setting.generator, device=setting.device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=setting.device)
    case = case_of(
        "mla_decode",
        f"B {batch} H {heads} length {length}",
        setting,
        [setting.randn(batch, heads, width), pages],
        [setting.randn(batch, heads, rank)],
        after=(order.int().view(batch, count), lengths, rank, width**-0.5),
        forward=Work(pages.numel() * pages.element_size(), 2.0 * batch * heads * length * (width + rank)),
    )
    if setting.gpu and "torch" in setting.against and case.law is not None:
        case.sides["gathered"] = case.law
    yield case


def moe(setting: Setting) -> Iterator[Case]:
    """Routed SwiGLU experts with uneven loads."""
    shape = setting.pick((120, 3, 8, 96, 64), (8192, 8, 256, 2304, 1024), (2048, 4, 16, 128, 64))
    tokens, choices, experts, hidden, width = shape

    # Real routers are uneven, and an even load would flatter grouped products.
    skew = torch.linspace(0, 2, experts, device=setting.device)
    scores = setting.randn(tokens, experts, dtype=torch.float32) + skew
    ids = scores.topk(choices, dim=1).indices
    leaves = [
        setting.leaf(tokens, hidden),
        ids,
        torch.full((tokens, choices), 1 / choices, device=setting.device).requires_grad_(),
        setting.leaf(experts, 2 * width, hidden, scale=hidden**-0.5),
        setting.leaf(experts, hidden, width, scale=width**-0.5),
    ]
    flops, size = 6.0 * tokens * choices * hidden * width, leaves[0].element_size()
    moved = size * (3.0 * experts * hidden * width + 2 * tokens * hidden)
    case = case_of(
        "moe_experts",
        f"T {tokens} top {choices} of {experts}, {hidden} x {width}",
        setting,
        leaves,
        [setting.randn(tokens, hidden)],
        forward=Work(moved, flops),
        backward=Work(2 * moved, 2 * flops),
    )
    if "eager" in setting.against and case.law is not None:
        case.sides["loop over experts"] = case.law
    yield case


def muon(setting: Setting) -> Iterator[Case]:
    """One Muon step (momentum, orthogonalisation, update) of a stack of expert matrices; the check looks at
    the orthogonalisation alone."""
    count, rows, columns = setting.pick((3, 128, 320), (128, 1024, 2304), (16, 64, 160))
    gradient = setting.randn(count, rows, columns, dtype=torch.float32)
    if setting.check:
        label, work = f"Newton-Schulz {count} x [{rows}, {columns}]", Work(8.0 * gradient.numel())
        yield case_of("newton_schulz", label, setting, [gradient], [gradient], forward=work, tolerance=0.1)
        return

    weight = setting.randn(count, rows, columns, dtype=torch.float32)
    momentum = torch.zeros_like(weight)
    short, long = min(rows, columns), max(rows, columns)

    def stacked(orthogonalise: Side, gradient: Tensor) -> Tensor:
        momentum.mul_(0.95).add_(gradient)
        return weight.add_(orthogonalise(gradient.add(momentum, alpha=0.95)), alpha=-1e-4 * 0.2 * long**0.5)

    sides: dict[str, Side] = {
        name: partial(stacked, op) for name, op in ours("newton_schulz", setting).items()
    }
    if "muon" in setting.against:
        # torch takes a list of matrices, one launch after the other.
        parameters = [torch.nn.Parameter(x.clone()) for x in weight]
        for parameter, slope in zip(parameters, gradient):
            parameter.grad = slope
        optimizer = torch.optim.Muon(parameters, lr=1e-4, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        sides["torch.optim.Muon"] = lambda gradient: optimizer.step()
    # Gram form with symmetric halves, five steps.
    work = Work(20.0 * gradient.numel(), count * (14.0 * short**3 + 6.0 * short**2 * long))
    yield Case(f"{count} x [{rows}, {columns}]", [gradient], [], sides, work)


CASES = {
    "kda": kda,
    "attnres": attnres,
    "loss": loss,
    "attention": attention,
    "rope": rope,
    "decode": decode,
    "moe": moe,
    "muon": muon,
}
"""Group -> its cases, made one at a time."""
