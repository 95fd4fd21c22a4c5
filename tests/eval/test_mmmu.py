"""MMMU-format exams: rows become interleaved prompts, letters are parsed as published, broken files are
named."""

import base64
import json

import pytest
from eval_cases import ask_all, own_model
from PIL import Image as PilImage

from earlyfusion.data.sample import Image, Text
from earlyfusion.data.tasks.scoring import parse_choice
from earlyfusion.eval.benchmarks.base import build_task
from earlyfusion.eval.protocol import EvalError, TaskOptions


def mmmu(path):
    return build_task("mmmu", TaskOptions(data=path))


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def row(name, question, answer, options="[]", image="red.png", **more):
    kind = "open" if options == "[]" else "multiple-choice"
    about = {"id": f"validation_{name}", "question": question, "options": options, "answer": answer}
    return {**about, "question_type": kind, "image_1": image, **more}


@pytest.fixture
def exam(tmp_path):
    """Four rows of the public schema: choices, an open number, an open word, pictures by path and base64."""
    PilImage.new("RGB", (20, 10), "red").save(tmp_path / "red.png")
    data = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    left = {"bytes": data, "path": None}
    rows = [
        row("Accounting_1", "<image 1> Which colour, as in <image 1>?", "A", "['red', 'blue']"),
        row("Art_Theory_2", "Compare <image 1> and <image 2>.", "C", "['<image 2>', 'left', 'x']", left),
        row("Math_3", "How wide is <image 1>?", "20", image=f"data:image/png;base64,{data}"),
        row("Math_4", "Name it. <image 1>", "['square', 'box']"),
    ]
    rows[1]["image_2"] = "red.png"
    return write(tmp_path / "exam.jsonl", rows), rows


def test_rows_become_interleaved_prompts(exam):
    questions = list(mmmu(exam[0]).questions())
    assert [q.category for q in questions] == ["Accounting", "Art_Theory", "Math", "Math"]
    first = questions[0].prompt
    assert [type(s) for s in first] == [Image, Text]  # shown once; the second mention stays words
    assert "<image 1>" in first[1].text and "(A) red\n(B) blue" in first[1].text
    assert first[1].text.endswith("Answer with the option's letter from the given choices directly.")
    assert sum(isinstance(s, Image) for s in questions[1].prompt) == 2
    assert all(s.open().size == (20, 10) for q in questions for s in q.prompt if isinstance(s, Image))
    assert questions[2].prompt[-1].text.endswith("using a single word or phrase.")


def test_a_model_of_ours_is_asked_in_the_form_of_pretraining(exam):
    """Pictures that begin a question stand before it, others where they are; a chat form takes the question
    alone."""
    model, task = own_model(), mmmu(exam[0])
    task.prepare(model)
    asked = [task.requests(question, 0) for question in task.questions()]
    first, second = asked[0][0].prompt, asked[1][0].prompt
    assert [type(part) for part in first] == [Image, Text] and asked[0][0].stop == ("\n",)
    assert first[1].text.startswith("\nQ: Which colour")
    assert [type(part) for part in second] == [Text, Image, Text, Image, Text]
    assert second[0].text == "\nQ: Compare " and second[-1].text.endswith("\nA:")
    assert [type(part) for part in asked[0][1].prompt] == [Image, Text], "the blind view has the same form"
    model.asks_qa = False
    task.prepare(model)
    (plain, _) = task.requests(next(iter(task.questions(1))), 0)
    assert plain.prompt[1].text.startswith(" Which colour")


def test_letters_and_open_answers_are_scored_and_never_guessed(exam):
    said = {"Accounting_1": "(A)", "Art_Theory_2": "I do not know", "Math_3": "It is 20.0", "Math_4": "a box"}
    for _ in range(3):  # the published parser would guess differently each time
        records, sums = ask_all(mmmu(exam[0]), lambda q, r: said[q.id.removeprefix("validation_")], None)
        assert [r["score"] for r in records] == [1.0, 0.0, 1.0, 1.0] and records[1]["extracted"] is None
    assert (sums["score"], sums["unextracted"], sums["chance"]) == pytest.approx((0.75, 0.25, 5 / 24))
    assert sums["by_category"]["Math"]["score"] == 1.0


def test_letters_are_parsed_as_published():
    options = ["red square", "blue", "green", "grey"]
    for text, letter in {
        "(B)": "B",
        "B": "B",
        "B.": "B",
        " b ": None,
        "The answer is B": "B",
        "A or rather C": "C",
        "(A) no, (D)": "D",
        "I think that it is the red square here": "A",
        "red square": None,
        "": None,
        "E": None,
        "Answer: D.": "D",
    }.items():
        assert parse_choice(text, options) == letter, text


@pytest.mark.parametrize(
    "change, message",
    [
        ({"answer": "F"}, "none of the letters"),
        ({"image_1": "lost.png"}, "neither a file"),
        ({"image_1": None}, "missing"),
        ({"options": "[1, "}, "row 1"),
        ({"question": "Which colour?"}, "row 1 .*image_1 is not used: write <image 1>"),
        ({"image_2": "red.png"}, "image_2 is not used: write <image 2>"),
        ({"question": "Which?", "image_1": None, "image": "red.png"}, "'image' is not read: call it image_1"),
    ],
)
def test_broken_exams_are_named(exam, change, message):
    path, rows = exam
    with pytest.raises(EvalError, match=message):
        list(mmmu(write(path, [{**rows[0], **change}])).questions())
