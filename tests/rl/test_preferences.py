"""Long to short by its definitions: averaged weights, preference pairs, the loss of pairs."""

import math

import pytest
import torch
from engine_cases import TOKENIZER, model
from rl_cases import problem_of

from earlyfusion.kernels.errors import UserError
from earlyfusion.rl.long2short.average import mean_state
from earlyfusion.rl.long2short.dpo import Pair, batches, compared, dpo_loss, make_pairs, pair_lines
from earlyfusion.rl.long2short.samples import Answer, Answered, lengths
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.rl.rollouts.prompts import Prompt, encode_prompt

EXACT = 1e-12  # float64


def test_an_average_sums_in_float32_and_keeps_counters():
    # 256 + 1 is not a bfloat16 number: a running sum in bfloat16 would lose the 1.
    states = [
        {"w": torch.tensor([v]).bfloat16(), "steps": torch.tensor(3)} for v in (256.0, 1.0, 1.0, -254.0)
    ]
    got = mean_state(states, [1.0] * 4)
    assert (float(got["w"]), got["w"].dtype, int(got["steps"])) == (1.0, torch.bfloat16, 3)


def made_up(number: int, *answers: tuple[int, bool]) -> Answered:
    """A problem with answers of these (tokens, right)."""
    entry = TaskEntry(name="counting", form="twin")
    prompt = Prompt(0, 0, number, None)
    prompt.__dict__["problem"] = problem_of(f"counting/train/0/{number}")
    prompt.__dict__["encoded"] = encode_prompt(prompt.problem, entry, TOKENIZER, model(0).config.vision)
    made = [Answer(list(range(20, 20 + n)), f"{n}", "stop", float(right), right) for n, right in answers]
    return Answered(prompt, entry.label, made)


def test_pairs_by_hand():
    """Chosen: 4 tokens. 6 is right and 1.5 times as long, 5 is right and is not, 5 and 9 are wrong, 3 is
    wrong but shorter; the second problem was never solved, in the third everything is equal."""
    answered = [
        made_up(0, (6, True), (4, True), (5, True), (5, False), (9, False), (3, False)),
        made_up(1, (2, False), (7, False)),
        made_up(2, (3, True), (3, True), (3, False)),
        made_up(3, (8, False), (2, True)),
    ]
    pairs = make_pairs(answered)
    assert pairs == [Pair(0, 1, 0), Pair(0, 1, 3), Pair(0, 1, 4), Pair(3, 1, 0)]
    with pytest.raises(UserError, match="no pairs: 1 of 2 problems got a right answer"):
        make_pairs(answered[1:3])
    assert [one.shortest() for one in answered] == [1, None, 0, 1]
    assert pair_lines(answered, pairs).count("\n") == 4

    # Lengths by entry: means over problems of the right ones, over answers of all.
    row = lengths(answered[:2])["all"]
    assert (row["problems"], row["solved"], row["accuracy"]) == (2, 1, 3 / 8)
    assert row["tokens_all"] == pytest.approx((6 + 4 + 5 + 5 + 9 + 3 + 2 + 7) / 8)
    assert (row["tokens_right"], row["tokens_shortest"]) == (5, 4)


def test_every_epoch_takes_every_pair_once():
    steps = batches(10, 4, 3, seed=1)
    assert [len(step) for step in steps] == [4, 4, 2] * 3
    for epoch in range(3):
        assert sorted(p for step in steps[3 * epoch : 3 * epoch + 3] for p in step) == list(range(10))
    assert steps[:3] != steps[3:6] and steps == batches(10, 4, 3, seed=1) != batches(10, 4, 3, seed=2)


@pytest.mark.parametrize("seed", [0, 1])
def test_dpo_gradient_equals_closed_form(seed):
    g = torch.Generator().manual_seed(seed)
    logp, reference = torch.randn(2, 6, 2, generator=g, dtype=torch.float64)
    logp.requires_grad_()
    loss, margins = dpo_loss(logp, reference, beta=0.3)
    (found,) = torch.autograd.grad(loss, logp)
    margin = 0.3 * (logp - reference).detach() @ torch.tensor([1.0, -1.0]).double()
    by_hand = -0.3 * torch.sigmoid(-margin) / 6
    torch.testing.assert_close(found, torch.stack([by_hand, -by_hand], 1), atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(margins, margin, atol=EXACT, rtol=EXACT)


def test_dpo_stays_finite():
    logp = torch.randn(4, 2)
    none = torch.zeros(0, 2, requires_grad=True)
    assert float(dpo_loss(none, none)[0].detach()) == 0
    assert torch.isfinite(dpo_loss(logp - torch.tensor([1e5, 0]), logp)[0])


def held(number: int, tokens: float, right: float) -> dict:
    same = {"label": "t", "key": f"k{number}", "way": "greedy", "answer": ""}
    return {**same, "tokens": tokens, "accuracy": right}


def test_before_and_after_are_paired_by_problem():
    before = [held(i, 10.0 + i, float(i % 2)) for i in range(4)]
    after = [held(i, 8.0 + i, 1.0) for i in reversed(range(4))]
    rows = {row["metric"]: row for row in compared(before, after) if row["label"] == "t"}
    assert rows["tokens"]["n"] == 4
    assert rows["tokens"]["value"] == rows["tokens"]["low"] == rows["tokens"]["high"] == -2.0
    assert (rows["accuracy"]["before"], rows["accuracy"]["after"]) == (0.5, 1.0)
    # d = 0, 1, 0, 1: mean 0.5, sd 0.577, SE 0.289, t(3) = 3.182
    assert rows["accuracy"]["low"] == pytest.approx(0.5 - 3.182 * 0.2887, abs=1e-3)
    alone = compared(before[:1], after)[0]
    assert alone["n"] == 1 and math.isnan(alone["low"])
