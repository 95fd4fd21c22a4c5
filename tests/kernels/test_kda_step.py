"""Decoding one token: the quick step against the definition, and the hand-over from a chunked prefill."""

import pytest
import torch
from kda_cases import cast, inputs

from earlyfusion.kernels.kda import chunk, naive, step

EXACT = 1e-12  # float64 on both sides
FP32 = 3e-6  # float32 against float64 over one token


def batch(sequences, regime, seed, **sizes):
    """One token of each of `sequences` sequences, with states: every document of the row has length 1."""
    return inputs((1,) * sequences, seed=seed, states=True, regime=regime, **sizes)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("regime", ["init", "bounded", "brutal"])
def test_one_step_matches_the_definition(regime, group, seed):
    _, tensors, bound = batch(5, regime, seed, group=group, key_dim=16, value_dim=7)
    before = tensors[7].detach().clone()
    with torch.no_grad():
        expected = naive.kda_step(*tensors, lower_bound=bound)
    for ours, law in zip(step.kda_step(*tensors, lower_bound=bound), expected):
        torch.testing.assert_close(ours, law, rtol=0, atol=EXACT)
    for ours, law in zip(step.kda_step(*cast(tensors, torch.float32), lower_bound=bound), expected):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), law, rtol=FP32, atol=FP32)
    assert torch.equal(tensors[7], before), "the caller's state must stay as it was"


def test_the_output_follows_the_value_dtype_and_the_state_stays_float32():
    _, tensors, bound = batch(2, "bounded", 0)
    half = [x.to(torch.bfloat16) for x in tensors[:5]] + [x.float() for x in tensors[5:]]
    o, state = step.kda_step(*half, lower_bound=bound)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("op", [naive.kda_step, step.kda_step])
def test_autocast_does_not_touch_the_recurrence(op):
    _, tensors, bound = batch(3, "bounded", 1, key_dim=16)
    tensors = [x.detach().float() for x in tensors]
    plain = op(*tensors, lower_bound=bound)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = op(*tensors, lower_bound=bound)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside))


@pytest.mark.parametrize("regime", ["init", "bounded"])
@pytest.mark.parametrize("prefill", [1, 15, 32, 50])
def test_chunked_prefill_then_steps_equals_the_whole_row(prefill, regime):
    steps = 6
    segments, tensors, bound = inputs((prefill + steps,) * 2, seed=3, group=2, regime=regime)
    q, k, v, f, b, A_log, dt_bias = (x.detach() for x in tensors)
    whole, _ = naive.kda(q, k, v, f, b, A_log, dt_bias, segments, lower_bound=bound)
    documents = [x.view(2, prefill + steps, *x.shape[1:]) for x in (q, k, v, f, b)]
    head = [x[:, :prefill].flatten(0, 1) for x in documents]
    prefill_segments = type(segments)((prefill,) * 2)
    _, state = chunk.kda(*head, A_log, dt_bias, prefill_segments, lower_bound=bound, output_final_state=True)
    whole = whole.view(2, prefill + steps, *whole.shape[1:])
    for t in range(prefill, prefill + steps):
        o, state = step.kda_step(*(x[:, t] for x in documents), A_log, dt_bias, state, bound)
        torch.testing.assert_close(o, whole[:, t], rtol=0, atol=1e-11)
