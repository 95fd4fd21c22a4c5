"""earlyfusion compare as a user runs it, on evaluation folders with a known truth."""

import json
import math

import numpy as np
import pytest
from page_cases import checked

from earlyfusion.eval.compare import CompareError, compare_arms, load_arm
from earlyfusion.eval.stats import mean_estimate
from earlyfusion.pipeline import cli

CATEGORIES = ("math", "law", "physics")
RNG = np.random.default_rng


def write_run(folder, scores, task="mmlu_pro", *, data="d" * 64, prompt="p{}", chance=None, **columns):
    """One task folder as the evaluator leaves it; scores [n] or [n, repeats]; columns: name -> list."""
    place = folder / task
    place.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, row in enumerate(np.asarray(scores, dtype=float).reshape(len(scores), -1)):
        for repeat, score in enumerate(row):
            record = {"id": str(i), "repeat": repeat, "prompt_hash": prompt.format(i), "score": score}
            record |= {"category": CATEGORIES[i % 3], "extracted": "A" if i % 10 else None, "tokens": 7}
            lines.append(json.dumps(record | {name: values[i] for name, values in columns.items()}))
    (place / "records.jsonl").write_text("\n".join(lines) + "\n")
    summary = {"task": task, "data_hash": data, "metrics": {"chance": chance}}
    (place / "summary.json").write_text(json.dumps(summary))
    return str(folder)


@pytest.fixture
def arms(tmp_path):
    """A function that writes runs of the arms base, treated, ... and loads them."""

    def make(*scores, **columns):
        names = ("base", "treated", "control")
        return [load_arm(n, write_run(tmp_path / n, s, **columns)) for n, s in zip(names, scores)]

    return make


def only(arms):
    (entry,) = compare_arms(*arms)["tasks"]
    return entry


@pytest.fixture
def truth():
    """Correlated answers of three models: +6 points for treated over base, +1 for the control."""
    rng = RNG(0)
    base = (rng.random(1200) < rng.random(1200) * 0.8 + 0.05).astype(float)
    return {"base": base, "treated": raised(rng, base, 0.12), "control": raised(rng, base, 0.02)}


def raised(rng, base, share):
    return np.where(rng.random(len(base)) < share, 1.0, base)


@pytest.fixture
def runs(tmp_path, truth):
    return {name: write_run(tmp_path / name, scores) for name, scores in truth.items()}


@pytest.fixture
def call(tmp_path):
    return lambda *words: cli.main(["compare", *words, "--out", str(tmp_path / "out")])


def test_the_whole_way_as_a_user_runs_it(runs, truth, call, tmp_path, capsys):
    assert call(runs["base"], runs["treated"], "--control", runs["control"]) == 0
    printed = capsys.readouterr().out
    page = checked(tmp_path / "out" / "compare.html")
    assert "gain" in printed and "visible from" in page and "physics" in page
    (entry,) = json.loads((tmp_path / "out" / "compare.json").read_text())["tasks"]
    d, delta = truth["treated"] - truth["base"], entry["delta"]
    assert (delta["value"], delta["se"]) == pytest.approx((d.mean(), mean_estimate(d).se))
    beyond = (truth["treated"] - truth["control"]).mean()
    assert entry["difference_in_differences"]["value"] == pytest.approx(beyond)
    assert entry["verdict"] == "gain" and len(entry["categories"]) == 3
    assert (entry["base"]["unextracted"], entry["base"]["tokens"]) == (pytest.approx(0.1), 7)
    assert f"{100 * d.mean():+.2f}" in printed


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": "e" * 64}, "data hashes dddddddddddd and eeeeeeeeeeee"),
        ({"prompt": "q{}"}, "1200 of 1200 prompt hashes differ"),
        ({"short": 100}, "different questions (1200 and 100 answers, 1100 not in both)"),
        ({"task": "piqa"}, "no task is in every run"),
    ],
)
def test_different_data_and_prompts_are_refused(runs, truth, call, tmp_path, capsys, change, message):
    other = write_run(tmp_path / "other", truth["treated"][: change.pop("short", None)], **change)
    assert call(runs["base"], other) == call(runs["base"], runs["treated"], "--control", other) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_missing_and_broken_folders_are_one_line(runs, call, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken" / "mmlu_pro" / "records.jsonl"
    write_run(tmp_path / "broken", [0, 1])
    broken.write_text('{"id": "0", "repeat": 0, "score": 1}\n{"id": "1", "sc\n')
    mistakes = [
        (["nowhere"], "no such folder"),
        ([str(tmp_path / "empty")], "holds no"),
        ([str(tmp_path / "broken")], "records.jsonl:2: not a record"),
        ([runs["treated"], "--metric", "mae"], "no number 'mae'"),
    ]
    for words, message in mistakes:
        assert call(runs["base"], *words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("lacking, message", [({"data": ""}, "different data"), ({"prompt": ""}, "missing")])
def test_runs_without_hashes_are_refused(truth, arms, lacking, message):
    with pytest.raises(CompareError, match=message):
        compare_arms(*arms(truth["base"], truth["treated"], **lacking))


def test_seeds_give_their_own_interval_and_can_refuse_the_gain(truth, tmp_path):
    """Treated seeds that scatter widely: the questions say gain, the seeds do not."""
    rng = RNG(1)
    for seed, up in enumerate((0.02, 0.30, 0.01)):
        write_run(tmp_path / f"vision-{seed}", raised(rng, truth["base"], up))
    base = load_arm("base", write_run(tmp_path / "base", truth["base"]))
    entry = only([base, load_arm("treated", str(tmp_path / "vision-*"))])
    assert entry["delta"]["low"] > 0 and entry["verdict"] == "no difference shown (seeds disagree)"
    means = np.array(entry["treated"]["seeds"]) - truth["base"].mean()
    found = entry["seeds"]["seeds"]
    assert (found["value"], found["se"]) == pytest.approx((means.mean(), means.std(ddof=1) / math.sqrt(3)))


def test_a_gain_the_control_has_too_is_not_ascribed_to_the_treatment(truth, arms):
    rng, base = RNG(4), truth["base"]
    treated, control = (raised(rng, base, 0.15) for _ in range(2))
    entry = only(arms(base, treated, control))
    assert entry["verdict"] == "gain, not told apart from the control's"
    expected = (treated - base).mean() - (control - base).mean()
    assert entry["difference_in_differences"]["value"] == pytest.approx(expected)


def test_repeats_are_averaged(arms):
    rng = RNG(5)
    p = rng.random(400)
    loaded = arms(*(rng.random((400, 8)) < p[:, None] for _ in range(2)))
    # Nothing but sampling differs here.
    expected = math.sqrt(2 * np.mean(p * (1 - p)) / 8 / 400)
    assert only(loaded)["delta"]["se"] == pytest.approx(expected, rel=0.15)
    assert loaded[0].of("mmlu_pro")[0].scores[0] in np.arange(9) / 8


def test_clusters_widen_the_interval(arms):
    scores = np.zeros(600), np.repeat(RNG(6).integers(0, 2, 60), 10).astype(float)
    plain, grouped = only(arms(*scores)), only(arms(*scores, cluster=[str(i // 10) for i in range(600)]))
    assert grouped["delta"]["se"] == pytest.approx(math.sqrt(10) * plain["delta"]["se"], rel=0.02)
    assert grouped["clusters"] == 60


def test_visual_tasks_are_compared_seen_blind_and_in_words(arms):
    """Seeing improves, guessing does not: the line for what seeing adds says so."""
    rng = RNG(7)
    blind = rng.integers(0, 2, 500).astype(float)
    columns = {"blind_score": blind, "words_score": blind, "metrics": [{"mae": i % 3} for i in range(500)]}
    columns["task"] = "counting"
    loaded = arms(raised(rng, blind, 0.1), raised(rng, blind, 0.6), **columns)
    lines = {entry["task"].removeprefix("counting"): entry for entry in compare_arms(*loaded)["tasks"]}
    assert list(lines) == ["", " (blind)", " (words)", " (seeing)"]
    assert lines[""]["verdict"] == lines[" (seeing)"]["verdict"] == "gain"
    assert lines[" (blind)"]["verdict"] == "no difference shown"
    assert lines[" (seeing)"]["delta"]["value"] == pytest.approx(lines[""]["delta"]["value"])
    added = lines[""]["base"]["score"] - blind.mean()
    assert lines[" (seeing)"]["base"]["score"] == pytest.approx(added)
    other = only([load_arm(arm.label, str(arm.folders[0]), "mae") for arm in loaded])
    assert other["task"] == "counting" and other["base"]["score"] == pytest.approx(0.998)


@pytest.mark.parametrize("others, verdict", [(0, "gain"), (9, "no difference shown")])
def test_one_of_many_tasks_is_no_gain_unless_it_survives_holm(arms, others, verdict):
    """A task whose own interval excludes 0: a gain by itself, not among nine others that show nothing."""
    treated = np.repeat([1.0, 0.0], [7, 193])  # sign flip p = 2 / 2^7 = 0.016
    for other in range(others):
        arms(np.zeros(200), np.zeros(200), task=f"other{other}")
    entry = compare_arms(*arms(np.zeros(200), treated))["tasks"][0]
    assert entry["task"] == "mmlu_pro" and entry["verdict"] == verdict
    assert entry["delta"]["low"] > 0 and entry["delta"]["p"] == pytest.approx(2**-6)


def test_both_at_chance_is_said(arms):
    rng = RNG(9)
    entry = only(arms(*(rng.random(600) < 0.11 for _ in range(2)), chance=0.1109))
    assert entry["verdict"] == "no difference shown (both at chance)"


def test_where_no_answer_changed_nothing_is_claimed(arms):
    """Equal answers: no interval of no width, and not "visible from 0"."""
    entry = only(arms(*[[1.0, 0.0] * 30] * 2))
    delta = entry["delta"]
    assert delta["p"] == 1.0 and entry["verdict"] == "no difference shown"
    assert delta["smallest_delta"] > 0.07
