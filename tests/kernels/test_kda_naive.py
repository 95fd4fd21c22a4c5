"""The definition of KDA against fla's own (transformers': tests/model/test_hf_parity.py)."""

import warnings

import pytest
import torch
from kda_cases import REGIMES, call, cast, gate_inputs, inputs

from earlyfusion.kernels.kda import naive

# Both sides run the same recurrence in float32, outputs of order 1.
FP32_ATOL = 3e-6
LENGTHS = (37, 1, 20)


def fla_modules():
    with warnings.catch_warnings():
        # fla warns on every machine without a GPU.
        warnings.simplefilter("ignore")
        try:
            from fla.ops.kda import gate as fla_gate
            from fla.ops.kda import naive as fla_naive
        except Exception as error:
            pytest.skip(f"fla-core (with triton) cannot be imported here: {error}")
    return fla_naive, fla_gate


def per_document(tensors, segments, lower_bound, op):
    """Outputs and final states of an oracle that knows one document at a time and takes processed gates."""
    q, k, v, f, b, A_log, dt_bias, state = tensors
    g = naive.log_decay(f, A_log, dt_bias, lower_bound)
    outputs, states = [], []
    for n, (start, length) in enumerate(zip(segments.offsets, segments.lengths)):
        q1, k1, v1, g1, b1 = (x[None, start : start + length] for x in (q, k, v, g, b.sigmoid()))
        o, final = op(q1, k1, v1, g1, b1, state[n : n + 1])
        outputs.append(o[0])
        states.append(final)
    return torch.cat(outputs), torch.cat(states)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("regime", ["init", "bounded", "strong"])
def test_the_definition_matches_fla(regime, seed):
    fla_naive, _ = fla_modules()
    segments, tensors, bound = inputs(LENGTHS, seed=seed, group=2, states=True, regime=regime)
    tensors = cast(tensors, torch.float32)

    def op(q, k, v, g, beta, state):
        q, k = naive.l2_normalize(q), naive.l2_normalize(k)
        return fla_naive.naive_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)

    o, final = call(naive.kda, tensors, segments, bound)
    fla_o, fla_final = per_document(tensors, segments, bound, op)
    torch.testing.assert_close(o, fla_o, rtol=0, atol=FP32_ATOL)
    torch.testing.assert_close(final, fla_final, rtol=0, atol=FP32_ATOL)


@pytest.mark.parametrize("regime", REGIMES)
def test_both_gates_match_fla(regime):
    _, fla_gate = fla_modules()
    f, A_log, dt_bias, bound = gate_inputs(regime, 33, 3, 8, torch.Generator().manual_seed(0))
    if bound is None:
        expected = fla_gate.naive_kda_gate(f, A_log, dt_bias.flatten())
    else:
        expected = fla_gate.naive_kda_lowerbound_gate(f, A_log, dt_bias.flatten(), lower_bound=bound)
    torch.testing.assert_close(naive.log_decay(f, A_log, dt_bias, bound), expected, rtol=1e-6, atol=1e-7)
