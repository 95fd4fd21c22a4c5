"""The guard: what counts as bad, what each policy does, bounds, agreement, state."""

import math

import pytest

from earlyfusion.pipeline.guard import DEVIATION_FLOOR, MIN_HISTORY, Guard


def steady(guard: Guard, steps: int = MIN_HISTORY) -> Guard:
    for i in range(steps):
        assert guard.check(2.0 + 0.1 * (-1) ** i, 1.0 + 0.1 * (-1) ** i).ok
    return guard


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf)])
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_non_finite_value_gets_the_policy_from_the_first_step(policy, bad):
    verdict = Guard(policy).check(*bad)
    assert verdict.action == policy and ("nan" in verdict.reason or "inf" in verdict.reason)


def test_a_spike_is_measured_by_mean_and_deviation_of_the_window():
    assert steady(Guard("skip", sigma=4.0)).check(2.39, 1.0).ok  # loss 2 +- 0.1: limit 2.4
    guard = steady(Guard("skip", sigma=4.0))
    verdict = guard.check(2.41, 1.0)
    assert verdict.action == "skip" and "loss 2.41 is above 2.4" in verdict.reason
    assert steady(Guard("skip", grad_norm_sigma=4.0)).check(2.0, 1.5).reason.startswith("gradient norm 1.5")


def test_a_sudden_improvement_is_no_fault():
    assert steady(Guard("stop")).check(0.01, 0.01).ok


def test_before_the_window_has_filled_only_non_finite_values_are_bad():
    guard = Guard("stop")
    for _ in range(MIN_HISTORY - 1):
        assert guard.check(1.0, 1.0).ok
    assert guard.check(50.0, 1.0).ok


def test_a_very_steady_run_does_not_stop_over_a_ripple():
    guard = Guard("stop", sigma=4.0)
    for _ in range(40):
        guard.check(1.0, 1.0)
    assert guard.check(1.0 + 3.9 * DEVIATION_FLOOR, 1.0).ok
    assert not guard.check(1.0 + 4.2 * DEVIATION_FLOOR, 1.0).ok


def test_bad_steps_do_not_enter_the_statistics():
    guard = steady(Guard("skip", max_skips=10))
    before = guard.state_dict()["history"]
    guard.check(1e9, 1.0)
    guard.check(math.nan, 1.0)
    assert guard.state_dict()["history"] == before and guard.bad_steps == 2


def test_too_many_skips_in_a_window_stop_the_run():
    guard = steady(Guard("skip", window=32, max_skips=3))
    assert [guard.check(math.nan, 1.0).action for _ in range(4)] == ["skip", "skip", "skip", "stop"]


def test_skips_far_apart_never_add_up():
    guard = Guard("skip", window=16, max_skips=1)
    for _ in range(5):
        assert guard.check(math.nan, 1.0).action == "skip"
        steady(guard, 20)


def test_rollbacks_are_bounded_and_the_counter_survives_them():
    guard = Guard("rollback", max_rollbacks=2)
    actions = []
    for _ in range(3):
        actions.append(guard.check(math.nan, 1.0).action)
        guard.new_stage()
    assert actions == ["rollback", "rollback", "stop"]


def test_without_a_checkpoint_rollback_means_skip():
    guard = Guard("rollback")
    assert guard.check(math.nan, 1.0, can_roll_back=False).action == "skip" and guard.rollbacks == 0


def test_one_rank_s_bad_step_is_bad_for_all():
    calls = []

    def another_rank_is_bad(code: int) -> int:
        calls.append(code)
        return max(code, 1)

    guard = Guard("skip", agree=another_rank_is_bad)
    verdict = guard.check(1.0, 1.0)
    assert verdict.action == "skip" and "another rank" in verdict.reason and calls[0] == 0


def test_a_new_stage_forgets_the_old_loss_level():
    guard = steady(Guard("stop"))
    guard.new_stage()
    assert guard.check(100.0, 100.0).ok


def test_a_restored_guard_judges_as_the_first_one():
    first = steady(Guard("skip", window=32, max_skips=5), 40)
    first.check(math.nan, 1.0)
    second = Guard("skip", window=32, max_skips=5)
    second.load_state_dict(first.state_dict())
    for loss in (2.0, 2.5, 9.0, math.nan, 2.1, 3.0):
        assert first.check(loss, 1.0) == second.check(loss, 1.0)
    assert first.state_dict() == second.state_dict()


def test_a_large_but_finite_gradient_norm_passes_where_only_finiteness_is_watched():
    """A jump in learning raises the norm for many steps; with clipping that is harmless, and skipping would
    never end."""
    guard = steady(Guard("skip", grad_norm_sigma=None))
    assert all(guard.check(1.0, norm).ok for norm in (50.0, 500.0, 5000.0))
    assert guard.check(1.0, float("inf")).action == "skip"
