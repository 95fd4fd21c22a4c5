"""Multi-head latent attention: the maximum logit that QK-Clip reads, and the parts only K3 has."""

import pytest
import torch

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.mixers import MultiHeadLatentAttention
from tests.model.tiny import tiny_text


def layer(seed: int = 0, **overrides) -> MultiHeadLatentAttention:
    torch.manual_seed(seed)
    return MultiHeadLatentAttention(tiny_text(**overrides))


def logits_by_hand(mla, x, segments):
    """Scaled, masked logits [H, T, T] with expanded keys."""
    q = (mla.q_b_proj(mla.q_a_layernorm(mla.q_a_proj(x))) if mla.low_rank_query else mla.q_proj(x)).view(
        -1, 3, 12
    )
    latent, shared = mla.kv_a_proj_with_mqa(x).split([12, 4], -1)
    up = mla.kv_b_proj(mla.kv_a_layernorm(latent)).view(-1, 3, 18)
    k = torch.cat([up[..., :8], shared[:, None].expand(-1, 3, -1)], -1)
    ids = segments.ids()
    hidden = (ids[:, None] != ids[None]) | torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    return (torch.einsum("ihd,jhd->hij", q, k) * 12**-0.5).masked_fill(hidden, float("-inf")), up[..., 8:]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("gate", [False, True])
def test_layer_equals_its_equations(seed, gate):
    mla = layer(seed, q_lora_rank=8 if gate else None, mla_output_gate=gate).double()
    x, segments = torch.randn(20, 24, dtype=torch.float64), Segments((7, 13))
    logits, v = logits_by_hand(mla, x, segments)
    o = torch.einsum("hij,jhv->ihv", logits.softmax(-1), v).flatten(1)
    if gate:
        o = o * mla.g_proj(x).sigmoid()
    torch.testing.assert_close(mla(x, segments), mla.o_proj(o), atol=1e-10, rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_max_logit_is_exact_above_tau_and_a_harmless_bound_below(seed):
    mla = layer(seed)
    segments = Segments((7, 13))
    with torch.no_grad():
        mla.q_proj.weight.view(3, 12, 24)[1] *= 40.0
    batches = [torch.randn(20, 24) * 3 for _ in range(3)]
    exact = torch.stack([logits_by_hand(mla, x, segments)[0].amax((1, 2)) for x in batches]).amax(0)
    mla.qk_clip_tau = exact.sort()[0][-2:].mean().item()  # between the blown-up head and the others
    for x in batches:
        mla(x, segments)
    assert mla.max_logit[1].item() == pytest.approx(exact[1].item(), rel=1e-5)
    for head in (0, 2):
        assert exact[head] - 1e-4 <= mla.max_logit[head] <= mla.qk_clip_tau
    mla.reset_max_logit()
    assert torch.isinf(mla.max_logit).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_filler_does_not_enter_the_maximum(seed):
    """Filler far larger than the documents: with it every head would be clipped, without it the documents'
    own maximum stands, exact or as a bound. (Sums of 26 rows may differ from those of 20 in the last bits.)
    """
    mla, documents = layer(seed), Segments((7, 13))
    x = torch.randn(26, 24)
    x[20:] *= 1e3
    counted = torch.arange(26) < 20
    for tau in (1e-3, 1e6):
        mla.qk_clip_tau = tau
        mla(x[:20], documents)
        alone = mla.max_logit.clone()
        mla.reset_max_logit()
        mla(x, Segments((7, 13, 6)), counted_T=counted)
        torch.testing.assert_close(mla.max_logit, alone, rtol=1e-5, atol=0)
        mla.reset_max_logit()
        mla(x, Segments((7, 13, 6)))
        assert (mla.max_logit > alone).all()
        mla.reset_max_logit()


def test_max_logit_rests_outside_training():
    mla = layer()
    x, segments = torch.randn(5, 24), Segments((5,))
    for training, tracked, grad in ((True, True, False), (False, True, True), (True, False, True)):
        mla.train(training).track_max_logit = tracked
        with torch.set_grad_enabled(grad):
            mla(x, segments)
    assert torch.isinf(mla.max_logit).all() and "max_logit" not in mla.state_dict()
