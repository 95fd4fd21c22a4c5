"""The report of a reinforcement learning run: complete, self-contained, escaped, and right in its numbers."""

import base64
import json
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
from earlyfusion.eval.stats import mean_estimate
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.report.page import data_uri
from earlyfusion.rl.report import (
    changes,
    read_measured,
    redraw,
    task_options,
    write_rl_report,
)
from earlyfusion.rl.rollouts.log import RolloutLog, read_rollouts


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("run"))


def test_the_page_holds_every_part_loads_nothing_and_escapes_everything(run):
    page = checked(write_rl_report(run))
    for label in ("counting/0/picture", "relation/1/twin", "ocr/0/rendered"):
        assert page.count(label) >= 3  # a curve, a line of the table, a part of the gallery
    assert "reward calls that failed: timeout 4" in page and "prompts left out: too_long 3" in page
    assert "learning rate 0.0005" in page and "could not be drawn" not in page
    assert '<td class="gain n">' in page and "Changed: wrong → right (" in page
    assert "&lt;b&gt;" in page and "&lt;i&gt;no&lt;/i&gt;" in page and "skills &lt;1&gt;" in page
    assert page == write_rl_report(run).read_text(), "a folder's report is always the same"

    # The pictures are those that were asked about: as logged, or drawn again.
    pictures = set(re.findall(r'src="(data:image/png[^"]*)"', page))
    logged = {(run / r["image"]).read_bytes() for r in read_rollouts(run) if r["image"]}
    again = [redraw(one.key, one.form, one.target, {}) for one in read_measured(run)[0]]
    drawn = set(map(data_uri, filter(None, again)))
    decoded = {base64.b64decode(uri.split(",")[1]) for uri in pictures - drawn}
    assert pictures & drawn and decoded and decoded <= logged


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "eval", "rollouts", "rollouts.jsonl", "recipe.toml", "facts.json", "all"]
)
def test_each_part_may_be_missing(tmp_path, name):
    out = synthetic_run(tmp_path / "run", 20, ENTRIES[:1])
    for broken in ("recipe.toml", "facts.json"):
        (out / broken).write_text("{broken")
    if name == "all":
        (tmp_path / "empty").mkdir()
        assert "<section>" not in write_rl_report(tmp_path / "empty").read_text()
        with pytest.raises(FileNotFoundError):
            write_rl_report(tmp_path / "nowhere")
        return
    (out / name).rename(tmp_path / "elsewhere")
    assert "could not be drawn" not in checked(write_rl_report(out))


@pytest.mark.parametrize("every", [1, 10])
def test_the_time_split_is_that_of_the_whole_run_however_often_it_was_logged(tmp_path, every):
    metrics(tmp_path, 200, ENTRIES[:1], every)
    page = checked(write_rl_report(tmp_path))
    assert "5m00s: rollout 53.3 % (2m40s)" in page  # 0.8 of 1.5 seconds, 200 times


def test_one_measurement_is_shown_and_two_are_compared(tmp_path):
    metrics(tmp_path, 1, ENTRIES[:1])
    rollouts(tmp_path, (1,), ENTRIES[:1])
    measure(tmp_path, 20, 0.5, ENTRIES[:1], 3)
    assert "nothing to compare with yet" in checked(write_rl_report(tmp_path))
    measure(tmp_path, 100, 0.5, ENTRIES[:1], 3)
    for foreign in ("easy_vqa_0000100.json", "update-000200.jsonl", "update-x.jsonl"):
        (tmp_path / "eval" / foreign).write_text("torn")
    measured = read_measured(tmp_path)
    (row,) = changes(measured)
    assert list(measured) == [20, 100] and row["n"] == 3 and len(row["sides"]) == 2
    assert "Before and after" in checked(write_rl_report(tmp_path))


def test_the_row_of_all_kinds_together_is_the_difference_of_all_problems(run):
    measured = read_measured(run)
    *kinds, together = changes(measured)
    keyed = [{(one.label, one.key): one.score for one in measured[update]} for update in (0, 200)]
    wanted = mean_estimate(np.array([keyed[1][key] - score for key, score in keyed[0].items()]))
    assert (together["label"], together["n"]) == ("all", sum(row["n"] for row in kinds)) == ("all", 72)
    found = [together[key] for key in ("value", "se", "low", "high")]
    assert found == pytest.approx([wanted.value, wanted.se, wanted.low, wanted.high])


@pytest.mark.parametrize("name", PROCEDURAL)
def test_a_measured_picture_is_drawn_again_from_its_key(name):
    for seed in (0, 5):
        problem = make_task(name).sample(seed, "test", 0)
        for form in ("picture", "twin", "rendered"):
            again, wanted = redraw(problem.key, form, problem.target, {}), shown(problem, form)
            assert (again is None) == (wanted is None)
            assert again is None or again.tobytes() == wanted.tobytes()
    for key, target in (
        (problem.key, "99?"),
        ("counting/test/0", problem.target),
        ("nothing/test/0/1", problem.target),
        ("ocr/test/9/1", problem.target),
    ):
        assert redraw(key, "rendered", target, {}) is None, "no longer the problem that was asked"


def test_word_problems_are_drawn_with_the_options_of_the_recipe(tmp_path):
    rows = [{"question": f"what is {i} + 1 ?", "answer": str(i + 1)} for i in range(30)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = f'[[tasks]]\nname = "text_math"\noptions = {{ path = "{tmp_path / "sums.jsonl"}" }}\n'
    options = task_options(recipe)
    problem = make_task("text_math", **options["text_math"]).sample(4, "test", 0)
    again = redraw(problem.key, "rendered", problem.target, options)
    assert again is not None and again.tobytes() == shown(problem, "rendered").tobytes()
    assert redraw(problem.key, "rendered", problem.target, {"text_math": {"path": "no"}}) is None
    assert task_options("not [toml") == {} and task_options('tasks = "odd"\neval = 3') == {}


def test_pictures_come_from_the_folder_alone_and_a_missing_one_is_drawn_again(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    rollouts(out, (1,), ENTRIES[:1])
    for path in (out / "rollouts").iterdir():
        path.unlink()
    uris = set(re.findall(r'src="(data:image/png[^"]*)"', write_rl_report(out).read_text()))
    assert uris == {data_uri(make_task("counting").sample(10 + i, "train", 0).picture) for i in range(3)}
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    lines = [json.dumps(r | {"image": "../secret.png", "key": "gone"}) for r in read_rollouts(out)]
    (out / "rollouts.jsonl").write_text("\n".join(lines))
    assert "<img" not in write_rl_report(out).read_text()


def test_odd_answers_do_not_break_the_page_and_long_ones_open_to_the_whole(tmp_path):
    problem = make_task("counting").sample(3, "train", 0)
    program = "(python) " + "\n".join(f"a{i} = {i} < 3" for i in range(40)) + "\nso there are\n17"
    texts = ["half \ud83d", "\x00\x07</div><script>alert(1)</script>", "   ", "y" * 5000, program]
    made = group(1, problem, "twin", texts)
    made["answers"][0] |= {"score": None, "reward": None, "advantage": None, "status": "timeout"}
    RolloutLog(tmp_path, start_update=0).write([made])
    with open(tmp_path / "rollouts.jsonl", "a") as file:
        file.write(json.dumps({"update": 3, "key": 7, "answers": [3]}) + "\n")
    page = checked(write_rl_report(tmp_path))
    assert "&lt;script&gt;" in page and "␀␇" in page and "(nothing)" in page and "timeout" in page
    assert f"<pre>{'y' * 5000}</pre>" in page and f'said">…{"y" * 160}<' in page and 'said">17 ' in page
    assert "could not be drawn" not in page


def test_the_verb_makes_the_report_and_refuses_other_folders(run, tmp_path, capsys):
    assert cli.main(["rollouts", str(run), "--each", "1"]) == 0
    said = capsys.readouterr().out
    assert str(run / "report.html") in said
    assert [cli.main(["rollouts", str(folder)]) for folder in (tmp_path / "nowhere", tmp_path)] == [2, 2]
    assert cli.main(["rollouts", str(run), "--each", "0"]) == 2
    assert capsys.readouterr().err.count("no metrics.jsonl") == 2 and not list(tmp_path.iterdir())
