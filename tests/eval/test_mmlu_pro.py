"""MMLU-Pro: prompts, context rule, guess and score are the published ones."""

import json

import pytest
from eval_cases import MMLU_PRO, Scripted, mmlu_pro_folder

from earlyfusion.eval.benchmarks.mmlu_pro import MmluPro, rescore
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import EvalError, TaskOptions

needs_data = pytest.mark.skipif(
    not (MMLU_PRO / "test.jsonl").is_file(), reason="the MMLU-Pro files are not here"
)
PUBLISHED = MMLU_PRO / "published_outputs_mistral-7b-v0.1.jsonl.gz"


def task(folder, **options):
    return MmluPro(TaskOptions(data=folder, **options))


@needs_data
@pytest.mark.slow
def test_published_outputs_give_the_published_predictions_and_total():
    first = rescore(PUBLISHED, levels=1)
    assert first["n"] == 12032
    assert first["differences"] == 0
    assert round(100 * first["score_strict"], 2) == 29.77
    third = rescore(PUBLISHED, levels=3)
    assert round(100 * third["score_strict"], 2) == 30.08


@needs_data
def test_published_baselines_are_found_in_the_data():
    test, validation = task(MMLU_PRO).rows
    assert (len(test), len(validation)) == (12032, 70)
    assert 100 * sum(1 / len(row["options"]) for row in test) / len(test) == pytest.approx(11.09, abs=0.005)
    assert 100 * sum(row["answer"] == "A" for row in test) / len(test) == pytest.approx(11.68, abs=0.005)
    assert all(option == option.strip() for row in test for option in row["options"])


@needs_data
def test_prompts_are_lm_evals_but_for_the_newlines_after_the_introduction():
    utils = pytest.importorskip("lm_eval.tasks.mmlu_pro.utils")
    ours = task(MMLU_PRO)
    validation = [json.loads(line) for line in (MMLU_PRO / "validation.jsonl").read_text().splitlines()]
    for question in list(ours.questions(14, None)):
        row = question.meta["row"]
        shots = [example for example in validation if example["category"] == question.category][:5]
        shown = "".join(utils.format_cot_example(example) for example in shots)
        shown += utils.format_cot_example(row, including_answer=False)
        intro, found, rest = question.prompt.partition("letter choice.\n\n\n\n")
        assert found and question.category in intro
        assert rest == shown


def test_the_prompt_is_written_out_as_published(tmp_path):
    folder = mmlu_pro_folder(tmp_path)
    question = next(iter(task(folder).questions(None, 1)))
    assert (
        question.prompt
        == "The following are multiple choice questions (with answers) about math. Think step by step and"
        ' then finish your answer with "the answer is (X)" where X is the correct letter'
        " choice.\n\n\n\nQuestion:\nExample 0 of math?\nOptions:\nA. one\nB. two\nC. three\nAnswer: Let's"
        " think step by step. Because 0. The answer is (B).\n\nQuestion:\nWhich is number 0 of"
        " math?\nOptions:\nA. option 000\nB. option 001\nC. option 002\nAnswer: Let's think step by step."
    )
    assert len(question.choices) == 3  # "N/A" is gone, and so are the blanks around the right one


def test_examples_are_dropped_until_the_prompt_fits(tmp_path):
    folder = mmlu_pro_folder(tmp_path)
    made = task(folder)

    class Counting(Scripted):
        def count_tokens(self, text):
            return 500 * text.count("Question:\n")

    model = Counting()
    made.prepare(model)
    question = next(iter(made.questions(None, None)))
    (request,) = made.requests(question, 0)
    # five shots and the question are 3,000 tokens, four 2,500, three 2,000: the first below 4096 - 2048
    assert request.prompt.count("Question:\n") == 4
    assert request.prompt.startswith("The following") and request.prompt.endswith("step by step.")
    assert (request.max_new_tokens, request.stop, request.temperature) == (2048, ("Question:",), 0.0)
    assert request.prompt[: request.shared].endswith("\n\n")


def test_only_examples_of_the_own_category_are_shown(tmp_path):
    for question in task(mmlu_pro_folder(tmp_path), form="mcf").questions(None, None):
        other = {"math": "computer science", "computer science": "math"}[question.category]
        assert f"of {question.category}?" in question.prompt and f"of {other}?" not in question.prompt


@pytest.mark.parametrize("form", ["mcf", "cf"])
def test_log_likelihood_forms_choose_the_likeliest(tmp_path, form):
    folder = mmlu_pro_folder(tmp_path)
    made = task(folder, form=form)
    gold = {}
    for question in made.questions(None, None):
        index = "ABC".index(question.target)
        answer = question.target if form == "mcf" else question.choices[index]
        gold[question.prompt] = f" {answer}"
    summary = run_task(Scripted(value=lambda r: -1.0 if gold[r.context] == r.continuation else -9.0), made)
    assert summary["metrics"]["score"] == 1.0
    summary = run_task(Scripted(value=lambda r: -9.0 if gold[r.context] == r.continuation else -1.0), made)
    assert summary["metrics"]["score"] == 0.0


def test_unextracted_answers_get_the_published_guess_and_are_counted(tmp_path):
    made = task(mmlu_pro_folder(tmp_path))
    metrics = run_task(Scripted(say=lambda r: "no letter here"), made)["metrics"]
    assert metrics["unextracted"] == 1.0 and metrics["score_strict"] == 0.0
    assert metrics["n"] == 8 and metrics["chance"] == pytest.approx(sum([1 / 3, 1 / 4, 1 / 5, 1 / 6] * 2) / 8)
    right = run_task(Scripted(say=lambda r: "The answer is (A)."), made)["metrics"]
    assert right["score"] == right["score_strict"] == right["majority"] == 0.5
    assert right["by_category"]["math"]["n"] == 4


def test_a_limit_takes_from_every_category_and_grows_in_place(tmp_path):
    made = task(mmlu_pro_folder(tmp_path))
    few = {q.id for q in made.questions(2, None)}
    more = {q.id for q in made.questions(5, None)}
    assert len(few) == 2 and few < more
    assert {q.category for q in made.questions(2, None)} == {"math", "computer science"}


def test_parquet_and_jsonl_are_the_same_data(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = mmlu_pro_folder(tmp_path / "a")
    other = tmp_path / "b"
    other.mkdir()
    for split in ("test", "validation"):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        parquet.write_table(arrow.Table.from_pylist(rows), str(other / f"{split}-00000-of-00001.parquet"))
    assert task(folder).data_hash() == task(other).data_hash()


def test_bad_data_is_named(tmp_path):
    with pytest.raises(EvalError, match="--data"):
        task(None).data_hash()
    folder = mmlu_pro_folder(tmp_path)
    (folder / "validation.jsonl").unlink()
    with pytest.raises(EvalError, match="validation"):
        list(task(folder).questions(None, None))
    with pytest.raises(EvalError, match="form"):
        task(folder, form="essay")


@pytest.mark.parametrize("samples", [1, 3])
def test_several_samples_are_drawn_with_seeds_of_their_own(tmp_path, samples):
    made = task(mmlu_pro_folder(tmp_path), samples=samples)
    model = Scripted(say=lambda r: "The answer is (B)." if r.seed % 2 else "The answer is (A).")
    summary = run_task(
        model,
        made,
    )
    assert summary["metrics"]["samples"] == 8 * samples
    assert len({request.seed for request in model.asked}) == 8 * samples
    assert {request.temperature for request in model.asked} == ({0.0} if samples == 1 else {1.0})
