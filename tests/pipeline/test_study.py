"""Studies: planted figures come out as the claims they must, tokens for the same loss by hand, arms that
begin with one another, a real study from its command to its page, stopped and gone on with."""

import json
import math
from statistics import fmean

import numpy as np
import pytest
from page_cases import checked
from scipy import stats

from earlyfusion.eval.measured import Measured, write_measured
from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import parse_literal
from earlyfusion.pipeline.study.findings import (
    Results,
    differences,
    headline,
    instrument,
    multiple,
    own_figures,
    ratio,
    token_rows,
    within_rows,
    write_findings,
)
from earlyfusion.pipeline.study.plan import (
    FOLDER,
    StudyConfig,
    chosen,
    literal,
    read_study,
    run_of,
    stages,
    trial_of,
    write_plan,
)
from earlyfusion.pipeline.study.records import Metric, Run, figure

KEY = "heldout/text"
SHIPPED = [path.stem for path in FOLDER.glob("*.toml")]


def ladder(**changes) -> StudyConfig:
    given = {
        "title": "t",
        "claim": "c",
        "recipes": ["nano"],
        "steps": 100,
        "tuning_steps": 10,
        "base_tokens": [0.5, 2.0, 4.0],
        "seeds": 4,
        "metrics": {"text": {"key": KEY}},
        "sizes": [{"name": "a"}, {"name": "b"}],
        "arms": [
            {"name": "base", "about": "b", "tune": "optim.lr", "values": [1e-3, 2e-3]},
            {"name": "new", "about": "n"},
            {"name": "again", "about": "b", "expect": "same", "like": "base"},
            {"name": "half", "about": "h", "expect": "worse", "like": "base", "tokens": 0.5},
        ],
    }
    return StudyConfig.model_validate(given | changes)


def arms_of(config):
    """Its arms as they were given."""
    return [arm.model_dump(exclude_unset=True) for arm in config.arms]


def plant(folder, *evals, train=()):
    """A finished run with these evaluations, one after the other, and training records."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    lines = [{"step": i + 1, "event": "train", **one} for i, one in enumerate(train)]
    lines += [{"step": i, "event": "eval", **one} for i, one in enumerate(evals, 1)]
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
                    folder = run_of(out, size.name, arm.name, length, s)
                    plant(folder, {KEY: loss}, train=[{"tokens": round(100 * length)}])
        for value in config.base_arm.values:
            plant(trial_of(out, size.name, "base", value), {KEY: 3.0 + value})


def found_in(config, out):
    """(differences, instrument) of what is planted."""
    results = Results(config, out)
    rows = differences(results)
    return rows, instrument(config, rows, own_figures(results))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_planted_effect_is_found_and_the_instrument_passes(tmp_path, seed):
    config = ladder()
    world(config, tmp_path, effect=-0.1, seed=seed)
    rows, tests = found_in(config, tmp_path)
    (row,) = [row for row in rows if row["arm"] == "new" and row["size"] == "all"]
    assert row["word"] == "lower" and row["low"] < -0.1 < row["high"]
    # By scipy, on the seeds' means over both sizes.
    found = stats.ttest_1samp(row["per_seed"], 0.0)
    low, high = found.confidence_interval()
    assert (row["p"], row["low"], row["high"]) == pytest.approx((found.pvalue, low, high))
    assert [one["arm"] for one in tests] == ["again", "half"]
    assert tests[1]["good"] and tests[1]["value"] == pytest.approx(0.2, abs=0.02)
    said = headline(config, {"rows": rows, "instrument": tests, "left_out": {}})
    assert "new: text lower than base" in said


def test_without_an_effect_nothing_is_claimed_and_a_blind_study_says_so(tmp_path):
    config = ladder(arms=arms_of(ladder())[:3])
    claims = 0
    for seed in range(20):
        world(config, tmp_path / str(seed), seed=seed)
        rows, _ = found_in(config, tmp_path / str(seed))
        claims += [r["word"] for r in rows if r["arm"] == "new" and r["size"] == "all"] != [
            "no difference shown"
        ]
    # 5 % of 20 studies; four or more have a chance of 1.6 %.
    assert claims < 4
    blind = ladder(arms=[arm | {"tokens": 1.0} for arm in arms_of(ladder())])
    world(blind, tmp_path / "blind", seed=5)
    rows, tests = found_in(blind, tmp_path / "blind")
    said = headline(blind, {"rows": rows, "instrument": tests, "left_out": {}})
    assert "failed its own test: half was not told from base" in said


def test_tokens_for_the_same_loss(tmp_path):
    """0.2 nats a doubling: 0.1 nats are half a doubling, by the formula and out of runs."""
    curve = {x: 3.0 - 0.2 * math.log2(x) for x in (0.5, 1.0, 2.0, 4.0)}
    for factor in (0.6, 1.0, 1.7, 3.9):
        assert multiple(curve, 3.0 - 0.2 * math.log2(factor)) == pytest.approx(factor)
    assert multiple(curve, 2.5) == math.inf and multiple(curve, 3.3) == 0.0
    config = ladder()
    world(config, tmp_path, effect=-0.1)
    rows = token_rows(Results(config, tmp_path), {"a": 10**6, "b": 4 * 10**6})
    for row in rows[:2]:
        assert row["low"] < 2**0.5 < row["high"] and row["value"] == pytest.approx(2**0.5, rel=0.1)
    assert rows[2]["size"] == "trend" and rows[2]["low"] < 0.0 < rows[2]["high"]


def test_the_best_value_is_taken_by_all_that_are_like_it(tmp_path):
    config = ladder()
    with pytest.raises(UserError, match="left a figure"):
        chosen(config, tmp_path, "a", config.base_arm)
    plant(trial_of(tmp_path, "a", "base", 1e-3), {KEY: math.nan})
    plant(trial_of(tmp_path, "a", "base", 2e-3), {KEY: 4.0})
    base, new, again, _ = config.arms
    assert chosen(config, tmp_path, "a", base) == chosen(config, tmp_path, "a", again) == {"optim.lr": 2e-3}
    assert chosen(config, tmp_path, "a", new) == {}
    made = {stage.name: stage for stage in stages(config, tmp_path)}
    assert "--optim.lr=0.002" in made["runs/a/half/x0.5-s0"].command()
    assert made["runs/a/half/x0.5-s0"].after == ("tuning/a/base/0.001", "tuning/a/base/0.002")
    assert "--stages.joint.steps=50" in made["runs/a/half/x0.5-s0"].command()


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_studies_are_whole(name):
    """Seeds for an interval, five values for every tuned arm, arms that test the study both ways."""
    config = read_study(name, {})
    assert config.seeds >= 3 and all(len(arm.values) >= 5 for arm in config.arms if arm.tune)
    expected = {arm.expect for arm in config.arms}
    assert expected & {"worse", "better"} and expected & {"same", "nothing"} and "" in expected


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
        (
            {"arms": [{"name": "a", "about": ""}, {"name": "b", "about": "", "against": ["a|c"]}]},
            "against 'c'",
        ),
        ({"arms": [{"name": "a", "about": "", "start": "b"}, {"name": "b", "about": ""}]}, "start 'b'"),
        ({"metrics": {"x": {"key": "y", "source": "z"}}}, "source 'z'"),
        ({"within": {"trained": "text", "asked": "tex"}}, "metric 'tex'"),
    ],
)
def test_mistakes_are_told_before_the_first_run(change, said):
    with pytest.raises(ValueError, match=said):
        ladder(**change)


def test_figures_are_read_as_their_metric_says(tmp_path):
    evals = [{"a/b.c": {"accuracy": value}} for value in (0.1, 0.4, 0.3)]
    # Tokens are those of an update in RL, so nothing is drawn over them.
    plant(
        tmp_path,
        *evals,
        train=[{"loss": x, "tokens": 600 - x, "max_logit": {"0": [x, 9 - x]}} for x in range(8)],
    )
    run, key = Run(tmp_path), "a/b.c.accuracy"
    told = {of: run.value(Metric(key=key, of=of)) for of in ("last", "first", "gain", "mean", "largest")}
    assert told == pytest.approx({"last": 0.3, "first": 0.1, "gain": 0.2, "mean": 0.8 / 3, "largest": 0.4})
    until = lambda level: run.value(Metric(key=key, of="until", level=level))
    assert (until(0.35), until(0.9)) == (2.0, 3.0), "never: all of the run"
    assert run.curve(Metric(key=key)) == [(1.0, 0.1), (2.0, 0.4), (3.0, 0.3)]
    assert run.value(Metric(key="loss", source="train")) == 6.5, "the mean of the last quarter"
    assert run.value(Metric(key="max_logit", source="train", of="largest")) == 9.0
    both = Metric(key=[key, key], minus="a/b.c.accuracy", of="largest")
    assert run.value(both) == 0.0, "every figure less another of the same moment"
    assert math.isnan(run.value(Metric(key="other"))) and math.isnan(figure({"a": {"b": "text"}}, "a.b"))


# ---- arms that begin with one another, groups of problems


def chained(**changes) -> StudyConfig:
    """One start, RL from it, its blind twin, and RL after that RL."""
    rl = lambda name, **more: {"name": name, "about": name, "program": "rl", "start": "start"} | more
    given = {
        "title": "t",
        "claim": "c",
        "recipes": ["rule"],
        "steps": 3,
        "seeds": 4,
        "cluster": "category",
        "base": {"rl": {"tasks": [{"name": "rule"}]}},
        "metrics": {
            "words": {"key": "rule/1/twin.accuracy", "of": "gain", "better": "higher"},
            "pictures": {
                "key": "rule/1/picture.accuracy",
                "of": "gain",
                "better": "higher",
                "claimed": False,
            },
        },
        "within": {"trained": "pictures", "asked": "words"},
        "gates": [{"key": "rule/1/twin.accuracy", "most": 0.3}],
        "starts": [{"name": "start", "about": "s"}],
        "arms": [
            rl("vision", against=["blind|other"]),
            rl("blind", expect="worse", config={"tasks": [{"name": "rule", "options": {"blind": True}}]}),
            rl("other"),
            rl("unshared", expect="nothing"),
            rl("after", start="vision"),
        ],
    }
    return StudyConfig.model_validate(given | changes)


def answers(folder, update, label, solved):
    """An evaluation's file: category -> whether its two problems are solved."""
    task, level, form = label.split("/")
    about = lambda i, group: (task, form, f"{task}/test/{level}/{i}", group, "", "x")
    return [
        Measured(*about(2 * i + j, group), "x", float(ok), ok, 0.5, 0.5, 0.5, label=label)
        for i, (group, ok) in enumerate(solved.items())
        for j in range(2)
    ]


def facts_world(config, out, learned, seed=0, known=()):
    """Every start knows nothing of 30 facts but those of `known` seeds; arm -> (facts learned as pictures, of
    them those right in words)."""
    rng = np.random.default_rng(seed)
    groups = [f"fact {i}" for i in range(30)]
    for s in range(config.seeds):
        plant(run_of(out, "one", "start", 1.0, s))
        for arm in config.arms:
            seen, said = learned.get(arm.name, (0, 0))
            picked = rng.choice(30, seen, replace=False)
            right = {"picture": set(picked.tolist()), "twin": set(picked[:said].tolist())}
            folder = run_of(out, "one", arm.name, 1.0, s)
            before = {"picture": set(), "twin": set(range(12)) if s in known else set()}
            evals = []
            for update, state in ((0, before), (3, right)):
                every = {f: {g: i in state[f] for i, g in enumerate(groups)} for f in state}
                made = [one for f in state for one in answers(folder, update, f"rule/1/{f}", every[f])]
                write_measured(folder / "eval" / f"update-{update:06d}.jsonl", made)
                means = {f: fmean(every[f].values()) for f in state}
                evals.append({f"rule/1/{f}": {"accuracy": mean} for f, mean in means.items()})
            plant(folder, *evals)


LEARNED = {"vision": (20, 12), "blind": (2, 0), "other": (6, 2), "after": (20, 15)}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_transfer_that_is_planted_is_found_with_its_facts(tmp_path, seed):
    config = chained()
    facts_world(config, tmp_path, LEARNED, seed)
    rows, tests = found_in(config, tmp_path)
    (row,) = [r for r in rows if r["arm"] == "vision" and r["metric"] == "words"]
    assert row["against"] == "blind|other" and row["value"] == pytest.approx(10 / 30)
    assert row["word"] == "higher" and row["df"] > 3, "facts are a sample, too"
    assert {one["arm"]: one["good"] for one in tests} == {"blind": True, "unshared": True}
    (split,) = [r for r in within_rows(Results(config, tmp_path)) if r["arm"] == "vision"]
    assert (split["items"], split["others"], split["learned"]) == (80, 40, pytest.approx(0.6))
    assert split["not_learned"] == 0.0 and split["ratio"]["value"] == pytest.approx(0.6)
    # Where the unshared arm gains, the study says that it failed.
    facts_world(config, tmp_path / "bad", LEARNED | {"unshared": (20, 12)}, seed)
    rows, tests = found_in(config, tmp_path / "bad")
    said = headline(config, {"rows": rows, "instrument": tests, "left_out": {}})
    assert "failed its own test: unshared is better than nothing" in said


def test_seeds_whose_start_fails_a_gate_are_left_out_and_named(tmp_path):
    config = chained()
    facts_world(config, tmp_path, LEARNED, known=(2,))
    results = Results(config, tmp_path)
    assert results.left_out == {2: "rule/1/twin.accuracy of its start is 0.400"}
    assert {len(row["per_seed"]) for row in differences(results)} == {3}
    write_findings(config, tmp_path)
    told = json.loads((tmp_path / "study.json").read_text())
    assert "Seed 2 is left out" in told["headline"]
    page = checked(tmp_path / "report.html")
    assert "blind|other" in page and "What was learned, and what was not" in page


def test_arms_begin_with_the_model_of_their_seed_and_further_commands_follow(tmp_path):
    measure = {"name": "more", "arms": ["vision"], "words": ["study", "mechanism", "{start}", "{model}"]}
    config = chained(measures=[measure])
    write_plan(config, tmp_path)
    made = {stage.name: stage for stage in stages(config, tmp_path)}
    after = made["runs/one/after/x1-s2"]
    assert after.after == ("runs/one/vision/x1-s2",)
    words = after.command()
    assert words[words.index("--init-from") + 1] == str(tmp_path / "runs/one/vision/x1-s2/model")
    assert "--train.updates=3" in words and str(tmp_path / "runs/one/after/x1-s2/arm.toml") in words
    assert "blind = true" in (tmp_path / "runs/one/blind/x1-s0/arm.toml").read_text()
    further = made["runs/one/vision/x1-s1/more"]
    assert further.after == ("runs/one/vision/x1-s1",)
    assert further.command()[-2:] == tuple(
        str(tmp_path / "runs/one" / run / "x1-s1/model") for run in ("start", "vision")
    )
    with pytest.raises(UserError, match="other gates"):
        write_plan(chained(measures=[measure], gates=[]), tmp_path)
    write_plan(chained(measures=[measure], seeds=9), tmp_path)


@pytest.mark.parametrize("value", [0.5, True, "a b", [], [1, 2.5], [{"at": 0.5, "b": {"c d": ["x"]}}]])
def test_values_reach_the_command_line_as_they_are(value):
    """By the parser that reads them there."""
    assert parse_literal(literal(value)) == value


def test_the_ratio_of_two_gains_has_the_jackknife_of_its_pairs():
    """Against the delta method, which it is to the first order, and coverage in 400 worlds."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        x = rng.normal(0.6, 0.1, 6)
        y = 0.5 * x + rng.normal(0, 0.05, 6)
        found = ratio(x.tolist(), y.tolist())
        hits += found.low <= 0.5 <= found.high
        by_delta = np.std(y - found.value * x, ddof=1) / x.mean() / 6**0.5
        assert found.se == pytest.approx(by_delta, rel=0.35)
    assert 370 <= hits <= 395


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
[metrics.text]
key = "heldout/text"
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
