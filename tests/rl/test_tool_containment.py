"""What programs may not do, calls that are none, held-out problems with tools: contained, counted, and the
run goes on."""

import json
import struct
import subprocess
from functools import partial

import numpy as np
import pytest
from rl_cases import flat
from tool_cases import (
    PIXEL,
    TOKENIZER,
    VISION,
    Among,
    answer,
    call,
    collected,
    directory,
    hold,
    last_output,
    look_then_tell,
    tool_training,
)

from earlyfusion.data.chat.template import Message
from earlyfusion.data.sample import Text
from earlyfusion.eval.measure import ask
from earlyfusion.eval.measured import summary
from earlyfusion.eval.sandbox import host as sandbox
from earlyfusion.eval.sandbox import walls
from earlyfusion.eval.sandbox.host import SandboxError
from earlyfusion.model.engine import engine as serving
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl import measure as measure_cmd
from earlyfusion.rl.environments.python import repeatable
from earlyfusion.rl.measure import measure_tools
from earlyfusion.rl.recipe import RolloutSection, TaskEntry
from earlyfusion.rl.rollouts.episodes import cut, fitted, reply_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return directory(tmp_path_factory.mktemp("start"))


pytestmark = pytest.mark.usefixtures("rewards_called_here")


# ------------------------------------------------------------------------------------------------ programs
# that attack


def attacks(tmp_path):
    """Program -> counters that must show it."""
    victim = tmp_path / "victim.txt"
    victim.write_text("untouched")
    return (
        victim,
        {
            f"open({str(victim)!r}, 'w').write('gone')": ("blocked", "forbidden"),
            "print(open('/etc/passwd').read())": ("blocked",),
            "import socket\nsocket.create_connection(('1.1.1.1', 53))": ("blocked",),
            "import random\nwhile True:\n    random._os.fork()": ("blocked",),
            "import subprocess\nsubprocess.run(['ls'])": ("blocked",),
            "import numpy as np\nnp.ones((1 << 16, 1 << 16))": ("memory",),
            # memory, or first the time on a busy machine
            "x = []\nwhile True:\n    x.append(bytearray(1 << 26))": (),
            "while True:\n    pass": ("timeout",),
            "import time\ntime.sleep(60)": ("timeout",),
            "while True:\n    print('x' * 10000)": ("output_limit",),
            "import os\nos._exit(0)": ("blocked",),
            "def f():\n    f()\nf()": ("error",),
            "(lambda: ().__class__.__base__.__subclasses__())()[0](": ("error",),
        },
    )


def test_attacks_are_contained_and_counted_and_the_run_goes_on(folder, tmp_path):
    victim, programs = attacks(tmp_path)
    codes = list(programs)

    def say(name, prompt):
        if last_output(prompt):
            return [answer("2")]
        return [call(codes[int(name.rpartition("/")[2]) % len(codes)])]

    changes = {
        "rollout": {"prompts": len(codes), "group_size": 2, "tool_timeout_s": 1.0},
        "train": {"updates": 2},
        "log": {"groups": 12, "rollouts_every": 1},
    }
    made = tool_training(folder, tmp_path / "run", say, **changes)
    assert made.train() == 0
    assert victim.read_text() == "untouched"
    for record in read_metrics(tmp_path / "run" / "metrics.jsonl", "train"):
        wanted = [name for names in programs.values() for name in names]
        for name in set(wanted):
            assert record[f"tools/{name}"] >= 2 * wanted.count(name), (name, record)
        assert (
            record["tools/calls"] == record["tools/answers"] == 2 * len(codes) and record["tools/valid"] == 1
        )
        assert "tools/ok" not in record and "tools/unavailable" not in record
    text = (tmp_path / "run" / "rollouts.jsonl").read_text()
    assert "root:" not in text and "[python] " in text


def test_a_program_that_hangs_costs_its_own_answer(folder, tmp_path):
    def say(name, prompt):
        if last_output(prompt):
            return [answer(last_output(prompt)[:60])]
        return [call("while True:\n    pass" if name.endswith("/0") else "6 * 7")]

    made = tool_training(folder, tmp_path / "run", say, rollout={"tool_timeout_s": 3.0})
    groups, counts = collected(made)
    said = [[t.completion.text for t in g.trajectories] for g in groups]
    assert said[1:] == [["42", "42"]] * 3, said
    assert all("stopped: more than 6 s" in text for text in said[0]), said[0]
    assert counts["tools/timeout"] == 2 and counts["tools/ok"] == 6


def test_a_sandbox_that_dies_is_told_to_the_model_and_counted(folder, tmp_path, monkeypatch):
    made = tool_training(folder, tmp_path / "run", look_then_tell)

    def gone(*_):
        raise OSError("no more processes")

    monkeypatch.setattr(made.prompts.environments.programs.sandbox, "run", gone)
    groups, counts = collected(made)
    assert {t.completion.text for g in groups for t in g.trajectories} == {
        "the tool is not available: OSError"
    }
    assert counts["tools/unavailable"] == 8 and counts["tools/valid"] == 0 == counts["tools/calls"]


BROKEN = {
    "another tool": (call("5", tool="ruby"), "no tool 'ruby'", "not_a_program"),
    "another argument": (call("5", key="text"), "python needs one argument", "not_a_program"),
    "an open call": ([*call("5")[:-12], TOKENIZER.end_of_msg_id], None, "malformed"),
    "no markup inside": ([TOKENIZER.open_id, TOKENIZER.open_id, TOKENIZER.end_of_msg_id], None, "malformed"),
    "the end of the document": ([*call("5")[:-1], TOKENIZER.eos_id], None, "malformed"),
    "a syntax error": (call("1 +"), "SyntaxError", "error"),
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_malformed_calls_are_told_or_end_the_answer_and_are_counted(folder, tmp_path, kind):
    ids, told, counted = BROKEN[kind]

    def say(name, prompt):
        return [answer(f"7 {last_output(prompt)}")] if last_output(prompt) else [ids]

    if kind == "another tool":  # its answer carries its name

        def say(name, prompt):
            return [answer("7 no tool 'ruby'")] if 'tool="ruby" index="1"<|sep|>no tool' in prompt else [ids]

    made = tool_training(folder, tmp_path / "run", say)
    groups, counts = collected(made)
    for trajectory in flat([g.trajectories for g in groups]):
        said = trajectory.completion.text
        assert said == "" if told is None else said.startswith("7 ") and told in said
        assert bool(trajectory.inserted) == (told is not None)
    assert counts[f"tools/{counted}"] == 8 and counts["tools/valid"] == (kind == "a syntax error")


# ----------------------------------------------------------------------------------------------------------
# measuring


@pytest.fixture
def held_engine(monkeypatch):
    """Measures with an engine that calls a program, then answers 2."""

    class Held(serving.Engine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.allowed = hold(self)

        def submit(self, request, after=None):
            prompt = TOKENIZER.decode(request.prompt.ids.tolist())
            choices = [answer("2")] if last_output(prompt) else [call(PIXEL), call("1 + 1", "hm")]
            self.allowed[request.id] = Among(choices, self.rules.config.text.vocab_size)
            return super().submit(request, after)

    monkeypatch.setattr(serving, "Engine", Held)


def test_held_out_problems_are_answered_with_the_tool_and_pair_with_those_without(folder, held_engine):
    entry = TaskEntry(name="counting", tools=True)
    net = load_model(folder)
    rollout = RolloutSection(max_new_tokens=200)
    seen = measure_tools(net, TOKENIZER, [entry], rollout, problems=12, seed=5, samples=2, slots=6)
    asked = ask(net, TOKENIZER, [TaskEntry(name="counting")], problems=12, seed=5, max_new_tokens=3)
    plain = asked.measured()
    assert [one.key for one in seen] == [one.key for one in plain]
    assert all(one.answer == "2" and one.solved == (one.target == "2") for one in seen)
    assert all(one.sampled == (one.score, one.score) for one in seen)
    assert all(0 < one.confidence < 1 and one.p_target == one.solved * one.confidence for one in seen)
    found = summary(seen)["counting/0/picture/tools"]
    assert found["accuracy"] == sum(one.target == "2" for one in seen) / 12 and 0 < found["accuracy"] < 1


def test_the_verb_measures_answers_with_and_without_tools(folder, held_engine, tmp_path, capsys):
    common = ["--model", str(folder), "--device", "cpu", "--problems", "6", "--seed", "5", "--slots", "6"]
    tasks = ["counting/0/picture/tools", "counting/0/twin"]
    assert cli.main(["measure", *common, "--tasks", *tasks, "--samples", "2", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "summary.json").read_text())["tasks"]
    assert set(told) == set(tasks)
    rollout = RolloutSection(max_new_tokens=measure_cmd.TOKENS_WITH_TOOLS)
    alone = measure_tools(
        load_model(folder),
        TOKENIZER,
        [TaskEntry(name="counting", tools=True)],
        rollout,
        problems=6,
        seed=5,
        samples=2,
        slots=6,
    )
    assert told[tasks[0]] == json.loads(json.dumps(summary(alone)[tasks[0]]))
    capsys.readouterr()
    assert cli.main(["measure", *common, "--tasks", tasks[0], "--match-entropy", "1"]) == 2
    assert "counting/0/picture/tools answers with tools" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------
# single pieces


def test_long_outputs_are_cut_and_turns_have_room_for_what_they_may_hold():
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = "".join(rng.choice(list("ab é\n日0 the quick"), size=int(rng.integers(0, 80))))
        room = int(rng.integers(1, 40))
        short = cut(text, room, TOKENIZER)
        assert text.startswith(short) and len(TOKENIZER.encode(short)) <= room
        assert short == text or len(TOKENIZER.encode(short)) >= room - 4
    many = [Message("tool", (Text("x" * 50),), tool="python", index=i + 1) for i in range(3)]
    heard = fitted(many, TOKENIZER, VISION, 100)
    assert heard is not None and all(0 < len(one.text) < 50 for one in heard)
    ids = tuple(reply_of(heard, TOKENIZER, VISION, False).ids.tolist()[1:])
    assert len(ids) <= 100 and ids.count(TOKENIZER.end_of_msg_id) == 3
    assert fitted(many * 4, TOKENIZER, VISION, 100) is None


def test_texts_hold_no_places():
    folder = "No such file: '/tmp/program-ab12_x9z/cat.png'; <object at 0x7f00deadbeef>"
    assert repeatable(folder) == "No such file: './cat.png'; <object at 0x0>"


@pytest.fixture
def without_landlock(monkeypatch):
    """A kernel without landlock, as far as the sandbox's server sees."""
    refused = b"".join(
        struct.pack("=HBBI", *one)
        for one in ((32, 0, 0, 0), (21, 0, 1, 444), (6, 0, 0, 0x50026), (6, 0, 0, 0x7FFF0000))
    )
    start = partial(subprocess.Popen, preexec_fn=lambda: walls.attach(refused))
    monkeypatch.setattr(sandbox.subprocess, "Popen", start)


def test_a_missing_wall_ends_the_run_at_its_start_or_stands_in_every_record(
    folder, tmp_path, without_landlock
):
    with pytest.raises(SandboxError, match=r"the sandbox lacks .*landlock.*sandbox\.allow_weaker"):
        tool_training(folder, tmp_path / "refused", look_then_tell)
    changes = {"train": {"updates": 1}, "log": {"rollouts_every": 1}, "eval": {"problems": 2}}
    made = tool_training(folder, tmp_path / "run", look_then_tell, sandbox={"allow_weaker": True}, **changes)
    assert made.train() == 0
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    told = record["tools/sandbox"]
    without, _, standing = told.partition("; with ")
    assert without.startswith("without ") and "landlock" in without and "seccomp" in standing
    for file in ("rollouts.jsonl", "eval/update-000001.jsonl"):
        for line in (tmp_path / "run" / file).read_text().splitlines():
            assert json.loads(line)["sandbox"] == told
