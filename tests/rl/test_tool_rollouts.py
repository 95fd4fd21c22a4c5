"""Answers with the Python tool: what is run, what is trained, what is counted, and that nothing a program
does ends a run."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rl_cases import flat, mismatch, trained_logprobs
from test_rl_train import assert_same
from tool_cases import (
    PIXEL,
    TOKENIZER,
    answer,
    call,
    collected,
    directory,
    last_output,
    look_then_tell,
    tool_training,
)

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.sample import Text
from earlyfusion.data.synth.panels import render_text
from earlyfusion.data.tool_problems import tool_messages
from earlyfusion.eval.rewards import Scored
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.engine import Row
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl.learn import Sums
from earlyfusion.rl.objectives.losses import policy_loss
from earlyfusion.rl.rollouts.experience import experience
from earlyfusion.rl.rollouts.packing import Inserted, pack, used_experts

GRAD_RTOL = 2e-4
"""As in test_learn: fp32 sums in another order."""
LOGP_ATOL = 1e-4
"""Engine against training forward, fp32, every generated token (the bar of test_rollout)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return directory(tmp_path_factory.mktemp("start"))


pytestmark = pytest.mark.usefixtures("rewards_called_here")


def wander(name, prompt):
    """Everything that can happen, as the weights like it: at first calls, later answers too."""
    calls = [
        call("1 + 1"),
        call(PIXEL, "I look."),
        call("1 / 0"),
        call("import os"),
        call("5", tool="ruby"),
        [*call("5")[:-1], TOKENIZER.eos_id],
        [TOKENIZER.open_id, TOKENIZER.sep_id, TOKENIZER.end_of_msg_id],
    ]
    return [*calls, answer("3"), answer("green", "easy")] if 'role="tool"' in prompt else calls


# ---------------------------------------------------------------------------------------------- pictures and
# documents


@pytest.mark.parametrize("form", ["picture", "twin", "rendered"])
def test_programs_read_the_picture_and_the_answer_depends_on_it(folder, tmp_path, form):
    tasks = [{"name": "counting", "form": form, "tools": True}]
    made = tool_training(folder, tmp_path / "run", look_then_tell, tasks=tasks)
    groups, counts = collected(made)
    pixels = set()
    for group in groups:
        picture = render_text(group.problem.description) if form == "rendered" else group.problem.picture
        pixel = str(picture.convert("RGB").getpixel((0, 0)))
        assert [t.completion.text for t in group.trajectories] == [pixel, pixel]
        assert all(len(t.inserted) == 1 and f"[python] {pixel}" in t.text for t in group.trajectories)
        pixels.add(pixel)
        assert (group.trajectories[0].prompt.patches is not None) == (form != "twin")
    assert len(pixels) > 1 or form == "rendered"
    assert counts["tools/calls"] == counts["tools/ok"] == 8 and counts["tools/valid"] == 1


def test_prompt_and_turns_are_the_document_of_training_token_for_token(folder, tmp_path):
    made = tool_training(folder, tmp_path / "run", look_then_tell)
    for group in collected(made)[0]:
        for trajectory in group.trajectories:
            pixel = trajectory.completion.text
            thinking = "I look." if "I look." in trajectory.text else None
            talk = [
                *tool_messages(group.problem, "picture"),
                Message(
                    "assistant",
                    (Text(""),),
                    thinking=thinking,
                    calls=(ToolCall("python", {"code": PIXEL}),),
                ),
                Message("tool", (Text(pixel),), tool="python"),
                Message("assistant", (Text(pixel),), thinking="so"),
            ]
            whole = encode_chat(
                talk, TOKENIZER, made.model.config.vision, add_generation_prompt=False
            ).ids.tolist()
            assert [*trajectory.prompt.ids.tolist(), *trajectory.tail[0]] == whole[:-1]


def test_a_conversation_is_read_once_however_many_turns_it_has(folder, tmp_path):
    """Read are the prompts, once for a group, and for every turn what the tool said and the token before it.
    Oracle: turns that read everything again."""

    def thrice(name, prompt):
        return [answer("2")] if prompt.count('role="tool"') == 3 else [call("1 + 1"), call(PIXEL, "hm")]

    seen, read = [], []
    for number, kept in enumerate((True, True, False)):
        made = tool_training(folder, tmp_path / str(number), thrice, rollout={"tool_turns": 3, "prompts": 2})
        if not kept:
            held = made.engine.submit
            made.engine.submit = lambda request, after=None, held=held: held(request)
        groups, _ = collected(made)
        seen.append(flat([group.trajectories for group in groups]))
        read.append(made.engine.stats()["read_tokens"])
    once, again, whole = seen
    prompts = sum(len(group.trajectories[0].prompt.ids) for group in groups)
    assert all(len(t.inserted) == 3 for t in once)
    assert read[0] == prompts + sum(len(part.ids) + 1 for t in once for part in t.inserted) < read[2] / 3
    for mine, same, other in zip(once, again, whole, strict=True):
        assert mine.tail == other.tail and mine.inserted == other.inserted
        assert np.array_equal(mine.completion.routing, other.completion.routing)
        assert mine.completion.logprobs == pytest.approx(other.completion.logprobs, abs=LOGP_ATOL)
        assert mine.tail == same.tail and mine.completion.logprobs == same.completion.logprobs  # bit for bit


# -------------------------------------------------------------------------------------------------- what is
# trained


def by_hand(made, seen):
    """The loss by definition: every answer by itself, labels on generated tokens only."""
    net, answers = made.model, flat([g.trajectories for g in seen.groups])
    logp, old, lengths = [], [], []
    for trajectory in answers:
        ids, labels, said, start = trajectory.prompt.ids.tolist(), [], [], 0
        labels += [-100] * len(ids)
        for part in (*trajectory.inserted, Inserted(len(trajectory.ids), ())):
            own = trajectory.ids[start : part.at]
            ids += [*own, *part.ids]
            labels += own + [-100] * len(part.ids)
            said += trajectory.completion.logprobs[start : part.at]
            start = part.at
        prompt = trajectory.prompt
        row = Row(
            torch.tensor(ids),
            Segments((len(ids),)),
            prompt.patches,
            list(prompt.grids),
            torch.as_tensor(prompt.media_positions),
        )
        _, places = pack(net, [trajectory])
        with used_experts(net, places):
            logits = net.logits(net.hidden(row)).float()
        logits[:, sorted(made.engine.rules.banned_ids)] = float("-inf")
        chosen = [i for i, label in enumerate(labels) if label >= 0]
        wanted = torch.tensor([labels[i] for i in chosen])
        logp.append(logits[[i - 1 for i in chosen]].log_softmax(-1).gather(1, wanted[:, None]).squeeze(1))
        old += said
        lengths.append(len(chosen))
    out = policy_loss(
        made.config.objective, torch.cat(logp), torch.tensor(old), seen.advantages_N, Segments(tuple(lengths))
    )
    out.loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def distance(got, want):
    """Largest relative difference of a parameter's gradient."""
    return max(
        float((got[key] - grad).norm() / grad.norm())
        for key, grad in want.items()
        if float(grad.abs().max()) > 1e-7
    )


@pytest.mark.parametrize("name", ["k2.5", "k1.5", "gspo"])
def test_gradients_are_those_of_the_generated_tokens_with_what_tools_said_as_context(folder, tmp_path, name):
    objective = {"name": name, "reset_optimizer": False}
    made = tool_training(
        folder, tmp_path / "run", look_then_tell, objective=objective, rollout={"prompts": 3}
    )
    groups, _ = collected(made)
    # As if the sampler had drawn freely: the script's grammar is no part of the policy.
    groups = [type(g)(g.prompt, [unheld(made, t) for t in g.trajectories]) for g in groups]
    answers = flat([g.trajectories for g in groups])
    scored = [Scored((i * 7 % 5) / 4) for i in range(len(answers))]
    seen = experience(made.config, groups, scored, 0, {})
    assert seen.lengths_N.tolist() == [len(t.ids) for t in answers] != [len(t.tail[0]) for t in answers]
    net, sums = made.model.train(), Sums()
    made.learner.gradients(seen, range(len(groups)), 0, sums)
    got = {key: p.grad.clone() for key, p in net.named_parameters() if p.grad is not None}
    tokens = sums.reduced(made.runtime)["tokens"]
    assert tokens == sum(len(t.ids) for t in answers)
    net.zero_grad(set_to_none=True)
    assert distance(got, by_hand(made, seen)) < GRAD_RTOL


def unheld(made, trajectory):
    """The trajectory with the log-probabilities of a sampler without a grammar, and a little noise as of
    older weights."""
    noise = torch.Generator().manual_seed(len(trajectory.ids))
    shift = (0.1 * torch.randn(len(trajectory.ids), generator=noise)).tolist()
    logprobs = [p + s for p, s in zip(trajectory.completion.logprobs1, shift)]
    return replace(trajectory, completion=replace(trajectory.completion, logprobs=logprobs))


def test_the_engine_and_the_trainer_agree_on_all_turns(folder, tmp_path):
    """Log-probabilities are of the turn that made the token; experts too, each once for every token."""
    made = tool_training(folder, tmp_path / "run", look_then_tell)
    answers = flat([g.trajectories for g in collected(made)[0]])
    for trajectory in answers:
        assert len(trajectory.completion.routing) == trajectory.total - 1
        assert (
            len(trajectory.completion.logprobs) == len(trajectory.completion.versions) == len(trajectory.ids)
        )
    for replay in (True, False):
        row, places = pack(made.model, answers)
        trained_M = trained_logprobs(made.model, row, places, replay).detach()
        assert mismatch(answers, trained_M)[1] < LOGP_ATOL


# ------------------------------------------------------------------------------------------------- turns and
# mistakes


@pytest.mark.parametrize("limit", [1, 2])
def test_a_call_after_the_last_turn_ends_the_answer_without_one(folder, tmp_path, limit):
    def say(name, prompt):
        return [call("1 + 1")]

    made = tool_training(folder, tmp_path / "run", say, rollout={"tool_turns": limit})
    groups, counts = collected(made)
    for trajectory in flat([g.trajectories for g in groups]):
        assert len(trajectory.inserted) == limit and trajectory.completion.text == ""
        assert trajectory.ids == call("1 + 1") * (limit + 1) and trajectory.completion.finish_reason == "stop"
    assert counts["tools/over_turns"] == 8 and counts["tools/turns"] == 8 * limit


def test_tokens_are_limited_over_all_turns_together_and_outputs_apart(folder, tmp_path):
    def say(name, prompt):
        return [answer("x" * 300)] if last_output(prompt) else [call("print('ab' * 4000)")]

    first = len(call("print('ab' * 4000)"))
    made = tool_training(
        folder, tmp_path / "run", say, rollout={"max_new_tokens": first + 20, "tool_output_tokens": 100}
    )
    for trajectory in flat([g.trajectories for g in collected(made)[0]]):
        assert len(trajectory.ids) == first + 20 and trajectory.completion.finish_reason == "length"
        assert 90 <= len(trajectory.inserted[0].ids) <= 100 and "ababab" in trajectory.shown
    made = tool_training(folder, tmp_path / "short", say, rollout={"max_new_tokens": first})
    groups, counts = collected(made)
    assert all(
        t.completion.finish_reason == "length" and not t.inserted for g in groups for t in g.trajectories
    )
    assert counts["tools/calls"] == 0 and counts["tools/answers"] == 8  # nobody could have read the result


def test_the_reward_sees_the_last_message_alone_and_the_log_the_whole_answer(folder, tmp_path):
    changes = {"reward": {"name": f"{__name__}:heard"}, "train": {"updates": 1}, "log": {"groups": 4}}
    made = tool_training(folder, tmp_path / "run", look_then_tell, **changes)
    HEARD.clear()
    assert made.train() == 0
    assert len(HEARD) == 8 and all(
        text.startswith("(") and text.endswith(")") and "\n" not in text for text in HEARD
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert line["image"] and "Answer with the tool python(code)" in line["prompt"]
        for one in line["answers"]:
            assert f"(python) {PIXEL}\n[python] (" in one["text"] and "(thinks) so\n(" in one["text"]


HEARD: list[str] = []


def heard(problem, response):
    HEARD.append(response)
    return float(len(HEARD) % 2)


# -------------------------------------------------------------------------------------------------- the same
# run again


def test_what_is_said_depends_on_no_batch_and_no_clock(folder, tmp_path, monkeypatch):
    seen = []
    for slots, workers in ((128, 2), (4, 1)):
        monkeypatch.setattr("earlyfusion.rl.environments.python.WORKERS", workers)
        rollout = {"slots": slots, "group_size": 4}
        made = tool_training(folder, tmp_path / str(slots), wander, rollout=rollout)
        groups, counts = collected(made)
        seen.append([[(t.ids, t.inserted, t.text) for t in g.trajectories] for g in groups])
    assert seen[0] == seen[1] and counts["tools/calls"] > 4
    assert len({tuple(t[0]) for g in seen[0] for t in g}) > 3 and any(
        len(t[1]) == 2 for g in seen[0] for t in g
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_stopped_and_resumed_run_equals_an_unbroken_one_bit_for_bit(folder, tmp_path, seed):
    changes = {
        "tasks": [
            {"name": "counting", "tools": True},
            {"name": "colour_shape"},
            {"name": "odd_one_out", "form": "twin", "tools": True},
        ],
        "rollout": {"max_new_tokens": 150, "resample": 1},
        "train": {"updates": 3},
    }

    def say(name, prompt):
        plain = [[*TOKENIZER.encode(word), TOKENIZER.eos_id] for word in (" red", " blue", " a")]
        return wander(name, prompt) if "<|open|>" in prompt else plain

    for name, resume, run in (("whole", False, {}), ("cut", False, {"steps": 1}), ("cut", True, {})):
        made = tool_training(folder, tmp_path / name, say, resume, run={"seed": seed, **run}, **changes)
        assert made.train() == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")
    whole, cut_ = (
        [
            {k: v for k, v in one.items() if k.startswith("tools/")}
            for one in read_metrics(tmp_path / name / "metrics.jsonl", "train")
        ]
        for name in ("whole", "cut")
    )
    assert whole == cut_ and sum(record["tools/calls"] for record in whole) > 2
