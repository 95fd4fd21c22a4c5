"""Studies of pretraining: planted losses come out as the claims they must, tokens for the same loss by hand,
a real study from its command to its page, stopped and gone on with."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.study.findings import (
    differences,
    headline,
    instrument,
    multiple,
    smallest,
    token_rows,
)
from earlyfusion.pipeline.study.ladder import LadderConfig, chosen, read_ladder, run_of, stages, trial_of

KEY = "heldout/text"


def ladder(**changes) -> LadderConfig:
    given = {
        "title": "t",
        "claim": "c",
        "recipes": ["nano"],
        "steps": 100,
        "tuning_steps": 10,
        "base_tokens": [0.5, 2.0, 4.0],
        "seeds": 4,
        "metrics": {"text": KEY},
        "sizes": [{"name": "a"}, {"name": "b"}],
        "arms": [
            {"name": "base", "about": "b", "tune": "optim.lr", "values": [1e-3, 2e-3]},
            {"name": "new", "about": "n"},
            {"name": "again", "about": "b", "expect": "same", "like": "base"},
            {"name": "half", "about": "h", "expect": "worse", "like": "base", "tokens": 0.5},
        ],
    }
    return LadderConfig.model_validate(given | changes)


def plant(folder, loss, tokens=100):
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    lines = [
        {"step": 1, "event": "train", "tokens": tokens, "seconds": 1.0},
        {"step": 1, "event": "eval", KEY: loss},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def world(config, out, effect=0.0, seed=0):
    """Losses 3 - 0.2 log2(tokens) + noise of each seed, which its arms share up to a tenth."""
    rng = np.random.default_rng(seed)
    for size in config.sizes:
        for s in range(config.seeds):
            shared = rng.normal(0, 0.05)
            for arm in config.arms:
                for length in config.lengths(arm):
                    loss = 3.0 - 0.2 * math.log2(length) + shared + rng.normal(0, 0.005)
                    loss += effect if arm.name == "new" else 0.0
                    plant(run_of(out, size.name, arm.name, length, s), loss, round(100 * length))
        for value in config.base.values:
            plant(trial_of(out, size.name, "base", value), 3.0 + value)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_planted_effect_is_found_and_the_instrument_passes(tmp_path, seed):
    config = ladder()
    world(config, tmp_path, effect=-0.1, seed=seed)
    rows = differences(config, tmp_path)
    (row,) = [row for row in rows if row["arm"] == "new" and row["size"] == "all"]
    assert row["word"] == "lower" and row["low"] < -0.1 < row["high"]
    # By scipy, on the seeds' means over both sizes.
    found = stats.ttest_1samp(row["per_seed"], 0.0)
    low, high = found.confidence_interval()
    assert (row["p"], row["low"], row["high"]) == pytest.approx((found.pvalue, low, high))
    tests = instrument(config, rows)
    assert [one["arm"] for one in tests] == ["again", "half"]
    assert tests[1]["good"] and tests[1]["value"] == pytest.approx(0.2, abs=0.02)
    said = headline(config, {"rows": rows, "instrument": tests})
    assert "new: a lower loss than base" in said


def test_without_an_effect_nothing_is_claimed_and_a_blind_study_says_so(tmp_path):
    config = ladder(arms=[*(arm.model_dump() for arm in ladder().arms[:3])])
    claims = 0
    for seed in range(20):
        world(config, tmp_path / str(seed), seed=seed)
        rows = differences(config, tmp_path / str(seed))
        claims += [r["word"] for r in rows if r["arm"] == "new" and r["size"] == "all"] != [
            "no difference shown"
        ]
    # 5 % of 20 studies; four or more have a chance of 1.6 %.
    assert claims < 4
    blind = ladder(arms=[*(arm.model_dump() | {"tokens": 1.0} for arm in ladder().arms)])
    world(blind, tmp_path / "blind", seed=5)
    rows = differences(blind, tmp_path / "blind")
    said = headline(blind, {"rows": rows, "instrument": instrument(blind, rows)})
    assert "failed its own test: half was not told from base" in said


def test_tokens_for_the_same_loss(tmp_path):
    """0.2 nats a doubling: 0.1 nats are half a doubling, by the formula and out of runs."""
    curve = {x: 3.0 - 0.2 * math.log2(x) for x in (0.5, 1.0, 2.0, 4.0)}
    for factor in (0.6, 1.0, 1.7, 3.9):
        assert multiple(curve, 3.0 - 0.2 * math.log2(factor)) == pytest.approx(factor)
    assert multiple(curve, 2.5) == math.inf and multiple(curve, 3.3) == 0.0
    config = ladder()
    world(config, tmp_path, effect=-0.1)
    rows = token_rows(config, tmp_path, {"a": 10**6, "b": 4 * 10**6})
    for row in rows[:2]:
        assert row["low"] < 2**0.5 < row["high"] and row["value"] == pytest.approx(2**0.5, rel=0.1)
    assert rows[2]["size"] == "trend" and rows[2]["low"] < 0.0 < rows[2]["high"]


def test_power_is_that_of_the_t_test():
    """Simulated: a difference of that size is shown in 80 % of studies."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(smallest(0.3, 5), 0.3, size=(4000, 5))
    shown = stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05
    assert shown.mean() == pytest.approx(0.8, abs=0.04)


def test_the_best_value_is_taken_by_all_that_are_like_it(tmp_path):
    config = ladder()
    with pytest.raises(UserError, match="left a loss"):
        chosen(config, tmp_path, "a", config.base)
    plant(trial_of(tmp_path, "a", "base", 1e-3), math.nan)
    plant(trial_of(tmp_path, "a", "base", 2e-3), 4.0)
    base, new, again, _ = config.arms
    assert chosen(config, tmp_path, "a", base) == chosen(config, tmp_path, "a", again) == {"optim.lr": 2e-3}
    assert chosen(config, tmp_path, "a", new) == {}
    made = {stage.name: stage for stage in stages(config, tmp_path)}
    assert "--optim.lr=0.002" in made["runs/a/half/x0.5-s0"].command()
    assert made["runs/a/half/x0.5-s0"].after == ("tuning/a/base/0.001", "tuning/a/base/0.002")
    assert "--stages.joint.steps=50" in made["runs/a/half/x0.5-s0"].command()


@pytest.mark.parametrize(
    ("name", "sizes"), [("optimizer", 3), ("residuals", 3), ("fusion", 1), ("qkclip", 1)]
)
def test_the_shipped_studies_are_whole(name, sizes, tmp_path):
    """Five values for every tuned arm, both of the arms that test the study."""
    config = read_ladder(name, {})
    assert len(config.sizes) == sizes and config.seeds >= 3
    assert all(len(arm.values) >= 5 for arm in config.arms if arm.tune)
    assert {arm.expect for arm in config.arms} == {"", "same", "worse"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": [{"name": "a", "about": ""}, {"name": "a", "about": ""}]}, "needs a name of its own"),
        ({"arms": [{"name": "a", "about": ""}, {"name": "b", "about": "", "like": "c"}]}, "like 'c'"),
        (
            {"arms": [{"name": "a", "about": ""}, {"name": "b", "about": "", "tune": "optim.lr"}]},
            "go together",
        ),
        ({"overrides": {"optim.lrr": 1}}, "optim.lrr"),
    ],
)
def test_mistakes_are_told_before_the_first_run(change, said):
    with pytest.raises(ValueError, match=said):
        ladder(**change)


@pytest.mark.slow
def test_a_study_runs_from_its_command_to_its_page(tmp_path, capsys):
    """Two arms of a few steps; a second command finds all of it done."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        """
title = "few steps"
claim = "none"
recipes = ["nano"]
steps = 2
tuning_steps = 1
seeds = 2
[overrides]
"stages.joint.tokens" = 256
"stages.joint.length" = 256
"stages.joint.warmup_steps" = 0
"eval.tasks" = []
"eval.samples" = 0
"eval.heldout" = 4
"checkpoint.every" = 0
[metrics]
text = "heldout/text"
[[sizes]]
name = "small"
overrides = { "model.num_hidden_layers" = 1 }
[[arms]]
name = "one"
about = "base"
[[arms]]
name = "two"
about = "another rate"
tune = "optim.lr"
values = [1e-3, 2e-3]
"""
    )
    words = f"study optimizer --recipe {recipe} --out {tmp_path / 'out'}".split()
    assert cli.main(words) == 0
    told = json.loads((tmp_path / "out" / "study.json").read_text())
    assert {row["arm"] for row in told["rows"]} == {"two"} and told["tuning"][0]["taken"] in (1e-3, 2e-3)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "few steps" in page and "another rate" in page
    assert cli.main(words) == 2 and "add --resume" in capsys.readouterr().err
    assert cli.main([*words, "--resume"]) == 0
    assert len((tmp_path / "out" / "study.jsonl").read_text().splitlines()) == 12
