"""`earlyfusion export`: a checkpoint becomes the model directory that the run itself would write."""

import json
import shutil

import pytest
from tiny_run import run_here

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.hub.config import load_config
from earlyfusion.model.hub.folder import load_model
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        words = ("--steps 4 --checkpoint.every 2 --checkpoint.asynchronous true",)
        assert run_here(recipe, out, *words, monkeypatch=patch) == EXIT_OK
    return out


def test_the_last_checkpoint_is_the_model_that_the_run_wrote(trained, tmp_path):
    assert cli.main(["export", str(trained), "--to", str(tmp_path / "out")]) == EXIT_OK
    out, model = tmp_path / "out", trained / "model"
    assert (out / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert load_config(out) == load_config(model)
    # The same vocabulary; the export alone puts [BOS] before a text by itself.
    words = [json.loads((folder / "tokenizer.json").read_text()) for folder in (out, model)]
    assert words[0].pop("post_processor") != words[1].pop("post_processor")
    assert words[0] == words[1]


def test_the_card_says_what_the_run_says(trained, tmp_path):
    """Of a checkpoint: steps, tokens, what was measured until then, the data with shares and licences; the
    licence that is chosen, and no word of none."""
    run = shutil.copytree(trained, tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        for step, loss in ((2, 1.25), (4, 0.75)):
            file.write(json.dumps({"step": step, "event": "eval", "heldout/text": loss}) + "\n")
    words = ["export", str(run), "--to", str(tmp_path / "out"), "--licence", "apache-2.0"]
    assert cli.main(words) == EXIT_OK
    own, card = ((folder / "README.md").read_text() for folder in (run / "model", tmp_path / "out"))
    limits = own.partition("## Limits")[2].partition("\n## ")[0].strip()
    assert "In training a document had at most" in limits and limits in card
    table = own.partition("## Data")[2].partition("\n## ")[0].strip()
    assert table.count("|") > 12 and table in card and "| heldout/text | 0.75 |" in card
    tokens = next(line for line in own.splitlines() if line.startswith("| tokens seen |"))
    assert tokens in card and "| optimizer steps | 4 |" in card
    assert "released under apache-2.0" in card and "No licence has been chosen" not in card
    checkpoint = run / "checkpoints" / "step-000002"
    assert cli.main(["export", str(checkpoint), "--to", str(tmp_path / "early")]) == EXIT_OK
    early = (tmp_path / "early" / "README.md").read_text()
    assert "| optimizer steps | 2 |" in early and tokens not in early and "| heldout/text | 1.25 |" in early


def test_an_earlier_one_is_another_model(trained, tmp_path):
    checkpoint = trained / "checkpoints" / "step-000002"
    assert cli.main(["export", str(checkpoint), "--to", str(tmp_path / "out")]) == EXIT_OK
    early, late = (folder / "model.safetensors" for folder in (tmp_path / "out", trained / "model"))
    assert early.read_bytes() != late.read_bytes() and early.stat().st_size == late.stat().st_size
    assert load_model(tmp_path / "out").config.text.vocab_size >= Tokenizer.load(tmp_path / "out").vocab_size


def test_what_cannot_be_exported_is_one_line(trained, tmp_path, capsys):
    assert cli.main(["export", str(tmp_path), "--to", str(tmp_path / "out")]) == EXIT_USER
    assert "holds no complete checkpoint" in capsys.readouterr().err
    checkpoint = tmp_path / "step-000002"
    checkpoint.mkdir()
    for file in (trained / "checkpoints" / "step-000002").iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    (shard,) = checkpoint.glob("shard-*")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert cli.main(["export", str(checkpoint), "--to", str(tmp_path / "out")]) == EXIT_USER
    said = capsys.readouterr().err
    assert "is damaged" in said and said.count("\n") == 1 and not (tmp_path / "out").exists()
