"""Threads and processes: the same batches as the caller makes itself, and an end with a name instead of a
wait."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading import loader as loading

from .conftest import folder_config
from .consumer import chained

MIX = {"easy_vqa": 0.5, "synth_scenes": 0.3, "pydoc": 0.2}
PROMPT_S = 10.0
"""A dead worker is told within this time (polls are 0.2 s; the rest is for a busy machine)."""


def hashes(one, steps):
    return [chained("", one.next_step()) for _ in range(steps)]


@pytest.mark.slow
def test_no_one_two_or_three_workers_give_the_same_batches(loader, mix):
    """And one number of workers goes on where another stopped."""
    whole = hashes(loader(mix(MIX, prefetch="none"), lanes=3), 10)
    assert hashes(loader(mix(MIX, prefetch="thread"), lanes=3), 10) == whole
    state = None
    for number, workers in enumerate((1, 2, 3)):
        one = loader(mix(MIX, prefetch="process", workers=workers), lanes=3)
        if state is not None:
            one.load_state_dict(state)
        assert hashes(one, 3) == whole[3 * number : 3 * number + 3]
        state = one.state_dict()
        one.close()
    alone = loader(mix(MIX), lanes=3)
    alone.load_state_dict(state)
    assert hashes(alone, 1) == whole[9:]


@pytest.mark.slow
def test_a_worker_killed_while_it_sends_is_told_at_once(loader, mix):
    """Its pipe is full and a step is half way through: the case in which a queue waits for ever."""
    one = loader(
        mix({"easy_vqa": 1.0}, prefetch="process", prefetch_steps=1), tokens=32768, max_patches=65536
    )
    first = one.next_step()[0]
    assert first.patches.numel() > 2 << 20  # larger than the pipe
    time.sleep(1.0)
    worker = one._feeds[0].process
    os.kill(worker.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(DataError, match="data process earlyfusion-data-0 ended with code -9"):
        for _ in range(4):
            one.next_step()
    assert time.monotonic() - start < PROMPT_S
    with pytest.raises(DataError, match="ended with code -9"):
        one.next_step()


def test_the_thread_takes_no_second_one_of_openmp():
    """More of them than cores would slow training by a third."""
    torch.set_num_threads(2)
    feed = loading.Feed("alone", torch.get_num_threads, None, 1)
    assert (feed._ready.get(), torch.get_num_threads()) == (1, 2)
    feed.close()
    torch.set_num_threads(1)


SLOW_DISK = """
import pathlib, time
read_bytes = pathlib.Path.read_bytes
def slow(path):
    while path.name == "endless.png" and path.exists():
        time.sleep(0.05)
    return read_bytes(path)
pathlib.Path.read_bytes = slow
"""


@pytest.fixture
def stuck(tmp_path, tmp_path_factory, monkeypatch):
    """A folder whose eighth line names a picture that is never read to its end, as from a disk that does not
    answer; here and in the processes that are started here."""
    start = tmp_path_factory.mktemp("start")
    (start / "sitecustomize.py").write_text(SLOW_DISK)
    monkeypatch.setenv("PYTHONPATH", str(start), prepend=os.pathsep)
    monkeypatch.setattr(Path, "read_bytes", Path.read_bytes)  # for the way back
    exec(SLOW_DISK, {})
    (tmp_path / "endless.png").write_bytes(b"a picture")
    lines = [json.dumps({"text": f"line {i} of text"}) for i in range(40)]
    lines[7] = '{"text": "never ends", "image": "endless.png"}'
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    yield tmp_path
    (tmp_path / "endless.png").unlink()  # lets a thread that still reads go


@pytest.mark.slow
def test_a_worker_that_dies_is_told_with_the_sample_it_held(loader, stuck):
    one = loader(folder_config(stuck, prefetch="process"))

    def kill():
        while not one._feeds or "lines.jsonl:8" not in one._feeds[0].watch.text:
            time.sleep(0.02)
        os.kill(one._feeds[0].process.pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    held = r"ended with code -9.*encoding source 'mine', sample 7 of epoch 0.*lines\.jsonl:8"
    with pytest.raises(DataError, match=held):
        one.next_step()


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", ["thread", "process"])
def test_a_worker_that_stands_still_is_told_with_the_sample_it_holds(loader, stuck, prefetch, monkeypatch):
    monkeypatch.setattr(loading, "STALL_S", 1.5 if prefetch == "thread" else 8.0)
    one = loader(folder_config(stuck, prefetch=prefetch))
    start = time.monotonic()
    with pytest.raises(
        DataError, match=r"has not moved for .* s; it was encoding source 'mine'.*lines.jsonl:8"
    ):
        one.next_step()
    one.close()
    assert time.monotonic() - start < 40


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path, loader, mix):
    child = os.fork()
    if child == 0:
        one = loader(mix({"pydoc": 1.0}, prefetch="process", workers=2), lanes=2)
        one.next_step()
        (tmp_path / "pids").write_text(" ".join(str(feed.process.pid) for feed in one._feeds))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + PROMPT_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a data process is left behind"
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
