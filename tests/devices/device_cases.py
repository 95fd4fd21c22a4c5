"""Starting worker.py on a device, and comparing what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def work(task, folder, *ways, **environment):
    """What worker.py found on a task, in each of the ways."""
    # A process of its own: the emulated device never goes away again.
    command = [sys.executable, str(HERE / "worker.py"), task, str(folder), *ways]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def furthest(these, those):
    """Largest relative difference of every pair of records."""
    assert len(these) == len(those) > 0
    assert all(a.keys() == b.keys() for a, b in zip(these, those))
    return [max(abs(a[key] - b[key]) / abs(a[key]) for key in a) for a, b in zip(these, those)]


def check_ahead(found):
    """What `worker.py ahead` found on a device with graphs: equal answers however far the device ran
    ahead."""
    for name in ("length", "stops"):
        stepwise, ahead = found[f"{name}/1"], found[f"{name}/16"]
        assert ahead["answers"] == stepwise["answers"] and ahead["counts"] == stepwise["counts"]
        assert ahead["logprobs"] == stepwise["logprobs"]
    assert found["length/16"]["looks"] < found["length/1"]["looks"] / 4
    assert found["stops/16"]["looks"] < found["stops/1"]["looks"] / 2
    reasons = {reason for _, _, reason, _, _ in found["stops/16"]["answers"]}
    assert reasons == {"stop", "length"} and found["stops/16"]["counts"][2] > 0
