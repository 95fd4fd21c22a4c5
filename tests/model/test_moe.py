"""Router and experts: what is chosen, what it weighs, and that both balancing rules level the load."""

import pytest
import torch

from earlyfusion.model.layers import (
    MixtureOfExperts,
    moe_layers,
    update_router_biases,
)
from tests.model.tiny import build, text_documents, tiny_fusion, tiny_text


def layer(seed: int = 0, **overrides) -> MixtureOfExperts:
    torch.manual_seed(seed)
    return MixtureOfExperts(tiny_text(**overrides))


def test_the_weight_of_a_single_expert_is_its_score_so_that_the_router_learns():
    """Several are renormalised, as transformers does (test_hf_parity.py): one would always weigh 1."""
    moe = layer(num_experts_per_token=1)
    ids, weights, scores = moe.gate(torch.randn(13, 24))
    torch.testing.assert_close(weights, scores.gather(1, ids) * moe.gate.scaling)
    weights.sum().backward()
    assert moe.gate.weight.grad.abs().max() > 1e-3


def test_router_is_fp32_under_autocast_and_its_bias_survives_a_cast():
    moe = layer()
    moe.gate.e_score_correction_bias.fill_(0.1234567)
    with torch.autocast("cpu", torch.bfloat16):
        _, weights, scores = moe.gate(torch.randn(5, 24).bfloat16())
    assert weights.dtype == scores.dtype == torch.float32
    moe.to(torch.bfloat16)
    assert moe.gate.weight.dtype == torch.bfloat16
    assert moe.gate.e_score_correction_bias.dtype == moe.load.dtype == torch.float32
    torch.testing.assert_close(moe.double().gate.e_score_correction_bias, torch.full((6,), 0.1234567))


def test_load_counts_training_tokens_that_count():
    moe = layer()
    x = torch.randn(40, 24)
    counted = torch.arange(40) < 30
    ids = moe.gate(x)[0]
    moe(x, counted)
    assert torch.equal(moe.load, torch.bincount(ids[:30].flatten(), minlength=6).float())
    with torch.no_grad():
        moe(x)
    moe.eval()(x)
    assert moe.load.sum() == 60


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_the_sign_rule_moves_towards_the_mean_and_a_step_without_tokens_leaves_the_bias(rule):
    moe = layer(router_balance=rule, router_bias_update_rate=0.01)
    bias = moe.gate.e_score_correction_bias
    before = bias.normal_().clone()
    update_router_biases(moe)
    assert torch.equal(bias, before)
    if rule == "sign":
        moe.load.copy_(torch.tensor([10.0, 0.0, 5.0, 5.0, 8.0, 2.0]))
        update_router_biases(moe)
        moved = torch.tensor([-0.01, 0.01, 0.0, 0.0, -0.01, 0.01])
        torch.testing.assert_close(bias, before + moved)
        assert not moe.load.any()


def test_quantile_rule_equals_its_definition():
    moe = layer(router_balance="quantile", initializer_range=0.5)
    moe.gate.e_score_correction_bias.normal_(0, 0.2)
    bias = moe.gate.e_score_correction_bias.clone()
    x = torch.randn(4000, 24)
    for part in x.split(1000):  # micro-batches of one optimizer step
        moe(part)
    scores = moe.gate(x)[2].detach()
    alpha = torch.sort(scores + bias, descending=True)[0][:, moe.gate.top_k]
    expected = torch.quantile(alpha[:, None] - scores, moe.gate.top_k / 6, dim=0)
    update_router_biases(moe)
    torch.testing.assert_close(
        moe.gate.e_score_correction_bias, expected - expected.mean(), atol=0.003, rtol=0
    )
    assert not moe.histogram.any() and not moe.load.any()


@pytest.mark.parametrize("rule", ["sign", "quantile", "none"])
def test_all_layers_update_with_one_reduction(rule):
    config = tiny_fusion(router_balance=rule)
    halves = [text_documents([60], config, 1), text_documents([45, 10], config, 2)]
    whole, here, there = (build(config) for _ in range(3))
    for model, parts in ((whole, halves), (here, halves[:1]), (there, halves[1:])):
        for part in parts:
            model(part)
    calls = []

    def add_the_other_rank(flat):
        buffers = [b for moe in moe_layers(there) for b in (moe.load, moe.histogram) if b is not None]
        calls.append(flat.numel())
        return flat + torch.cat([b.flatten() for b in buffers])

    metrics, reduced = update_router_biases(whole), update_router_biases(here, add_the_other_rank)
    assert len(calls) == 1
    for a, b in zip(moe_layers(whole), moe_layers(here)):
        assert torch.equal(a.gate.e_score_correction_bias, b.gate.e_score_correction_bias)
    share = metrics["load_share"]
    assert torch.equal(share, reduced["load_share"])
    torch.testing.assert_close(share.sum(1), torch.ones(3))
    torch.testing.assert_close(metrics["max_violation"], (share * 6 - 1).abs().amax(1))


def test_padding_is_not_counted_by_the_model():
    config = tiny_fusion()
    model = build(config)
    batch = text_documents([20, 12], config)
    batch.ids[20:] = config.text.pad_token_id
    model(batch)
    assert all(moe.load.sum() == 20 * 2 for moe in moe_layers(model))
    assert update_router_biases(build(tiny_fusion(num_experts=0))) == {}
