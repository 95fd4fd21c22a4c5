"""Environments: what is said reaches the model as in training, what is paid reaches the reward, and what goes
wrong costs its own answer."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from environment_cases import frame
from rl_cases import flat, mismatch, trained_logprobs
from tool_cases import TOKENIZER, answer, collected, directory, ids_of, tool_training

from earlyfusion.data.chat.declare import declaration
from earlyfusion.data.chat.template import Message, ToolCall, tools_message
from earlyfusion.data.chat.tokens import encode_chat
from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval.rewards import Rewards, TaskReward
from earlyfusion.kernels.errors import UserError
from earlyfusion.rl.environments.base import EnvironmentFault, make_environment
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.rl.rollouts.experience import experience, score
from earlyfusion.rl.rollouts.packing import pack

LOGP_ATOL = 1e-4
"""Engine against training forward, fp32, every generated token (the bar of test_rollout)."""
CASES = "environment_cases"

pytestmark = pytest.mark.usefixtures("rewards_called_here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return directory(tmp_path_factory.mktemp("start"))


def entry(place, **changes):
    return {"name": "episode", "environment": place, "turns": 6, "reply_tokens": 60, **changes}


def walking(folder, out, say=None, environment=f"{CASES}:Walk", options=None, rollout=None, **changes):
    """A run whose model says what it likes of: go, end, what."""
    say = say or (lambda name, prompt: [answer("go"), answer("go"), answer("end"), answer("what")])
    task = entry(environment, environment_options=options or {}, **changes)
    rollout = {"max_new_tokens": 120, "prompts": 8, **(rollout or {})}
    return tool_training(folder, out, say, tasks=[task], rollout=rollout)


def told(trajectory):
    """What the assistant said, message by message."""
    return [one.text for one in trajectory.messages if one.role == "assistant"]


# ------------------------------------------------------------------------------------------ what is read and
# what is trained


def test_an_episode_is_the_document_of_training_token_for_token_and_patch_for_patch(folder, tmp_path):
    made = walking(folder, tmp_path / "run")
    seen = set()
    for group in collected(made)[0]:
        seed = group.problem.meta["seed"]
        for trajectory in group.trajectories:
            place, talk = 0, [Message("system", (Text("walk"),))]
            talk.append(Message("user", (Image(frame(seed, 0)), Text("here"))))
            for word in told(trajectory):
                talk.append(Message("assistant", (Text(word),)))
                place += word == "go"
                shown = (Image(frame(seed, place)), Text(str(place)))
                talk.append(Message("user", (Text("go or end"),) if word == "what" else shown))
            # What was said last needs no answer, and is not read.
            whole = encode_chat(talk[:-1], TOKENIZER, made.model.config.vision, add_generation_prompt=False)
            patches, grids, _ = trajectory.media
            assert [*trajectory.prompt.ids.tolist(), *trajectory.tail[0]] == whole.ids.tolist()[:-1]
            assert torch.equal(torch.cat([trajectory.prompt.patches, *patches]), whole.patches)
            assert [*trajectory.prompt.grids, *grids] == list(whole.grids)
            seen.add(tuple(told(trajectory)))
    assert len(seen) > 3 and any("what" in words for words in seen) and any(len(w) > 2 for w in seen)


@pytest.mark.parametrize("shared", [True, False])
def test_the_trainer_sees_the_pictures_of_every_turn(folder, tmp_path, shared):
    """Engine's log-probabilities against the training forward; another frame changes them."""
    made = walking(folder, tmp_path / "run")
    groups, _ = collected(made)
    answers = flat([group.trajectories for group in groups])
    assert sum(len(part.grids) for t in answers for part in t.inserted) > 10
    row, places = pack(made.model, answers, share_pictures=shared)
    features = {"feature_of_M": places.feature_of_F} if shared else {}
    embed = made.model.embed
    made.model.embed = lambda row, route=None: embed(row, route, **features)
    with torch.no_grad():
        trained = trained_logprobs(made.model, row, places)
    assert mismatch(answers, trained)[1] < LOGP_ATOL

    row.patches[-1] = 255 - row.patches[-1]
    with torch.no_grad():
        other = trained_logprobs(made.model, row, places)
    assert not torch.equal(other, trained)


def test_a_conversation_with_pictures_is_read_once(folder, tmp_path):
    """Read are the prompts, once for a group, and for every turn the reply and the token before it; every
    picture goes through the tower once. Oracle: turns that read everything again."""
    read, seen = [], []
    for kept in (True, False):
        made = walking(folder, tmp_path / str(kept), options={"length": 5}, rollout={"prompts": 3})
        made.engine.images.limit = 0  # nothing is remembered from one request to the next
        if not kept:
            held = made.engine.submit
            made.engine.submit = lambda request, after=None, held=held: held(request)
        groups, _ = collected(made)
        seen.append(flat([group.trajectories for group in groups]))
        read.append((made.engine.stats()["read_tokens"], made.engine.images.encoded))
    once, whole = seen
    prompts = sum(len(group.trajectories[0].prompt.ids) for group in groups)
    frames = sum(len(part.grids) for t in once for part in t.inserted)
    assert read[0][0] == prompts + sum(len(part.ids) + 1 for t in once for part in t.inserted) < read[1][0]
    assert frames <= read[0][1] <= len(groups) + frames < read[1][1] and frames > 6
    for mine, other in zip(once, whole, strict=True):
        assert mine.tail == other.tail
        assert mine.completion.logprobs == pytest.approx(other.completion.logprobs, abs=LOGP_ATOL)


def test_what_is_paid_is_the_reward_and_teaches(folder, tmp_path):
    made = walking(folder, tmp_path / "run", rollout={"group_size": 4})
    groups, counts = collected(made)
    scored = score(Rewards(TaskReward(made.prompts.tasks)), groups)
    answers = flat([group.trajectories for group in groups])
    for one, trajectory in zip(scored, answers, strict=True):
        goes = told(trajectory).count("go")
        assert (trajectory.paid or 0.0) == 0.5 * goes == (one.value if trajectory.paid is not None else 0.0)
    assert len({t.paid for t in answers}) > 2
    seen = experience(made.config, groups, scored, 0, {})
    assert float(seen.advantages_N.abs().max()) > 0
    assert counts["tools/answers"] == len(answers) and counts["tools/turns"] == sum(
        len(told(t)) for t in answers
    )


# ----------------------------------------------------------------------------------------- clocks and faults


def test_ordered_replies_do_not_depend_on_the_clock(folder, tmp_path):
    seen = []
    for number, (wait_s, ordered) in enumerate(((0.0, True), (0.03, True), (0.03, False))):
        rollout = {"ordered": ordered}
        made = walking(folder, tmp_path / str(number), options={"wait_s": wait_s}, rollout=rollout)
        groups, counts = collected(made)
        steps = made.engine.stats()["steps"]
        seen.append(([t.tail for t in flat([group.trajectories for group in groups])], counts, steps))
    fast, slow, free = seen
    assert fast == slow and fast[:2] == free[:2]


@pytest.mark.parametrize(
    ("what", "isolated", "counter"),
    [
        ("raise", False, "failed"),
        ("exit", False, "failed"),
        ("nan", False, "failed"),
        ("shape", False, "failed"),
        ("silent", False, "failed"),
        ("hang", False, "late"),
        ("raise", True, "failed"),
        ("hang", True, "late"),
        ("die", True, "failed"),
    ],
)
def test_a_faulty_environment_costs_its_own_answers(folder, tmp_path, what, isolated, counter):
    rollout = {"step_timeout_s": 2.0 if what == "hang" else 30.0, "group_size": 2, "prompts": 4}
    made = walking(
        folder,
        tmp_path / "run",
        lambda name, prompt: [answer("go")],
        f"{CASES}:Faulty",
        {"what": what},
        rollout,
        isolated=isolated,
    )
    groups, counts = collected(made)
    hurt = [group for group in groups if group.problem.meta["seed"] % 4 == 0]
    well = [group for group in groups if group.problem.meta["seed"] % 4]
    assert hurt and well
    assert counts[f"tools/{counter}"] == 2 * len(hurt)
    for trajectory in flat([group.trajectories for group in hurt]):
        assert not trajectory.ended and "[environment]" in trajectory.shown and told(trajectory) == ["go"] * 2
    for trajectory in flat([group.trajectories for group in well]):
        assert trajectory.ended and trajectory.paid == 1.5
    # The next iteration is none the worse.
    assert len(made.collector.collect(1, 1.0, 4)) == 4


def test_budgets_of_turns_and_tokens_end_an_episode_that_keeps_what_it_earned(folder, tmp_path):
    go = lambda name, prompt: [answer("go")]
    made = walking(folder, tmp_path / "run", go, options={"length": 9}, turns=2, rollout={"prompts": 2})
    for trajectory in flat([group.trajectories for group in collected(made)[0]]):
        assert trajectory.paid == 1.0 and trajectory.ended and len(told(trajectory)) == 2
    spent = len(answer("go"))
    made = walking(
        folder,
        tmp_path / "short",
        go,
        options={"length": 9},
        rollout={"prompts": 2, "max_new_tokens": 2 * spent},
    )
    for trajectory in flat([group.trajectories for group in collected(made)[0]]):
        assert len(trajectory.ids) == 2 * spent and trajectory.paid == 1.0


def test_plain_classes_and_coroutines_are_environments_and_rewards_judge_where_none_pays(folder, tmp_path):
    say = lambda name, prompt: [answer("yes"), answer("no")]
    made = walking(folder, tmp_path / "run", say, f"{CASES}:Plain", rollout={"prompts": 3}, turns=40)
    answers = flat([group.trajectories for group in collected(made)[0]])
    assert {told(t)[-1] for t in answers if t.ended} == {"no"} and all(t.paid is None for t in answers)
    assert all(t.answer == ("no" if t.ended else "") for t in answers)


@pytest.mark.slow
def test_a_thousand_conversations_wait_at_once(folder, tmp_path):
    """1,000 conversations of four turns of 100 ms: one after the other they would wait 400 s."""
    rollout = {"prompts": 250, "group_size": 4, "ordered": False, "slots": 64}
    made = walking(
        folder, tmp_path / "run", lambda name, prompt: [answer("go")], f"{CASES}:Thousand", rollout=rollout
    )
    most = 0
    due = made.collector.pool.environments.step

    def counted(begun, message):
        nonlocal most
        future = due(begun, message)
        waiting.add(future)
        future.add_done_callback(waiting.discard)
        most = max(most, len(waiting))
        return future

    waiting: set = set()
    made.collector.pool.environments.step = counted
    groups, counts = collected(made)
    assert counts["tools/answers"] == 1000 and counts["tools/turns"] == 4000
    assert all(t.paid == 1.0 and t.ended for t in flat([group.trajectories for group in groups]))
    assert most > 30


# ------------------------------------------------------------------------------------------------- functions


def calls(*names_and_arguments):
    made = tuple(ToolCall(name, arguments) for name, arguments in names_and_arguments)
    return ids_of(Message("assistant", (Text(""),), calls=made))


def test_functions_are_declared_checked_and_answer_with_text_and_pictures(folder, tmp_path):
    said = [
        calls(("add", {"a": 2, "b": 3}), ("draw", {"colour": "red"})),
        calls(("add", {"a": "many"})),
        calls(("fail", {"why": "no disk"})),
        calls(("adds", {"a": 1})),
    ]
    say = lambda name, prompt: [answer("5")] if 'role="tool"' in prompt else said
    options = {"functions": [f"{CASES}:{name}" for name in ("add", "draw", "fail")]}
    made = tool_training(
        folder,
        tmp_path / "run",
        say,
        tasks=[entry("functions", environment_options=options, name="counting", reply_tokens=120)],
        rollout={"prompts": 8, "max_new_tokens": 300},
    )
    groups, counts = collected(made)
    shown = "\n".join(t.shown for t in flat([group.trajectories for group in groups]))
    assert "[add] 5" in shown and "[draw]" in shown
    assert "add: a: Input should be a valid integer" in shown
    assert "[fail] OSError: no disk" in shown and "no tool 'adds'; did you mean 'add'" in shown
    assert counts["tools/ok"] and counts["tools/error"] and counts["tools/not_a_program"]
    declared = [one for group in groups for one in group.prompt.messages if one.role == "system"]
    assert declared and all(
        "Add two numbers." in one.text and "not shown" not in one.text for one in declared
    )
    pictured = [t for t in flat([g.trajectories for g in groups]) if "[draw]" in t.shown]
    assert all(len(part.grids) == 1 for t in pictured for part in t.inserted)


def test_declarations_are_json_schema():
    from environment_cases import add

    about = declaration(add)["function"]
    assert about["name"] == "add" and about["description"] == "Add two numbers."
    assert about["parameters"] == {
        "type": "object",
        "additionalProperties": False,
        "properties": {"a": {"type": "integer"}, "b": {"default": 1, "type": "integer"}},
        "required": ["a"],
    }
    assert tools_message([declaration(add)]).role == "system"


# ---------------------------------------------------------------------------------------------- other houses


def test_a_gymnasium_game_shows_frames_and_takes_actions(folder, tmp_path):
    pytest.importorskip("gymnasium")
    options = {
        "id": "FrozenLake-v1",
        "actions": ["left", "down", "right", "up"],
        "render": False,
        "words": True,
        "options": {"is_slippery": False},
    }
    way = ["down", "down", "right", "right", "down", "right"]

    def say(name, prompt):
        moves = prompt.count("reward")
        return [answer(f"up or {way[moves]}")] if moves or "#" in name else [answer("swim"), answer("down")]

    made = walking(folder, tmp_path / "run", say, "gymnasium", options, turns=12, rollout={"prompts": 3})
    groups, counts = collected(made)
    answers = flat([group.trajectories for group in groups])
    assert {told(t)[0] for t in answers} == {"swim", "down"}
    assert all(t.paid == 1.0 and t.ended for t in answers), [t.shown for t in answers]
    swims = sum(told(t)[0] == "swim" for t in answers)
    assert counts["tools/not_an_action"] == swims > 0
    assert counts["tools/actions"] == 6 * len(answers)


def test_frames_of_a_game_are_functions_of_the_seed():
    gymnasium = pytest.importorskip("gymnasium")
    import numpy as np

    class Dot(gymnasium.Env):
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
        metadata = {"render_modes": ["rgb_array"]}

        def __init__(self, render_mode=None):
            self.render_mode = render_mode

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.at = self.np_random.random(2).astype(np.float32)
            return self.at, {}

        def step(self, action):
            self.at = np.clip(self.at + action, 0, 1)
            return self.at, float(self.at.sum()), False, False, {}

        def render(self):
            canvas = np.zeros((40, 60, 3), np.uint8)
            canvas[int(self.at[0] * 39), int(self.at[1] * 59)] = 255
            return canvas

    gymnasium.register("Dot-v0", Dot)
    task = make_task("episode")
    problem, other = task.sample(1), task.sample(2)
    frames = []
    for asked in (problem, problem, other):
        made = make_environment("gymnasium", {"id": "Dot-v0", "size": 30})
        first = made.reset(asked)[-1].content[0].open()
        step = made.step(Message("assistant", (Text("[1.0, 1.0]"),)))
        assert step.reward == 2.0 and not step.done and first.size == (30, 20)
        assert made.step(Message("assistant", (Text("[2.0, 1.0]"),))).counts == {"not_an_action": 1}
        frames.append((first.tobytes(), step.messages[0].content[0].open().tobytes()))
        made.close()
    assert frames[0] == frames[1] and frames[0][0] != frames[2][0] and frames[0][1] == frames[2][1]


# -------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": "gymnasum"}, "did you mean 'gymnasium'"),
        ({"environment": "nowhere:Game"}, "nowhere"),
        (
            {"environment": f"{CASES}:Walk", "environment_options": {"size": 3}},
            "unexpected keyword argument 'size'",
        ),
        ({"environment": f"{CASES}:Restless"}, "began one problem in two ways"),
        ({"environment": f"{CASES}:Long", "turns": 2}, "replies 3 times.*after 2; set turns.* to 3"),
        ({"environment": f"{CASES}:Plain", "chat": True}, "drop chat"),
        ({"environment": f"{CASES}:Plain", "tools": True}, "drop one"),
        ({"environment": None, "isolated": True}, "are for an environment; name one"),
        ({"environment": "functions", "environment_options": {"functions": []}}, "give at least one"),
        (
            {"environment": "functions", "environment_options": {"functions": [f"{CASES}:untyped"]}},
            "argument 'a' needs a plain type",
        ),
    ],
)
def test_mistakes_are_one_line_before_the_first_step(folder, tmp_path, changes, message):
    with pytest.raises(Exception, match=message) as caught:
        tool_training(folder, tmp_path / "run", lambda *_: [], tasks=[{"name": "episode", **changes}])
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)


def test_a_label_tells_the_environment():
    assert TaskEntry(name="episode", environment="gymnasium").label == "episode/0/picture/gymnasium"
    assert TaskEntry(name="counting", environment=f"{CASES}:Walk").label == "counting/0/picture/Walk"
    with pytest.raises(EnvironmentFault, match="Nothing"):
        make_environment("gymnasium", {"id": "Nothing-v7"})


def test_the_game_of_the_documentation_is_played_as_it_says(folder, tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[2] / "docs" / "post-training.md").read_text()
    section = page.partition("## Your own tools and environments")[2].partition("\n## ")[0]
    code, recipe = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("python", "toml"))
    (tmp_path / "my_games.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    made = tool_training(
        folder,
        tmp_path / "run",
        lambda name, prompt: [answer("left"), answer("stay"), answer("right")],
        **tomllib.loads(recipe),
        rollout={"prompts": 8, "group_size": 4, "max_new_tokens": 100},
    )
    groups, counts = collected(made)
    for group in groups:
        ball = int(np.random.default_rng(group.problem.meta["seed"]).integers(5))
        for trajectory in group.trajectories:
            paddle = 2
            for word in told(trajectory):
                paddle = min(4, max(0, paddle + {"left": -1, "stay": 0, "right": 1}[word]))
            assert trajectory.paid == float(ball == paddle) and len(told(trajectory)) == 3
    assert {t.paid for group in groups for t in group.trajectories} == {0.0, 1.0}
    assert counts["tools/turns"] == 96 and not counts.get("tools/failed")
