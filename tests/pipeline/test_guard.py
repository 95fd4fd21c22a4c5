"""The guard: what counts as bad, what each policy does, bounds, agreement, state."""

import math

import pytest

from earlyfusion.pipeline import update as module
from earlyfusion.pipeline.update import DEVIATION_FLOOR, MIN_HISTORY, Guard


def steady(guard: Guard, steps: int = MIN_HISTORY) -> Guard:
    for i in range(steps):
        assert guard.check(2.0 + 0.1 * (-1) ** i, 1.0).ok
    return guard


def actions(guard: Guard, count: int) -> list[str]:
    return [guard.check(math.nan, 1.0).action for _ in range(count)]


@pytest.fixture
def limits(monkeypatch):
    """Sets constants of the module."""
    return lambda **given: [monkeypatch.setattr(module, name, value) for name, value in given.items()]


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf)])
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_non_finite_value_gets_the_policy_from_the_first_step(policy, bad):
    verdict = Guard(policy).check(*bad)
    assert verdict.action == policy and ("nan" in verdict.reason or "inf" in verdict.reason)


def test_a_spike_is_measured_by_mean_and_deviation_of_good_steps(limits):
    limits(SIGMA=4.0)
    guard = steady(Guard())
    assert guard.check(0.01, 5000.0).ok, "no improvement is a fault, and no finite norm"
    guard = steady(Guard())
    before = list(guard.history)
    verdict = guard.check(2.41, 1.0)  # loss 2 +- 0.1: limit 2.4
    assert verdict.action == "skip" and "loss 2.41 is above 2.4" in verdict.reason
    assert guard.check(1e9, 1.0).action == "skip" and list(guard.history) == before
    assert guard.check(2.39, 1.0).ok
    guard.new_stage()
    assert guard.check(100.0, 1.0).ok, "another stage has another loss"
    even = Guard()
    for _ in range(40):
        even.check(1.0, 1.0)
    assert even.check(1.0 + 3.9 * DEVIATION_FLOOR, 1.0).ok, "a ripple of a very steady run"
    assert not even.check(1.0 + 4.2 * DEVIATION_FLOOR, 1.0).ok


def test_before_the_window_has_filled_only_non_finite_values_are_bad():
    guard = Guard("stop")
    for _ in range(MIN_HISTORY - 1):
        assert guard.check(1.0, 1.0).ok
    assert guard.check(50.0, 1.0).ok


def test_too_many_skips_in_a_window_stop_the_run_and_those_far_apart_do_not(limits):
    limits(WINDOW=16, MAX_SKIPS=3)
    assert actions(steady(Guard()), 4) == ["skip", "skip", "skip", "stop"]
    limits(MAX_SKIPS=1)
    guard = Guard()
    for _ in range(5):
        assert actions(guard, 1) == ["skip"]
        steady(guard, 20)


def test_rollbacks_are_bounded_and_without_a_checkpoint_are_skips(limits):
    limits(MAX_ROLLBACKS=2)
    guard = Guard("rollback")
    assert guard.check(math.nan, 1.0, can_roll_back=False).action == "skip" and guard.rollbacks == 0
    assert actions(guard, 3) == ["rollback", "rollback", "stop"]


def test_one_rank_s_bad_step_is_bad_for_all():
    calls = []
    guard = Guard("skip", lambda code: calls.append(code) or max(code, 1))
    verdict = guard.check(1.0, 1.0)
    assert verdict.action == "skip" and "another rank" in verdict.reason and calls[0] == 0


def test_a_restored_guard_judges_as_the_first_one():
    first, second = steady(Guard(), 40), Guard()
    first.check(math.nan, 1.0)
    second.load_state_dict(first.state_dict())
    for loss in (2.0, 2.5, 9.0, math.nan, 2.1, 3.0):
        assert first.check(loss, 1.0) == second.check(loss, 1.0)
    assert first.state_dict() == second.state_dict()
