"""Questions of one's own from a file: what a row may say, what answers earn, what is held out, and what is
told of a bad row."""

import json
import pickle
from collections import Counter

import pytest
from PIL import Image

from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Image as Picture
from earlyfusion.data.sample import Text
from earlyfusion.data.tasks.registry import make_task

PLACE = {"type": "image"}


def picture(path, colour):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 10), colour).save(path)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def only(tmp_path, row, **options):
    """The problem of a file with one row."""
    path = write(tmp_path / "one.jsonl", [row])
    task = make_task("file", path=str(path), heldout=0.0, **options)
    return task, task.sample(0)


def half(problem, response):
    return 0.5 if response == "so so" else -2.0


CASES = {
    "words": ({"answer": ["a cup", "mug"]}, "The cup.", "mug", "bowl"),
    "number": ({"answer": 1200}, "it costs $1,200", "answer: 1200.0", "12"),
    "choice": ({"answer": "pan", "choices": ["cup", "pan"]}, "B", "<think>A?</think> (B)", "A"),
    "boxes": ({"answer": [1, 2, 9, 9], "image": "a.png"}, "[1, 2, 9, 9]", "[[1,2,9,9]]", "[10,2,19,9]"),
    "math": ({"answer": "\\frac{1}{2}"}, "$0.5$", "so it is \\boxed{\\frac{2}{4}}", "$0.25$"),
    "json_schema": (
        {"answer": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}},
        '{"n": 3}',
        '```json\n{"n": 0}\n```',
        '{"n": "3"}',
    ),
}


@pytest.mark.parametrize("check", CASES)
def test_each_check_pays_right_answers_and_no_others(check, tmp_path):
    pytest.importorskip({"math": "math_verify", "json_schema": "jsonschema"}.get(check, "json"))
    row, right, also, wrong = CASES[check]
    picture(tmp_path / "a.png", "red")
    task, problem = only(tmp_path, {"question": "what?", **row}, check=check)
    assert [task.reward(problem, text) for text in (right, also, wrong, "")] == [1.0, 1.0, 0.0, 0.0]
    # What is told as the target earns the full reward, and a process can score what it is sent.
    if check != "json_schema":
        assert (
            pickle.loads(pickle.dumps(task)).reward(pickle.loads(pickle.dumps(problem)), problem.target) == 1
        )
    assert task.quick == (check not in ("math", "json_schema"))


def test_a_function_of_ones_own_checks_a_row(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_check.py").write_text("def half(problem, response):\n    return len(response) / 4\n")
    task, problem = only(tmp_path, {"question": "what?", "check": "mine_check:half"})
    assert task.reward(problem, "ab") == 0.5 and not task.quick


def test_rows_of_every_usual_form_are_one_question(tmp_path):
    """OpenAI, ShareGPT, TRL and verl names; the picture by path, in a folder, as data."""
    picture(tmp_path / "in" / "a.png", "red")
    data = (
        "data:image/png;base64,"
        + __import__("base64").b64encode((tmp_path / "in/a.png").read_bytes()).decode()
    )
    said = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "colour?"}]}
    rows = [
        {"question": "colour?", "image": "in/a.png", "answer": "red"},
        {"messages": [said], "images": ["in/a.png"], "answer": "red"},
        {"messages": [{"role": "user", "content": "<image>colour?"}], "images": [data], "answer": "red"},
        {
            "conversations": [
                {"from": "human", "value": "<image>colour?"},
                {"from": "gpt", "value": "red"},
            ],
            "image": "in/a.png",
        },
        {"prompt": [said], "images": ["in/a.png"], "solution": "red"},
        {"prompt": [said], "images": ["in/a.png"], "reward_model": {"ground_truth": "red"}},
    ]
    for row in rows:
        _, problem = only(tmp_path, row)
        shown, text = problem.chat()[-1].content
        assert isinstance(shown, Picture) and shown.open().getpixel((0, 0)) == (255, 0, 0)
        assert (text.text, problem.answer, problem.target) == ("colour?", "red", "red")
        assert [type(part) for part in problem.prompt()] == [Picture, Text]
        assert problem.image.size == (20, 10)


def test_choices_are_listed_and_a_system_message_stays(tmp_path):
    row = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "which?"}]}
    _, problem = only(tmp_path, {**row, "choices": ["cup", "pan"], "answer": 1, "check": "choice"})
    assert [message.text for message in problem.chat()] == ["Be brief.", "which?\n(A) cup\n(B) pan"]
    assert problem.target == "B"


def test_rows_keep_their_side_when_the_file_grows_and_groups_stay_together(tmp_path):
    rows = [{"question": f"q{i}", "answer": i, "group": f"g{i // 4}"} for i in range(400)]
    sides = []
    for count in (200, 400):
        path = write(tmp_path / f"{count}.jsonl", rows[:count])
        task = make_task("file", path=str(path), check="number", heldout=0.25)
        side = {
            task.sample(i, split).question: split
            for split in task.sides
            for i in range(len(task.sides[split].numbers))
        }
        assert len(side) == count
        sides.append(side)
    assert all(sides[1][question] == split for question, split in sides[0].items())
    groups = {}
    for question, split in sides[1].items():
        groups.setdefault(int(question[1:]) // 4, set()).add(split)
    assert all(len(found) == 1 for found in groups.values())
    share = Counter(sides[1].values())["test"] / 400
    assert 0.1 < share < 0.4  # five standard deviations of 100 groups
    other = make_task("file", path=str(tmp_path / "200.jsonl"), check="number", heldout=str(path))
    assert len(other.sides["test"].numbers) == 400 and len(other.sides["train"].numbers) == 200


def test_every_row_is_asked_before_any_comes_again_and_weights_count(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question": f"q{i}", "answer": i} for i in range(30)])
    task = make_task("file", path=str(path), check="number", heldout=0.0)
    for epoch in range(3):
        seen = [task.numbered(epoch * 30 + i, seed=7).question for i in range(30)]
        assert sorted(seen) == sorted(f"q{i}" for i in range(30))
    assert seen != [task.numbered(i, seed=7).question for i in range(30)], "another order in every pass"
    rows = [{"question": f"q{i}", "answer": i, "weight": 2.0 if i < 10 else 0.5} for i in range(30)]
    task = make_task("file", path=str(write(path, rows)), check="number", heldout=0.0)
    drawn = Counter(task.numbered(i, seed=7).question for i in range(30 * 20))
    heavy = sum(drawn[f"q{i}"] for i in range(10))
    assert heavy == pytest.approx(600 * 20 / 30, abs=30) and len(drawn) == 30
    problem = task.numbered(5, seed=7)
    assert task.sample(int(problem.key.rsplit("/", 1)[1])).question == problem.question


def test_held_out_rows_are_asked_once_each(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question": f"q{i}", "answer": i} for i in range(100)])
    task = make_task("file", path=str(path), check="number", heldout=0.3)
    held = {problem.question for problem in task.test_problems(1000, seed=1)}
    assert len(held) == len(task.sides["test"].numbers)
    trained = {task.numbered(i, seed=0).question for i in range(100)}
    assert not held & trained and len(held | trained) == 100


def test_parquet_and_datasets_hold_pictures_in_their_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    pictures = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")] * 4
    rows = {"question": ["colour?"] * 8, "answer": ["red", "blue"] * 4, "image": pictures}
    made = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    split = datasets.DatasetDict({"train": made, "validation": made})
    split.save_to_disk(tmp_path / "set")
    made.to_parquet(tmp_path / "set.parquet")
    for options in (
        {"path": "set", "split": "train", "heldout": "split:validation"},
        {"path": "set.parquet", "heldout": 0.0},
    ):
        task = make_task("file", **{**options, "path": str(tmp_path / options["path"])})
        for i in range(8):
            problem = task.sample(i)
            wanted = {"red": (255, 0, 0), "blue": (0, 0, 255)}[problem.target]
            assert problem.image.getpixel((3, 3)) == wanted


BAD = {
    "no answer": ({"question": "what?"}, r"one.jsonl:1: answer None.*there is none"),
    "no question": ({"answer": "red"}, "no messages and no question"),
    "no picture": ({"question": "what?", "image": "gone.png", "answer": "red"}, "no such file"),
    "outside": ({"question": "what?", "image": "../../etc/passwd", "answer": "red"}, "outside"),
    "url": ({"question": "what?", "image": "http://a.b/c.png", "answer": "red"}, "urls = true"),
    "no number": ({"question": "what?", "answer": "many", "check": "number"}, "expected a number"),
    "no choice": (
        {"question": "?", "answer": "C", "choices": ["a", "b"], "check": "choice"},
        "letter of A to B",
    ),
    "check": ({"question": "what?", "answer": "red", "check": "wrods"}, "did you mean 'words'"),
    "weight": ({"question": "what?", "answer": "red", "weight": -1}, "weight -1"),
    "limit": ({"question": "what?", "answer": "red", "max_new_tokens": 0}, "whole number from 1"),
    "last": (
        {"messages": [{"role": "system", "content": "x"}], "answer": "red"},
        "must end with a message of the user",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_what_to_do_or_left_out_and_told(name, tmp_path):
    row, words = BAD[name]
    with pytest.raises(DataError, match=words):
        only(tmp_path, row)
    path = write(tmp_path / "two.jsonl", [{"question": "what?", "answer": "red"}, row])
    task = make_task("file", path=str(path), heldout=0.0, skip_bad_rows=True)
    assert "1 rows to train on, 0 held out, 1 left out (two.jsonl:2" in task.told


def test_urls_are_fetched_once_when_they_are_allowed(tmp_path, monkeypatch):
    import threading
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    monkeypatch.setenv("EF_CACHE", str(tmp_path / "cache"))
    picture(tmp_path / "served" / "a.png", "red")
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "served")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/a.png"
        task, problem = only(tmp_path, {"question": "colour?", "image": url, "answer": "red"}, urls=True)
        assert problem.image.size == (20, 10) and task.sample(0).image.size == (20, 10)
        assert asked == ["/a.png"], "nothing is fetched to look at a row, and nothing twice"
    finally:
        server.shutdown()
        server.server_close()
