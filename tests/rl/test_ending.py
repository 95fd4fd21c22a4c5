"""An answer is what the policy ends itself: nothing is to be won by going on until the limit cuts it off."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rl_cases import config, model_directory, run

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.requests import Completion, TokenPrompt
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl.objectives.losses import policy_loss
from earlyfusion.rl.rewards import RandomReward, Rewards, TaskReward
from earlyfusion.rl.rollouts.collect import Group
from earlyfusion.rl.rollouts.experience import experience, score
from earlyfusion.rl.rollouts.packing import Trajectory

LIMIT = 6
TASK = make_task("odd_one_out")
PROBLEM = next(p for p in (TASK.sample(seed) for seed in range(99)) if p.target == "row 1, column 2")
PROMPT = SimpleNamespace(bin=0, entry=0, problem=PROBLEM)
SAYS = [" row 1", " row 2", ", column 1", ", column 2", "wsslonment for", ""]
SHARED = 3.0
END = 5


class Toy:
    """A policy of six things to say, the last of them the end. One logit of each for all places and one for
    its own place: what is learned of the end at one place is believed at the others, as in a language model.
    """

    def __init__(self) -> None:
        self.shared_V = torch.zeros(len(SAYS), requires_grad=True)
        self.own_LV = torch.zeros(LIMIT, len(SAYS))
        self.own_LV[2:] = torch.tensor(
            [-2.0, -2.0, -2.0, -2.0, 2.0, 0.0]
        )  # behind an answer it babbles more than it ends
        self.own_LV.requires_grad_()

    def log_probs(self, limit: int) -> torch.Tensor:
        """[limit, V]; places beyond those that were trained are like the last one."""
        places = torch.arange(limit).clamp(max=LIMIT - 1)
        return (SHARED * self.shared_V + self.own_LV[places]).log_softmax(-1)

    def draw(self, limit: int, generator: torch.Generator) -> Completion:
        logp_LV = self.log_probs(limit).detach()
        ids: list[int] = []
        while len(ids) < limit and ids[-1:] != [END]:
            ids.append(int(torch.multinomial(logp_LV[len(ids)].exp(), 1, generator=generator)))
        logp = [float(logp_LV[place, token]) for place, token in enumerate(ids)]
        text, reason = "".join(SAYS[token] for token in ids), "stop" if ids[-1] == END else "length"
        return Completion("toy", 0, ids, logp, logp, [0] * len(ids), text, reason, 1, 0)


def trained(settings, updates=150, answers=48):
    toy, generator = Toy(), torch.Generator().manual_seed(0)
    steps = torch.optim.Adam([toy.shared_V, toy.own_LV], lr=0.08)
    rewards = Rewards(TaskReward([TASK]))
    for update in range(updates):
        drawn = [Trajectory(TokenPrompt(torch.zeros(1)), toy.draw(LIMIT, generator)) for _ in range(answers)]
        groups = [Group(PROMPT, drawn)]
        seen = experience(settings, groups, score(rewards, groups), update, {})
        ids_M = torch.tensor([i for t in drawn for i in t.ids])
        places_M = torch.tensor([place for t in drawn for place in range(len(t.ids))])
        old_M = torch.tensor([p for t in drawn for p in t.completion.logprobs])
        segments = Segments.from_lengths([len(t.ids) for t in drawn])
        steps.zero_grad()
        logp_M = toy.log_probs(LIMIT)[places_M, ids_M]
        policy_loss(settings.objective, logp_M, old_M, seen.advantages_N, segments).loss.backward()
        steps.step()
    return toy


def test_a_policy_that_could_win_by_not_stopping_learns_to_stop(tmp_path):
    """Ending at once earns nothing, so the end becomes unlikely everywhere; where the beginning of a cut
    answer is paid for, nothing ever brings it back, and babbling behind the right place is as good as the
    end."""
    settings = config(tmp_path, tmp_path, tasks=[{"name": "odd_one_out"}])
    toy, generator = trained(settings), torch.Generator().manual_seed(1)
    for limit in (LIMIT, 4 * LIMIT):
        drawn = [toy.draw(limit, generator) for _ in range(200)]
        ended = sum(one.finish_reason == "stop" for one in drawn) / len(drawn)
        right = sum(TASK.reward(PROBLEM, one.text) * (one.finish_reason == "stop") for one in drawn) / len(
            drawn
        )
        assert ended > 0.9 and right > 0.85, (limit, ended, right)


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
