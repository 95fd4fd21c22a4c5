"""Stages of a study: in order, side by side, once; failed, killed, stopped and gone on with."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from earlyfusion.pipeline.errors import EXIT_REQUEUE
from earlyfusion.pipeline.study import runner as running
from earlyfusion.pipeline.study.runner import Runner, Stage


@pytest.fixture
def stage(tmp_path):
    def made(name, script, *after) -> Stage:
        """A stage that runs Python lines; `done()` writes its result."""
        result = tmp_path / name / "result"
        head = "import sys, time, signal; from pathlib import Path\n"
        head += f"done = lambda: Path({str(result)!r}).write_text('x')\n"
        command = (sys.executable, "-c", head + script)
        return Stage(name, lambda: command, result, result.parent, after)

    return made


@pytest.fixture
def events(tmp_path):
    def read():
        lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
        return [(e["event"], e["stage"], e.get("code"), e.get("last")) for e in lines]

    return read


def test_stages_run_in_order_side_by_side_and_once(tmp_path, stage, events):
    made = [stage(name, "time.sleep(0.2); done()") for name in "ab"] + [stage("c", "done()", "a", "b")]
    runner = Runner(made, tmp_path / "log.jsonl", jobs=2)
    assert runner.run() == 0
    told = [event[:2] for event in events()]
    assert set(told[:2]) == {("start", "a"), ("start", "b")}
    assert told[-2:] == [("start", "c"), ("done", "c")]
    assert runner.run() == 0 and len(events()) == 6
    (tmp_path / "b" / "result").unlink()
    assert runner.run() == 0
    assert [event[:2] for event in events()] == [*told, ("start", "b"), ("done", "b")]


def test_a_failing_stage_stops_only_what_needs_it(tmp_path, stage, events):
    made = [
        stage("bad", "print('went wrong'); sys.exit(3)"),
        stage("good", "done()"),
        stage("child", "done()", "bad"),
    ]
    assert Runner(made, tmp_path / "log.jsonl").run() == 1
    assert [event for event in events() if event[0] == "failed"] == [("failed", "bad", 3, "went wrong")]
    assert made[1].done and not made[2].done


def test_a_killed_attempt_is_cleared_and_a_saved_one_resumed(tmp_path, stage):
    fresh, saved = (
        stage("fresh", "done()"),
        stage("saved", "done() if '--resume' in sys.argv else sys.exit(1)"),
    )
    (saved.folder / "checkpoints" / "step-1").mkdir(parents=True)
    fresh.folder.mkdir()
    for file in (
        fresh.folder / "half",
        fresh.folder / "arm.toml",
        saved.folder / "checkpoints/step-1/COMPLETE",
    ):
        file.touch()
    assert Runner([fresh, saved], tmp_path / "log.jsonl").run() == 0
    assert not (fresh.folder / "half").exists() and (fresh.folder / "arm.toml").exists()
    assert not (saved.folder / "checkpoints").exists()  # the model is kept, the checkpoints are not


@pytest.mark.parametrize("polite", [True, False])
def test_a_signal_lets_stages_save_and_the_next_start_goes_on(tmp_path, stage, events, monkeypatch, polite):
    monkeypatch.setattr(running, "GRACE_S", 5.0 if polite else 0.5)
    saved, up = tmp_path / "saved", tmp_path / "up"
    leave = f"Path({str(saved)!r}).touch(); {'sys.exit(75)' if polite else ''}"
    script = f"def leave(*_): {leave}\nsignal.signal(signal.SIGTERM, leave); Path({str(up)!r}).touch()\n"
    made = [
        stage("long", script + "for _ in range(300): time.sleep(0.1)\ndone()"),
        stage("next", "done()", "long"),
    ]

    def interrupt():
        until = time.monotonic() + 20
        while not up.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun = time.monotonic()
    assert Runner(made, tmp_path / "log.jsonl").run() == EXIT_REQUEUE
    thread.join()
    assert saved.exists() and time.monotonic() - begun < 25
    assert events()[-1][:3] == ("stopped", "long", 75 if polite else -9) and not made[1].done
    made[0] = stage("long", "done()")
    assert Runner(made, tmp_path / "log.jsonl").run() == 0
