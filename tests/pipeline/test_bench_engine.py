"""`earlyfusion bench engine`: both sides compute the same function, and the figures are of what they say."""

import json

import pytest
import torch
from forked import result_of

from earlyfusion.pipeline import cli
from earlyfusion.pipeline.bench import engine
from earlyfusion.pipeline.bench.engine import GROUP, Batch


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


@pytest.mark.slow
def test_engine_and_transformers_give_the_same_tokens(tmp_path, monkeypatch):
    """The whole command, small: equal weights, equal prompts, equal answers."""
    monkeypatch.setattr(engine, "run_side", lambda side, request: result_of(side, request))
    out = tmp_path / "engine.json"
    options = "--batches 16 --prompts 9 --new 6 --threads 1 --steps 0 --sides generate,generate-tuned"
    assert cli.main(["bench", "engine", *options.split(), "--out", str(out)]) == 0
    records = json.loads(out.read_text())["comparison"]
    assert [r["case"] for r in records] == [[16, 9, kind] for kind in ("equal", "ragged", "groups")]
    for record in records:
        for side in ("generate", "generate-tuned"):
            # transformers' padding may flip a near tie
            assert record[f"engine / {side}"]["tokens_per_s"] > 0
            assert record[side]["equal_answers"] >= 0.9, side
