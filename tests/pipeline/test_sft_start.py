"""Where a chat stage starts: rows for missing special tokens, and what is measured before and after."""

import json

import pytest
import torch
from chat_cases import chat_recipe, tune, write_chats, write_start
from tiny_run import weights, write_recipe

from earlyfusion.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.pipeline import sft
from earlyfusion.pipeline.config.compose import compose, validate
from earlyfusion.pipeline.sft_start import start_model, with_start


@pytest.fixture(scope="module")
def model_dir(folder, tokenizer):
    return write_start(folder / "start", tokenizer)


@pytest.fixture(scope="module")
def chats(folder):
    return write_chats(folder / "chats")


def without_chat_tokens(model_dir, target):
    """The directory as it would come from elsewhere: its tokenizer knows no chat tokens, its rows end with
    the others."""
    from safetensors.torch import load_file, save_file

    gone = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    target.mkdir()
    for file in model_dir.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    plain = json.loads((model_dir / "tokenizer.json").read_text())
    ids = {entry["content"]: entry["id"] for entry in plain["added_tokens"]}
    kept = [i for i in range(320) if i not in {ids[name] for name in gone}]
    new = {old: number for number, old in enumerate(kept)}
    plain["added_tokens"] = [
        e | {"id": new[e["id"]]} for e in plain["added_tokens"] if e["content"] not in gone
    ]
    plain["model"]["vocab"] = {t: new[i] for t, i in plain["model"]["vocab"].items() if t not in gone}
    (target / "tokenizer.json").write_text(json.dumps(plain))
    config = json.loads((model_dir / "config.json").read_text())
    for part in (config, config["text_config"]):
        part["vocab_size"] = len(kept)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            part[key] = new[part[key]]
    config["media_placeholder_token_id"] = new[config["media_placeholder_token_id"]]
    (target / "config.json").write_text(json.dumps(config))
    state = load_file(model_dir / "model.safetensors")
    name = next(name for name in state if "embed_tokens" in name)
    state[name] = state[name][kept].contiguous()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target, name, gone


def test_missing_chat_tokens_get_rows_that_are_the_mean_of_the_others(
    model_dir, chats, tmp_path, monkeypatch
):
    small, name, gone = without_chat_tokens(model_dir, tmp_path / "small")
    before = weights_of(small)[name].clone()
    recipe = write_recipe(tmp_path / "r.toml", chat_recipe(small, chats))
    config = validate(with_start(compose([str(recipe)])))
    tokens = Tokenizer.load(small)
    assert tokens.added == gone and config.model.vocab_size == 320 == before.shape[0] + 4
    model, added = start_model(small, sft.build.fusion_config(config, tokens.media_pad_id), tokens)
    table = model.decoder.embed_tokens.weight
    assert torch.equal(table[:316], before)
    assert torch.allclose(table[316:], before.mean(0).expand(4, -1), rtol=0, atol=1e-7)
    assert model.decoder.head_weight() is table, "tied"
    assert "4 special tokens" in added and "mean of the other rows (316 rows before, 320 after)" in added
    assert tune(recipe, tmp_path / "out", "--steps 2", monkeypatch=monkeypatch) == 0
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "4 special tokens were added" in card and "<|end_of_msg|>" in card
    again = load_model(tmp_path / "out" / "model")
    assert again.config.text.vocab_size == 320 and Tokenizer.load(tmp_path / "out" / "model").added == ()
    assert not torch.equal(weights(tmp_path / "out")[name][316:], table[316:]), "and they are learned"


def weights_of(directory):
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_a_tokenizer_of_the_same_size_changes_nothing(model_dir, chats, tmp_path):
    config = validate(with_start(chat_recipe(model_dir, chats)))
    tokens = Tokenizer.load(model_dir)
    model, added = start_model(model_dir, sft.build.fusion_config(config, tokens.media_pad_id), tokens)
    ours, theirs = model.state_dict(), load_model(model_dir).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and added == ""
    # What is stored in bfloat16 is trained in float32, where a small step is not rounded away.
    stored = save_model(load_model(model_dir, dtype=torch.bfloat16), tokens, tmp_path / "stored")
    model, _ = start_model(stored, model.config, tokens)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert set(SPECIAL_TOKENS) <= set(tokens.special_ids)


# ---- what is learned
