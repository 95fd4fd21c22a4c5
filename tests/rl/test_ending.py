"""An answer is what the policy ends itself: nothing is to be won by going on until the limit cuts it off."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rl_cases import model_directory, run

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.model.engine.requests import Completion, TokenPrompt
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl.rewards import RandomReward, Rewards, TaskReward
from earlyfusion.rl.rollouts.collect import Group
from earlyfusion.rl.rollouts.experience import score
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


@pytest.mark.usefixtures("rewards_called_here")
def test_the_share_of_cut_answers_is_logged_for_every_kind_of_prompt(tmp_path):
    folder = model_directory(tmp_path)
    assert run(folder, tmp_path / "run", train={"updates": 1}, rollout={"max_new_tokens": 1}) == 0
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    labels = [key.removeprefix("score/") for key in record if key.startswith("score/")]
    assert labels and 0 < record["cut"] <= 1
    assert record["score"] == 0.0, "one token that ends an answer says nothing, any other is cut off"
    assert all(0 <= record[f"cut/{label}"] <= 1 for label in labels)
