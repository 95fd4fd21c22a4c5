"""AttnRes and loss cases: a whole residual path with every sub-layer's output given, and the loss head.

The path of a model with N blocks of S sub-layers: per block one phase 1 over the finished sources, then
between two sub-layers sum, merge and pre-norm. Outputs are the inputs every sub-layer sees. Sides: ours (two
fused operations), the torch form of the same schedule, eager (stack, norm, softmax, sum per sub-layer, as the
paper's listing), fla.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.attnres import fused
from earlyfusion.kernels.dispatch import REGISTRY, load
from earlyfusion.pipeline.bench.kernels.case import Case, Setting, Side, leaf, ours
from earlyfusion.pipeline.bench.timing import Work

EPS = 1e-5
# label, blocks, sub-layers a block, hidden, tokens
PATHS = (
    ("48B, 54 sub-layers, d 2304", 9, 6, 2304, 8192),
    ("32 layers, d 4096", 8, 8, 4096, 4096),
    ("K3, 186 sub-layers, d 7168", 8, 24, 7168, 1024),
)
CPU_PATHS = (("12 sub-layers, d 256", 2, 6, 256, 2048),)
CHECK_PATH = ("12 sub-layers, d 2304", 2, 6, 2304, 37)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return (
        F.rms_norm(x.float(), weight.shape, weight, EPS).to(x.dtype)
        if x.dtype != torch.float64
        else F.rms_norm(x, weight.shape, weight, EPS)
    )


def two_phase(open_block: Side, step: Side, blocks: int, size: int) -> Side:
    """The schedule with our two operations."""

    def run(embedding: Tensor, outs_LTD: Tensor, qw_LD: Tensor, norms_LD: Tensor) -> tuple[Tensor, ...]:
        sources, outs, seen = (embedding,), outs_LTD.unbind(), []
        queries, norms = qw_LD.unbind(), norms_LD.unbind()
        for block in range(blocks):
            first = block * size
            o, lse, sources = open_block(sources, qw_LD[first : first + size], EPS)
            seen.append(_norm(o[0], norms[first]))
            partial_TD = outs[first]
            for s in range(1, size):
                out = outs[first + s - 1] if s > 1 else None
                partial_TD, x = step(
                    o[s], lse[s], partial_TD, out, queries[first + s], norms[first + s], EPS, EPS
                )
                seen.append(x)
            sources = (*sources, partial_TD + outs[first + size - 1] if size > 1 else partial_TD)
        return (*seen, sources[-1])

    return run


def one_phase(mix: Side, blocks: int, size: int) -> Side:
    """Every sub-layer mixes all its sources by itself: ``mix(sources, qw, norm) -> x``."""

    def run(embedding: Tensor, outs_LTD: Tensor, qw_LD: Tensor, norms_LD: Tensor) -> tuple[Tensor, ...]:
        sources, outs, seen = [embedding], outs_LTD.unbind(), []
        queries, norms = qw_LD.unbind(), norms_LD.unbind()
        for block in range(blocks):
            summed: Tensor | None = None
            for s in range(size):
                index = block * size + s
                every = sources if summed is None else [*sources, summed]
                seen.append(mix(every, queries[index], norms[index]))
                summed = outs[index] if summed is None else summed + outs[index]
            assert summed is not None
            sources = [*sources, summed]
        return (*seen, sources[-1])

    return run


def _eager(sources: list[Tensor], qw_D: Tensor, norm_D: Tensor) -> Tensor:
    stacked = torch.stack(sources)
    keys = F.rms_norm(stacked, (stacked.shape[-1],), None, EPS)
    weights = torch.einsum("d,ntd->nt", qw_D.to(keys.dtype), keys).softmax(0)
    return F.rms_norm(torch.einsum("nt,ntd->td", weights, stacked), norm_D.shape, norm_D.to(keys.dtype), EPS)


def _fla(ones_D: Tensor) -> Side:
    """fla's mixture of one sub-layer; its query and weight come in the sources' dtype (`Case.leaves_of`)."""
    from fla.ops.attnres import fused_attnres

    def mix(sources: list[Tensor], qw_D: Tensor, norm_D: Tensor) -> Tensor:
        if len(sources) == 1:
            return F.rms_norm(sources[0], norm_D.shape, norm_D, EPS)
        return fused_attnres(qw_D, sources, ones_D, norm_D, rms_eps=EPS, checkpoint_level=0)

    return mix


def path_work(blocks: int, size: int, tokens: int, hidden: int, itemsize: int) -> tuple[Work, Work]:
    """Least traffic of the two-phase schedule: per block n + S units for phase 1, 6 per sub-layer around it;
    backward 3 n + S and 6. A unit is one [T, D]."""
    unit = tokens * hidden * itemsize
    forward = sum((block + 1) + size + 5 * (size - 1) + 2 for block in range(blocks))
    backward = sum(3 * (block + 1) + size + 6 * (size - 1) + 3 for block in range(blocks))
    return Work(forward * unit, 0.0), Work(backward * unit, 0.0)


def path_case(label: str, blocks: int, size: int, hidden: int, tokens: int, setting: Setting) -> Case:
    """The residual path of one model."""
    count = blocks * size
    leaves = [
        leaf(setting.randn(tokens, hidden)),
        leaf(setting.randn(count, tokens, hidden)),
        leaf(setting.randn(count, hidden, scale=hidden**-0.5, dtype=torch.float32)),
        leaf(1 + setting.randn(count, hidden, scale=0.1, dtype=torch.float32)),
    ]
    opens, steps = ours("attnres_open", setting), ours("attnres_step", setting)
    sides = {name: two_phase(opens[name], steps[name], blocks, size) for name in opens}
    skipped, leaves_of = {}, {}
    if "eager" in setting.against:
        sides["eager"] = one_phase(_eager, blocks, size)
    if setting.gpu and "fla" in setting.against:
        if find_spec("fla") is None:
            skipped["fla"] = "not installed: pip install fla-core==0.6.0"
        else:
            ones_D = torch.ones(hidden, dtype=setting.dtype, device=setting.device)
            sides["fla"] = one_phase(_fla(ones_D), blocks, size)
            leaves_of["fla"] = [leaf(x.to(setting.dtype)) for x in leaves]
    forward, backward = path_work(blocks, size, tokens, hidden, leaves[0].element_size())
    cotangent = setting.randn(tokens, hidden)
    return Case(
        "attnres",
        f"{label}, T {tokens}",
        leaves,
        [cotangent] * (count + 1),
        sides,
        forward,
        backward,
        law=two_phase(fused.open_block_naive, fused.step_naive, blocks, size),
        tolerance=0.03 if setting.dtype == torch.bfloat16 else 1e-4,
        skipped=skipped,
        leaves_of=leaves_of,
    )


def _in_full(h: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    nll = F.cross_entropy(F.linear(h, weight).float(), labels, reduction="none")
    return (nll * weights).sum()


def loss_case(tokens: int, hidden: int, vocabulary: int, setting: Setting) -> Case:
    """The loss head: hidden states to the summed loss."""
    labels = torch.randint(0, vocabulary, (tokens,), generator=setting.generator, device=setting.device)
    weights = torch.ones(tokens, device=setting.device)
    leaves = [
        leaf(setting.randn(tokens, hidden)),
        leaf(setting.randn(vocabulary, hidden, scale=hidden**-0.5)),
        labels,
        weights,
    ]
    sides: dict[str, Side] = {
        name: (lambda *x, op=op: op(*x)[0]) for name, op in ours("linear_cross_entropy", setting).items()
    }
    skipped = {}
    if "eager" in setting.against:
        sides["logits in full"] = _in_full
    if setting.gpu and "liger" in setting.against:
        if find_spec("liger_kernel") is None:
            skipped["liger"] = "not installed: pip install liger-kernel"
        else:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
            sides["liger"] = lambda h, weight, labels, weights: liger(weight, h, labels)
    flops, size = 2.0 * tokens * hidden * vocabulary, leaves[0].element_size()
    once = size * hidden * (tokens + vocabulary)
    return Case(
        "loss",
        f"T {tokens} d {hidden} vocabulary {vocabulary}",
        leaves,
        [torch.ones((), device=setting.device)],
        sides,
        Work(once, flops),
        Work(2 * once, 2 * flops),
        law=lambda *x: load(REGISTRY["linear_cross_entropy"]["naive"])(*x)[0],
        tolerance=0.03 if setting.dtype == torch.bfloat16 else 1e-4,
        skipped=skipped,
    )


def cases(setting: Setting, quick: bool) -> Iterator[partial[Case]]:
    """AttnRes and loss cases of this device."""
    if setting.check:
        yield partial(path_case, *CHECK_PATH, setting)
        yield partial(loss_case, 200, 256, 5000, setting)
        return
    paths = PATHS if setting.gpu else CPU_PATHS
    for path in paths[:1] if quick else paths:
        yield partial(path_case, *path, setting)
    yield partial(loss_case, *((8192, 2304, 163840) if setting.gpu else (2048, 128, 8192)), setting)
