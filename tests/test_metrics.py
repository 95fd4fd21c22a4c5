"""docs/metrics.md names every number that a run writes, and none that no run writes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from earlyfusion.data.errors import REASONS
from earlyfusion.eval.measured import MEANS
from earlyfusion.eval.rewards import STATUSES
from earlyfusion.eval.tool_talks import MEASURES
from earlyfusion.pipeline.config.compose import flatten
from earlyfusion.pipeline.track import TRACKERS, read_metrics
from earlyfusion.rl.long2short.dpo import SUMS
from earlyfusion.rl.rollouts.episodes import COUNTED

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ALWAYS = {"step", "event", "time"}
PRETRAIN = (
    "pretrain nano --steps 2 --stages.joint.tokens 512 --stages.joint.length 256 --eval.every 1"
    " --eval.samples 0"
    " --eval.heldout 2 --eval.limits {easy_vqa=2,bpb=2,counting=2}"
    " --eval.tasks ['easy_vqa','bpb','counting']"
    " --checkpoint.every 1"
)
RL = (
    "rl vision-rl --steps 1 --eval.problems 2 --eval.samples 2 --rollout.prompts 4 --rollout.group_size 4"
    " --train.warmup_updates 0"
)


def named(title):
    """The names in the first column of the table under a heading."""
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def matches(name, documented):
    """Whether a name is one of these, <...> standing for anything."""
    patterns = (
        "".join(".+" if part[:1] == "<" else re.escape(part) for part in re.split(r"(<\w+>)", one))
        for one in documented
    )
    return any(re.fullmatch(pattern, name) for pattern in patterns)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """kind of run -> event -> names, of a tiny run of each."""
    found = {}
    for kind, words in (("pretrain", PRETRAIN), ("rl", RL)):
        out = tmp_path_factory.mktemp(kind)
        command = [sys.executable, "-m", "earlyfusion.pipeline.cli", *words.split(), "--out", str(out)]
        bare = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--track.log_every", "1"],
            capture_output=True,
            text=True,
            timeout=300,
            env=bare,
            cwd=out,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        events = found.setdefault(kind, {})
        for record in read_metrics(out / "metrics.jsonl"):
            names = (
                set(record)
                if kind == "pretrain" or record["event"] != "eval"
                else dict(flatten(record)).keys()
            )
            events.setdefault(record["event"], set()).update(names - ALWAYS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "event", "title", "least"),
    [
        ("pretrain", "train", "Pretraining and fine-tuning: `train`", 30),
        ("pretrain", "eval", "Pretraining and fine-tuning: `eval`", 14),
        ("rl", "train", "Reinforcement learning: `train`", 30),
        ("rl", "eval", "Reinforcement learning: `eval`", 30),
    ],
)
def test_every_number_of_a_run_is_documented(written, kind, event, title, least):
    names, documented = written[kind][event], named(title)
    assert len(names) >= least
    # A task's name may be anything, so it is no pattern here.
    tasks = {"easy_vqa", "easy_vqa_blind", "counting", "counting_blind"}
    known = [one for one in documented if one not in ("<task>", "<task>_blind")]
    assert not [name for name in names - tasks if not matches(name, known)]
    assert "<task>" not in documented or {"easy_vqa", "counting_blind"} <= names
    # And what has no condition is really written.
    plain = {one for one in documented if "<" not in one}
    rare = {"ptx_loss", "sandbox", "touched", "clip_share", "message"}
    assert plain - names <= rare


@pytest.mark.slow
def test_events_are_documented(written):
    events = {event for kind in written.values() for event in kind}
    assert {"train", "eval", "checkpoint"} <= events <= set(named("Events"))


def test_names_that_a_tiny_run_does_not_write_are_those_of_the_code():
    rl = named("Reinforcement learning: `train`")
    (failures,) = re.findall(r"`rewards/<status>` \| .*: (.*) \|", PAGE)
    (counters,) = re.findall(r"`tools/<counter>` \| (.*?);", PAGE)
    assert tuple(failures.split(", ")) == STATUSES[1:] and counters.split(", ") == list(COUNTED)
    assert {"rewards/<status>", "tools/<counter>", "prompts/<reason>"} <= set(rl) and REASONS
    assert {f"<task>.{name}" for name in MEANS} <= set(named("Reinforcement learning: `eval`"))
    sft = named("Pretraining and fine-tuning: `eval`")
    assert {f"{name}/<source>" for name in MEASURES} <= set(sft) and "answer_loss/<source>" in sft
    assert set(SUMS) <= set(named("DPO (`long2short`): `train`"))
    source = "\n".join(
        path.read_text() for room in ("pipeline", "rl", "eval") for path in (ROOT / room).rglob("*.py")
    )
    every = {name for title in re.findall(r"^## (.*: `\w+`)$", PAGE, re.MULTILINE) for name in named(title)}
    words = {word for name in every for word in re.findall(r"\w+", re.sub(r"<\w+>", " ", name))}
    assert len(words) > 60 and not [word for word in words if not re.search(rf"\b{word}", source)]


def test_every_tracker_is_named():
    assert all(f"`{name}`" in PAGE for name in TRACKERS)
