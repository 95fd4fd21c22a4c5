"""Long to short as a user runs it: merged weights, and shortest right answers that SFT trains on."""

import json
import os
import re
import signal

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from engine_cases import SHAPE, TOKENIZER, model
from fusion_cases import TEXTS
from long2short_cases import call, lines, told
from PIL import Image
from rl_cases import model_directory, problem_of

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline import cli, sft
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl.long2short import samples as long2short_samples
from earlyfusion.rl.recipe import entry_of
from earlyfusion.rl.rollouts.prompts import encode_prompt

MEAN_ATOL = 1e-6
"""fp32 sums of two products of weights below 1."""


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """Two model directories of one configuration."""
    home = tmp_path_factory.mktemp("models")
    return model_directory(home, 0), model_directory(home, 1)


def average(folders, out, more="") -> int:
    return cli.main(["long2short", "average", *map(str, folders), "--out", str(out), *more.split()])


@pytest.mark.parametrize(
    "given, shares", [("", (0.5, 0.5)), ("--weights 1 3", (0.25, 0.75)), ("--weights 0 2", (0.0, 1.0))]
)
def test_merged_directories_hold_the_weighted_mean_of_every_tensor(untrained, tmp_path, given, shares):
    out = tmp_path / "merged"
    assert average(untrained, out, given) == 0
    first, second, merged = (load_model(folder).state_dict() for folder in (*untrained, out))
    assert merged.keys() == first.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == first[name].dtype
        by_hand = shares[0] * first[name].double() + shares[1] * second[name].double()
        torch.testing.assert_close(tensor.double(), by_hand, atol=MEAN_ATOL, rtol=1e-6)
    assert Tokenizer.load(out).hash == Tokenizer.load(untrained[0]).hash
    card = (out / "README.md").read_text()
    assert all(f"{share:.4g} of `{folder}`" in card for share, folder in zip(shares, untrained))


def test_the_first_models_chat_template_goes_along(untrained, tmp_path):
    speaks = save_model(load_model(untrained[0]), TOKENIZER, tmp_path / "speaks")
    (speaks / "chat_template.jinja").write_text("{{ messages }}")
    for folders, has in (((speaks, untrained[1]), True), ((untrained[1], speaks), False)):
        assert average(folders, tmp_path / str(has)) == 0
        assert (tmp_path / str(has) / "chat_template.jinja").exists() is has


def test_models_that_cannot_be_averaged_are_told_in_one_line(untrained, tmp_path, capsys):
    (a, b), out = untrained, tmp_path / "out"
    other = train_bpe([text[::-1] for text in TEXTS], TOKENIZER.vocab_size)
    wide = save_model(model(0, **SHAPE, kv_lora_rank=20), TOKENIZER, tmp_path / "wide")
    strange = save_model(model(0), other, tmp_path / "words")
    cases = [
        ((a,), "", "needs two or more"),
        ((a, b), "--weights 1", "1 given for 2 models"),
        ((a, b), "--weights 2 -1", "at least 0"),
        ((a, b), "--weights 0 0", "not all 0"),
        ((a, b), "--weights nan 1", "at least 0"),
        ((a, a), "", "given twice"),
        ((a, b, out), "", "given twice"),
        ((a, tmp_path / "nowhere"), "", "not a model directory"),
        ((a, strange), "", "another tokenizer"),
        ((a, wide), "", "not of the architecture.*kv_lora_rank: 16 -> 20"),
    ]
    for folders, more, message in cases:
        assert average(folders, out, more) == 2
        error = told(capsys)
        assert re.search(message, error), error
        assert not out.exists()


# shortest


@pytest.fixture(scope="module")
def documents(here, toy, tmp_path_factory):
    """A run of `shortest` on the toy."""
    out = tmp_path_factory.mktemp("shortest") / "out"
    assert call("shortest", toy, out) == 0
    return out


def test_the_shortest_right_answer_of_each_problem_is_written(documents):
    samples = lines(documents / "samples.jsonl")[1:]
    rows = {row["key"]: row for row in lines(documents / "train.jsonl")}
    assert len(samples) == 16
    for one in samples:
        right = [len(a["ids"]) for a in one["answers"] if a["text"].strip() == "yes"]
        assert (one["key"] in rows) is bool(right)
        if right:
            assert rows[one["key"]]["tokens"] == min(right)
            assert rows[one["key"]]["messages"][1]["content"] == [{"type": "text", "text": " yes"}]
    table = json.loads((documents / "summary.json").read_text())["entries"]["all"]
    every = [len(a["ids"]) for one in samples for a in one["answers"]]
    assert table["tokens_all"] == pytest.approx(np.mean(every)) and table["problems"] == 16
    assert table["tokens_shortest"] == pytest.approx(np.mean([row["tokens"] for row in rows.values()]))
    assert table["tokens_shortest"] < table["tokens_all"] - 0.5


def test_documents_are_the_prompts_and_answers_token_for_token(documents):
    """Oracle: the prompt as reinforcement learning encodes it, its picture, and the sampled ids."""
    path, options = str(documents / "train.jsonl"), {"template": "plain"}
    config = SourceConfig(name="s", kind="chat_files", path=path, options=options)
    source = build_source(config, seed=0, val_fraction=0.0)
    vision, kinds = model(0).config.vision, set()
    sampled = {one["key"]: one for one in lines(documents / "samples.jsonl")[1:]}
    rows = lines(documents / "train.jsonl")
    assert len(source) == len(rows) > 0
    for position, row in enumerate(rows):
        form, shown = "twin", row["messages"][0]["content"][0]
        problem = problem_of(row["key"])
        if shown["type"] == "image":
            form, drawn = "picture", np.asarray(Image.open(documents / shown["image"]))
            assert (drawn == np.asarray(problem.picture.convert("RGB"))).all()
        kinds.add(form)
        entry = entry_of(f"{problem.task}/{problem.key.split('/')[2]}/{form}")
        prompt = encode_prompt(problem, entry, TOKENIZER, vision)
        document = encode(source.read(0, position, 0), TOKENIZER, vision)
        answer = document.ids[len(prompt.ids) :].tolist()
        assert torch.equal(document.ids[: len(prompt.ids)], prompt.ids)
        assert answer in [a["ids"] for a in sampled[row["key"]]["answers"] if len(a["ids"]) == row["tokens"]]
        assert document.loss_weights.tolist() == [0.0] * len(prompt.ids) + [1.0] * len(answer)
    assert kinds == {"picture", "twin"}


def test_sft_trains_on_what_was_written(documents, tmp_path):
    AcceleratorState._reset_state(True)
    given = "--stages.0.steps 6 --eval.every 0 --optim.lr 1e-2 --track.log_every 1 --train.threads 1"
    given += " --data.prefetch none --stages.0.tokens 512 --eval.tasks []"
    assert sft.main([str(documents / "sft.toml"), "--out", str(tmp_path / "sft"), *given.split()]) == 0
    losses = [record["loss"] for record in read_metrics(tmp_path / "sft" / "metrics.jsonl", "train")]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3
    # it answers in the form it was asked in
    assert not (tmp_path / "sft" / "model" / "chat_template.jinja").exists()


def test_sampling_that_was_stopped_goes_on_with_the_same_answers(here, toy, tmp_path, monkeypatch):
    monkeypatch.setattr(long2short_samples, "PART", 5)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert call("shortest", toy, whole, problems=12) == 0
    real, count = long2short_samples.Sampler._part, []

    def part(self, *given):
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *given)

    monkeypatch.setattr(long2short_samples.Sampler, "_part", part)
    assert call("shortest", toy, cut, problems=12) == 75
    assert len(lines(cut / "samples.jsonl")) == 1 + 10 and not (cut / "train.jsonl").exists()
    assert call("shortest", toy, cut, "--resume", problems=12) == 0
    for name in ("samples.jsonl", "train.jsonl"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
