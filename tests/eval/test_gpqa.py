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


def synthetic(path, rows=12, seed=0):
    """A file of GPQA's columns full of words that occur nowhere else; returns the words."""
    rng = random.Random(seed)
    marks = []

    def text(count):
        words = ["".join(rng.choice(SYLLABLES) for _ in range(4)) for _ in range(count)]
        marks.extend(words)
        return " ".join(words)

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "Record ID", "High-level domain"])
        writer.writeheader()
        for n in range(rows):
            values = {column: text(3) for column in COLUMNS}
            values["Question"] = text(9) + " [" + text(1) + "]?"
            writer.writerow({**values, "Record ID": f"rec{seed}{n}", "High-level domain": "ABC"[n % 3]})
    return marks


def task(path, **options):
    return Gpqa("diamond", TaskOptions(data=path, **options))


def leaks(marks, *places):
    """Files (and captured texts) in which any of the words stands."""
    found = []
    for place in places:
        for path in [place] if place.is_file() else [p for p in place.rglob("*") if p.is_file()]:
            content = path.read_bytes().decode("utf-8", "replace")
            if any(mark in content for mark in marks):
                found.append(str(path))
    return found


@pytest.mark.parametrize("form", ["cot", "lm_eval", "mcf", "cf"])
def test_records_hold_no_text_even_when_the_model_repeats_the_question(tmp_path, form, capfd):
    marks = synthetic(tmp_path / "gpqa_diamond.csv")
    model = Scripted(say=lambda request: f"{request.prompt} Answer: B (B)")
    out = tmp_path / "out"
    run_task(model, task(tmp_path / "gpqa_diamond.csv", form=form), limit=9, out=out)
    assert leaks(marks, out) == []
    assert not any(mark in text for mark in marks for text in capfd.readouterr())
    (folder,) = out.iterdir()
    record = json.loads((folder / "records.jsonl").read_text().splitlines()[0])
    assert record["prompt_hash"] and record["extracted"] in "ABCD" and "output" not in record


@pytest.mark.slow
def test_a_run_from_the_command_line_leaves_no_text_behind(tmp_path):
    data, home, out = tmp_path / "own.csv", tmp_path / "home", tmp_path / "out"
    marks = synthetic(data)
    home.mkdir()
    folder = hf_folder(tmp_path / "model")
    command = [
        sys.executable,
        "-m",
        "earlyfusion.pipeline.cli",
        "eval",
        "--model",
        f"hf:{folder}",
        "--data",
        str(data),
    ]
    command += [
        "--tasks",
        "gpqa_diamond,gpqa_diamond:cf",
        "--samples",
        "2",
        "--max-new-tokens",
        "8",
        "--out",
        str(out),
    ]
    places = {key: str(home) for key in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "EF_CACHE")}
    done = subprocess.run(
        command, env={**os.environ, **places}, capture_output=True, text=True, cwd=home, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert leaks(marks, out, home, folder) == []
    assert not any(mark in done.stdout + done.stderr for mark in marks)
    assert leaks(marks, data) == [str(data)]  # the check can see


def test_broken_files_are_refused_without_quoting_them(tmp_path):
    path = tmp_path / "gpqa_diamond.jsonl"
    path.write_text('{"Question": "secretword", "Correct Answer": "x"}\n')
    with pytest.raises(EvalError, match="Incorrect Answer 1") as error:
        list(task(path).questions(None, None))
    assert "secretword" not in str(error.value)
    path.write_text('{"Question": "secretword"\n')
    with pytest.raises(DataError, match="not valid JSON") as error:
        list(task(path).questions(None, None))
    assert "secretword" not in str(error.value)


def test_the_order_depends_on_the_question_and_the_repeat_alone():
    orders = {(q, r): permutation(q, r) for q in ("rec1", "rec2", "rec3") for r in range(6)}
    assert orders == {key: permutation(*key) for key in reversed(orders)}
    assert len({tuple(order) for order in orders.values()}) > 6
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders.values())
    firsts = [permutation(f"q{n}", 0).index(0) for n in range(4000)]
    assert all(abs(firsts.count(k) / 4000 - 0.25) < 0.03 for k in range(4))


@pytest.mark.parametrize("form", ["cot", "lm_eval", "mcf", "cf"])
def test_a_model_that_knows_the_answers_scores_one_in_every_repeat(tmp_path, form):
    synthetic(tmp_path / "d.csv")
    made = task(tmp_path / "d.csv", form=form, samples=4)
    right = {row["Correct Answer"] for row in made.rows}

    def letter(prompt):
        lines = [line for line in prompt.splitlines() if any(answer in line for answer in right)]
        (line,) = lines
        return line.strip("()")[0]

    def say(request):
        return f"Hmm.\nAnswer: {letter(request.prompt)} and ({letter(request.prompt)})"

    def value(request):
        if form == "cf":
            return -1.0 if request.continuation.strip() in right else -50.0
        return -1.0 if f"({letter(request.context)})" in request.continuation else -50.0

    metrics = run_task(
        Scripted(say, value),
        made,
    )["metrics"]
    assert metrics["score"] == 1.0 and metrics["n"] == 12 and metrics["samples"] == 48
    assert metrics["chance"] == 0.25 and set(metrics["by_category"]) == {"A", "B", "C"}


def test_averages_over_repeats_are_averages_of_averages(tmp_path):
    synthetic(tmp_path / "d.csv")
    made = task(tmp_path / "d.csv", samples=8)
    metrics = run_task(
        Scripted(say=lambda r: "Answer: A"),
        made,
    )["metrics"]
    share = [sum(permutation(f"rec0{n}", r)[0] == 0 for r in range(8)) / 8 for n in range(12)]
    assert metrics["score"] == pytest.approx(sum(share) / 12)
    mean = sum(share) / 12
    assert metrics["standard_error"] == pytest.approx((sum((s - mean) ** 2 for s in share) / 11 / 12) ** 0.5)


def test_the_prompts_are_those_of_simple_evals_and_lm_eval(tmp_path):
    synthetic(tmp_path / "d.csv", rows=1)
    shown = {}
    for form in ("cot", "lm_eval", "mcf"):
        made = task(tmp_path / "d.csv", form=form)
        (question,) = made.questions(None, None)
        request = made.requests(question, 0)[0]
        shown[form] = request.context if form == "mcf" else request.prompt
        options = [question.choices[i] for i in permutation(question.id, 0)]
    text = question.prompt
    assert shown["cot"].endswith(
        f"before answering.\n\n{text}\n\nA) {options[0]}\nB) {options[1]}\nC) {options[2]}\nD) {options[3]}"
    )
    stem = f"What is the correct answer to this question:{text}\nChoices:\n" + "".join(
        f"({letter}) {option}\n" for letter, option in zip("ABCD", options)
    )
    assert shown["lm_eval"] == stem + "Let's think step by step: "
    assert shown["mcf"] == stem + "Answer:"
    assert "[" in text  # brackets are formulae and stay


def test_shots_are_refused(tmp_path):
    synthetic(tmp_path / "d.csv")
    with pytest.raises(EvalError, match="zero-shot"):
        run_task(Scripted(), task(tmp_path / "d.csv"), shots=5)
