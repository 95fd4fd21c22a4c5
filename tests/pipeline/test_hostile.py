"""A thousand damaged inputs of two dozen kinds: each is read as far as it goes, or refused in one line;
nothing else.

tests/pipeline/hostile_cases.py makes them from seeds and reads them, in processes whose memory is limited;
this file watches those processes, and looks at single rows of what they must do.
"""

import contextlib
import json
import os
import queue
import resource
import subprocess
import sys
import threading
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from tiny_state import trained

from earlyfusion.data.loading.encode import MAX_TEXT_CHARS
from earlyfusion.data.prepare.cmd import prepare
from earlyfusion.pipeline.checkpoint import Checkpointer, RunFacts
from earlyfusion.pipeline.cli import command_of, guarded, invoke
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER
from earlyfusion.pipeline.report.page import write_report
from earlyfusion.pipeline.runtime import Runtime
from earlyfusion.pipeline.track import Tracker, read_metrics

ROOMS = [str(Path(__file__).parents[1] / room) for room in ("pipeline", "data", "model", ".")]
SILENCE = 30
"""Seconds without a result after which a process is ended: three times what a case may take."""
STARTS = 120
"""Seconds until the first case: what a case needs is imported, and the right inputs are made."""


def run_prepare(words):
    return invoke(command_of(prepare, "prepare"), words, "prepare")


def watched(root, jobs):
    """The results of all jobs, in order. A process that dies or is silent for too long costs one case its
    outcome."""
    found = []
    while len(found) < len(jobs):
        folder = root / f"from-{len(found)}"
        folder.mkdir()
        (folder / "jobs.json").write_text(json.dumps(jobs[len(found) :]))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(ROOMS)}
        command = [sys.executable, f"{ROOMS[0]}/hostile_cases.py", str(folder), str(folder / "jobs.json")]
        with open(folder / "stderr", "wb") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
        lines: queue.Queue = queue.Queue()
        threading.Thread(
            target=lambda c=child, q=lines: [q.put(line) for line in chain(c.stdout, [""])], daemon=True
        ).start()
        try:
            patience = STARTS
            while line := lines.get(timeout=patience):
                if line.startswith("{"):
                    found.append(json.loads(line))
                    patience = SILENCE
            outcome = f"died with {child.wait()}"
        except queue.Empty:
            outcome = "hang"
        child.kill()
        child.wait()
        if len(found) < len(jobs):
            kind, seed = jobs[len(found)]
            tail = (folder / "stderr").read_text(errors="replace")[-600:]
            found.append({"kind": kind, "seed": seed, "outcome": outcome, "message": tail, "counts": None})
    return found


@pytest.mark.slow
def test_a_thousand_damaged_inputs_are_used_counted_or_refused_in_one_line(tmp_path, monkeypatch):
    for room in ROOMS:
        monkeypatch.syspath_prepend(room)
    import hostile_cases

    for name in ("av", "pyarrow", "zstandard", "datasets"):
        pytest.importorskip(name)
    jobs = [[name, seed] for name, (_, count) in hostile_cases.KINDS.items() for seed in range(count)]
    assert len(jobs) >= 1000 and len(hostile_cases.KINDS) >= 20
    found = watched(tmp_path, jobs)
    assert [[case["kind"], case["seed"]] for case in found] == jobs

    unexpected = [case for case in found if case["outcome"] not in ("loaded", "refused")]
    told = "\n".join(
        f"{c['kind']} {c['seed']}: {c['outcome']}\n{c['message'][-600:]}" for c in unexpected[:5]
    )
    assert not unexpected, f"{Counter(case['outcome'] for case in unexpected)}\n{told}"

    lost = [case for case in found if case["counts"] and case["counts"][0] != sum(case["counts"][1:])]
    assert not lost, "used + left out = items"
    for case in found:
        if case["outcome"] == "refused":
            assert case["message"] and "MemoryError" not in case["message"] and len(case["message"]) < 3000
    loaded = Counter(case["kind"] for case in found if case["outcome"] == "loaded")
    none = [name for name in hostile_cases.KINDS if name != "bomb" and not loaded[name]]
    assert not none, f"nothing of {none} was loaded"


@contextlib.contextmanager
def a_disk_that_takes(size):
    """No file of this process grows beyond `size` bytes: every write after that fails as it does on a full
    disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refusal(capsys, call):
    """The one line that a refused call leaves on stderr."""
    capsys.readouterr()
    assert guarded(call) == EXIT_USER
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_prepare_on_a_full_disk_is_one_line_leaves_no_half_and_goes_on(
    tmp_path, tokenizer, monkeypatch, capsys
):
    monkeypatch.setenv("EF_CACHE", str(tmp_path / "cache"))
    rows = [json.dumps({"text": f"{i} " + "words " * 300}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    out = tmp_path / "out"
    words = [str(tmp_path / "a.jsonl"), "--out", str(out), "--workers", "1", "--shard-samples", "10"]
    words += ["--tokenizer", str(tokenizer)]
    call = lambda: run_prepare(words)
    with a_disk_that_takes(12_000):
        line = refusal(capsys, call)
    assert str(out) in line and "free disk space" in line
    assert not (out / "index.json").exists() and not list(out.glob("*.tmp"))
    assert (
        guarded(call) == EXIT_OK and guarded(lambda: run_prepare(["--out", str(out), "--verify"])) == EXIT_OK
    )
    assert json.loads((out / "index.json").read_text())["samples"] == 40


def test_metrics_on_a_full_disk_are_one_line_and_the_run_can_go_on(tmp_path, capsys):
    tracker = Tracker(tmp_path, Runtime(), total_steps=900)

    def run():
        for step in range(900):
            tracker.event(step, "eval", accuracy=0.5)

    with a_disk_that_takes(5_000):
        line = refusal(capsys, run)
        tracker.close()
    assert str(tmp_path / "metrics.jsonl") in line and "--resume" in line
    kept = len(read_metrics(tmp_path / "metrics.jsonl"))
    assert kept > 10
    Tracker(tmp_path, Runtime(), total_steps=900, start_step=5).close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(6))


def test_a_checkpoint_that_does_not_fit_is_one_line_and_the_older_one_stays(tmp_path, capsys):
    keeper = Checkpointer(tmp_path, Runtime(), RunFacts({"stages": []}, "words", 300))

    def save(step, size):
        model, optimizer = trained(step, size)
        return keeper.save(step, model=model, optimizer=optimizer, trainer={}, lanes={0: 1})

    first = save(1, 2)
    with a_disk_that_takes(20_000):
        line = refusal(capsys, lambda: save(2, 9_000))
    assert str(keeper.folder) in line and list(keeper.folder.iterdir()) == [first]
    assert keeper.start(resume=True).step == 1


def test_a_report_that_does_not_fit_leaves_the_one_before(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "event": "guard", "message": "x" * 9000}))
    (tmp_path / "report.html").write_text("before")
    with a_disk_that_takes(6_000):
        assert "free disk space" in refusal(capsys, lambda: write_report(tmp_path))
    assert (tmp_path / "report.html").read_text() == "before" and len(list(tmp_path.iterdir())) == 2


def test_a_flipped_bit_of_a_checkpoint_is_seen_and_the_one_before_is_taken(tmp_path, capsys):
    keeper = Checkpointer(tmp_path, Runtime(), RunFacts({"stages": []}, "words", 300), keep=3)
    for step in (1, 2):
        model, optimizer = trained(step)
        keeper.save(step, model=model, optimizer=optimizer, trainer={}, lanes={0: step})
    (path,) = (keeper.folder / "step-000002").glob("shard-*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert keeper.start(resume=True).step == 1
    assert "step-000002 is damaged (shard-00001-model" in capsys.readouterr().err
    (keeper.folder / "step-000001" / "run.json").unlink()
    assert "none of the" in refusal(capsys, lambda: keeper.start(resume=True))


def test_a_text_too_long_is_left_out_before_it_is_tokenised(tmp_path, monkeypatch, capsys):
    """A line of 40 MB (sparse: no disk is used), and a document of one character too many."""
    monkeypatch.setenv("EF_CACHE", str(tmp_path / "cache"))
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(json.dumps({"text": "a" * (MAX_TEXT_CHARS + 1)}).encode() + b'\n{"text": "words"}\n')
        file.seek(40_000_000, os.SEEK_CUR)
        file.write(b"}\n")
    out = tmp_path / "out"
    assert (
        guarded(lambda: run_prepare([str(tmp_path / "a.jsonl"), "--out", str(out), "--workers", "1"]))
        == EXIT_OK
    )
    made = json.loads((out / "index.json").read_text())
    assert made["samples"] == 1 and made["items"] == 3 and made["skipped"] == {"too_large": 2}
