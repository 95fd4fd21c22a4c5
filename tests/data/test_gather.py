"""Plans of a wide search: outcomes by hand, bounds, rewards that are what their names say, hostile text."""

import asyncio
from statistics import fmean

import pytest

from earlyfusion.data.tasks import gather
from earlyfusion.data.tasks.gather import CAP, COSTS, f1, outcome, played, scheduled, serial
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.rl.swarm import bounds
from earlyfusion.rl.swarm.bounds import by_clock, figures, timeline

CHEAP = [item for item in COSTS if COSTS[item] == 2]
DEAR = [item for item in COSTS if COSTS[item] == 4]


def test_plans_come_to_what_a_pencil_says():
    a, b, c = CHEAP[:3]
    wanted = frozenset((a, b, c))
    assert played(f"{a} {b}", wanted, 10).found == {a, b} and played(f"{a} {b}", wanted, 3).found == {a}
    one = played(f"({a} {b}) ({c}) !", wanted, 10)
    # One step to give the work, then the longer of 1 + 2 + 2 and 1 + 2.
    assert (one.found, one.assigned, one.finished, one.steps, one.total) == (wanted, 2, 2, 6, 9)
    assert played(f"({a} {b}) ({c}) !", wanted, 5).found == set(), "nothing is there before the group is done"
    # Beyond the cap nothing is found; what was never run, is known or was not asked for is not finished.
    assert played(f"({a} {b} {c}) !", wanted, 20).steps == 1 + CAP
    assert played(f"({a} {b} {c}) !", wanted, 20).finished == 0
    assert played(f"({a})", wanted, 10).assigned == 1 and played(f"({a})", wanted, 10).finished == 0
    assert played(f"{a} ({a}) !", wanted, 20).finished == 0
    assert played(f"({DEAR[0]}) () !", wanted, 20).finished == 0
    for broken in (")", "((a", "x", f"({a} !", "?", "ü", "!" * 5000 + "x"):
        assert not played(broken, wanted, 10).found, broken
    assert played("", wanted, 10).valid and played("(" + a * 100_000, wanted, 10).found == set()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_bounds_are_apart_and_targets_are_plans(level):
    task = make_task("gather")
    problems = [task.sample(seed, ("train", "test")[seed % 2], level) for seed in range(200)]
    score = lambda plan: fmean(task.score(one, plan(one.meta["wanted"])) for one in problems)
    assert score(scheduled) > score(serial) + 0.2 and score(scheduled) > 0.88
    assert all(outcome(one, one.target).valid for one in problems)
    spawned = fmean(bool(outcome(one, one.target).assigned) for one in problems)
    assert 0.1 < spawned < 0.4
    eight = [one for one in problems if len(one.meta["wanted"]) == 8]
    whole = lambda one, plan: played(plan(one.meta["wanted"]), frozenset(one.meta["wanted"]), 99).steps
    if level == 2:
        assert fmean(whole(one, serial) for one in eight) > 3 * fmean(whole(one, scheduled) for one in eight)


def test_rewards_pay_for_what_they_are_called():
    problem = make_task("gather").sample(3, "train", 2)
    wanted = problem.meta["wanted"]
    plans = {
        "serial": serial(wanted),
        "empty": "() () () () () () () () !",
        "good": scheduled(wanted),
        "broken": "( (",
    }
    got = {
        name: [getattr(gather, part)(problem, plan) for part in ("parallel", "finish", "collapsed")]
        for name, plan in plans.items()
    }
    assert got["serial"] == [0.0, 0.0, 1.0] and got["empty"] == [0.5, 0.0, 0.0]
    assert got["good"][0] == 0.5 and got["good"][1] > 0.6 and got["broken"] == [0.0, 0.0, 1.0]
    assert f1(frozenset("ab"), frozenset("abcd")) == pytest.approx(2 / 3)
    assert gather.steps(problem, plans["good"]) < 1.0 == gather.steps(problem, plans["serial"])


@pytest.mark.parametrize("seed", range(40))
def test_a_timeline_holds_all_work_and_ends_when_the_plan_does(seed):
    problem = make_task("gather").sample(seed, "train", seed % 3)
    pieces = []
    came = played(problem.target, frozenset(problem.meta["wanted"]), 99, lambda *piece: pieces.append(piece))
    assert max(begun + took for _, begun, took in pieces) == came.steps
    assert sum(took for _, _, took in pieces) == came.total
    assert [items for items, *_ in pieces].count("!") == problem.target.count("!")
    # An episode ends with its budget, whatever was still planned.
    assert outcome(problem, problem.target).steps == min(came.steps, problem.meta["budget"])


def test_the_bounds_of_a_study_and_their_timelines(tmp_path, monkeypatch):
    problems = [make_task("gather").sample(seed, "test", 2) for seed in range(20)]
    oracle = figures(problems, lambda problem: scheduled(problem.meta["wanted"]))
    alone = figures(problems, lambda problem: serial(problem.meta["wanted"]))
    assert oracle["items"] > 0.95 and oracle["speed_up"] > 3 and oracle["collapsed"] == 0
    assert alone["collapsed"] == pytest.approx(1) and alone["steps"] == problems[0].meta["budget"]
    assert alone["speed_up"] < 1, "what is begun and not ended with the budget is lost"
    # Steps so long that a busy machine adds little to them.
    monkeypatch.setattr(bounds, "STEP_S", 0.05)
    clock = asyncio.run(by_clock(problems[:2], lambda problem: scheduled(problem.meta["wanted"])))
    assert 1.5 < clock < 5
    assert asyncio.run(by_clock(problems[:1], lambda problem: "?")) == 0
    timeline(problems[0], scheduled(problems[0].meta["wanted"]), tmp_path)
    page = (tmp_path / "timeline.html").read_text()
    assert all(f"sub-agent ({item})" in page for item in problems[0].meta["wanted"])
