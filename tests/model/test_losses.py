"""What the model reports of its labels (loss, z-loss, log-probabilities, entropy) against full logits in
float64."""

from __future__ import annotations

import pytest
import torch

from tests.model.tiny import build, close, document, gradients, pack, tiny_fusion

EXACT = dict(atol=1e-10, rtol=1e-10)  # float64; sums in another order


def case(seed):
    config = tiny_fusion(attn_res="block", attn_res_block_size=2)
    batch = pack(
        [
            document(12, [(1, 4, 4)], config, seed),
            document(1, [], config, 8),
            document(9, [], config, seed + 1),
        ]
    )
    batch.loss_weights[3] = 0.0
    model = build(config, seed, torch.float64).train()
    return model, batch, model.logits(model.hidden(batch))


def gradients_of(model, scalar):
    scalar.backward()
    return gradients(model)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_is_the_weighted_sum_over_labelled_tokens(seed):
    model, batch, logits = case(seed)
    counted = (batch.labels >= 0) & (batch.loss_weights != 0)
    nll = torch.nn.functional.cross_entropy(logits[counted], batch.labels[counted], reduction="none")
    expected = (batch.loss_weights.double()[counted] * nll).sum()
    want = gradients_of(model, expected)
    out = model(batch)
    torch.testing.assert_close(out.loss_sum, expected, **EXACT)
    torch.testing.assert_close(out.nll_T[counted], nll, **EXACT)
    got = gradients_of(model, out.loss_sum)
    close(got, want, 1e-9, 1e-8)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("seed", [0, 1])
def test_log_probs_and_entropy_are_those_of_the_tempered_logits(seed, temperature):
    model, batch, logits = case(seed)
    labelled = batch.labels >= 0
    logp = torch.log_softmax(logits[labelled] / temperature, -1)
    picked = logp.gather(1, batch.labels[labelled][:, None])[:, 0]
    upstream = torch.randn(picked.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    want = gradients_of(model, (upstream * picked).sum())
    got_T, entropy_T = model.token_log_probs(batch, temperature)
    torch.testing.assert_close(got_T[labelled], picked, **EXACT)
    torch.testing.assert_close(entropy_T[labelled], -(logp.exp() * logp).sum(-1), **EXACT)
    assert not got_T[~labelled].any() and not entropy_T[~labelled].any() and not entropy_T.requires_grad
    got = gradients_of(model, (upstream * got_T[labelled]).sum())
    close(got, want, 1e-9, 1e-8)
