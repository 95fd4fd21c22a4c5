"""Metrics on disk: whole lines, no step told twice, strict JSON; the progress line."""

import importlib
import io
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import LoggerType
from rich.console import Console

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.config.schema import RunConfig, RunSection, TrackSection
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.pipeline.track import Tracker, check_trackers, read_metrics


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


def test_every_record_is_on_disk_before_the_next_step(tmp_path, runtime):
    tracker = Tracker(tmp_path, runtime, total_steps=9, console=quiet())
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0 / step, "lr": 1e-3})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # not closed, not flushed by us
        assert len(lines) == step and json.loads(lines[-1])["step"] == step
    tracker.event(2, "eval", accuracy=0.5)
    assert read_metrics(tmp_path / "metrics.jsonl", "eval")[0]["accuracy"] == 0.5
    tracker.close()


def test_evaluations_reach_the_trackers_too(tmp_path, runtime):
    tracker, sent = Tracker(tmp_path, runtime, total_steps=9, console=quiet()), []
    tracker._trackers = SimpleNamespace(log=lambda numbers, step: sent.append((step, numbers)))
    tracker.event(4, "eval", **{"heldout/source/photos": 1.5}, note="text", message="said", nothing=None)
    tracker.event(4, "checkpoint", path="step-000004")
    tracker.close()
    assert sent == [(4, {"heldout/source/photos": 1.5})]


def test_a_resume_drops_later_records_and_a_torn_line(tmp_path, runtime):
    tracker = Tracker(tmp_path, runtime, total_steps=9, console=quiet())
    for step in range(1, 6):
        tracker.log(step, {"loss": float(step)})
    tracker.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "event": "tr')
    resumed = Tracker(tmp_path, runtime, total_steps=9, start_step=3, console=quiet())
    for step in (4, 5, 6):
        resumed.log(step, {"loss": -float(step)})
    resumed.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in records] == [1, 2, 3, -4, -5, -6]


def test_a_rollback_rewinds_the_records(tmp_path, runtime):
    tracker = Tracker(tmp_path, runtime, total_steps=9, console=quiet())
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1.0})
    tracker.rewind(1)
    tracker.log(2, {"loss": 2.0})
    tracker.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 2.0)]


def test_records_are_strict_json_whatever_they_are_given(tmp_path, runtime):
    tracker = Tracker(tmp_path, runtime, total_steps=1, console=quiet())
    tracker.log(
        1, {"loss": math.nan, "t": torch.tensor([1.0, math.inf]), "nested": {"a": (1, 2)}, "path": tmp_path}
    )
    tracker.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert record["loss"] is None and record["t"] == [1.0, None] and record["nested"] == {"a": [1, 2]}


def test_without_a_terminal_each_record_is_one_plain_line(tmp_path, runtime):
    console = quiet()
    tracker = Tracker(tmp_path, runtime, total_steps=100, console=console)
    tracker.tick(9, {"loss": 2.0})
    tracker.log(10, {"stage": "joint", "loss": 1.5})
    tracker.event(10, "guard", message="loss is [nan]")
    tracker.close()
    assert console.file.getvalue() == "step 10/100 | joint | loss 1.500\n[guard] step 10: loss is [nan]\n"


def test_tensorboard_gets_the_numbers_when_asked(tmp_path, runtime):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = RunConfig.model_construct(track=TrackSection(trackers=["tensorboard"]))
    tracker = Tracker(tmp_path, runtime, total_steps=2, config=config, console=quiet())
    tracker.log(1, {"loss": 2.5, "stage": "joint"})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5)]


RECORDING = """
calls = []

class Settings(dict):
    def update(self, values, **_):
        calls.append(("config", values))

class Run:
    def log(self, values, step=None, **_):
        calls.append(("log", step, values))

    def finish(self):
        calls.append(("finish",))

config = Settings()

def init(**given):
    if given["name"] == "no key":
        raise ValueError("no key;\\nlog in")
    calls.append(("init", given))
    run = Run()
    run.config = config
    return run
"""


@pytest.fixture(params=["wandb", "trackio"])
def recorder(request, tmp_path, monkeypatch):
    """A module of that name which writes down what accelerate asks of it."""
    (tmp_path / f"{request.param}.py").write_text(RECORDING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType(request.param)])
    module = importlib.import_module(request.param)
    yield module
    sys.modules.pop(request.param, None)


def tracked(*names: str, name: str) -> RunConfig:
    return RunConfig.model_construct(run=RunSection(name=name), track=TrackSection(trackers=list(names)))


def test_a_tracker_gets_the_recipe_the_numbers_and_the_evaluations_of_the_named_run(tmp_path, recorder):
    runtime, out = Runtime(), tmp_path / "run"
    check_trackers([recorder.__name__])
    config = tracked(recorder.__name__, name="first")
    tracker = Tracker(out, runtime, total_steps=4, config=config, console=quiet())
    tracker.log(2, {"loss": 2.5, "stage": "joint", "expert_load": {"0": [0.5, 0.5]}})
    tracker.event(
        2, "eval", **{"heldout/image": 1.5, "counting/0/picture": {"accuracy": 0.25}}, message="said"
    )
    tracker.event(2, "checkpoint", path="step-000002")
    tracker.close()
    runtime.close()
    kinds = [call[0] for call in recorder.calls]
    assert kinds == ["init", "config", "log", "log", "finish"]
    (_, given), (_, recipe), first, second, _ = recorder.calls
    assert given["project"] == "earlyfusion" and given["name"] == "first"
    assert given.get("dir", str(out)) == str(out) and recipe["run.name"] == "first"
    assert first == ("log", 2, {"loss": 2.5})
    assert second == ("log", 2, {"heldout/image": 1.5, "counting/0/picture.accuracy": 0.25})


def test_a_tracker_that_cannot_start_ends_the_run(tmp_path, recorder):
    with pytest.raises(UserError, match=r"cannot start \(no key; log in\); log in or mend") as caught:
        Tracker(tmp_path / "run", Runtime(), total_steps=4, config=tracked(recorder.__name__, name="no key"))
    assert "\n" not in str(caught.value) and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_missing_tracker_is_one_clear_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="tensorboard is not installed; pip install tensorboard"):
        check_trackers(["tensorboard"])
