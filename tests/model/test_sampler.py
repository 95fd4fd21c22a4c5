"""The sampler: noise that is a function of the request alone, and distributions that are what they claim to
be."""

import math
from dataclasses import replace

import pytest
import torch

from earlyfusion.model.engine.requests import Controls, Needs, choose, gumbel, sequence_key

pytestmark = pytest.mark.usefixtures("way")
NOTHING = torch.zeros(0, dtype=torch.long)


def controls(keys, positions=0, temperature=1.0, top_p=1.0, min_p=0.0, logprobs=True) -> Controls:
    keys = torch.as_tensor(keys, dtype=torch.long)
    fill = lambda value: torch.full(keys.shape, float(value))
    positions = torch.as_tensor(positions, dtype=torch.long).expand(keys.shape)
    needs = Needs(temperature > 0, top_p < 1, min_p > 0, logprobs)
    return Controls(keys, positions, fill(temperature), fill(top_p), fill(min_p), needs)


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([sequence_key(seed, f"request {i}", i % 3) for i in range(count)])


def test_noise_is_gumbel():
    """Mean, variance and tails of 800,000 numbers; the standard error of the mean is 0.0015."""
    noise = gumbel(keys(400), torch.zeros(400, dtype=torch.long), 2000).double()
    assert abs(noise.mean().item() - 0.57722) < 0.006
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    cumulative = torch.exp(-torch.exp(-noise)).flatten().sort().values
    steps = (torch.arange(cumulative.numel()) + 0.5) / cumulative.numel()
    # Kolmogorov-Smirnov, p about 1e-4
    assert (cumulative - steps).abs().max() < 2.2 / math.sqrt(cumulative.numel())
    assert noise.max() > 11 and torch.isfinite(noise).all()


def test_neighbouring_keys_positions_and_tokens_are_uncorrelated():
    key = keys(1).expand(512)
    by_position = gumbel(key, torch.arange(512), 512).double()
    by_key = gumbel(key + torch.arange(512), torch.zeros(512, dtype=torch.long), 512).double()
    for table in (by_position, by_key):
        table = table - table.mean()
        scale = table.square().mean()
        for shifted in (table.roll(1, 0), table.roll(1, 1), table.roll(2, 0), table.roll((1, -1), (0, 1))):
            # 262,144 products: the standard error of a correlation is 0.002
            assert abs((table * shifted).mean() / scale) < 0.01


@pytest.mark.parametrize(
    ("temperature", "top_p", "min_p"), [(1.0, 1.0, 0.0), (0.5, 1.0, 0.0), (1.3, 0.8, 0.0), (1.0, 0.9, 0.2)]
)
def test_draws_follow_the_distribution_whose_logprobs_are_returned(temperature, top_p, min_p):
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, -3.0, 0.0, 1.5, -1.0])
    count = 20000
    chosen = choose(logits.expand(count, -1), controls(keys(count), 0, temperature, top_p, min_p), NOTHING)
    p = (logits / temperature).double().softmax(-1)
    order = p.sort(descending=True)
    kept = torch.zeros(8, dtype=torch.bool)
    kept[order.indices[(order.values.cumsum(0) - order.values) < top_p]] = True
    kept &= p >= min_p * p.max()
    expected = torch.where(kept, p, 0.0) / p[kept].sum()
    shares = torch.bincount(chosen[0].long(), minlength=8) / count
    assert (shares[~kept] == 0).all()
    assert (shares - expected).abs().max() < 0.016  # 4.5 standard errors of a share of 20,000 draws
    torch.testing.assert_close(chosen[1], expected.log()[chosen[0].long()], atol=1e-6, rtol=0)
    plain = logits.double().log_softmax(-1)[chosen[0].long()]
    torch.testing.assert_close(chosen[2], plain, atol=1e-6, rtol=0)


def test_greedy_rows_and_drawn_rows_share_a_batch():
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    mixed = replace(controls(keys(6)), temperature_B=torch.tensor([0.0, 1, 0, 1, 0, 1]))
    chosen = choose(logits, mixed, NOTHING)
    drawn = choose(logits, controls(keys(6)), NOTHING)
    assert torch.equal(chosen[0, ::2], logits[::2].argmax(-1).double())
    assert (chosen[1, ::2] == 0).all()
    assert torch.equal(chosen[:, 1::2], drawn[:, 1::2])
    cold = choose(logits, controls(keys(6), 0, 1e-4), NOTHING)
    assert torch.equal(cold[0], logits.argmax(-1).double())


def test_banned_tokens_are_never_drawn_and_probabilities_are_renormalised():
    logits = torch.zeros(3000, 4)
    logits[:, 2] = 50.0
    chosen = choose(logits, controls(keys(3000)), torch.tensor([2]))
    assert set(chosen[0].long().tolist()) == {0, 1, 3}
    torch.testing.assert_close(
        chosen[1], torch.full((3000,), math.log(1 / 3), dtype=torch.float64), atol=1e-6, rtol=0
    )
    mask = torch.zeros(3000, 4, dtype=torch.bool)
    mask[::2, 2] = True
    chosen = choose(logits, controls(keys(3000)), mask)
    assert (chosen[0, 1::2] == 2).all() and (chosen[0, ::2] != 2).all()
