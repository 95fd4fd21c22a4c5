"""Questions of one's own as a benchmark: the controls are blind, own checks decide, categories have errors,
and processes that share the questions get what one gets."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from eval_cases import ask_all
from PIL import Image

from earlyfusion.data.sample import Image as Picture
from earlyfusion.eval.benchmarks.base import build_task
from earlyfusion.eval.blind import instead, replaced
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import Generation, TaskOptions, prompt_text

COLOURS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}


@pytest.fixture
def file(tmp_path):
    rows = []
    for i in range(30):
        colour = [*COLOURS][i % 3]
        Image.new("RGB", (20 + i, 10), colour).save(tmp_path / f"{i}.png")
        row = {"question": "what color?", "image": f"{i}.png", "answer": colour, "category": f"c{i % 2}"}
        rows.append(json.dumps(row))
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    return tmp_path / "mine.jsonl"


def colour_of(prompt):
    """What an honest eye says."""
    (picture,) = [part for part in prompt if isinstance(part, Picture)]
    pixel = picture.open().getpixel((3, 3))
    return next((name for name, rgb in COLOURS.items() if rgb == pixel), "grey")


def test_only_a_model_that_sees_scores_and_only_with_the_right_picture(file):
    task = build_task("file", TaskOptions(data=file))
    _, seen = ask_all(task, lambda q, r: colour_of(r.prompt), 30)
    assert (seen["score"], seen["blind_score"], seen["swapped_score"]) == (1.0, 0.0, 0.0)
    assert seen["seeing"] == 1.0 and set(seen["by_category"]) == {"c0", "c1"}
    _, constant = ask_all(task, lambda q, r: "red", 30)
    assert constant["score"] == constant["blind_score"] == constant["swapped_score"] == 1 / 3
    part = constant["by_category"]["c0"]
    assert part["standard_error"] == pytest.approx(np.std([1.0] * 5 + [0.0] * 10, ddof=1) / 15**0.5)
    for question in task.questions(4):
        shown, grey, swapped = (request.prompt for request in task.requests(question, 0))
        sizes = [one[0].open().size for one in (shown, grey)]
        assert sizes[0] == sizes[1] and set(grey[0].open().getdata()) == {(128, 128, 128)}
        assert prompt_text(shown) == prompt_text(grey) == prompt_text(swapped)
        assert swapped[0].open().size != shown[0].open().size


def test_questions_in_words_have_no_views_and_rows_name_their_check(tmp_path):
    rows = [{"question": f"{i} + 1?", "answer": i + 1, "check": "number"} for i in range(6)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = build_task("file", TaskOptions(data=tmp_path / "sums.jsonl"))
    assert task.needs == frozenset() and task.views == ()
    _, found = ask_all(task, lambda q, r: f"it is {q.target}", 6)
    assert found["score"] == 1.0 and "blind_score" not in found
    (question,) = task.questions(1)
    cut = task.score(question, 0, [Generation("1", 1, "length")])
    assert cut["score"] == 0.0, "the beginning of an answer is none"


def test_checks_that_hang_cost_their_answer_alone(tmp_path, monkeypatch):
    (tmp_path / "slow_check.py").write_text(
        "def slow(problem, response):\n"
        "    while response == 'hang':\n        pass\n"
        "    return float(response == problem.target)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("earlyfusion.eval.benchmarks.file.DEADLINE_S", 1.0)
    rows = [{"question": "say", "answer": f"a{i}", "check": "slow_check:slow"} for i in range(3)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = build_task("file", TaskOptions(data=tmp_path / "own.jsonl"))
    try:
        said = {"a0": "a0", "a1": "hang", "a2": "a2"}
        records, _ = ask_all(task, lambda q, r: said[q.target], 3)
        assert [record["score"] for record in records] == [1.0, 0.0, 1.0]
        assert records[1]["error"].startswith("timeout") and "error" not in records[2]
    finally:
        task.rewards.close()


class Eye:
    """A model that sees colours, but takes green for blue."""

    name, capabilities, max_length = "eye", frozenset({"text", "image", "generate"}), None

    def identity(self):
        return {}

    def generate(self, requests):
        said = [colour_of(request.prompt).replace("green", "blue") for request in requests]
        return [Generation(text, 1, "stop") for text in said]


def test_processes_that_share_the_questions_get_what_one_gets(file):
    task = build_task("file", TaskOptions(data=file))
    alone = run_task(Eye(), task)["metrics"]
    parts, met = {}, threading.Barrier(3, timeout=30)

    def ask(rank):
        def gather(own):
            parts[rank] = dict(own)
            met.wait()
            return list(parts.values())

        return run_task(Eye(), build_task("file", TaskOptions(data=file)), share=(rank, 3), gather=gather)

    with ThreadPoolExecutor(3) as pool:
        found = [one["metrics"] for one in pool.map(ask, range(3))]
    assert [len(part) for part in parts.values()] == [10, 10, 10] and found == [alone] * 3
    assert alone["score"] == pytest.approx(2 / 3)


def test_what_is_shown_instead_keeps_places_and_sizes():
    red, blue, green = (
        Picture(Image.new("RGB", (n, 4), c)) for n, c in ((3, "red"), (5, "blue"), (7, "green"))
    )
    prompts = [[red, "a", blue], ["words"], [green]]
    grey = instead(prompts, "grey")
    assert [[one.open().size for one in media] for media in grey] == [[(3, 4), (5, 4)], [], [(7, 4)]]
    assert instead(prompts, "swapped") == [[green], (), [red, blue]]
    assert instead(prompts, "none") == [(), (), ()] and instead(prompts, "true") == [None] * 3
    assert replaced(prompts[0], [green]) == [green, "a"]
    assert replaced(prompts[2], [red, blue]) == [red, blue]
    assert replaced(prompts[0], None) == prompts[0] and replaced(prompts[0], ()) == ["a"]
