"""Long to short: averaged weights, shortest right answers, preference pairs and their loss."""

import math

import pytest
import torch

from earlyfusion.data.errors import DataError
from earlyfusion.rl.long2short.preferences import (
    average_weights,
    dpo_loss,
    preference_pairs,
    shortest_correct,
)

EXACT = 1e-12  # float64


def test_weight_average_is_the_mean_and_of_linear_models_the_mean_output():
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2).double() for _ in range(3)]
    x = torch.randn(5, 3, dtype=torch.float64)
    mixed = torch.nn.Linear(3, 2).double()
    mixed.load_state_dict(average_weights([m.state_dict() for m in models], [2, 1, 1]))
    expected = 0.5 * models[0](x) + 0.25 * models[1](x) + 0.25 * models[2](x)
    torch.testing.assert_close(mixed(x), expected, atol=EXACT, rtol=EXACT)


def test_weight_average_of_one_or_of_copies_is_the_same_and_sums_in_float32():
    state = {"w": torch.randn(4).bfloat16(), "steps": torch.tensor(3), "b": torch.randn(2)}
    for copies in (1, 2, 4):
        got = average_weights([state] * copies)
        assert all(
            torch.equal(got[name], state[name]) and got[name].dtype == state[name].dtype for name in state
        )
    assert got["w"].data_ptr() != state["w"].data_ptr()
    # 256 + 1 is not a bfloat16 number: a running sum in bfloat16 would lose the 1.
    values = [256.0, 1.0, 1.0, -254.0]
    mean = average_weights([{"w": torch.tensor([v]).bfloat16()} for v in values])["w"]
    assert float(mean) == 1.0


def test_weight_average_names_what_differs():
    with pytest.raises(DataError, match="'extra'"):
        average_weights([{"w": torch.zeros(1)}, {"w": torch.zeros(1), "extra": torch.zeros(1)}])
    with pytest.raises(DataError, match="w: shapes"):
        average_weights([{"w": torch.zeros(1)}, {"w": torch.zeros(2)}])
    with pytest.raises(DataError, match="steps"):
        average_weights([{"steps": torch.tensor(1)}, {"steps": torch.tensor(2)}])
    for weights in ([1.0], [0.0, 0.0], [2.0, -1.0]):
        with pytest.raises(DataError, match="weights"):
            average_weights([{"w": torch.zeros(1)}] * 2, weights)


LENGTH = torch.tensor([30, 10, 12, 15, 20, 5, 8, 9])
RIGHT = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]).bool()
PROMPT = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])


def test_shortest_right_answer_of_each_prompt():
    assert shortest_correct(LENGTH, RIGHT, PROMPT) == {0: 1}
    tied = shortest_correct(torch.tensor([4, 4]), torch.tensor([True, True]), torch.tensor([9, 9]))
    assert tied == {9: 0}


def test_rejected_are_longer_wrong_and_much_longer_right_answers():
    """Chosen: 10 tokens. 12 is right but under 1.5 times as long, 5 is wrong but shorter, prompt 1 was never
    solved."""
    assert preference_pairs(LENGTH, RIGHT, PROMPT) == [(1, 0), (1, 3), (1, 4)]
    assert preference_pairs(LENGTH, RIGHT, PROMPT, longer=1.1) == [(1, 0), (1, 2), (1, 3), (1, 4)]
    with pytest.raises(DataError, match="more than 1"):
        preference_pairs(LENGTH, RIGHT, PROMPT, longer=1.0)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_gradient_equals_closed_form_and_finite_differences(seed, smoothing):
    g = torch.Generator().manual_seed(seed)
    c, r, rc, rr = (torch.randn(6, generator=g, dtype=torch.float64).requires_grad_(i < 2) for i in range(4))
    out = dpo_loss(c, r, rc, rr, beta=0.3, label_smoothing=smoothing)
    by_c, by_r = torch.autograd.grad(out.loss, [c, r])
    margin = 0.3 * ((c - rc) - (r - rr)).detach()
    by_hand = -0.3 * ((1 - smoothing) * torch.sigmoid(-margin) - smoothing * torch.sigmoid(margin)) / 6
    torch.testing.assert_close(by_c, by_hand, atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(by_r, -by_hand, atol=EXACT, rtol=EXACT)
    assert float(out.accuracy) == pytest.approx(float((margin > 0).double().mean()))
    assert torch.autograd.gradcheck(lambda a, b: dpo_loss(a, b, rc, rr, 0.3, smoothing).loss, (c, r))


def test_dpo_starts_at_log_two_and_knows_no_reference_offset():
    c, r = torch.randn(4), torch.randn(4)
    assert float(dpo_loss(c, r, c, r).loss) == pytest.approx(math.log(2))
    shifted = dpo_loss(c + 5, r + 5, torch.zeros(4), torch.zeros(4)).loss
    torch.testing.assert_close(shifted, dpo_loss(c, r, torch.zeros(4), torch.zeros(4)).loss)
    none = torch.zeros(0, requires_grad=True)
    assert float(dpo_loss(none, none, none, none).loss) == 0
    assert torch.isfinite(dpo_loss(c - 1e5, r, c, r).loss)


def test_dpo_refuses_bad_numbers():
    one = torch.zeros(1)
    with pytest.raises(DataError, match="beta"):
        dpo_loss(one, one, one, one, beta=0.0)
    with pytest.raises(DataError, match="smoothing"):
        dpo_loss(one, one, one, one, label_smoothing=0.5)
    with pytest.raises(DataError, match="shapes"):
        dpo_loss(one, torch.zeros(2), one, one)
