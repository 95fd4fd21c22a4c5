"""Long to short as a user runs it: merged weights, and shortest right answers that SFT trains on."""

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from engine_cases import SHAPE, TOKENIZER, model
from fusion_cases import TEXTS
from long2short_cases import call, lines, told, toy_directory, weights, words
from PIL import Image
from rl_cases import model_directory, problem_of

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline import sft
from earlyfusion.pipeline.track import read_metrics
from earlyfusion.rl import rewards
from earlyfusion.rl.entries import entry_of
from earlyfusion.rl.long2short import samples as long2short_samples
from earlyfusion.rl.long2short.preferences import average_weights
from earlyfusion.rl.rollouts.prompts import encode_prompt

MEAN_ATOL = 1e-6
"""fp32 sums of two products of weights below 1."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return toy_directory(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """Two model directories of one configuration."""
    home = tmp_path_factory.mktemp("models")
    return model_directory(home, 0), model_directory(home, 1)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Rewards of the tests are called in this process."""
    made = rewards.make_reward
    monkeypatch.setattr("earlyfusion.rl.rollouts.experience.make_reward", lambda *a: (made(*a)[0], "inline"))


# average


@pytest.mark.parametrize("seed", [0, 1])
def test_an_average_of_linear_nets_answers_with_the_average_of_their_answers(seed):
    torch.manual_seed(seed)
    nets = [torch.nn.Linear(5, 3) for _ in range(3)]
    merged = torch.nn.Linear(5, 3)
    merged.load_state_dict(average_weights([net.state_dict() for net in nets], [1, 2, 5]))
    x = torch.randn(7, 5)
    by_hand = sum(share * net(x) for share, net in zip((0.125, 0.25, 0.625), nets))
    torch.testing.assert_close(merged(x), by_hand, atol=MEAN_ATOL, rtol=0)


@pytest.mark.parametrize(
    "given, shares", [((), (0.5, 0.5)), (("1", "3"), (0.25, 0.75)), (("0", "2"), (0.0, 1.0))]
)
def test_merged_directories_hold_the_weighted_mean_of_every_tensor(untrained, tmp_path, given, shares):
    out = tmp_path / "merged"
    assert (
        call("average", *map(str, untrained), *(("--weights", *given) if given else ()), "--out", str(out))
        == 0
    )
    first, second, merged = weights(untrained[0]), weights(untrained[1]), weights(out)
    assert merged.keys() == first.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == first[name].dtype
        by_hand = shares[0] * first[name].double() + shares[1] * second[name].double()
        torch.testing.assert_close(tensor.double(), by_hand, atol=MEAN_ATOL, rtol=1e-6)
    load_model(out)
    assert Tokenizer.load(out).hash == Tokenizer.load(untrained[0]).hash
    card = (out / "README.md").read_text()
    assert all(f"{share:.4g} of `{folder}`" in card for share, folder in zip(shares, untrained))


def test_the_first_models_chat_template_goes_along(untrained, tmp_path):
    speaks = save_model(load_model(untrained[0]), TOKENIZER, tmp_path / "speaks")
    (speaks / "chat_template.jinja").write_text("{{ messages }}")
    assert call("average", str(speaks), str(untrained[1]), "--out", str(tmp_path / "a")) == 0
    assert call("average", str(untrained[1]), str(speaks), "--out", str(tmp_path / "b")) == 0
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "b" / "chat_template.jinja").exists()


def strangers(home: Path) -> dict[str, Path]:
    """A model of another configuration, and one of the same with another tokenizer."""
    other = train_bpe([text[::-1] for text in TEXTS], TOKENIZER.vocab_size)
    odd = model(0, **SHAPE, kv_lora_rank=20)
    return {
        "wide": save_model(odd, TOKENIZER, home / "wide"),
        "words": save_model(model(0), other, home / "words"),
    }


def test_models_that_cannot_be_averaged_are_told_in_one_line(untrained, tmp_path, capsys):
    a, b, out = str(untrained[0]), str(untrained[1]), str(tmp_path / "out")
    odd = strangers(tmp_path)
    cases = [
        ((a,), "needs two or more"),
        ((a, b, "--weights", "1"), "1 given for 2 models"),
        ((a, b, "--weights", "2", "-1"), "at least 0"),
        ((a, b, "--weights", "0", "0"), "not all 0"),
        ((a, b, "--weights", "nan", "1"), "at least 0"),
        ((a, a), "given twice"),
        ((a, str(tmp_path / "nowhere")), "not a model directory"),
        ((a, str(odd["words"])), "another tokenizer"),
        ((a, str(odd["wide"])), "not of the architecture.*kv_lora_rank: 16 -> 20"),
    ]
    for given, message in cases:
        assert call("average", *given, "--out", out) == 2
        error = told(capsys)
        assert re.search(message, error), error
        assert not Path(out).exists()
    assert call("average", a, b, "--out", b) == 2 and "one of the models" in told(capsys)
    assert call("average", a, b) == 2 and "--out" in told(capsys)


# shortest


@pytest.fixture(scope="module")
def documents(toy, tmp_path_factory):
    """A run of `shortest` on the toy."""
    out = tmp_path_factory.mktemp("shortest") / "out"
    with pytest.MonkeyPatch.context() as patch:
        made = rewards.make_reward
        patch.setattr("earlyfusion.rl.rollouts.experience.make_reward", lambda *a: (made(*a)[0], "inline"))
        assert call(*words("shortest", toy, out)) == 0
    return out


def test_the_shortest_right_answer_of_each_problem_is_written(documents):
    samples, rows = (
        lines(documents / "samples.jsonl")[1:],
        {row["key"]: row for row in lines(documents / "train.jsonl")},
    )
    assert len(samples) == 16
    for one in samples:
        right = [a for a in one["answers"] if a["text"].strip() == "yes"]
        assert (one["key"] in rows) is bool(right)
        if right:
            row = rows[one["key"]]
            assert row["tokens"] == min(len(a["ids"]) for a in right)
            assert row["messages"][1]["content"] == [{"type": "text", "text": " yes"}]
            assert row["sampled_tokens"] == [len(a["ids"]) for a in one["answers"]] and row["right"] == len(
                right
            )
    table = json.loads((documents / "summary.json").read_text())["entries"]["all"]
    every = [len(a["ids"]) for one in samples for a in one["answers"]]
    assert table["tokens_all"] == pytest.approx(np.mean(every)) and table["problems"] == 16
    assert table["tokens_shortest"] == pytest.approx(np.mean([row["tokens"] for row in rows.values()]))
    assert table["tokens_shortest"] < table["tokens_all"] - 0.5


def test_rows_ask_what_the_problem_asks_with_its_picture(documents):
    kinds = set()
    for row in lines(documents / "train.jsonl"):
        problem = problem_of(row["key"])
        content = row["messages"][0]["content"]
        kinds.add(content[0]["type"])
        if content[0]["type"] == "image":
            drawn = np.asarray(Image.open(documents / content[0]["image"]))
            assert (drawn == np.asarray(problem.picture.convert("RGB"))).all()
            assert content[1]["text"] == problem.prompt()[-1].text
        else:
            assert content == [{"type": "text", "text": problem.prompt("twin")[0].text}]
    assert kinds == {"image", "text"}


def test_documents_are_the_prompts_and_answers_token_for_token(documents):
    """Oracle: the prompt as reinforcement learning encodes it, and the sampled ids."""
    source = build_source(
        SourceConfig(
            name="s", kind="chat_files", path=str(documents / "train.jsonl"), options={"template": "plain"}
        ),
        seed=0,
        val_fraction=0.0,
    )
    vision = model(0).config.vision
    sampled = {one["key"]: one for one in lines(documents / "samples.jsonl")[1:]}
    rows = lines(documents / "train.jsonl")
    assert len(source) == len(rows) > 0
    for position, row in enumerate(rows):
        form = "picture" if row["messages"][0]["content"][0]["type"] == "image" else "twin"
        problem = problem_of(row["key"])
        prompt = encode_prompt(
            problem, entry_of(f"{problem.task}/{problem.key.split('/')[2]}/{form}"), TOKENIZER, vision
        )
        document = encode(source.read(0, position, 0), TOKENIZER, vision)
        answer = document.ids[len(prompt.ids) :].tolist()
        assert torch.equal(document.ids[: len(prompt.ids)], prompt.ids)
        assert answer in [a["ids"] for a in sampled[row["key"]]["answers"] if len(a["ids"]) == row["tokens"]]
        assert document.loss_weights.tolist() == [0.0] * len(prompt.ids) + [1.0] * len(answer)


def test_sft_trains_on_what_was_written(documents, tmp_path, monkeypatch):
    source = build_source(
        SourceConfig(name="s", kind="chat_files", path=str(documents / "train.jsonl")),
        seed=0,
        val_fraction=0.2,
    )
    count = len(lines(documents / "train.jsonl"))
    assert len(source) + source.heldout_len() == count
    sample = encode(source.get(0, 0), TOKENIZER, model(0).config.vision)
    assert 0 < float(sample.loss_weights.sum()) < len(sample)
    AcceleratorState._reset_state(True)
    given = [
        str(documents / "sft.toml"),
        "--out",
        str(tmp_path / "sft"),
        "--stages.0.steps",
        "6",
        "--eval.every",
        "0",
        "--optim.lr",
        "1e-2",
        "--track.log_every",
        "1",
        "--train.threads",
        "1",
        "--data.prefetch",
        "none",
        "--stages.0.tokens",
        "512",
        "--eval.tasks",
        "[]",
    ]
    assert sft.main(given) == 0
    losses = [record["loss"] for record in read_metrics(tmp_path / "sft" / "metrics.jsonl", "train")]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3
    assert not (
        tmp_path / "sft" / "model" / "chat_template.jinja"
    ).exists()  # it answers in the form it was asked in


def test_sampling_that_was_stopped_goes_on_with_the_same_answers(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(long2short_samples, "PART", 5)
    assert call(*words("shortest", toy, tmp_path / "whole", problems=12)) == 0
    real, count = long2short_samples.Sampler._part, []

    def part(self, *given):
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *given)

    monkeypatch.setattr(long2short_samples.Sampler, "_part", part)
    assert call(*words("shortest", toy, tmp_path / "cut", problems=12)) == 75
    file = tmp_path / "cut" / "samples.jsonl"
    assert len(lines(file)) == 1 + 10 and not (tmp_path / "cut" / "train.jsonl").exists()
    file.write_bytes(file.read_bytes()[:-30])  # a kill in the middle of a line
    assert call(*words("shortest", toy, tmp_path / "cut", "--resume", problems=12)) == 0
    assert file.read_bytes() == (tmp_path / "whole" / "samples.jsonl").read_bytes()
    assert (tmp_path / "cut" / "train.jsonl").read_bytes() == (
        tmp_path / "whole" / "train.jsonl"
    ).read_bytes()
