"""Decoding one token: the quick step against the definition, and the hand-over from a chunked prefill."""

import pytest
import torch
from kda_cases import cast, halves, inputs

from earlyfusion.kernels.kda import decode, naive

# Float64 on both sides; float32 against float64 over one token.
EXACT, FP32 = 1e-12, 3e-6


def batch(sequences, regime, seed, **sizes):
    """One token of each of `sequences` sequences, with states: every document of the row has length 1."""
    _, tensors, bound = inputs((1,) * sequences, seed=seed, states=True, regime=regime, **sizes)
    return [x.detach() for x in tensors], bound


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("regime", ["init", "bounded", "brutal"])
def test_one_step_matches_the_definition(regime, group, seed):
    tensors, bound = batch(5, regime, seed, group=group, key_dim=16, value_dim=7)
    before = tensors[7].clone()
    law = naive.kda_step(*tensors, lower_bound=bound)
    single = decode.kda_step(*cast(tensors, torch.float32), lower_bound=bound)
    for ours, rounded, want in zip(decode.kda_step(*tensors, lower_bound=bound), single, law):
        torch.testing.assert_close(ours, want, rtol=0, atol=EXACT)
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded.double(), want, rtol=FP32, atol=FP32)
    assert torch.equal(tensors[7], before), "the caller's state must stay as it was"


@pytest.mark.parametrize("op", [naive.kda_step, decode.kda_step])
def test_neither_half_precision_nor_autocast_touches_the_state(op):
    tensors, bound = batch(3, "bounded", 1, key_dim=16)
    half = halves(tensors)
    plain = op(*half, lower_bound=bound)
    assert [x.dtype for x in plain] == [torch.bfloat16, torch.float32]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(plain, op(*half, lower_bound=bound)))
