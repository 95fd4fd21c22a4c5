"""Visual tasks: answers hold in the graph, the controls are blind, an all-knowing model scores 1 and a
constant one little."""

import json
import re
from collections import Counter

import numpy as np
import pytest
from eval_cases import own_model
from PIL import Image as PilImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.sample import Image, Text, Video, question_text
from earlyfusion.data.synth.palette import pairs
from earlyfusion.data.tasks.scoring.boxes import parse_boxes
from earlyfusion.eval.benchmarks.mmmu import parse_choice
from earlyfusion.eval.benchmarks.questions import KINDS, make_items
from earlyfusion.eval.protocol import (
    EvalError,
    GenerateRequest,
    Generation,
    TaskOptions,
    prompt_hash,
    prompt_text,
)
from earlyfusion.eval.registry import build_task

GENERATED = ("counting", "scene", "ocr", "grounding", "chart", "board", "video_qa")


def run(task, answer, limit):
    """Ask a task of a model given as a function (question, request) -> text; records and sums."""
    records = []
    for question in task.questions(limit, None, 0):
        outputs = [Generation(answer(question, request), 1, "stop") for request in task.requests(question, 0)]
        records.append({"id": question.id, "category": question.category, **task.score(question, 0, outputs)})
    return records, task.aggregate(records)


def pixels(prompt):
    """All pixels of a prompt's pictures."""
    found = []
    for segment in prompt if not isinstance(prompt, str) else ():
        if isinstance(segment, Image):
            found.append(np.asarray(segment.open()))
        elif isinstance(segment, Video):
            found += [np.asarray(frame) for frame in segment.frames]
    return found


@pytest.mark.parametrize("name", [*GENERATED, "easy_vqa"])
def test_an_answer_that_the_limit_cut_off_is_no_answer(name):
    """Its beginning is right; where it would have gone is not known."""
    task = build_task(name)
    for question in task.questions(8, None, 0):
        outputs = [Generation(f" {question.target}", 8, "length") for _ in task.requests(question, 0)]
        record = task.score(question, 0, outputs)
        assert record["score"] == record["blind_score"] == 0.0 and record["extracted"] is None
        assert name == "easy_vqa" or record["metrics"]["cut"] == 1.0
    if name == "easy_vqa":
        assert (
            task.score(question, 0, [Generation(f" {question.target} wss\n", 8, "stop")] * 2)["score"] == 0.0
        )


@pytest.mark.parametrize("name", GENERATED)
def test_a_model_that_knows_the_answers_scores_one(name):
    records, sums = run(build_task(name), lambda question, request: f" {question.target}\n", 40)
    assert sums["score"] == sums["words_score"] == sums["blind_score"] == 1.0 and sums["seeing"] == 0.0
    assert sums["n"] == len(records) == 40 and sums["unextracted"] == 0
    assert set(sums["by_category"]) == set(KINDS[name])
    json.dumps([records, sums])


@pytest.mark.parametrize("name", GENERATED)
def test_silence_scores_nothing_and_counts_as_unextracted(name):
    records, sums = run(build_task(name), lambda question, request: "", 20)
    assert sums["score"] == 0.0 and sums["unextracted"] == 1.0
    assert all(record["extracted"] is None for record in records)


@pytest.mark.parametrize("name", GENERATED)
def test_views_are_told_apart_and_blind_pictures_tell_only_their_size(name):
    """A model that answers only where it gets a picture, words or grey scores exactly there."""

    def sees(question, request):
        colours = {tuple(p) for picture in pixels(request.prompt) for p in picture.reshape(-1, 3)}
        return question.target if len(colours) > 1 else ""

    _, sums = run(build_task(name), sees, 12)
    assert (sums["score"], sums["blind_score"], sums["words_score"], sums["seeing"]) == (1.0, 0.0, 0.0, 1.0)
    _, reads = run(build_task(name), lambda q, r: q.target if isinstance(r.prompt, str) else "", 12)
    assert (reads["score"], reads["blind_score"], reads["words_score"]) == (0.0, 0.0, 1.0)
    task = build_task(name)
    for question in task.questions(6, None, 0):
        seen, blind, words = task.requests(question, 0)
        assert [p.shape for p in pixels(seen.prompt)] == [p.shape for p in pixels(blind.prompt)]
        assert all((p == 128).all() for p in pixels(blind.prompt))
        assert (
            prompt_text(seen.prompt)
            == prompt_text(blind.prompt)
            == question_text(question.meta["item"].question)
        )
        assert words.prompt.endswith(prompt_text(seen.prompt)) and len(words.prompt) > len(
            prompt_text(seen.prompt)
        )


def test_tasks_repeat_exactly_and_depend_on_the_seed():
    hashes = {}
    for seed in (0, 0, 1):
        for name in GENERATED:
            task = build_task(name, TaskOptions(seed=seed))
            prompts = [prompt_hash(task.requests(q, 0)) for q in task.questions(6, None, 0)]
            if (name, seed) in hashes:
                assert hashes[name, seed] == (task.data_hash(), prompts)
            hashes[name, seed] = (task.data_hash(), prompts)
    for name in GENERATED:
        assert hashes[name, 0][0] != hashes[name, 1][0] and hashes[name, 0][1] != hashes[name, 1][1]


def test_a_shorter_run_asks_the_first_questions_of_a_longer_one():
    task = build_task("scene")
    long, short = ([(q.id, q.target) for q in task.questions(limit, None, 0)] for limit in (30, 11))
    assert short == long[:11]
    assert len(list(build_task("chart", TaskOptions(extra={"n": "7"})).questions(None, None, 0))) == 7


def test_counting_is_balanced_and_counts_the_graph():
    items = make_items("counting", 240, 3)
    answers = Counter(item.answer for item in items)
    assert set(answers) == {"0", "1", "2", "3", "4"} and max(answers.values()) < 0.33 * len(items)
    for item in items:
        what = re.match(r"how many (.*) are there", item.question)[1]
        things = item.graph.objects
        if what == "objects":
            expected = len(things)
        elif what.endswith(" objects"):
            expected = sum(thing.colour == what.split()[0] for thing in things)
        else:
            expected = sum(thing.shape == what[:-1] for thing in things)
        assert str(expected) == item.answer


def test_questions_of_sight_hold_in_the_pixels():
    """Grounding boxes hold all pixels of the object's colour; sorting, comparison and relations hold in the
    boxes."""
    from earlyfusion.data.synth.palette import COLOURS

    for item in make_items("grounding", 40, 1):
        (box,) = parse_boxes(item.answer, item.graph.width, item.graph.height)
        name = re.search(r"the (\w+ \w+)", item.question)[1]
        if sum(thing.colour == name.split()[0] for thing in item.graph.objects) > 1:
            continue
        picture = np.asarray(item.media().open())
        ys, xs = np.nonzero((picture == COLOURS[name.split()[0]]).all(-1))
        assert (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == pytest.approx(box, abs=0.6)
    for item in make_items("scene", 210, 1):
        boxes = {thing.name: thing.box for thing in item.graph.objects}
        if item.category == "sorting":
            axis = 0 if "left to right" in item.question else 1
            centres = [boxes[name][axis] + boxes[name][axis + 2] for name in item.answer.split(", ")]
            assert centres == sorted(centres) and len(centres) == len(item.graph.objects)
        elif item.category == "comparison":
            both = re.match(r"which is larger, the (.*) or the (.*)\?", item.question).groups()
            sizes = {
                name: (boxes[name][2] - boxes[name][0]) * (boxes[name][3] - boxes[name][1]) for name in both
            }
            assert sizes[item.answer] == max(sizes.values()) >= 1.3 * min(sizes.values())


def test_yes_and_no_are_balanced():
    items = [item for item in make_items("scene", 700, 5) if item.answer in ("yes", "no")]
    share = sum(item.answer == "yes" for item in items) / len(items)
    assert len(items) == 200 and abs(share - 0.5) < 0.11  # three standard errors


def test_every_scene_holds_a_combination_training_never_draws():
    for item in make_items("scene", 30, 0):
        assert any((thing.colour, thing.shape) in pairs(True) for thing in item.graph.objects)


def test_side_metrics():
    _, sums = run(build_task("counting"), lambda q, r: str(int(q.target) + 1), 30)
    assert (sums["score"], sums["mae"], sums["within_one"]) == (0.0, 1.0, 1.0)
    records, sums = run(
        build_task("counting"), lambda q, r: "", 30
    )  # silence costs as much as saying 0, at least 1
    assert sums["mae"] == pytest.approx(np.mean([max(int(record["target"]), 1) for record in records]))
    _, sums = run(build_task("ocr"), lambda q, r: f"it says {q.target}", 12)
    assert sums["score"] == 1.0 and sums["exact"] == 0.0 and sums["cer"] > 0 and sums["anls"] < 1
    _, sums = run(
        build_task("chart"), lambda q, r: f"{1.04 * float(q.target)}" if q.target.isdigit() else q.target, 40
    )
    assert 0.9 < sums["score"] <= 1.0 and sums["exact"] < 0.7  # a gold 0 is compared as text
    _, sums = run(build_task("grounding"), lambda q, r: "[0, 0, 9999, 9999]", 20)
    assert sums["score"] == 0.0 and 0 <= sums["majority"] < 0.6 and sums["unextracted"] == 0


def test_the_constant_answer_earns_its_majority():
    task = build_task("scene")
    best = {}
    for question in task.questions(140, None, 0):
        best.setdefault(question.category, Counter())[question.target] += 1
    _, sums = run(task, lambda q, r: best[q.category].most_common(1)[0][0], 140)
    assert sums["score"] == pytest.approx(sums["majority"])
    _, sums = run(build_task("counting"), lambda q, r: "2", 200)
    assert sums["majority"] < 0.35


def test_wrong_options_say_what_is_known():
    with pytest.raises(EvalError, match=r"unknown view 'gray'.*blind"):
        build_task("counting", TaskOptions(extra={"views": "gray"}))
    with pytest.raises(EvalError, match="n='many'"):
        build_task("counting", TaskOptions(extra={"n": "many"}))
    with pytest.raises(EvalError, match="shots=3"):
        list(build_task("ocr").questions(2, 3, 0))
    assert build_task("ocr", TaskOptions(extra={"views": ""})).views == ()


# MMMU format


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
    questions = list(task.questions(None, None, 0))
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
    asked = [task.requests(question, 0) for question in task.questions(None, None, 0)]
    first, second = asked[0][0].prompt, asked[1][0].prompt
    assert [type(part) for part in first] == [Image, Text] and asked[0][0].stop == ("\n",)
    assert first[1].text.startswith("\nQ: Which colour") and first[1].text.endswith("directly.\nA:")
    assert [type(part) for part in second] == [Text, Image, Text, Image, Text]
    assert second[0].text == "\nQ: Compare " and second[-1].text.endswith("\nA:")
    assert [type(part) for part in asked[0][1].prompt] == [Image, Text], "the blind view has the same form"
    model.chat = True
    task.prepare(model)
    assert (
        task.requests(next(iter(task.questions(None, None, 0))), 0)[0]
        .prompt[1]
        .text.startswith(" Which colour")
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
        records, sums = run(build_task("mmmu", TaskOptions(data=path)), lambda q, r: said[q.id], None)
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
        list(build_task("mmmu", TaskOptions(data=p)).questions(None, None, 0))
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
            list(build_task("mmmu", TaskOptions(data=path)).questions(None, None, 0))
    path.write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        list(build_task("mmmu", TaskOptions(data=path)).questions(None, None, 0))


def test_answers_are_greedy_and_end_with_their_line():
    task = build_task("counting", TaskOptions(max_new_tokens=5))
    question = next(iter(task.questions(1, None, 0)))
    request = task.requests(question, 0)[0]
    assert isinstance(request, GenerateRequest)
    assert (request.temperature, request.stop, request.max_new_tokens) == (0.0, ("\n",), 5)
