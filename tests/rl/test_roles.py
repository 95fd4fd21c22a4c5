"""Engines in processes of their own: the run of one process, bit for bit where all answers are waited for;
answers of older weights, none lost and none twice, where they are not."""

import time
from collections import Counter
from dataclasses import replace

import pytest
from rl_cases import model_directory, run, training
from tiny_run import assert_same, numbers

from earlyfusion.eval.rewards import Rewards
from earlyfusion.rl.recipe import RLConfig
from earlyfusion.rl.rollouts.experience import score

inline = pytest.mark.usefixtures("rewards_called_here")
STEADY = {"temperature": {"start": 1.0, "end": 1.0}, "eval": {"problems": 0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("start"))


@inline
@pytest.mark.slow
def test_a_run_that_waits_for_its_engines_is_that_of_one_process(folder, tmp_path):
    assert run(folder, tmp_path / "one", **STEADY) == 0
    roles = {"engines": 2, "policy": "divided", "chunk": 2}
    assert run(folder, tmp_path / "three", roles=roles, **STEADY) == 0
    assert_same(tmp_path / "one", tmp_path / "three")


@inline
@pytest.mark.slow
def test_engines_that_go_on_meanwhile_lose_nothing_and_a_stopped_run_goes_on(folder, tmp_path):
    """Two iterations ahead: every prompt that is drawn is trained once or still under way, its tokens tell
    which weights drew them, and what is under way goes through a checkpoint."""
    changes = {**STEADY, "roles": {"engines": 1, "ahead": 2, "chunk": 3}, "stale": {"max_lag": 3}}
    assert run(folder, tmp_path / "run", **{**changes, "run": {"steps": 3}}) == 0
    assert run(folder, tmp_path / "run", resume=True, **changes) == 0
    records = numbers(tmp_path / "run")
    assert all(record["answers"] == records[0]["answers"] > 0 for record in records)
    assert records[0]["staleness"] == 0 and max(record["staleness"] for record in records) >= 1

    made = training(folder, tmp_path / "by hand", **changes)
    try:
        seen: Counter[str] = Counter()
        for update in range(4):
            made.update = update
            made.refresh_engine()
            groups = made.collector.collect(update, 1.0, made.config.rollout.prompts)
            assert len(groups) == made.config.rollout.prompts
            assert len(made.collector.flying) == 2 * made.config.rollout.prompts
            for group in groups:
                assert len(group.trajectories) == made.config.rollout.group_size
                versions = {v for answer in group.trajectories for v in answer.completion.versions}
                assert max(versions) <= update and min(versions) >= update - 3
                seen[str(group.prompt.ids)] += 1
            if update == 1:
                # Through a checkpoint and back: paused for it, and going on.
                state = made.collector.state_dict()
                assert len(state) == len(made.collector.flying)
        assert set(seen.values()) == {1}

        # Asked to stop while answers are collected: what was under way before is kept, with its prompts.
        flying = sorted(str(prompt.ids) for prompt, _ in made.collector.flying.values())
        made.update, made.runtime.stop.received = 4, "SIGTERM"
        assert made.unless_stopped(made.iterate) is None
        assert sorted(str(prompt.ids) for prompt, _ in made.collector.carried) == flying
        assert len(made.collector.state_dict()) == len(flying) == 2 * made.config.rollout.prompts
    finally:
        made.close()


@pytest.mark.parametrize("roles", [{}, {"engines": 1, "ahead": 1}])
def test_workers_are_asked_while_others_are_written_and_nothing_is_lost_or_counted_twice(
    folder, tmp_path, roles
):
    changes = {"name": ["task", "earlyfusion.rl.bench:late"], "weights": [1.0, 0.5], "anneal_updates": 4}
    made = training(folder, tmp_path / "run", roles=roles, reward=changes, **STEADY)
    number, ahead = made.config.rollout.prompts, roles.get("ahead", 0)
    here = Rewards(made.rewards.functions, span=made.rewards.span)
    judged, seen = 0, Counter()
    for update in range(3):
        made.update = update
        made.refresh_engine()
        groups = made.collector.collect(update, 1.0, number)
        assert len(groups) == number and len(made.collector.flying) == ahead * number
        assert all(group.earned is not None for group in groups)
        seen.update(str(group.prompt.ids) for group in groups)

        # As if they had been judged here, now, at today's share.
        here.share = made.rewards.share = 1 - update / 4
        alone = score(here, [replace(group, earned=None) for group in groups])
        assert score(made.rewards, groups) == alone
        judged += sum(answer.ended for group in groups for answer in group.trajectories)
        assert made.rewards.counts == {"ok": judged}

        # Meanwhile, until everything is written and judged: the next call finds it, and draws what follows.
        with made.collector.beside():
            until = time.monotonic() + 120
            while len(made.collector.ready) < ahead * number and time.monotonic() < until:
                time.sleep(0.01)
        assert {*made.collector.ready} == {*made.collector.flying}
    assert set(seen.values()) == {1} and len(seen) == 3 * number


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"roles": {"ahead": 1}}, "without roles.engines"),
        ({"roles": {"engines": 1, "ahead": 1}, "rollout": {"token_cap": 4}}, "answers of one message"),
        ({"roles": {"engines": 1, "ahead": 1}, "temperature": {"start": 1.5, "updates": 3}}, "temperature"),
        ({"roles": {"engines": 1, "policy": "oracle"}}, "knows lengths beforehand"),
        ({"roles": {"engines": 1, "policy": "first"}}, "policy"),
    ],
)
def test_roles_that_cannot_work_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        RLConfig.model_validate({"tasks": [{"name": "counting"}], **changes})
