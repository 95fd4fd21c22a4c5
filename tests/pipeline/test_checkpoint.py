"""Checkpoints: exact, whole or not at all, thinned out by rule, refused when the run is another one, never
pickled."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from runpy import run_path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from forked import finish, ranks
from safetensors.torch import load_file
from tiny_state import restored, trained

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import checkpoint as module
from earlyfusion.pipeline import state
from earlyfusion.pipeline.checkpoint import (
    Checkpointer,
    RunFacts,
    completed,
    latest,
    load_tree,
    save_tree,
    step_of,
)
from earlyfusion.pipeline.runtime import Runtime, StopFlag

RECIPE = {"optim": {"lr": 0.01}, "run": {"out": "a"}, "stages": [{"name": "s", "steps": 9}]}
FACTS = RunFacts(RECIPE, "abc", 300)


def save(keeper, step, **trainer):
    """The state of a step, whose weight tells the step."""
    model, optimizer = trained(step)
    return keeper.save(step, model=model, optimizer=optimizer, trainer=trainer, lanes={0: {"cursor": step}})


def assert_of_step(loaded, step):
    weight, momentum = restored(loaded)
    assert torch.equal(weight, torch.full((4,), float(step)))
    assert torch.equal(momentum, 10 * weight) and loaded.step == step


@pytest.fixture
def keeper(tmp_path) -> Checkpointer:
    return Checkpointer(tmp_path, Runtime(), FACTS, keep=2)


def test_state_trees_come_back_exactly(tmp_path):
    shared = torch.randn(3, 4)
    tree = {
        "floats": [0.1, -0.0, 1e-308, math.inf, -math.inf],
        "ints": {3: 2**70, "x": -1},
        "tuple": (1, (2.5, "a", None, True)),
        "tensors": {
            "view": shared[1:, ::2],
            "same": shared,
            "again": shared,
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "bf16": torch.randn(5).bfloat16(),
            "mask": torch.tensor([True, False]),
            "long": torch.tensor([2**60]),
        },
        "looks like a tag": {"__tensor__": 1},
    }
    save_tree(tmp_path / "x", tree)
    back = load_tree(tmp_path / "x")
    for name, tensor in tree["tensors"].items():
        assert back["tensors"][name].dtype == tensor.dtype and torch.equal(back["tensors"][name], tensor), (
            name
        )
    for key in ("floats", "ints", "tuple", "looks like a tag"):
        assert back[key] == tree[key] and type(back[key]) is type(tree[key]), key
    assert math.copysign(1, back["floats"][1]) == -1


def test_no_file_of_a_checkpoint_is_a_pickle(keeper):
    """Every byte is JSON or safetensors, read by parsers that run nothing."""
    for file in save(keeper, 1).iterdir():
        if file.suffix == ".safetensors":
            assert load_file(file)
        else:
            json.loads(file.read_text())


def test_what_cannot_be_written_without_pickle_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"state at /a/b: a set"):
        save_tree(tmp_path / "x", {"a": {"b": {1, 2}}})


KILLED = textwrap.dedent("""
    import os, signal, sys
    import torch
    from pathlib import Path
    from earlyfusion.pipeline import checkpoint
    from earlyfusion.pipeline.checkpoint import Checkpointer, RunFacts
    from earlyfusion.pipeline.runtime import Runtime
    import torch.distributed.checkpoint
    sys.path.insert(0, HERE)
    from tiny_state import trained

    torch.set_num_threads(1)
    runtime, calls, kill_at = Runtime(), 0, 0

    def counted(real):
        def call(*args, **kwargs):
            global calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call

    def save(keeper, step):
        model, optimizer = trained(step)
        keeper.save(step, model=model, optimizer=optimizer, trainer={}, lanes={0: step})

    def one(folder):
        global calls
        keeper = Checkpointer(folder, runtime, RunFacts({"stages": []}, "abc", 300), keep=1)
        save(keeper, 1)
        checkpoint.save_file = counted(checkpoint.save_file)
        os.fsync, os.replace, os.unlink = counted(os.fsync), counted(os.replace), counted(os.unlink)
        checkpoint.shutil.rmtree = counted(checkpoint.shutil.rmtree)
        calls = 0
        save(keeper, 2)

    while True:
        kill_at += 1
        child = os.fork()
        if child == 0:
            one(Path(sys.argv[1]) / str(kill_at))
            os._exit(0)
        if os.waitpid(child, 0)[1] != signal.SIGKILL:
            break
    """)


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL before each write, fsync, rename and removal in turn; what is found afterwards is step 1 or 2,
    intact."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.replace("HERE", repr(str(Path(__file__).parent))))
    subprocess.run([sys.executable, script, tmp_path / "runs"], check=True, timeout=120)
    folders = sorted((tmp_path / "runs").iterdir(), key=lambda path: int(path.name))
    assert len(folders) > 12
    steps = []
    for folder in folders:
        keeper = Checkpointer(folder, Runtime(), RunFacts({"stages": []}, "abc", 300), keep=1)
        loaded = keeper.load(latest(keeper.folder))
        assert_of_step(loaded, loaded.step)
        assert loaded.lanes == {0: loaded.step}
        steps.append(loaded.step)
        save(keeper, 3)
        assert [path.name for path in keeper.folder.iterdir()] == ["step-000003"], "the next save cleans up"
    assert steps == sorted(steps) and set(steps) == {1, 2}


def test_half_written_and_damaged_folders_do_not_count(keeper):
    good = save(keeper, 1)
    newer = save(keeper, 2)
    with open(next(newer.glob("shard-*")), "r+b") as file:
        file.truncate(10)
    (keeper.folder / "step-000009").mkdir()
    (keeper.folder / "step-000010.tmp-partial").mkdir()
    assert latest(keeper.folder) == good
    assert_of_step(keeper.load_intact(), 1)
    (newer / "run.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        keeper.load(newer)


def test_retention_keeps_the_newest_and_the_multiples(tmp_path):
    keeper = Checkpointer(tmp_path, Runtime(), FACTS, keep=2, keep_every=30)
    for step in range(10, 101, 10):  # found by number: 100 is newer than 90
        save(keeper, step)
    assert [p.name for p in completed(keeper.folder)] == [f"step-{s:06d}" for s in (30, 60, 90, 100)]
    assert sorted(p.name for p in keeper.folder.iterdir()) == [p.name for p in completed(keeper.folder)]


def test_saving_a_step_again_supersedes_it_without_a_gap(keeper):
    save(keeper, 7, attempt=0)
    second = save(keeper, 7, attempt=1)
    third = save(keeper, 7, attempt=2)
    assert second.name == "step-000007-1"
    assert completed(keeper.folder) == [third] and keeper.load(third).trainer["attempt"] == 2


def test_a_full_disk_is_told_before_anything_is_written(keeper, monkeypatch):
    good = save(keeper, 1)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"no disk space .* MiB are free; free some") as caught:
        save(keeper, 2)
    assert "\n" not in str(caught.value)
    assert list(keeper.folder.iterdir()) == [good]


def no_space(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("failing", ["save_file", "write_atomic", "tensors"])
def test_a_disk_that_fills_up_midway_leaves_nothing_half_written(keeper, monkeypatch, failing):
    good = save(keeper, 1)
    with monkeypatch.context() as patch:
        if failing == "tensors":
            # In the middle of the weights, where torch writes.
            patch.setattr("torch.distributed.checkpoint.filesystem._write_item", no_space)
        else:
            patch.setattr(module, failing, no_space)
        with pytest.raises(UserError, match=r"No space left on device.*older checkpoints are untouched"):
            save(keeper, 2)
    assert list(keeper.folder.iterdir()) == [good]
    save(keeper, 2)
    assert keeper.load(latest(keeper.folder)).step == 2


def test_an_asynchronous_save_holds_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    """The thread is held up until the weight has changed; the next save waits for it, and tells its fault."""
    keeper = Checkpointer(tmp_path, Runtime(), FACTS, keep=3, asynchronous=True)
    model, optimizer = trained(1)
    go, real = Event(), state.write
    monkeypatch.setattr(state, "write", lambda *given: (go.wait(60), real(*given)))
    cursor = {"cursor": 1}
    keeper.save(1, model=model, optimizer=optimizer, trainer={}, lanes={0: cursor})
    assert completed(keeper.folder) == []
    with torch.no_grad():
        model.w.fill_(99)
        optimizer.state[model.w]["momentum_buffer"].fill_(99)
    cursor["cursor"] = 99
    go.set()
    loaded = keeper.load_intact()
    assert_of_step(loaded, 1)
    assert loaded.lanes == {0: {"cursor": 1}}

    monkeypatch.setattr(state, "write", no_space)
    save(keeper, 2)
    with pytest.raises(UserError, match="No space left on device"):
        save(keeper, 3)
    monkeypatch.setattr(state, "write", real)
    save(keeper, 4)
    keeper.wait()
    assert [step_of(path) for path in completed(keeper.folder)] == [1, 4]


def changed(**optim):
    return {**RECIPE, "optim": {"lr": 0.01, **optim}}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (RunFacts(RECIPE, "abc", 301), ["vocabulary of 300", "has 301"]),
        (RunFacts(RECIPE, "xyz", 300), ["tokenizer differs"]),
        (RunFacts(changed(lr=0.02), "abc", 300), ["recipe changed", "optim.lr: 0.01 -> 0.02"]),
        (RunFacts(changed(new=1), "abc", 300), ["optim.new: '(absent)' -> 1"]),
    ],
)
def test_another_run_s_checkpoint_is_refused_in_one_line(keeper, facts, words):
    path = save(keeper, 1)
    with pytest.raises(UserError) as caught:
        Checkpointer(keeper.folder.parent, keeper.runtime, facts).load(path)
    message = str(caught.value)
    assert message.startswith(f"cannot resume {path}") and "\n" not in message
    assert all(word in message for word in words), message


def test_signals_ask_for_a_stop_and_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    flag = StopFlag().install()
    try:
        assert flag.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        flag.restore()
    assert signal.getsignal(signal.SIGTERM) is before


TWO_RANKS = textwrap.dedent("""
    import os, signal
    import torch
    import torch.distributed.checkpoint.filesystem as filesystem
    from earlyfusion.pipeline import checkpoint
    from earlyfusion.pipeline.checkpoint import Checkpointer, RunFacts
    from earlyfusion.kernels.errors import UserError
    from earlyfusion.pipeline.update import Guard
    from earlyfusion.pipeline.runtime import Runtime, seed_everything
    from tiny_state import restored, sharded

    runtime = Runtime(threads=1)
    assert runtime.world == 2
    assert runtime.sum(runtime.rank + 1).item() == 3 and runtime.max(runtime.rank).item() == 1
    assert Guard(agree=runtime.agree).check(float("nan") if runtime.rank else 1.0, 1.0).action == "skip"

    seed_everything(runtime.rank)
    keeper = Checkpointer(OUT, runtime, RunFacts({"stages": []}, "abc", 300), asynchronous=ASYNC)
    def save(step, state):
        model, optimizer = sharded(step)
        return keeper.save(step, model=model, optimizer=optimizer, trainer={}, lanes={runtime.rank: state})
    path = save(1, {"cursor": runtime.rank * 10})
    drawn = torch.rand(1).item()
    keeper.wait()
    loaded = keeper.load(path)
    assert restored(loaded)[0].tolist() == [1.0] * 4
    assert loaded.lanes == {0: {"cursor": 0}, 1: {"cursor": 10}}, loaded.lanes
    loaded.restore_rng(runtime.rank, 0)
    assert torch.rand(1).item() == drawn

    save(2, {"cursor": 1})
    keeper.wait()
    # The disk of one rank is full: before a tensor is written, and in the middle of its shard.
    def no_space(*_):
        raise OSError(28, "No space left on device")
    for place, name in ((checkpoint, "save_tree"), (filesystem, "_write_item")):
        real = getattr(place, name)
        if runtime.rank == 1:
            setattr(place, name, no_space)
        try:
            save(3, {})
            keeper.wait()
            raise SystemExit("both ranks should have failed")
        except UserError as error:
            assert "not written" in str(error)
        setattr(place, name, real)
        runtime.barrier()
        assert sorted(p.name for p in keeper.folder.iterdir()) == ["step-000001", "step-000002"]

    # One flipped bit in the shard of one rank: all take the one before.
    assert keeper.load_intact().step == 2
    runtime.barrier()
    if runtime.rank == 1:
        (shard,) = (keeper.folder / "step-000002").glob("shard-00002-*")
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    runtime.barrier()
    loaded = keeper.load_intact()
    assert loaded.step == 1 and restored(loaded)[0].tolist() == [1.0] * 4

    runtime.stop.install()
    assert not runtime.should_stop()
    if runtime.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert runtime.should_stop()
    runtime.close()
    """)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_gloo_ranks_save_fail_and_stop_together(asynchronous, tmp_path):
    script = tmp_path / "ranks.py"
    text = TWO_RANKS.replace("OUT", repr(str(tmp_path / "out"))).replace("ASYNC", str(asynchronous))
    script.write_text(text)
    said = []
    for code, errors in map(finish, ranks(run_path, (str(script),), {**os.environ})):
        assert code == 0, errors[-3000:]
        said.append(errors)
    assert "step-000002 is damaged (shard-00002-" in said[0] and "the one before is taken" in said[0]
    assert "damaged" not in said[1], "told once"
