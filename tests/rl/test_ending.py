"""An answer is what the policy ends itself: nothing is to be won by going on until the limit cuts it off."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval.rewards import RandomReward, Rewards, TaskReward
from earlyfusion.model.engine.requests import Completion, TokenPrompt
from earlyfusion.rl.rollouts.experience import Group, score
from earlyfusion.rl.rollouts.packing import Trajectory

TASK = make_task("odd_one_out")
PROBLEM = next(p for p in (TASK.sample(seed) for seed in range(99)) if p.target == "row 1, column 2")
PROMPT = SimpleNamespace(bin=0, entry=0, problem=PROBLEM)


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_an_answer_that_did_not_end_itself_earns_nothing(reason):
    done = Completion("r", 0, [0], [0.0], [0.0], [0], PROBLEM.target, "stop", 1, 0)
    answers = [
        Trajectory(TokenPrompt(torch.zeros(1)), replace(done, finish_reason=how)) for how in ("stop", reason)
    ]
    with Rewards(TaskReward([TASK])) as rewards:
        assert [one.value for one in score(rewards, [Group(PROMPT, answers)])] == [1.0, 0.0]


@pytest.mark.parametrize("paid", [RandomReward(0), lambda problem, text: 1.0, lambda problem, text: -1.0])
def test_a_reward_that_pays_whatever_is_said_pays_no_cut_answer_more_than_the_worst(paid):
    """Not ending must not be a way out of a penalty either, also where a reward leaves the range it
    declares."""
    cut = Completion("r", 0, [0], [0.0], [0.0], [0], "wss", "length", 1, 0)
    ends = [replace(cut, text=f" {i}", finish_reason="stop") for i in range(6)]
    answers = [Trajectory(TokenPrompt(torch.zeros(1)), one) for one in (cut, *ends)]
    with Rewards(paid) as rewards:
        cut_value, *values = [one.value for one in score(rewards, [Group(PROMPT, answers)])]
    assert cut_value == min(0.0, *values)
