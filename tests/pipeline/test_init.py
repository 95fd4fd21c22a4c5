"""`earlyfusion init`: what it says of data is so, and what it writes trains."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import load_config

SMALL = (
    " --steps 2 --stages.joint.tokens 512 --stages.joint.length 512 --eval.every 0 --eval.heldout 6"
    " --eval.samples 3 --eval.tasks [] --train.threads 1"
)


def pictures(folder, count, words=lambda i: f"picture {i}"):
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (24, 24 + 8 * (i % 3), 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.png")
        (folder / f"{i:03}.txt").write_text(words(i))


@pytest.mark.slow
def test_the_commands_that_init_prints_train_and_report_on_the_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "my photos", 40)
    assert cli.main(["init", "mine", "--from", "my photos"]) == 0
    printed = capsys.readouterr().out
    commands = [line.strip() for line in printed.splitlines() if line.startswith("    earlyfusion ")]
    prepare, pretrain, serve = commands
    assert serve == "earlyfusion serve --model runs/mine"
    for line in (prepare, pretrain + SMALL):
        words = [sys.executable, "-m", "earlyfusion.pipeline.cli", *shlex.split(line)[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
    # Caption loss on what is held out, beside a grey picture, and what the model says of held-out pictures.
    heldout = [json.loads(path.read_text()) for path in Path("runs/mine/eval").glob("heldout*.json")]
    assert heldout and "mine" in json.dumps(heldout)
    samples = [json.loads(path.read_text()) for path in Path("runs/mine/samples").glob("*.json")]
    assert samples and re.search(r"picture \d+", json.dumps(samples))
    report = Path("runs/mine/report.html").read_text()
    assert "mine" in report and re.search(r"picture \d+", report)


def test_what_is_told_is_what_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "in", 12, words=lambda i: "the same" if i % 3 == 0 else f"word {i}")
    for name in ("png", "txt"):  # a copy of a sample
        (tmp_path / "in" / f"100.{name}").write_bytes((tmp_path / "in" / f"000.{name}").read_bytes())
    (tmp_path / "in" / "101.png").write_bytes(b"\x89PNG\r\n broken")
    (tmp_path / "in" / "101.txt").write_text("broken")
    assert cli.main(["init", "mine", "--from", "in"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "samples │ 14 │" in told and "caption 13" in told
    assert "13; smallest, middle, largest: 24x24, 32x24, 40x24" in told
    assert "1 samples, 1 pictures" in told and "corrupt_image 1" in told
    assert "corrupt_image, such as 101:" in told


def test_numbers_of_the_recipe_follow_from_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "short", 5)
    pictures(tmp_path / "long", 5, words=lambda i: f"{i} " + "many words in a row " * 100)
    for name in ("short", "long"):
        assert cli.main(["init", name, "--from", name]) == 0
    short, long = (load_config([f"{name}/recipe.toml"]) for name in ("short", "long"))
    assert short.stages[0].length == 512 < long.stages[0].length
    assert short.run.name == "short" and short.data.sources[0].name == "short"
    assert 200 <= short.stages[0].steps <= 640
    assert short.model == load_config(["nano"]).model


def test_many_samples_are_looked_at_evenly_spread(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"number {i}" if i < 90 else ""} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["init", "mine", "--from", "rows.jsonl", "--look", "20"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "100, 20 looked at, evenly spread" in told and "text 18" in told and "empty_text 2" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine", "--from", "nowhere"], "nowhere: does not exist; expected a folder of"),
        (["mine", "--from", "empty"], "holds nothing to prepare"),
        (["mine", "--from", "blank.jsonl"], "none of 1 samples can be used"),
        (["..", "--from", "empty"], "expected the name of a folder"),
        (["old", "--from", "blank.jsonl"], "exists already"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "recipe.toml").write_text("mine")
    assert cli.main(["init", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and not (tmp_path / "mine").exists()
    assert (tmp_path / "old" / "recipe.toml").read_text() == "mine"
