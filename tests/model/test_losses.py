"""What the model reports of its labels (loss, z-loss, log-probabilities, entropy) against full logits in
float64."""

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


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_log_probs_and_entropy_are_those_of_the_logits(seed, temperature):
    """The loss weighted, at temperature 1; one upstream gradient through all of them."""
    model, batch, logits = case(seed)
    labelled = batch.labels >= 0
    given, labels, weights = logits[labelled], batch.labels[labelled], batch.loss_weights.double()[labelled]
    nll = torch.nn.functional.cross_entropy(given, labels, reduction="none")
    logp = torch.log_softmax(given / temperature, -1)
    picked = logp.gather(1, labels[:, None])[:, 0]
    upstream = torch.randn(picked.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ((upstream * picked).sum() + (weights * nll).sum()).backward()
    want = gradients(model)
    out, (got_T, entropy_T) = model(batch), model.token_log_probs(batch, temperature)
    torch.testing.assert_close(out.loss_sum, (weights * nll).sum(), **EXACT)
    torch.testing.assert_close(out.nll_T[labelled], nll * (weights != 0), **EXACT)
    torch.testing.assert_close(got_T[labelled], picked, **EXACT)
    torch.testing.assert_close(entropy_T[labelled], -(logp.exp() * logp).sum(-1), **EXACT)
    assert not got_T[~labelled].any() and not entropy_T[~labelled].any() and not entropy_T.requires_grad
    ((upstream * got_T[labelled]).sum() + out.loss_sum).backward()
    close(gradients(model), want, 1e-9, 1e-8)
