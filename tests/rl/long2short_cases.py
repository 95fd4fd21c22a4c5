"""A toy where long answers are wrong: a tiny model that says " yes" or " no no no no", and a reward for
"yes"."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from engine_cases import TOKENIZER, model
from rl_cases import trained_logprobs

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval import rewards
from earlyfusion.model.engine.requests import Completion
from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline import cli
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.rl.rollouts.packing import Trajectory, pack
from earlyfusion.rl.rollouts.prompts import encode_prompt

SHORT, LONG = " yes", " no no no no"
TASKS = "colour_shape/0/twin odd_one_out/0/picture"
REWARD = f"{__name__}:yes_is_right"


def yes_is_right(problem, response: str) -> float:
    return float(response.strip() == "yes")


def toy_directory(folder: Path) -> Path:
    """The tiny model after a few steps of fine-tuning on both answers to every prompt; both are likely then,
    or nothing could be shown."""
    net, prompts = model(0), []
    for kind in (TaskEntry(name="colour_shape", form="twin"), TaskEntry(name="odd_one_out")):
        for number in range(3):
            problem = make_task(kind.name).sample(1000 + number)
            prompts.append(encode_prompt(problem, kind, TOKENIZER, net.config.vision))
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.0)
    answers = []
    for prompt in prompts:
        for text in (SHORT, LONG):
            ids = [*TOKENIZER.encode(text), TOKENIZER.eos_id]
            nan, versions = [float("nan")] * len(ids), [0] * len(ids)
            done = Completion("x", 0, ids, nan, nan, versions, text, "stop", len(prompt.ids), 0)
            answers.append(Trajectory(prompt, done))
    row, places = pack(net, answers)
    net.train()
    for _ in range(30):
        loss = -trained_logprobs(net, row, places).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert float(loss) < 0.8
    return save_model(net.eval(), TOKENIZER, folder / "toy")


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    return toy_directory(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def here():
    """Rewards of the tests are called in this process."""
    made = rewards.make_reward
    with pytest.MonkeyPatch.context() as patch:
        inline = lambda *given: (made(*given)[0], "inline")
        patch.setattr("earlyfusion.rl.rollouts.experience.make_reward", inline)
        yield


def call(way: str, folder: Path, out: Path, more: str = "", problems: int = 16) -> int:
    """The verb in this process, on a small run."""
    AcceleratorState._reset_state(True)
    return cli.main(["long2short", *words(way, folder, out, more, problems)])


def words(way: str, folder: Path, out: Path, more: str = "", problems: int = 16) -> list[str]:
    given = f"{way} --model {folder} --out {out} --problems {problems} --samples 6 --max-new-tokens 7"
    given += f" --tasks {TASKS} --set reward.name={REWARD} --set train.threads=1 {more}"
    return given.split()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(capsys) -> str:
    """The one line on stderr."""
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error, error
    return error
