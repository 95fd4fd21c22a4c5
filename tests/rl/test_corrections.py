"""Weights for the engine's gap, and masks for stale tokens, against plain loops and exact expectations."""

import itertools
import math

import pytest
import torch

from earlyfusion.kernels.segments import Segments
from earlyfusion.rl.objectives.losses import CorrectionConfig, StaleConfig, fresh, importance_weights

EXACT = 1e-12  # float64
LENGTHS = (3, 1, 6, 4)
SEGMENTS = Segments(LENGTHS)
MODES = ("tis", "mis", "reject")
LEVELS = ("token", "sequence", "geometric")


def logs(seed):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(14, generator=g, dtype=torch.float64)
    return (
        old,
        old + 0.4 * torch.randn(14, generator=g, dtype=torch.float64),
        torch.rand(14, generator=g) > 0.2,
    )


def by_loop(cfg, log, mask):
    """Weights in plain Python."""
    weights, start = [], 0
    for length in LENGTHS:
        span = range(start, start + length)
        kept = [log[t] for t in span if mask[t]]
        whole = {"sequence": sum(kept), "geometric": sum(kept) / max(1, len(kept))}
        k3 = sum(math.exp(l) - 1 - l for l in kept) / max(1, len(kept))
        for t in span:
            w = math.exp(log[t] if cfg.level == "token" else whole[cfg.level])
            inside = cfg.low <= w <= cfg.high
            w = {"tis": min(w, cfg.high), "mis": w * inside, "reject": float(inside)}[cfg.mode]
            if cfg.max_k3 is not None and k3 > cfg.max_k3:
                w = 0.0
            weights.append(w if mask[t] else 0.0)
        start += length
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode,level", itertools.product(MODES, LEVELS))
def test_weights_equal_the_definition(mode, level, seed):
    old, sampler, mask = logs(seed)
    for extra in ({}, {"max_k3": 0.05}):
        cfg = CorrectionConfig(mode=mode, level=level, low=0.8, high=1.3, **extra)
        got, touched = importance_weights(cfg, old, sampler, SEGMENTS, mask)
        expected = by_loop(cfg, (old - sampler).tolist(), mask.tolist())
        torch.testing.assert_close(got, expected, atol=EXACT, rtol=EXACT)
        cut = {"tis": expected == 1.3, "mis": expected == 0, "reject": expected == 0}[mode]
        assert int(touched) >= int((cut & mask).sum()) and not got.requires_grad


def test_long_answers_neither_overflow_nor_mask_by_their_length_alone():
    """A constant gap of 0.02 nats a token over 100,000 tokens: the product is e^2000, the geometric mean
    1.02."""
    segments, gap = Segments((100_000,)), torch.full((100_000,), 0.02)
    everything = torch.ones_like(gap, dtype=torch.bool)
    for mode, level, weight in (
        ("tis", "sequence", 2.0),
        ("mis", "sequence", 0.0),
        ("mis", "geometric", 1.02),
    ):
        options = CorrectionConfig(mode=mode, level=level)
        got, _ = importance_weights(options, gap, torch.zeros_like(gap), segments, everything)
        torch.testing.assert_close(got, torch.full_like(gap, weight), rtol=1e-3, atol=0)


def test_poison_outside_the_mask_stays_outside():
    old, sampler, _ = logs(3)
    mask = torch.ones(14, dtype=torch.bool)
    mask[[1, 5]] = False
    poisoned = old.clone(), sampler.clone()
    poisoned[0][[1, 5]], poisoned[1][1] = float("nan"), float("inf")
    for level in LEVELS:
        options = CorrectionConfig(mode="tis", level=level)
        before = importance_weights(options, old, sampler, SEGMENTS, mask)
        after = importance_weights(options, *poisoned, SEGMENTS, mask)
        assert all(torch.equal(a, b) for a, b in zip(after, before))


def test_stale_segments_of_a_partial_rollout_leave_the_loss():
    versions = torch.tensor([5, 5, 6, 6, 3, 4, 5, 6, 6, 6, 4, 4, 4, 4])
    age = 6 - versions
    for lag in (0, 1, 2, 3):
        assert torch.equal(fresh(StaleConfig(max_lag=lag), versions, 6), age <= lag)
    assert fresh(StaleConfig(), versions, 6).all()
