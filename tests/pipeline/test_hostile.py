"""A thousand damaged inputs of two dozen kinds: each is read as far as it goes, or refused in one line; nothing else.

tests/pipeline/hostile_cases.py makes them from seeds and reads them, in processes whose memory is limited; this file
watches those processes, and looks at single rows of what they must do.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

ROOMS = [str(Path(__file__).parents[1] / room) for room in ("pipeline", "data", "model")]
SILENCE = 30
"""Seconds without a result after which a process is ended: three times what a case may take."""
STARTS = 120
"""Seconds until the first case: what a case needs is imported, and the right inputs are made."""


def watched(root, jobs):
    """The results of all jobs, in order. A process that dies or is silent for too long costs one case its outcome."""
    found = []
    while len(found) < len(jobs):
        folder = root / f"from-{len(found)}"
        folder.mkdir()
        (folder / "jobs.json").write_text(json.dumps(jobs[len(found) :]))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(ROOMS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, f"{ROOMS[0]}/hostile_cases.py", str(folder), str(folder / "jobs.json")]
        with open(folder / "stderr", "wb") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
        lines: queue.Queue = queue.Queue()
        threading.Thread(target=lambda c=child, q=lines: [q.put(line) for line in (*c.stdout, "")], daemon=True).start()
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
    told = "\n".join(f"{c['kind']} {c['seed']}: {c['outcome']}\n{c['message'][-600:]}" for c in unexpected[:5])
    assert not unexpected, f"{Counter(case['outcome'] for case in unexpected)}\n{told}"

    lost = [case for case in found if case["counts"] and case["counts"][0] != sum(case["counts"][1:])]
    assert not lost, "used + left out = items"
    for case in found:
        if case["outcome"] == "refused":
            assert case["message"] and "MemoryError" not in case["message"] and len(case["message"]) < 3000
    loaded = Counter(case["kind"] for case in found if case["outcome"] == "loaded")
    assert all(loaded[name] for name in hostile_cases.KINDS if name != "bomb"), "no kind is all refused"
