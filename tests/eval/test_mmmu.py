"""MMMU-format exams: rows become interleaved prompts, letters are parsed as published, broken files are
named."""

import json

import pytest
from eval_cases import ask_all, own_model
from PIL import Image as PilImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Image, Text
from earlyfusion.eval.benchmarks.mmmu import parse_choice
from earlyfusion.eval.protocol import EvalError, TaskOptions, prompt_text
from earlyfusion.eval.registry import build_task


@pytest.fixture
def exam(tmp_path):
    """Four rows of the public schema: choices, an open number, an open word, pictures by path and base64."""
    import base64

    PilImage.new("RGB", (20, 10), "red").save(tmp_path / "red.png")
    data = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    rows = [
        {
            "id": "validation_Accounting_1",
            "question": "<image 1> Which colour, as in <image 1>?",
            "options": "['red', 'blue']",
            "answer": "A",
            "question_type": "multiple-choice",
            "image_1": "red.png",
        },
        {
            "id": "validation_Art_Theory_2",
            "question": "Compare <image 1> and <image 2>.",
            "options": "['<image 2>', 'left', 'x']",
            "answer": "C",
            "question_type": "multiple-choice",
            "image_1": {"bytes": data, "path": None},
            "image_2": "red.png",
        },
        {
            "id": "validation_Math_3",
            "question": "How wide is <image 1>?",
            "options": "[]",
            "answer": "20",
            "question_type": "open",
            "image_1": f"data:image/png;base64,{data}",
        },
        {
            "id": "validation_Math_4",
            "question": "Name it. <image 1>",
            "options": "[]",
            "answer": "['square', 'box']",
            "question_type": "open",
            "image_1": "red.png",
        },
    ]
    path = tmp_path / "exam.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path, rows


def test_mmmu_rows_become_interleaved_prompts(exam):
    path, _ = exam
    task = build_task("mmmu", TaskOptions(data=path))
    questions = list(task.questions(None, None))
    assert [q.category for q in questions] == ["Accounting", "Art_Theory", "Math", "Math"]
    first = questions[0].prompt
    assert [type(s) for s in first] == [Image, Text]  # shown once; the second mention stays words
    assert "<image 1>" in first[1].text and "(A) red\n(B) blue" in first[1].text
    assert first[1].text.endswith("Answer with the option's letter from the given choices directly.")
    assert sum(isinstance(s, Image) for s in questions[1].prompt) == 2
    assert all(s.open().size == (20, 10) for q in questions for s in q.prompt if isinstance(s, Image))
    assert questions[2].prompt[-1].text.endswith("using a single word or phrase.")


def test_mmmu_asks_a_model_of_ours_in_the_form_of_pretraining(exam):
    """Pictures that begin a question stand before it, others where they are; a chat form takes the question
    alone."""
    path, rows = exam
    rows[3] |= {"explanation": "see <image 2>", "image_2": "red.png"}
    path.write_text("\n".join(map(json.dumps, rows)))
    model = own_model()
    task = build_task("mmmu", TaskOptions(data=path))
    task.prepare(model)
    asked = [task.requests(question, 0) for question in task.questions(None, None)]
    first, second = asked[0][0].prompt, asked[1][0].prompt
    assert [type(part) for part in first] == [Image, Text] and asked[0][0].stop == ("\n",)
    assert first[1].text.startswith("\nQ: Which colour") and first[1].text.endswith("directly.\nA:")
    assert [type(part) for part in second] == [Text, Image, Text, Image, Text]
    assert second[0].text == "\nQ: Compare " and second[-1].text.endswith("\nA:")
    assert [type(part) for part in asked[0][1].prompt] == [Image, Text], "the blind view has the same form"
    model.chat = True
    task.prepare(model)
    assert (
        task.requests(next(iter(task.questions(None, None))), 0)[0].prompt[1].text.startswith(" Which colour")
    )


def test_mmmu_scores_letters_and_open_answers_and_never_guesses(exam):
    path, _ = exam
    said = {
        "validation_Accounting_1": "(A)",
        "validation_Art_Theory_2": "I do not know",
        "validation_Math_3": "It is 20.0",
        "validation_Math_4": "a box",
    }
    for _ in range(3):  # the published parser would guess differently each time
        records, sums = ask_all(build_task("mmmu", TaskOptions(data=path)), lambda q, r: said[q.id], None)
        assert [r["score"] for r in records] == [1.0, 0.0, 1.0, 1.0] and records[1]["extracted"] is None
    assert (
        sums["score"] == 0.75
        and sums["unextracted"] == 0.25
        and sums["chance"] == pytest.approx((1 / 2 + 1 / 3) / 4)
    )
    assert sums["by_category"]["Math"]["score"] == 1.0 and sums["by_domain"]["Science"]["n"] == 2


def test_mmmu_reads_parquet_as_jsonl(exam, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path, rows = exam
    full = (tmp_path / "red.png").read_bytes()
    for row in rows:
        row |= {
            key: {"bytes": full, "path": "red.png"} if key in row else None for key in ("image_1", "image_2")
        }
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "exam.parquet")
    one, other = (
        list(build_task("mmmu", TaskOptions(data=p)).questions(None, None))
        for p in (path, tmp_path / "exam.parquet")
    )
    assert [(q.id, prompt_text(q.prompt), q.target) for q in one] == [
        (q.id, prompt_text(q.prompt), q.target) for q in other
    ]


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


def test_broken_exams_are_named(exam, tmp_path):
    path, rows = exam
    with pytest.raises(EvalError, match="pass --data"):
        build_task("mmmu")
    with pytest.raises(EvalError, match="no such file"):
        build_task("mmmu", TaskOptions(data=tmp_path / "none.jsonl"))
    for change, message in (
        ({"answer": "F"}, "none of the letters"),
        ({"image_1": "lost.png"}, "neither a file"),
        ({"image_1": None}, "missing"),
        ({"options": "[1, "}, "row 1"),
        ({"question": "Which colour?"}, "row 1 .*image_1 is not used: write <image 1>"),
        ({"image_2": "red.png"}, "image_2 is not used: write <image 2>"),
        ({"question": "Which?", "image_1": None, "image": "red.png"}, "'image' is not read: call it image_1"),
    ):
        path.write_text(json.dumps({**rows[0], **change}))
        with pytest.raises(EvalError, match=message):
            list(build_task("mmmu", TaskOptions(data=path)).questions(None, None))
    path.write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        list(build_task("mmmu", TaskOptions(data=path)).questions(None, None))
