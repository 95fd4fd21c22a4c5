"""Environments of other packages, as they are: verifiers and OpenEnv. Skipped where a package is missing
(pip install 'verifiers<0.3' openenv-core)."""

import threading
import time

import pytest
from rl_cases import flat
from tool_cases import answer, collected, directory, ids_of, tool_training

from earlyfusion.data.chat.template import Message, ToolCall
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval.rewards import Rewards, TaskReward
from earlyfusion.rl.environments.base import EnvironmentFault, make_environment
from earlyfusion.rl.rollouts.experience import score

pytestmark = pytest.mark.usefixtures("rewards_called_here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return directory(tmp_path_factory.mktemp("start"))


def played(folder, out, say, **entry):
    """(run, trajectories, counts) of one iteration."""
    task = {"turns": 8, "reply_tokens": 60, **entry}
    made = tool_training(
        folder, out, say, tasks=[task], rollout={"prompts": 4, "max_new_tokens": 200, "step_timeout_s": 20.0}
    )
    groups, counts = collected(made)
    return made, groups, counts


# ------------------------------------------------------------------------------------------------- verifiers


def verifiers_entry(**args):
    options = {"id": "verifiers-case", "args": args}
    return {
        "name": "verifiers",
        "options": options,
        "environment": "verifiers",
        "environment_options": options,
    }


def test_a_verifiers_game_is_played_by_our_engine_and_paid_by_its_rubric(folder, tmp_path):
    pytest.importorskip("verifiers", exc_type=ImportError)

    def say(name, prompt):
        return [answer(str(i)) for i in range(4)]

    made, groups, counts = played(folder, tmp_path / "run", say, **verifiers_entry())
    numbers = set()
    for group in groups:
        wanted = group.problem.answer
        assert group.prompt.messages[0].text == "Guess."
        for trajectory in group.trajectories:
            said = [one.text for one in trajectory.messages if one.role == "assistant"]
            heard = [one.text for one in trajectory.messages if one.role == "user"]
            told = ["right" if one == wanted else "higher" if one < wanted else "lower" for one in said]
            found = wanted in said
            assert said.index(wanted) == len(said) - 1 if found else len(said) == 5
            assert heard == told[: len(heard)] and len(heard) >= len(said) - 1
            assert trajectory.paid == pytest.approx(1 / len(said) if found else 0.0)
            numbers.add(trajectory.paid)
    assert len(numbers) > 2 and not counts.get("tools/failed")
    scored = score(Rewards(TaskReward(made.prompts.tasks)), groups)
    assert [one.value for one in scored] == [t.paid for t in flat([group.trajectories for group in groups])]


def test_tools_of_verifiers_are_declared_and_called(folder, tmp_path):
    pytest.importorskip("verifiers", exc_type=ImportError)

    def say(name, prompt):
        if 'role="tool"' in prompt:
            said = prompt.rpartition('role="tool"')[2].partition("<|sep|>")[2]
            return [answer(said.partition("<|close|>")[0])]
        number = int(prompt.rpartition("number ")[2].partition("<|")[0])
        call = ToolCall("double", {"number": number})
        return [ids_of(Message("assistant", (Text(""),), calls=(call,)))]

    made, groups, _ = played(folder, tmp_path / "run", say, **verifiers_entry(tools=True))
    answers = flat([group.trajectories for group in groups])
    assert all(t.paid == 1.0 and t.ended for t in answers), [t.shown for t in answers]
    assert all("Twice a number." in group.prompt.messages[0].text for group in groups)
    task = made.prompts.tasks[0]
    assert [one.answer for one in task.test_problems(9, 0)] == ["8", "10"]


def test_missing_packages_and_environments_are_one_line(monkeypatch):
    with pytest.raises(EnvironmentFault, match=r"pip install|load_environment") as caught:
        make_task("verifiers", id="no-such-environment")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(__import__("sys").modules, "websockets.asyncio.client", None)
    with pytest.raises(EnvironmentFault, match="pip install"):
        make_environment("openenv", {"url": "http://localhost:1"})


# --------------------------------------------------------------------------------------------------- OpenEnv


@pytest.fixture(scope="module")
def server():
    """The address of a server of openenv-core."""
    http = pytest.importorskip("openenv.core.env_server.http_server", exc_type=ImportError)
    import uvicorn
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Word(Action):
        message: str

    class Heard(Observation):
        text: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **_):
            self.seed, self.left = seed, 3
            return Heard(text=f"seed {seed}")

        def step(self, action, timeout_s=None, **_):
            if action.message == "burn":
                raise RuntimeError("the house is on fire")
            self.left -= 1
            return Heard(text=action.message.upper(), reward=float(len(action.message)), done=not self.left)

        @property
        def state(self):
            return State(step_count=3 - self.left)

    app = http.create_fastapi_app(Echo, Word, Heard, max_concurrent_envs=64)
    served = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    while not served.started:
        assert thread.is_alive()
        time.sleep(0.05)
    yield f"http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}"
    served.should_exit = True
    thread.join(10)


def test_an_openenv_server_is_played_over_its_socket(folder, tmp_path, server):
    options = {"url": server, "shown": "text", "system": "Say words."}
    entry = {"name": "episode", "environment": "openenv", "environment_options": options}

    def say(name, prompt):
        return [answer("cat"), answer("horse")]

    _, groups, counts = played(folder, tmp_path / "run", say, **entry)
    for group in groups:
        system, first = group.prompt.messages
        assert system.text == "Say words." and first.text == f"seed {group.problem.meta['seed'] % 2**31}"
        for trajectory in group.trajectories:
            said = [one.text for one in trajectory.messages if one.role == "assistant"]
            heard = [one.text for one in trajectory.messages if one.role == "user"]
            assert heard == [one.upper() for one in said] and len(said) == 3
            assert trajectory.paid == sum(map(len, said))
    assert counts["tools/actions"] == 24 and not counts.get("tools/failed")


def test_an_openenv_server_that_fails_costs_its_own_answers(folder, tmp_path, server):
    options = {"url": server, "shown": "text"}
    entry = {"name": "episode", "environment": "openenv", "environment_options": options}

    def say(name, prompt):
        return [answer("burn" if int(prompt.split("seed ")[1].split("<")[0]) % 4 == 0 else "cat")]

    _, groups, counts = played(folder, tmp_path / "run", say, **entry)
    answers = flat([group.trajectories for group in groups])
    burnt = [t for t in answers if any(one.text == "burn" for one in t.messages)]
    assert 0 < len(burnt) == counts["tools/failed"] < len(answers)
    assert all(not t.ended for t in burnt) and all(t.paid == 9 for t in answers if t not in burnt)


def test_a_server_that_is_not_there_is_told_before_the_first_step(folder, tmp_path):
    pytest.importorskip("websockets")
    entry = {
        "name": "episode",
        "environment": "openenv",
        "environment_options": {"url": "http://127.0.0.1:9"},
    }
    with pytest.raises(EnvironmentFault, match="reset raised") as caught:
        played(folder, tmp_path / "run", lambda *_: [], **entry)
    assert "\n" not in str(caught.value)
