"""Processes that hang say where; processes that are killed come back as if nothing had happened."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
from forked import finish, free_port, ranks
from test_launchers import processes_of
from test_resume import wait_for_step
from tiny_run import MODULE, environment, numbers, same, two_ranks, weights

from earlyfusion.pipeline.checkpoint import latest, step_of
from earlyfusion.pipeline.launch import restarted
from earlyfusion.pipeline.watchdog import Watchdog

HANGS = textwrap.dedent("""
    import time
    from earlyfusion.pipeline.config.schema import ParallelSection
    from earlyfusion.pipeline.runtime import Runtime

    def forgets_to_come():
        time.sleep(600)

    runtime = Runtime(threads=1, parallel=ParallelSection(timeout_s=2.0))
    runtime.sum(1.0)
    # As long as one of them computes nobody is missed.
    until = time.monotonic() + 5
    while runtime.rank == 0 and time.monotonic() < until:
        WORK
    runtime.sum(1.0)
    if runtime.rank == 1:
        forgets_to_come()
    runtime.max(2.0)
    """)


def test_ranks_that_wait_for_one_another_say_where_and_leave(tmp_path):
    script = tmp_path / "hangs.py"
    # Ten places, so that three looks hardly ever find the same.
    script.write_text(HANGS.replace("WORK", "; ".join(["time.sleep(0.1)"] * 10)))
    start = time.monotonic()
    (first, said), (second, _) = map(finish, ranks(run_path, (str(script),), {**os.environ}))
    assert first != 0 and second != 0
    # The sums before: the watchdog was not too early.
    assert time.monotonic() - start > 7
    (line,) = [line for line in said.splitlines() if line.startswith("error: nothing has moved for")]
    assert "rank 0 waits in all_reduce, called at pipeline/runtime.py:" in line and "(_reduce)" in line
    assert "rank 1 is at" in line


def test_a_watched_run_keeps_nothing_alive_and_its_thread_ends():
    """A frame that somebody holds keeps the tensors of its function: a step's activations, or the model while
    the process ends."""
    watchdog, looks = Watchdog(0, 2, timeout_s=1.0), []
    watchdog.watch(SimpleNamespace(set=lambda key, value: looks.append(value)))

    def step():
        tensor = torch.zeros(3)
        seen = len(looks)
        while len(looks) < seen + 2:
            time.sleep(0.01)
        return weakref.ref(tensor)

    assert step()() is None
    watchdog.stop()
    assert not watchdog._thread.is_alive()


def test_a_restart_goes_on_where_there_is_something_to_go_on_from(tmp_path):
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert not restarted(tmp_path, again) and not restarted(tmp_path, {})


SHARDS = "--parallel.dp_shard 2 --parallel.ep 2 --checkpoint.asynchronous true"


@pytest.mark.slow
def test_a_rank_that_is_killed_is_restarted_and_nothing_shows(recipe, tmp_path):
    """SIGKILL for one of two ranks in the middle of a run, of shards whose checkpoints a thread writes;
    torchrun starts both again; bit for bit the run that nobody disturbed."""
    words = ["--checkpoint.every", "2", "--checkpoint.keep", "9", "--stages.short.lanes", "2"]
    words += ["--stages.long.lanes", "2", "--steps", "9", *SHARDS.split()]
    for code, errors in map(finish, two_ranks(recipe, tmp_path / "calm", *words)):
        assert code == 0, errors[-3000:]

    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    out = tmp_path / "killed"
    command = [sys.executable, *launcher, "-m", MODULE, str(recipe), "--out", str(out), *words]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_step(process, out, 3)
    workers = [pid for pid in processes_of(out) if pid != process.pid]
    os.kill(max(workers), signal.SIGKILL)
    code, errors = finish(process)
    assert code == 0, errors[-3000:]
    assert step_of(latest(out / "checkpoints")) == 9
    assert numbers(out) == numbers(tmp_path / "calm") and len(numbers(out)) == 9
    assert same(weights(out), weights(tmp_path / "calm"))
