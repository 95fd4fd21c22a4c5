"""`earlyfusion bench engine`: both sides compute the same function, and the figures are of what they say."""

import json

import pytest
import torch

from earlyfusion.pipeline import cli
from earlyfusion.pipeline.bench.contexts import measure_context, model_pair
from earlyfusion.pipeline.bench.engine import GROUP, Batch
from earlyfusion.pipeline.config.compose import load_config

SMALL = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, vocab_size=64, num_experts=4)


def test_cases_are_what_they_are_called():
    equal, ragged, groups = (Batch.make(32, 40, 12, kind, 64) for kind in ("equal", "ragged", "groups"))
    assert {len(ids) for ids in equal.prompts} == {40} and set(equal.counts) == {12}
    lengths = [len(ids) for ids in ragged.prompts]
    assert len(set(lengths)) > 5 and len(set(ragged.counts)) > 3
    assert max(lengths) <= 40 and min(ragged.counts) >= 3
    assert len({tuple(ids.tolist()) for ids in groups.prompts}) == 32 // GROUP
    _, mask = ragged.padded()
    assert mask[:, -1].all() and mask.sum(1).tolist() == lengths
    again = Batch.make(32, 40, 12, "ragged", 64)
    assert all(torch.equal(a, b) for a, b in zip(ragged.prompts, again.prompts))


def test_the_hybrid_needs_the_share_of_its_mla_layers():
    """nano: one MLA layer of four. At long contexts the state hardly counts, and four times the batch
    fits."""
    shape = {**load_config(["nano"]).model.model_dump(mode="json"), **SMALL}
    models = model_pair(shape, torch.float32)
    short, long = (measure_context(models, context, 1) for context in (512, 8192))
    for record, least in ((short, 2.0), (long, 3.5)):
        assert least < record["all_mla_bytes"] / record["hybrid_bytes"] <= 4.0
        assert record["hybrid_step_s"] > 0 and record["larger_batch"] in (2, 3, 4)
    assert long["hybrid_bytes"] - short["hybrid_bytes"] == (8192 - 512) * 80 * 4
    assert not models[1].config.text.linear_attn_config.kda_layers


@pytest.mark.slow
def test_engine_and_transformers_give_the_same_tokens(tmp_path):
    """The whole command, small: equal weights, equal prompts, equal answers."""
    out = tmp_path / "engine.json"
    options = "--batches 16 --prompts 9 --new 6 --threads 1 --steps 0 --sides generate,generate-tuned"
    assert cli.main(["bench", "engine", *options.split(), "--out", str(out)]) == 0
    records = json.loads(out.read_text())["comparison"]
    assert [(r["batch"], r["lengths"]) for r in records] == [(16, "equal"), (16, "ragged"), (16, "groups")]
    for record in records:
        for side, ratio in record["ratio_to"].items():
            # transformers' padding may flip a near tie
            assert ratio > 0 and record["sides"][side]["equal_tokens"] >= 0.9, side
        assert set(record["ratio_to"]) == {"generate", "generate-tuned"}
