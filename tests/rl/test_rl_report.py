"""The report of a reinforcement learning run: complete, self-contained, escaped, and right in its numbers."""

import base64
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from page_cases import checked
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))

from synthetic_run import ENTRIES, group, measure, metrics, rollouts, shown, synthetic_run

from earlyfusion.data.tasks.registry import PROCEDURAL, make_task
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.report.data import data_uri, read_run
from earlyfusion.rl.report.gallery import FOLDED, flips, gallery, later_half, sorts
from earlyfusion.rl.report.measured import change, changes, label_of, pairs_by_label, read_measured, redraw
from earlyfusion.rl.report.run import phase_seconds, rl_page, task_options, write_rl_report
from earlyfusion.rl.rollouts.log import RolloutLog, read_rollouts

EXACT = 1e-12  # the same formula in float64, added up in another order


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run) -> str:
    return checked(write_rl_report(run))


def record(key: str, score: float, **changes) -> dict:
    made = {
        "task": key.split("/")[0],
        "form": "picture",
        "key": key,
        "prompt": "",
        "target": "1",
        "answer": "1",
    }
    return (
        made
        | {"score": score, "solved": score >= 0.5, "p_target": score, "entropy": 0.1, "sampled": []}
        | changes
    )


def test_the_page_holds_every_part_loads_nothing_and_escapes_everything(page):
    for label in ("counting/0/picture", "relation/1/twin", "ocr/0/rendered", "grounding/0/picture"):
        assert page.count(label) >= 3  # a curve, a line of the table, a part of the gallery
    assert "rollout 53.3 % (2m40s)" in page  # 0.8 of 1.5 seconds, 200 times
    assert "reward calls that failed: timeout 4" in page and "prompts left out: too_long 3" in page
    assert "learning rate 0.0005" in page and "could not be drawn" not in page
    assert "&lt;b&gt;" in page and "&lt;i&gt;no&lt;/i&gt;" in page and "skills &lt;1&gt;" in page
    assert page.count("data:image/png;base64,") > 10


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "eval", "rollouts", "rollouts.jsonl", "recipe.toml", "facts.json"]
)
def test_each_part_may_be_missing(tmp_path, name):
    out = synthetic_run(tmp_path / "run", 20, ENTRIES[:2])
    for broken in ("recipe.toml", "facts.json"):
        (out / broken).write_text("{broken")
    (out / name).rename(tmp_path / "elsewhere")
    assert "could not be drawn" not in checked(write_rl_report(out))


def test_an_empty_folder_gives_a_page_and_no_folder_an_error(tmp_path):
    assert "<section>" not in write_rl_report(tmp_path).read_text()
    with pytest.raises(FileNotFoundError):
        write_rl_report(tmp_path / "nowhere")


def test_a_run_of_one_update_and_one_measurement_can_be_reported(tmp_path):
    metrics(tmp_path, 1, ENTRIES[:1])
    rollouts(tmp_path, (1,), ENTRIES[:1])
    measure(tmp_path, 0, 0.5, ENTRIES[:1], 1)
    assert "nothing to compare with yet" in checked(write_rl_report(tmp_path))
    measure(tmp_path, 1, 0.5, ENTRIES[:1], 1)
    assert len(rl_page(tmp_path)["changes"]) == 1 and "Before and after" in checked(write_rl_report(tmp_path))


def test_two_forms_of_one_problem_count_as_one():
    rng = np.random.default_rng(3)
    before, after = rng.random(20), rng.random(20)
    one = [
        (record(f"ocr/test/0/{i}", a), record(f"ocr/test/0/{i}", b))
        for i, (a, b) in enumerate(zip(before, after))
    ]
    twice = [(a | {"form": form}, b | {"form": form}) for a, b in one for form in ("picture", "twin")]
    single, both = change("x", one)["delta"], change("x", twice)["delta"]
    assert both.n == 40 and (both.low, both.high) == pytest.approx((single.low, single.high), rel=1e-9)


def test_gain_stands_only_where_the_interval_excludes_0():
    noise = [(record(f"ocr/test/0/{i}", i % 2), record(f"ocr/test/0/{i}", (i + 1) % 2)) for i in range(20)]
    gain = [(record(f"ocr/test/0/{i}", 0), record(f"ocr/test/0/{i}", float(i < 15))) for i in range(20)]
    assert change("x", noise)["verdict"] == "not shown" and change("x", gain)["verdict"] == "gain"
    assert change("x", [(after, before) for before, after in gain])["verdict"] == "loss"
    alike = [(record(f"ocr/test/0/{i}", 0), record(f"ocr/test/0/{i}", 1)) for i in range(20)]
    assert change("x", alike)["verdict"] == "not shown"  # an interval of no width claims nothing
    assert change("x", alike[:1])["verdict"] == "not shown" and math.isnan(
        change("x", alike[:1])["delta"].low
    )


def test_a_policy_that_takes_the_reward_by_not_ending_its_answers_is_seen():
    keys = [f"ocr/test/0/{i}" for i in range(4)]
    before = [record(key, 1, ended=True, solved_4x=i < 3) for i, key in enumerate(keys)]
    after = [record(key, 1, ended=i < 1, solved_4x=i < 1) for i, key in enumerate(keys)]
    (row,) = changes(pairs_by_label({0: before, 9: after}))
    assert row["ended"] == (1.0, 0.25) and row["solved_4x"] == (0.75, 0.25)


def test_only_problems_measured_both_times_are_compared():
    first = [record(f"ocr/test/0/{i}", 0) for i in range(5)] + [record("maze/test/0/1", 1)]
    last = [record(f"ocr/test/0/{i}", 1) for i in range(3, 9)] + [record("maze/test/1/1", 1)]
    (row,) = changes(pairs_by_label({0: first, 1: last}))
    assert row["label"] == "ocr/0/picture" and row["delta"].n == 2


def test_torn_and_foreign_measurements_are_left_out(tmp_path):
    measure(tmp_path, 100, 0.5, ENTRIES[:1], 3)
    measure(tmp_path, 20, 0.5, ENTRIES[:1], 3)
    path = tmp_path / "eval" / "update-000100.jsonl"
    path.write_text(path.read_text()[:-30])
    (tmp_path / "eval" / "easy_vqa_0000100.json").write_text("{}")
    (tmp_path / "eval" / "update-000200.jsonl").write_text("torn")
    measured = read_measured(tmp_path)
    assert list(measured) == [20, 100] and [len(records) for records in measured.values()] == [3, 2]


@pytest.mark.parametrize("name", PROCEDURAL)
def test_a_measured_picture_is_drawn_again_from_its_key(name):
    for seed, difficulty in ((0, 0), (5, make_task(name).knobs(0))):
        problem = make_task(name).sample(seed, "test", difficulty)
        for form in ("picture", "twin", "rendered"):
            again = redraw({"key": problem.key, "form": form, "target": problem.target})
            wanted = shown(problem, form)
            assert (again is None) == (wanted is None)
            assert again is None or again.tobytes() == wanted.tobytes()


def test_a_problem_that_is_no_longer_the_same_is_not_drawn():
    problem = make_task("counting").sample(0, "test", 0)
    good = {"key": problem.key, "form": "picture", "target": problem.target}
    assert redraw(good) is not None
    for change_ in (
        {"target": "99"},
        {"key": "counting/test/0"},
        {"key": "nothing/test/0/1"},
        {"key": "ocr/test/9/1"},
    ):
        assert redraw(good | change_) is None
    assert (
        redraw({"key": "text_math/test/0/1", "form": "rendered", "target": ""}, {"text_math": {"path": "no"}})
        is None
    )


def test_word_problems_are_drawn_with_the_options_of_the_recipe(tmp_path):
    rows = [{"question": f"what is {i} + 1 ?", "answer": str(i + 1)} for i in range(30)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = f'[[tasks]]\nname = "text_math"\noptions = {{ path = "{tmp_path / "sums.jsonl"}" }}\n'
    options = task_options(recipe)
    problem = make_task("text_math", **options["text_math"]).sample(4, "test", 0)
    again = redraw({"key": problem.key, "form": "rendered", "target": problem.target}, options)
    assert again is not None and again.tobytes() == shown(problem, "rendered").tobytes()
    assert task_options("not [toml") == {} and task_options('tasks = "odd"\neval = 3') == {}


def test_the_label_is_the_entry_of_the_recipe():
    from earlyfusion.rl.recipe import TaskEntry

    for thought in (False, True):
        entry = TaskEntry(name="maze", difficulty=1, form="twin", thought=thought)
        problem = make_task("maze").sample(3, "test", 1)
        prompt = "".join(segment.text for segment in problem.prompt("twin", thought))
        made = {"task": "maze", "form": "twin", "key": problem.key, "prompt": prompt}
        assert label_of(made) == entry.label == label_of({"task": "x", "key": "odd", "label": entry.label})


def test_best_worst_and_divided_come_from_the_later_half():
    def made(update: int, *scores: float) -> dict:
        return {"update": update, "answers": [{"score": score, "reward": score} for score in scores]}

    early, worst, best = made(1, 0, 0), made(3, 0, 0), made(4, 1, 1)
    divided, tame = made(4, 0, 1), made(3, 0.5, 0.6)
    groups = [early, worst, best, divided, tame]
    assert later_half(groups) == [worst, best, divided, tame]
    assert sorts(groups, 1) == {"Best": [best], "Worst": [worst], "Most divided": [divided]}
    assert sorts([early], 2) == {"Best": [], "Worst": [early], "Most divided": []}


def test_changed_problems_are_told_apart_and_the_clearest_come_first():
    def pair(number: int, before: float, after: float, chance: float) -> tuple[dict, dict]:
        key = f"ocr/test/0/{number}"
        return record(key, before, p_target=0.1), record(key, after, p_target=chance)

    faint, clear, lost, still, kept = (
        pair(0, 0, 1, 0.5),
        pair(1, 0, 1, 0.9),
        pair(2, 1, 0, 0),
        pair(3, 0, 0, 0),
        pair(4, 1, 1, 1),
    )
    found = flips([faint, clear, lost, still, kept])
    assert list(found.values()) == [[clear, faint], [lost], [still]]


def test_the_gallery_shows_the_pictures_that_were_asked_about(run):
    page = write_rl_report(run, each=1).read_text()
    pictures = set(re.findall(r'src="(data:image/png[^"]*)"', page))
    logged = {(run / r["image"]).read_bytes() for r in read_rollouts(run) if r["image"]}
    measured = {data_uri(picture) for r in read_measured(run)[0] if (picture := redraw(r)) is not None}
    decoded = {base64.b64decode(uri.split(",")[1]) for uri in pictures - measured}
    assert pictures & measured and decoded and decoded <= logged


def test_a_problem_asked_again_is_shown_earlier_and_later(tmp_path):
    problem = make_task("counting").sample(3, "train", 0)
    log = RolloutLog(tmp_path, start_update=0)
    log.write(
        [group(1, problem, "picture", ["no", "no"]), group(9, problem, "picture", [problem.target] * 2)]
    )
    (kind,) = gallery(read_rollouts(tmp_path), {}, lambda record: None, 3)
    changed = kind["cards"]["Most changed in training: the same problem, earlier and later"]
    assert [card["tag"] for card in changed] == ["update 1 · mean 0.00", "update 9 · mean 1.00"]


def test_pictures_outside_the_folder_are_not_read(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    rollouts(out, (1,), ENTRIES[:1])
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    lines = [json.dumps(r | {"image": "../secret.png", "key": "gone"}) for r in read_rollouts(out)]
    (out / "rollouts.jsonl").write_text("\n".join(lines))
    assert "<img" not in write_rl_report(out).read_text()


def test_a_picture_that_is_missing_is_drawn_again(tmp_path):
    rollouts(tmp_path, (1,), ENTRIES[:1])
    for path in (tmp_path / "rollouts").iterdir():
        path.unlink()
    uris = set(re.findall(r'src="(data:image/png[^"]*)"', write_rl_report(tmp_path).read_text()))
    assert uris == {data_uri(make_task("counting").sample(10 + i, "train", 0).picture) for i in range(3)}


def test_odd_answers_do_not_break_the_page(tmp_path):
    problem = make_task("counting").sample(3, "train", 0)
    made = group(
        1, problem, "twin", ["half \ud83d", "\x00\x07</div><script>alert(1)</script>", "   ", "x" * 5000]
    )
    RolloutLog(tmp_path, start_update=0).write([made])
    bare = made["answers"][0] | {"score": None, "reward": None, "advantage": None, "status": "timeout"}
    with open(tmp_path / "rollouts.jsonl", "a") as file:
        file.write(
            json.dumps({"update": 3, "key": 7, "answers": [bare, 3]})
            + "\n"
            + json.dumps({"update": 3})
            + "\n"
        )
    page = checked(write_rl_report(tmp_path))
    assert "&lt;script&gt;" in page and "␀␇" in page and "(nothing)" in page and "timeout" in page


def test_long_answers_show_their_last_line_and_open_to_the_whole(tmp_path):
    problem = make_task("counting").sample(3, "train", 0)
    program = "(python) " + "\n".join(f"a{i} = {i} < 3" for i in range(40)) + "\nso there are\n17"
    RolloutLog(tmp_path, start_update=0).write([group(1, problem, "picture", [program, "y" * 5000, "5"])])
    (kind,) = gallery(read_rollouts(tmp_path), {}, lambda record: None, 3)
    (card,) = kind["cards"]["Worst"]
    found = {answer["brief"]: answer["whole"] for answer in card["answers"]}
    assert found == {"17": program, "5": "", f"…{'y' * FOLDED}": "y" * 5000}
    assert f"<pre>{'y' * 5000}</pre>" in write_rl_report(tmp_path).read_text()


@pytest.mark.parametrize("every", [1, 10])
def test_the_time_split_is_that_of_the_whole_run_however_often_it_was_logged(tmp_path, every):
    metrics(tmp_path, 40, ENTRIES[:1])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(r) for r in lines if r["step"] % every == 0))
    seconds = phase_seconds(read_run(tmp_path)["train"])
    assert seconds == pytest.approx({"rollout": 32.0, "score": 2.0, "train": 24.0, "other": 2.0})


def test_many_kinds_of_prompts_get_a_chart_for_each_task(tmp_path):
    entries = [(name, level, "picture") for name in ("counting", "ocr", "maze") for level in (0, 1, 2)]
    metrics(tmp_path, 30, entries)
    for update in (0, 15, 30):
        measure(tmp_path, update, 0.5, entries, 2)
    page = rl_page(tmp_path)
    assert list(page["rewards"]) == [": counting", ": ocr", ": maze", ": all"]
    assert list(page["score_curves"]) == [": counting", ": ocr", ": maze"]


def test_the_verb_makes_the_report_and_refuses_other_folders(run, tmp_path, capsys):
    assert cli.main(["rollouts", str(run), "--each", "1"]) == 0
    said = capsys.readouterr().out
    assert "36 groups of 4 kinds" in said and "[0, 100, 200]" in said and str(run / "report.html") in said
    assert [cli.main(["rollouts", str(folder)]) for folder in (tmp_path / "nowhere", tmp_path)] == [2, 2]
    assert cli.main(["rollouts", str(run), "--each", "0"]) == 2
    assert capsys.readouterr().err.count("neither metrics.jsonl") == 2 and not list(tmp_path.iterdir())


def test_the_report_of_a_folder_is_always_the_same(run, page):
    assert write_rl_report(run).read_text() == page
