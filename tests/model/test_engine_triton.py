"""With the Triton backend the engine decodes by the kernels that work on its slots and pages in place
(interpreted here)."""

import pytest
import torch

from tests.model.tiny import interpreted

pytest.importorskip("triton")

CASES = ("softplus gate", "bounded gate, plain stream")
ROUNDING = 2e-5  # fp32, sums in another order through two layers


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One process for all cases."""
    return interpreted("engine_triton_worker", tmp_path_factory.mktemp("triton") / "engine.pt")


def equal(got, expected) -> None:
    for key, (ids, logprobs) in got.items():
        assert ids == expected[key][0], key
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(expected[key][1]), atol=ROUNDING, rtol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_decode_kernels_give_the_tokens_of_the_torch_form(results, case):
    """Groups, chunked prompts, fewer slots than samples."""
    found = results[case]
    kernels = {
        "kda.decode:decode",
        "attention.triton.decode:mla_decode",
        "attention.triton.flash:attention_append",
    }
    assert kernels <= found["called"]
    assert found["triton"].keys() == found["torch"].keys() and len(found["torch"]) == 4
    equal(found["triton"], found["torch"])


@pytest.mark.slow
def test_a_request_moves_between_the_kernels_and_the_torch_form(results):
    """The state leaves the ring and the transposed slots in the common form, and enters them from it."""
    found = results[CASES[0]]
    for first in ("triton", "torch"):
        assert len(found["moved"][first]) == 3
        equal(found["moved"][first], found["torch"])
