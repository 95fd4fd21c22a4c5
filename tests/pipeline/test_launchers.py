"""A run that is stopped under a launcher: the checkpoint is saved, no process trains on, and nothing of ours
is a traceback.

accelerate and torchrun turn every exit code into their own, make into 2; the run's own is 75
(test_resume.py).
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_resume import wait_for_step
from tiny_run import ACCELERATE, MODULE, REPOSITORY, environment

from earlyfusion.pipeline.checkpoint import latest, step_of
from earlyfusion.pipeline.errors import EXIT_REQUEUE
from earlyfusion.pipeline.track import read_metrics

LONG = "--stages.long.steps 4000 --checkpoint.every 2".split()
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()


def command(launcher: str, recipe: Path, out: Path) -> list[str]:
    if launcher == "make":
        words = " ".join([sys.executable, "-m", MODULE, *LONG])
        return [
            "make",
            "-C",
            str(REPOSITORY),
            "-o",
            "setup",
            "pretrain",
            f"TRAIN={words}",
            f"RECIPE={recipe}",
            f"RUN={out}",
        ]
    before = {"plain": (), "accelerate": ACCELERATE, "torchrun": TORCHRUN}[launcher]
    lanes = "--stages.short.lanes 2 --stages.long.lanes 2".split() if launcher == "torchrun" else []
    return [sys.executable, *before, "-m", MODULE, str(recipe), "--out", str(out), *LONG, *lanes]


def processes_of(out: Path) -> list[int]:
    """Processes that were started with the output folder on their command line, launchers included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(out).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # gone meanwhile
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc, which is Linux's"
)
@pytest.mark.parametrize(
    ("launcher", "number", "whole_group"),
    [
        ("plain", signal.SIGINT, True),
        ("accelerate", signal.SIGTERM, False),
        ("torchrun", signal.SIGTERM, False),
        ("make", signal.SIGTERM, False),
        ("make", signal.SIGINT, True),
    ],
)
def test_a_stopped_launcher_leaves_a_checkpoint_and_no_orphan(
    recipe, tmp_path, launcher, number, whole_group
):
    """whole_group: as Ctrl-C at a terminal reaches everybody; else only the launcher is told, as schedulers
    do."""
    if launcher == "make" and shutil.which("make") is None:
        pytest.skip("make is not installed")
    out, log = tmp_path / "out", tmp_path / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            command(launcher, recipe, out),
            stdout=file,
            stderr=file,
            env=environment(),
            start_new_session=True,
        )
    try:
        process.communicate = lambda: (None, log.read_text())  # type: ignore[method-assign]
        wait_for_step(process, out, 2)
        (os.killpg if whole_group else os.kill)(process.pid, number)
        code = process.wait(timeout=120)
        deadline = time.monotonic() + 120
        while processes_of(out) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not processes_of(out), "an orphan goes on"
    finally:
        for pid in processes_of(out):
            os.kill(pid, signal.SIGKILL)
    said = log.read_text()
    (stop,) = read_metrics(out / "metrics.jsonl", "stop")
    assert stop["step"] == step_of(latest(out / "checkpoints")) and "--resume" in stop["message"], said
    assert not re.search(r'File ".*/pipeline/', said), said
    assert code == {"plain": EXIT_REQUEUE}.get(launcher, code) and code != 0
    if launcher == "plain":
        assert "Traceback" not in said
