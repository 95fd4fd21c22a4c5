"""`bench speedrun` reads a curve as the run wrote it; nothing counts that misses a target."""

import json

import pytest

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline.bench.speedrun import TARGET, curve, missed, speedrun

SMALL = """
extends = "nano"
[model]
hidden_size = 32
num_hidden_layers = 2
[[stages]]
name = "joint"
steps = 4
tokens = 512
length = 256
warmup_steps = 1
[eval]
every = 2
heldout = 4
samples = 0
limits = { easy_vqa = 13 }
limits_during = { easy_vqa = 13 }
[track]
log_every = 1
"""


def test_only_a_run_that_reaches_every_target_counts():
    good = {"tokens": 2_700_000, "easy_vqa": 0.97, "questions": 9_673, "bits_per_byte": 1.87}
    assert set(good) == set(TARGET) and missed(good) == []
    bad = {"tokens": 2_700_001, "easy_vqa": 0.9699, "questions": 9_672, "bits_per_byte": 1.8701}
    for name, worse in bad.items():
        (told,) = missed(good | {name: worse})
        assert told.startswith(name)
        # What was not measured was not reached.
        assert missed({key: value for key, value in good.items() if key != name}) != []
        assert missed(good | {name: float("nan")}) != []


def test_a_run_is_trained_measured_and_kept(tmp_path, capfd):
    recipe, out = tmp_path / "mine.toml", tmp_path / "speedrun.json"
    recipe.write_text(SMALL)
    given = {"recipe": str(recipe), "seeds": "5", "folder": tmp_path / "runs", "out": str(out)}
    speedrun(**given)
    found = json.loads(out.read_text())["runs"]["seed 5"]
    run = tmp_path / "runs" / "seed-5"
    assert found["curve"] == curve(run) and [row["step"] for row in found["curve"]] == [2, 4]
    assert 1800 < found["curve"][-1]["tokens"] <= 4 * 512
    for name in ("easy_vqa", "bits_per_byte"):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        told = [record for record in map(json.loads, lines) if record["event"] == "eval"]
        assert [row[name] for row in found["curve"]] == [record[name] for record in told]
    assert found["core_seconds"] > 1 and found["missed"] and "seed = 5" in (run / "recipe.toml").read_text()
    # A part of the test split is not the test split.
    assert "questions 13, expected 9673 to 9673" in found["missed"] and "easy_vqa" in capfd.readouterr().out
    # What was measured is shown again; another recipe under the same name is not taken for it.
    speedrun(**given)
    assert "seed 5: measured before" in capfd.readouterr().out
    recipe.write_text(SMALL.replace("steps = 4", "steps = 6"))
    with pytest.raises(UserError, match="came to its end; move it away"):
        speedrun(**given)
    assert json.loads(out.read_text())["runs"]["seed 5"] == found
