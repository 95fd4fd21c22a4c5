"""tokenizer.path: a user's own tokenizer, from a file of the `tokenizers` library to generated text."""

import json
from pathlib import Path

import pytest
from tiny_run import run_here, tiny_recipe, write_recipe
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from earlyfusion.pipeline.cli import main

ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def trained(path: Path, alphabet=ALPHABET, specials=(), size=400):
    """A byte-level BPE as a user trains one, without a word of ours; the file it was saved to."""
    manual = build_source(SourceConfig(name="pydoc", kind="pydoc"))
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    options = {"vocab_size": size, "special_tokens": list(specials), "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    backend.train_from_iterator((text for index in range(12) for text in manual.texts(index)), trainer)
    backend.save(str(path))
    return path


@pytest.fixture
def small(tmp_path):
    """A recipe of two steps over the tokenizer in a file."""

    def write(file):
        return write_recipe(tmp_path / "r.toml", tiny_recipe(file, run__steps=2, checkpoint__every=0))

    return write


@pytest.mark.slow
def test_a_bpe_of_ones_own_goes_from_its_file_to_generated_text(small, tmp_path, monkeypatch, capsys):
    file = trained(tmp_path / "mine.json", specials=["<|endoftext|>"])
    assert Backend.from_file(str(file)).get_vocab_size() == 400
    assert run_here(small(file), tmp_path / "run", monkeypatch=monkeypatch) == 0

    # Its entries keep their ids; what our forms need lies behind them; the model has a row for each.
    saved = Tokenizer.load(tmp_path / "run" / "model")
    theirs = Backend.from_file(str(file))
    text = "A question, 17 + 4?\n\tAn answer: {'é': 21}"
    assert saved.encode(text) == tuple(theirs.encode(text, add_special_tokens=False).ids)
    assert saved.decode(saved.encode(text)) == text
    assert sorted(saved.special_ids.values()) == list(range(400, 400 + len(SPECIAL_TOKENS)))
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    found = config.get("text_config", config.get("text", config))
    assert found["vocab_size"] == saved.vocab_size == 400 + len(SPECIAL_TOKENS)
    assert found["bos_token_id"] == saved.bos_id >= 400

    # The run goes on with it, and with no other.
    capsys.readouterr()
    other = trained(tmp_path / "other.json", specials=["<|other|>"])
    assert main(["pretrain", str(small(other)), "--out", str(tmp_path / "run"), "--resume"]) == 2
    assert "tokenizer.path" in capsys.readouterr().err

    ask = ["generate", "--model", str(tmp_path / "run"), "--prompt", "The import", "--max-new-tokens", "4"]
    assert main(ask) == 0
    assert capsys.readouterr().out.strip()


def test_special_tokens_that_are_there_are_used(tmp_path):
    file = trained(tmp_path / "tokenizer.json", specials=SPECIAL_TOKENS)
    tokenizer = Tokenizer.load(file)
    assert tokenizer.added == () and tokenizer.vocab_size == 400
    assert tokenizer.special_ids == {name: index for index, name in enumerate(SPECIAL_TOKENS)}
    assert Tokenizer.load(tmp_path).hash == tokenizer.hash


def test_plan_tells_what_the_tokenizer_brings(small, tmp_path, capsys):
    file = trained(tmp_path / "mine.json")
    assert main(["plan", str(small(file))]) == 0
    printed = capsys.readouterr().out
    assert f"tokenizer {file}: 411 entries, 11 special tokens added" in printed
    assert "vocab_size = 411" in printed


def test_a_tokenizer_that_loses_text_is_told_before_training(small, tmp_path, capsys):
    """The usual slip: a byte-level BPE without its alphabet knows only the bytes of its corpus."""
    file = trained(tmp_path / "mine.json", alphabet=[], size=120)
    missing = Tokenizer.load(file).lost()
    assert missing and set(missing) <= set(map(chr, range(33, 127)))
    assert Tokenizer.load(trained(tmp_path / "whole.json")).lost() == ""
    for verb in ("plan", "pretrain"):
        assert (
            main([verb, str(small(file)), "--out", str(tmp_path / "run")][: 2 if verb == "plan" else 4]) == 2
        )
        printed = capsys.readouterr().err.strip()
        assert f"{len(missing)} characters do not come back" in printed and "initial_alphabet" in printed
        assert printed.count("\n") == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or directory; give a file that `tokenizers` saved"),
        (b"\x0a\x0bsentencepiece", "not a tokenizers file"),
        (b'{"a": 0}', "not a tokenizers file"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_one_line(small, tmp_path, capsys, content, message):
    file = tmp_path / "mine.model"
    if content is not None:
        file.write_bytes(content)
    assert main(["plan", str(small(file))]) == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed and printed.count("\n") == 0
