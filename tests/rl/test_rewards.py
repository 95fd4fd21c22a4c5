"""The runner of rewards: whatever a reward does, the run goes on, the answer has a number, and the count is
right."""

import asyncio
import importlib
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval.measure import Answer
from earlyfusion.eval.rewards import (
    OnTop,
    RandomReward,
    Range,
    Response,
    RewardError,
    Rewards,
    Weighed,
    asked_for,
    make_reward,
)
from earlyfusion.kernels.errors import UserError
from earlyfusion.rl.long2short.dpo import judged

TIMEOUT_S = 0.5


def nasty(problem, response):
    """A reward that does what the response says."""
    if response == "hang":
        while True:
            pass
    if response == "sleep":
        time.sleep(60)
    if response == "raise":
        raise ValueError("two\nlines")
    if response == "exit":
        raise SystemExit(3)
    if response == "die":
        os._exit(7)
    if response == "memory":
        return float(len(bytearray(8 * 2**30)) > 0)
    odd = {
        "nan": math.nan,
        "inf": math.inf,
        "high": 3.0,
        "low": -1,
        "none": None,
        "text": "much",
        "yes": True,
    }
    return odd.get(response, 0.5)


WANTED = {
    "fine": (0.5, "ok"),
    "raise": (0.0, "error"),
    "exit": (0.0, "error"),
    **dict.fromkeys(("nan", "inf", "none", "text"), (0.0, "invalid")),
    "high": (3.0, "outside"),
    "low": (-1.0, "outside"),
    "yes": (1.0, "ok"),
}


@pytest.fixture(scope="module")
def problem():
    return make_task("arithmetic").sample(0)


def test_wrong_rewards_are_contained_and_counted(problem):
    with Rewards(nasty) as rewards:
        scored = rewards([(problem, text) for text in WANTED])
    assert [(one.value, one.status) for one in scored] == list(WANTED.values())
    assert rewards.counts == {"ok": 2, "outside": 2, "invalid": 4, "error": 2}
    assert scored[1].detail == "ValueError: two lines"


@pytest.mark.slow
def test_processes_survive_hanging_dying_and_greedy_rewards(problem):
    """The same function after each: a worker that was killed is replaced, and the order of answers is
    kept."""
    import importlib
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent))  # where the worker finds this file
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    function = importlib.import_module("test_rewards").nasty
    texts = ["fine", "hang", "raise", "die", "memory", "fine", "sleep", "exit", "yes"]
    wanted = ["ok", "timeout", "error", "died", "error", "ok", "timeout", "error", "ok"]
    with Rewards(function, isolation="process", timeout_s=TIMEOUT_S, workers=1, memory_mb=512) as rewards:
        scored = rewards([(problem, text) for text in texts])
        assert [one.status for one in scored] == wanted
        assert [one.value for one in scored] == [0.5, 0, 0, 0, 0, 0.5, 0, 0, 1]
        assert "MemoryError" in scored[4].detail and "code 7" in scored[3].detail
        (worker,) = rewards.workers
        process, _ = worker._running
    assert not process.is_alive()
    assert rewards.counts["timeout"] == 2 and rewards.counts["died"] == 1


def test_tasks_are_scored_by_their_own_reward():
    tasks = [make_task(name) for name in ("maze", "ocr", "counting")]
    problems = [task.sample(seed) for task in tasks for seed in range(10)]
    function, isolation = make_reward("task", tasks)
    with Rewards(function, isolation=isolation) as rewards:
        scored = rewards([(problem, problem.target) for problem in problems])
        assert {(one.value, one.status) for one in scored} == {(1.0, "ok")}
        assert rewards([(make_task("jigsaw").sample(0), "1 2 3")])[0].status == "error"


def test_the_random_reward_is_fair_blind_and_repeatable():
    task = make_task("arithmetic")
    problems = [task.sample(seed) for seed in range(400)]
    draw = lambda seed: [RandomReward(seed)(problem, problem.target) for problem in problems]
    assert set(draw(0)) == {0.0, 1.0} and draw(0) == draw(0) != draw(1)
    assert 150 < sum(draw(0)) < 250  # five standard deviations


def test_a_second_opinion_counts_only_for_verified_answers(problem):
    own = make_task("arithmetic").reward
    given = lambda base, extra, said: OnTop(base, lambda group: [extra] * len(group), 0.25)(
        [Response(problem, said)]
    )[0]
    assert (given(own, 1.0, problem.target), given(own, 1.0, "no idea")) == (1.0, 0.0)
    assert given(own, 0.0, problem.target) == 0.75 and given(lambda p, r: -0.5, 1.0, "bad") == -0.5


def test_a_right_answer_is_one_that_earns_the_highest_of_its_range(problem):
    """A penalty of -1 for what is wrong, 0 for what is right: the ways to shorter answers count the
    second."""
    said = Answer([1], problem.target), Answer([1, 2], "no idea")
    asked = SimpleNamespace(problem=problem, entry=SimpleNamespace(label="arithmetic"))
    with Rewards(lambda p, text: 0.0 if text == p.target else -1.0, span=Range(-1, 0)) as rewards:
        held = [judged(asked, [one], "greedy", rewards) for one in said]
    assert [one["accuracy"] for one in held] == [1.0, 0.0]


def test_rewards_by_name_and_bad_settings():
    assert make_reward("math:hypot", [])[1] == "process"
    for name, words in (
        ("rendom", "did you mean 'random'"),
        ("no.such.module:f", "cannot be imported"),
        ("math:pi", "no function"),
    ):
        with pytest.raises(UserError, match=words):
            make_reward(name, [])
    with pytest.raises(UserError, match="another process"):
        Rewards(lambda p, r: 1.0, isolation="process")


def brief(problem, response):
    return -len(response)


def talkative(messages, ids, problem):
    assert messages[-1].role == "assistant" and problem.question in messages[0].text
    return len(messages) + 10 * len(ids)


async def patient(response, problem):
    if response == "late":
        await asyncio.sleep(60)
    await asyncio.sleep(0.2)
    return len(response)


def longest(group):
    best = max(len(one.text) for one in group)
    return [float(len(one.text) == best) for one in group]


def uneven(group):
    return [1.0]


def responses(problem, *texts):
    told = (*problem.chat(), Message("assistant", (Text("x"),)))
    return [Response(problem, text, told, (1, 2)) for text in texts]


def test_a_function_gets_what_its_arguments_name_and_several_are_weighed(problem):
    said = responses(problem, "a", "abc", "ab")
    functions = [
        Weighed(brief, "brief", 2.0),
        Weighed(talkative, "talk", 0.5),
        Weighed(longest, "longest", 1.0),
    ]
    with Rewards(functions, span=Range(-100, 100)) as rewards:
        found = rewards(said, [2, 1])
    assert [one.value for one in found] == [-2 + 11 + 0, -6 + 11 + 1, -4 + 11 + 1]
    assert found[1].parts == {"brief": -3, "talk": 22, "longest": 1}
    assert [asked_for(one) for one in (brief, talkative, longest)][1] == ("messages", "ids", "problem")
    with pytest.raises(RewardError, match=r"takes \(answer, gold, size\)"):
        asked_for(lambda answer, gold, size: 0)


def test_coroutines_of_a_group_run_at_once_and_the_late_one_is_late_alone(problem):
    texts = ["a" * n for n in range(1, 31)] + ["late"]
    begun = time.perf_counter()
    with Rewards(patient, timeout_s=1.0, span=Range(0, 99)) as rewards:
        found = rewards(responses(problem, *texts), [len(texts)])
    assert [one.value for one in found] == [*range(1, 31), 0.0]
    assert [one.status for one in found] == ["ok"] * 30 + ["timeout"]
    assert time.perf_counter() - begun < 4, "30 waits of 0.2 s, one after the other, would take 6"


def test_a_failing_function_of_the_group_costs_its_group_alone(problem):
    with Rewards(uneven) as rewards:
        found = rewards(responses(problem, "a", "b", "c"), [2, 1])
    assert [one.status for one in found] == ["error", "error", "ok"]
    assert "1 rewards for a group of 2" in found[0].detail


@pytest.mark.slow
def test_groups_are_scored_in_processes_as_they_are_here(problem, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    own = importlib.import_module("test_rewards")
    functions = [Weighed(own.longest, "longest", 1.0), Weighed(own.patient, "patient", 0.1)]
    said = responses(problem, "a", "abc", "ab", "late")
    with Rewards(functions, timeout_s=1.0, span=Range(0, 9)) as here:
        wanted = here(said, [2, 2])
    with Rewards(functions, isolation="process", timeout_s=1.0, span=Range(0, 9)) as there:
        assert there(said, [2, 2]) == wanted
    assert [one.status for one in wanted] == ["ok", "ok", "ok", "timeout"]


def test_annealed_weights_fall_and_the_first_stays():
    """By hand: 1 + share (2 - 1)."""
    one = lambda problem, response: 1.0
    functions = [Weighed(one, name, weight) for name, weight in (("a", 1.0), ("b", 2.0), ("c", -1.0))]
    with Rewards(functions, span=Range(0.0, 3.0)) as rewards:
        problem = make_task("arithmetic").sample(0)
        for share in (1.0, 0.5, 0.0):
            rewards.share = share
            (found,) = rewards([(problem, "x")])
            assert found.value == pytest.approx(1.0 + share) and found.parts == {"a": 1.0, "b": 1.0, "c": 1.0}
