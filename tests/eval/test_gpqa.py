"""GPQA: nothing of the questions is left anywhere, and every model sees the same order of options."""

import csv
import json
import os
import random
import subprocess
import sys

import pytest
from eval_cases import Scripted, hf_folder

from earlyfusion.data.errors import DataError
from earlyfusion.eval.benchmarks.gpqa import COLUMNS, Gpqa, permutation
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import EvalError, TaskOptions

SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe qui ro su ta ve wi xo yu zo".split()
FORMS = pytest.mark.parametrize("form", ["cot", "lm_eval", "mcf", "cf"])


@pytest.fixture
def data(tmp_path):
    """A file of GPQA's columns full of words that occur nowhere else, and the words."""
    rng, marks, path = random.Random(0), [], tmp_path / "gpqa_diamond.csv"

    def text(count):
        marks.extend("".join(rng.choice(SYLLABLES) for _ in range(4)) for _ in range(count))
        return " ".join(marks[-count:])

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "Record ID", "High-level domain"])
        writer.writeheader()
        for n in range(12):
            row = {column: text(3) for column in COLUMNS} | {"Question": f"{text(9)} [{text(1)}]?"}
            writer.writerow({**row, "Record ID": f"rec{n}", "High-level domain": "ABC"[n % 3]})
    return path, marks


def task(path, **options):
    return Gpqa("diamond", TaskOptions(data=path, **options))


def leaks(marks, *places):
    """Files below these places in which any of the words stands."""
    found = []
    for place in places:
        for path in filter(lambda p: p.is_file(), [place, *place.rglob("*")]):
            content = path.read_bytes().decode("utf-8", "replace")
            found += [path] if any(mark in content for mark in marks) else []
    return found


@FORMS
def test_records_hold_no_text_even_when_the_model_repeats_the_question(tmp_path, data, form, capfd):
    path, marks = data
    model = Scripted(say=lambda request: f"{request.prompt} Answer: B (B)")
    run_task(model, task(path, form=form), limit=9, out=tmp_path / "out")
    assert leaks(marks, tmp_path / "out") == []
    assert not any(mark in text for mark in marks for text in capfd.readouterr())
    (records,) = (tmp_path / "out").glob("*/records.jsonl")
    record = json.loads(records.read_text().splitlines()[0])
    assert record["prompt_hash"] and record["extracted"] in "ABCD" and "output" not in record


@pytest.mark.slow
def test_a_run_from_the_command_line_leaves_no_text_behind(tmp_path, data):
    path, marks = data
    home, out, folder = tmp_path / "home", tmp_path / "out", hf_folder(tmp_path / "model")
    home.mkdir()
    words = ["eval", "--model", f"hf:{folder}", "--data", path, "--tasks", "gpqa_diamond,gpqa_diamond:cf"]
    words += ["--samples", 2, "--max-new-tokens", 8, "--out", out]
    places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "EF_CACHE"), str(home))
    command = [sys.executable, "-m", "earlyfusion.pipeline.cli", *map(str, words)]
    how = {"env": {**os.environ, **places}, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=home, **how)
    assert done.returncode == 0, done.stderr[-2000:]
    assert leaks(marks, out, home, folder) == []
    assert not any(mark in done.stdout + done.stderr for mark in marks)
    assert leaks(marks, path) == [path]  # the check can see


@pytest.mark.parametrize(
    "row, error, message",
    [
        ('{"Question": "secretword", "Correct Answer": "x"}', EvalError, "Incorrect Answer 1"),
        ('{"Question": "secretword"', DataError, "not valid JSON"),
    ],
)
def test_broken_files_are_refused_without_quoting_them(tmp_path, row, error, message):
    (tmp_path / "gpqa_diamond.jsonl").write_text(row + "\n")
    with pytest.raises(error, match=message) as refused:
        list(task(tmp_path).questions())
    assert "secretword" not in str(refused.value)


def test_the_order_depends_on_the_question_and_the_repeat_alone():
    orders = [permutation(f"q{n}", n % 3) for n in range(4000)]
    assert orders == [permutation(f"q{n}", n % 3) for n in range(4000)]
    assert permutation("q0", 0) != permutation("q0", 1)
    assert all(abs(sum(order[0] == k for order in orders) / 4000 - 0.25) < 0.03 for k in range(4))


@FORMS
def test_a_model_that_knows_the_answers_scores_one_in_every_repeat(data, form):
    made = task(data[0], form=form, samples=4)
    right = {row["Correct Answer"] for row in made.rows}

    def letter(prompt):
        (line,) = [line for line in prompt.splitlines() if any(answer in line for answer in right)]
        return line.strip("()")[0]

    def say(request):
        return f"Hmm.\nAnswer: {letter(request.prompt)} and ({letter(request.prompt)})"

    def value(request):
        found = request.continuation.strip()
        return float(found in right if form == "cf" else found == f"({letter(request.context)})")

    metrics = run_task(Scripted(say, value), made)["metrics"]
    assert (metrics["score"], metrics["n"], metrics["samples"], metrics["chance"]) == (1.0, 12, 48, 0.25)
    assert set(metrics["by_category"]) == {"A", "B", "C"}


def test_the_prompts_are_those_of_simple_evals_and_lm_eval(data):
    shown = {}
    for form in ("cot", "lm_eval", "mcf"):
        made = task(data[0], form=form)
        question = next(iter(made.questions(1)))
        request = made.requests(question, 0)[0]
        shown[form] = request.context if form == "mcf" else request.prompt
    text, (a, b, c, d) = question.prompt, [question.choices[i] for i in permutation(question.id, 0)]
    assert shown["cot"].endswith(f"before answering.\n\n{text}\n\nA) {a}\nB) {b}\nC) {c}\nD) {d}")
    listed = f"(A) {a}\n(B) {b}\n(C) {c}\n(D) {d}\n"
    stem = f"What is the correct answer to this question:{text}\nChoices:\n{listed}"
    assert shown["lm_eval"] == stem + "Let's think step by step: " and shown["mcf"] == stem + "Answer:"
    assert "[" in text  # brackets are formulae and stay


def test_shots_are_refused(data):
    with pytest.raises(EvalError, match="zero-shot"):
        task(data[0], shots=5)
