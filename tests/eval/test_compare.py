"""earlyfusion compare as a user runs it, on evaluation folders with a known truth."""

import json
import math
import re

import numpy as np
import pytest
from page_cases import checked

from earlyfusion.eval.compare.analysis import Options, compare_arms, verdict
from earlyfusion.eval.compare.load import CompareError, load_arm
from earlyfusion.eval.stats import mean_estimate
from earlyfusion.pipeline import cli

CATEGORIES = ("math", "law", "physics")


def write_run(
    folder, scores, *, task="mmlu_pro", data_hash="d" * 64, prompt=lambda i: f"p{i}", repeats=1, **columns
):
    """One task folder as the evaluator leaves it; scores [n] or [n, repeats]; columns: name -> list or
    value."""
    place = folder / task
    place.mkdir(parents=True, exist_ok=True)
    scores = np.asarray(scores, dtype=float).reshape(len(scores), -1)
    lines = []
    for i, row in enumerate(scores):
        for repeat, score in enumerate(row):
            record = {
                "id": str(i),
                "repeat": repeat,
                "prompt_hash": prompt(i),
                "score": score,
                "seed": repeat,
                "category": CATEGORIES[i % 3],
                "extracted": "A" if i % 10 else None,
                "tokens": 7,
            }
            for name, values in columns.items():
                record[name] = values[i] if isinstance(values, list | np.ndarray) else values
            lines.append(json.dumps(record))
    (place / "records.jsonl").write_text("\n".join(lines) + "\n")
    summary = {"task": task, "data_hash": data_hash, "model": {"path": folder.name}}
    (place / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def truth():
    """Correlated answers of three models: +6 points for treated over base, +1 for the control."""
    rng = np.random.default_rng(0)
    ability = rng.random(1200)
    draw = lambda shift: (rng.random(1200) < np.clip(ability * 0.8 + shift, 0, 1)).astype(float)
    flip = lambda base, up: np.where(rng.random(1200) < up, 1.0, base)
    base = draw(0.05)
    return {"base": base, "treated": flip(base, 0.12), "control": flip(base, 0.02)}


@pytest.fixture
def runs(tmp_path, truth):
    return {name: str(write_run(tmp_path / name, scores)) for name, scores in truth.items()}


def call(*words):
    return cli.main(["compare", *words])


def test_the_whole_way_as_a_user_runs_it(runs, truth, tmp_path, capsys):
    out = tmp_path / "delta"
    assert call(runs["base"], runs["treated"], "--control", runs["control"], "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert "mmlu_pro" in printed and "gain" in printed and "McNemar" in printed and "physics" in printed
    result = json.loads((out / "compare.json").read_text())
    (entry,) = result["tasks"]
    d = truth["treated"] - truth["base"]
    assert entry["delta"]["value"] == pytest.approx(d.mean()) and entry["delta"]["se"] == pytest.approx(
        mean_estimate(d).se
    )
    assert entry["delta"]["mcnemar"]["won"] == int((d > 0).sum()) and entry["delta"]["mcnemar"][
        "lost"
    ] == int((d < 0).sum())
    assert entry["difference_in_differences"]["value"] == pytest.approx(
        (truth["treated"] - truth["control"]).mean()
    )
    assert entry["verdict"] == "gain" and len(entry["categories"]) == 3
    assert entry["base"]["unextracted"] == pytest.approx(0.1) and entry["base"]["tokens"] == 7
    assert f"{100 * d.mean():+.2f}" in printed


def test_the_report_stands_alone_and_holds_its_plots(runs, tmp_path):
    out = tmp_path / "delta"
    assert call(runs["base"], runs["treated"], "--out", str(out)) == 0
    page = checked(out / "compare.html")
    labels = re.findall(r'aria-label="([^"]+)"', page)
    assert [label.split(",")[0].split(" of ")[0] for label in labels] == [
        "delta",
        "bootstrap",
        "power",
        "delta by category",
    ]
    assert "K2.5" in page and "No control arm" in page and "cannot" not in page.split("<h2>mmlu_pro")[0]
    assert page.count("<path") > 50 and "could not be drawn" not in page


def test_no_difference_is_not_called_a_gain(tmp_path, capsys):
    rng = np.random.default_rng(3)
    base = rng.integers(0, 2, 198).astype(float)
    treated = np.where(rng.random(198) < 0.1, 1 - base, base)
    treated[np.flatnonzero(treated == 0)[:3]] = 1
    a, b = (write_run(tmp_path / n, s, task="gpqa_diamond") for n, s in (("a", base), ("b", treated)))
    assert call(str(a), str(b), "--out", str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert "no difference shown" in printed and "gain" not in printed
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "this run alone cannot confirm it" in page  # +2.1 is below what 198 questions show
    entry = json.loads((tmp_path / "out" / "compare.json").read_text())["tasks"][0]
    assert 0.03 < entry["delta"]["smallest_delta_mcnemar"] < 0.12


def test_different_data_and_prompts_are_refused(runs, truth, tmp_path, capsys):
    other = write_run(tmp_path / "data", truth["treated"], data_hash="e" * 64)
    assert call(runs["base"], str(other), "--out", str(tmp_path / "x")) == 2
    assert "data hashes dddddddddddd and eeeeeeeeeeee" in capsys.readouterr().err
    other = write_run(tmp_path / "prompts", truth["treated"], prompt=lambda i: "q" if i == 7 else f"p{i}")
    assert call(runs["base"], str(other), "--out", str(tmp_path / "x")) == 2
    assert "1 of 1200 prompt hashes differ" in capsys.readouterr().err
    other = write_run(tmp_path / "short", truth["treated"][:100])
    assert call(runs["base"], str(other), "--out", str(tmp_path / "x")) == 2
    assert "different questions (1200 and 100 answers, 1100 not in both)" in capsys.readouterr().err
    other = write_run(tmp_path / "control", truth["control"], data_hash="f" * 64)
    assert call(runs["base"], runs["treated"], "--control", str(other), "--out", str(tmp_path / "x")) == 2
    other = write_run(tmp_path / "task", truth["treated"], task="piqa")
    assert call(runs["base"], str(other), "--out", str(tmp_path / "x")) == 2
    assert "no task is in every run" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_missing_and_broken_folders_are_one_line(runs, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    for given, message in (("nowhere", "no such folder"), (str(empty), "holds no"), (",", "names no folder")):
        assert call(runs["base"], given) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    broken = write_run(tmp_path / "broken", [0, 1])
    (broken / "mmlu_pro" / "records.jsonl").write_text('{"id": "0", "score": 1}\n{"id": "1", "sc')
    assert call(runs["base"], str(broken)) == 2
    assert "records.jsonl:2: not a record" in capsys.readouterr().err
    (broken / "mmlu_pro" / "summary.json").unlink()
    (broken / "mmlu_pro" / "records.jsonl").write_text('{"id": "0", "score": 1}\n')
    assert call(runs["base"], str(broken)) == 2
    assert "did not finish" in capsys.readouterr().err
    assert call(runs["base"], runs["treated"], "--metric", "mae") == 2
    assert "no number 'mae'" in capsys.readouterr().err
    assert call(runs["base"], runs["treated"], "--control-base", runs["base"]) == 2
    assert call(runs["base"], runs["treated"], "--draws", "3") == 2


def test_runs_without_hashes_are_refused(truth, tmp_path):
    a = write_run(tmp_path / "a", truth["base"], data_hash="")
    b = write_run(tmp_path / "b", truth["treated"], data_hash="")
    with pytest.raises(CompareError, match="different data"):
        compare_arms(load_arm("base", str(a)), load_arm("treated", str(b)))
    a = write_run(tmp_path / "a", truth["base"], prompt=lambda i: None)
    b = write_run(tmp_path / "b", truth["treated"], prompt=lambda i: None)
    with pytest.raises(CompareError, match="missing"):
        compare_arms(load_arm("base", str(a)), load_arm("treated", str(b)))


def test_seeds_give_their_own_interval_and_can_refuse_the_gain(truth, tmp_path):
    """Treated seeds that scatter widely: the questions say gain, the seeds do not."""
    rng = np.random.default_rng(1)
    base = write_run(tmp_path / "base", truth["base"])
    for seed, up in enumerate((0.02, 0.30, 0.01)):
        write_run(tmp_path / f"vision-{seed}", np.where(rng.random(1200) < up, 1.0, truth["base"]))
    result = compare_arms(load_arm("base", str(base)), load_arm("treated", str(tmp_path / "vision-*")))
    entry = result["tasks"][0]
    assert len(result["arms"]["treated"]) == 3 and entry["delta"]["low"] > 0
    assert entry["verdict"] == "no difference shown (seeds disagree)"
    means = np.array(entry["treated"]["seeds"]) - truth["base"].mean()
    assert entry["seeds"]["seeds"]["value"] == pytest.approx(means.mean())
    assert entry["seeds"]["seeds"]["se"] == pytest.approx(means.std(ddof=1) / math.sqrt(3))
    assert entry["delta"]["mcnemar"] is None  # means over seeds are not binary answers


def test_even_seeds_confirm_and_pairing_needs_equal_numbers(truth, tmp_path, capsys):
    rng = np.random.default_rng(2)
    for seed in range(3):
        start = np.where(rng.random(1200) < 0.05, 1 - truth["base"], truth["base"])
        write_run(tmp_path / f"a{seed}", start)
        write_run(tmp_path / f"b{seed}", np.where(rng.random(1200) < 0.2, 1.0, start))
    listed = [",".join(str(tmp_path / f"{arm}{s}") for s in range(3)) for arm in "ab"]
    assert call(*listed, "--paired-seeds", "--out", str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert "3 base and 3 treated seeds" in printed and "gain" in printed
    page = checked(tmp_path / "out" / "compare.html")
    assert "scores of the seeds" in page
    assert call(str(tmp_path / "a0"), listed[1], "--paired-seeds") == 2
    assert "equally many" in capsys.readouterr().err


def test_a_gain_the_control_has_too_is_not_ascribed_to_the_treatment(truth, tmp_path):
    rng = np.random.default_rng(4)
    both = [np.where(rng.random(1200) < 0.15, 1.0, truth["base"]) for _ in range(2)]
    arms = [
        load_arm(n, str(write_run(tmp_path / n, s)))
        for n, s in zip(("base", "treated", "control"), (truth["base"], *both))
    ]
    entry = compare_arms(*arms)["tasks"][0]
    assert entry["verdict"] == "gain, not told apart from the control's"
    own = load_arm("control base", str(write_run(tmp_path / "start", np.zeros(1200))))
    other = compare_arms(*arms, own)["tasks"][0]["difference_in_differences"]["value"]
    assert other == pytest.approx((both[0] - truth["base"]).mean() - both[1].mean())


def test_repeats_are_averaged_and_their_share_of_the_error_is_reported(tmp_path):
    rng = np.random.default_rng(5)
    p = rng.random(400)
    arms = [
        load_arm(n, str(write_run(tmp_path / n, rng.random((400, 8)) < p[:, None])))
        for n in ("base", "treated")
    ]
    delta = compare_arms(*arms)["tasks"][0]["delta"]
    expected = math.sqrt(2 * np.mean(p * (1 - p)) / 8 / 400)
    assert delta["sampling_se"] == pytest.approx(expected, rel=0.1)
    assert delta["se"] == pytest.approx(expected, rel=0.15)  # nothing but sampling differs here
    assert arms[0].of("mmlu_pro")[0].scores[0] in np.arange(9) / 8


def test_clusters_widen_the_interval(tmp_path):
    rng = np.random.default_rng(6)
    shift = np.repeat(rng.integers(0, 2, 60), 10).astype(float)
    scores = np.zeros(600), shift
    plain, grouped = (
        compare_arms(
            *(
                load_arm(n, str(write_run(tmp_path / f"{n}{k}", s, **c)))
                for n, s in zip(("base", "treated"), scores)
            )
        )
        for k, c in enumerate(({}, {"cluster": [str(i // 10) for i in range(600)]}))
    )
    ratio = grouped["tasks"][0]["delta"]["se"] / plain["tasks"][0]["delta"]["se"]
    assert ratio == pytest.approx(math.sqrt(10), rel=0.02) and grouped["tasks"][0]["clusters"] == 60


def test_visual_tasks_are_compared_seen_blind_and_in_words(tmp_path):
    """Seeing improves, guessing does not: the line for what seeing adds says so."""
    rng = np.random.default_rng(7)
    blind = rng.integers(0, 2, 500).astype(float)
    folders = [
        write_run(
            tmp_path / name,
            np.maximum(blind, rng.random(500) < share),
            task="counting",
            blind_score=blind,
            words_score=blind,
            metrics=[{"mae": float(i % 3)} for i in range(500)],
        )
        for name, share in (("base", 0.1), ("treated", 0.6))
    ]
    result = compare_arms(*(load_arm(n, str(f)) for n, f in zip(("base", "treated"), folders)))
    lines = {entry["task"]: entry for entry in result["tasks"]}
    assert list(lines) == ["counting", "counting (blind)", "counting (words)", "counting (seeing)"]
    assert lines["counting"]["verdict"] == lines["counting (seeing)"]["verdict"] == "gain"
    assert lines["counting (blind)"]["verdict"] == "no difference shown"
    assert lines["counting (seeing)"]["delta"]["value"] == pytest.approx(lines["counting"]["delta"]["value"])
    seeing, seen = lines["counting (seeing)"]["base"]["score"], lines["counting"]["base"]["score"]
    assert seeing == pytest.approx(seen - blind.mean())
    other = compare_arms(*(load_arm(n, str(f), "mae") for n, f in zip(("base", "treated"), folders)))
    assert [entry["task"] for entry in other["tasks"]] == ["counting"] and other["tasks"][0]["base"][
        "score"
    ] == pytest.approx(0.998)


def test_holm_guards_many_categories(tmp_path):
    """Twenty categories without any difference: single ones fall below 5 %, after Holm none does (in 19 of 20
    worlds)."""
    rng = np.random.default_rng(8)
    lowest, adjusted = 0, 0
    for world in range(20):
        base, treated = rng.integers(0, 2, (2, 1200)).astype(float)
        names = [f"c{i % 20}" for i in range(1200)]
        arms = [
            load_arm(n, str(write_run(tmp_path / f"{n}{world}", s, category=names)))
            for n, s in (("base", base), ("treated", treated))
        ]
        entry = compare_arms(*arms, options=Options(draws=100, flips=999))["tasks"][0]
        lowest += min(c["p"] for c in entry["categories"]) <= 0.05
        adjusted += min(c["p_holm"] for c in entry["categories"]) <= 0.05
    assert lowest >= 8 and adjusted <= 4  # expected 12.8 and at most 1


def test_one_of_many_tasks_is_no_gain_unless_it_survives_holm(tmp_path):
    """A task whose own interval excludes 0: a gain by itself, not among nine others that show nothing."""
    base = np.zeros(200)
    treated = base.copy()
    treated[:7] = 1  # sign flip p = 2 / 2^7 = 0.016
    for name, scores in (("base", base), ("treated", treated)):
        write_run(tmp_path / "alone" / name, scores)
        write_run(tmp_path / "many" / name, scores)
        for other in range(9):
            write_run(tmp_path / "many" / name, base, task=f"other{other}")
    verdicts = {}
    for kind in ("alone", "many"):
        arms = [load_arm(name, str(tmp_path / kind / name)) for name in ("base", "treated")]
        entry = next(e for e in compare_arms(*arms)["tasks"] if e["task"] == "mmlu_pro")
        assert entry["delta"]["low"] > 0 and entry["delta"]["p"] == pytest.approx(2**-6)
        verdicts[kind] = entry["verdict"]
    assert verdicts == {"alone": "gain", "many": "no difference shown"}


def test_both_at_chance_is_said(truth, tmp_path):
    rng = np.random.default_rng(9)
    arms = []
    for name in ("base", "treated"):
        folder = write_run(tmp_path / name, rng.random(600) < 0.11)
        path = folder / "mmlu_pro" / "summary.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "metrics": {"chance": 0.1109, "majority": 0.1168}})
        )
        arms.append(load_arm(name, str(folder)))
    entry = compare_arms(*arms)["tasks"][0]
    assert entry["verdict"] == verdict(entry) == "no difference shown (both at chance)"


def test_where_no_answer_changed_nothing_is_claimed(tmp_path, capsys):
    """Equal answers: no interval of no width, and not "visible from 0": the rule of three bounds the
    discordance."""
    same = [1.0, 0.0] * 30
    a, b = (str(write_run(tmp_path / name, same)) for name in "ab")
    assert call(a, b, "--out", str(tmp_path / "o")) == 0
    entry = json.loads((tmp_path / "o" / "compare.json").read_text())["tasks"][0]
    assert entry["delta"]["p"] == 1.0 and entry["verdict"] == "no difference shown"
    assert entry["delta"]["smallest_delta"] == pytest.approx(math.sqrt(7.849 * 0.05 / (60 + 7.849)), rel=1e-3)
    assert entry["categories"][0]["smallest_delta"] > entry["delta"]["smallest_delta"]
    printed = capsys.readouterr().out
    assert "none changed" in printed and "+0.00, +0.00" not in printed.split("bootstrap")[0]


def test_a_resumed_file_counts_a_question_once(truth, tmp_path, runs):
    path = tmp_path / "treated" / "mmlu_pro" / "records.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, *lines[:50]]) + "\n")
    entry = compare_arms(load_arm("base", runs["base"]), load_arm("treated", runs["treated"]))["tasks"][0]
    assert entry["n"] == 1200 and entry["treated"]["score"] == pytest.approx(truth["treated"].mean())
