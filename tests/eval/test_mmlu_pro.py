"""MMLU-Pro: prompts, context rule, guess and score are the published ones."""

import pytest
from eval_cases import MMLU_PRO, Scripted, mmlu_pro_folder

from earlyfusion.data.row_files import read_rows
from earlyfusion.data.tasks.scoring import mmlu_pro_letter
from earlyfusion.eval.benchmarks.mmlu_pro import MmluPro
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import EvalError, TaskOptions

needs_data = pytest.mark.skipif(
    not (MMLU_PRO / "test.jsonl").is_file(), reason="the MMLU-Pro files are not here"
)
PUBLISHED = MMLU_PRO / "published_outputs_mistral-7b-v0.1.jsonl.gz"


@pytest.fixture
def data(tmp_path):
    return mmlu_pro_folder(tmp_path / "data")


def task(folder, **options):
    return MmluPro(TaskOptions(data=folder, **options))


@needs_data
@pytest.mark.slow
def test_published_outputs_give_the_published_predictions_and_total():
    right = {1: 0, 3: 0}
    rows = read_rows(PUBLISHED)
    for row in rows:
        for levels in right:
            text = str(row.get("generated_text") or row["model_outputs"])
            letter, _ = mmlu_pro_letter(text, levels) or (None, 0)
            right[levels] += letter == row["answer"]
            assert levels == 3 or letter == (row["pred"] or None)
    shares = {levels: round(100 * count / len(rows), 2) for levels, count in right.items()}
    assert len(rows) == 12032 and shares == {1: 29.77, 3: 30.08}


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
    validation = read_rows(MMLU_PRO / "validation.jsonl")
    for question in task(MMLU_PRO).questions(14):
        shots = [example for example in validation if example["category"] == question.category][:5]
        shown = "".join(utils.format_cot_example(example) for example in shots)
        shown += utils.format_cot_example(question.meta["row"], including_answer=False)
        intro, found, rest = question.prompt.partition("letter choice.\n\n\n\n")
        assert found and question.category in intro and rest == shown


def test_the_prompt_is_written_out_as_published(data):
    question = next(iter(task(data, shots=1).questions()))
    assert (
        question.prompt
        == "The following are multiple choice questions (with answers) about math. Think step by step and"
        ' then finish your answer with "the answer is (X)" where X is the correct letter'
        " choice.\n\n\n\nQuestion:\nExample 0 of math?\nOptions:\nA. one\nB. two\nC. three\nAnswer: Let's"
        " think step by step. Because 0. The answer is (B).\n\nQuestion:\nWhich is number 0 of"
        " math?\nOptions:\nA. option 000\nB. option 001\nC. option 002\nAnswer: Let's think step by step."
    )
    assert len(question.choices) == 3  # "N/A" is gone, and so are the blanks around the right one


def test_examples_are_dropped_until_the_prompt_fits(data):
    model, made = Scripted(), task(data)
    model.count_tokens = lambda text: 500 * text.count("Question:\n")
    made.prepare(model)
    (request,) = made.requests(next(iter(made.questions())), 0)
    # five shots and the question are 3,000 tokens, four 2,500, three 2,000: the first below 4096 - 2048
    assert request.prompt.count("Question:\n") == 4
    assert request.prompt.startswith("The following") and request.prompt.endswith("step by step.")
    assert (request.max_new_tokens, request.stop, request.temperature) == (2048, ("Question:",), 0.0)
    assert request.prompt[: request.shared].endswith("\n\n")


@pytest.mark.parametrize("form", ["mcf", "cf"])
def test_log_likelihood_forms_choose_the_likeliest(data, form):
    made, gold = task(data, form=form), {}
    for question in made.questions():
        letter = question.target
        gold[question.prompt] = letter if form == "mcf" else question.choices["ABC".index(letter)]
    knows = lambda r: float(f" {gold[r.context]}" == r.continuation)
    assert run_task(Scripted(value=knows), made)["metrics"]["score"] == 1.0
    assert run_task(Scripted(value=lambda r: -knows(r)), made)["metrics"]["score"] == 0.0


def test_unextracted_answers_get_the_published_guess_and_are_counted(data):
    metrics = run_task(Scripted(say=lambda r: "no letter here"), task(data))["metrics"]
    assert (metrics["n"], metrics["unextracted"], metrics["score_strict"]) == (8, 1.0, 0.0)
    right = run_task(Scripted(say=lambda r: "The answer is (A)."), task(data))["metrics"]
    assert right["score"] == right["score_strict"] == right["majority"] == 0.5


def test_parquet_and_jsonl_are_the_same_data(data, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for split in ("test", "validation"):
        rows = arrow.Table.from_pylist(read_rows(data / f"{split}.jsonl"))
        parquet.write_table(rows, str(tmp_path / f"{split}-00000-of-00001.parquet"))
    assert task(data).data_hash() == task(tmp_path).data_hash()


def test_bad_data_is_named(data):
    with pytest.raises(EvalError, match="--data"):
        task(None).data_hash()
    (data / "validation.jsonl").unlink()
    with pytest.raises(EvalError, match="validation"):
        list(task(data).questions())


@pytest.mark.parametrize("samples", [1, 3])
def test_several_samples_are_drawn_with_seeds_of_their_own(data, samples):
    model = Scripted(say=lambda r: f"The answer is ({'AB'[r.seed % 2]}).")
    assert run_task(model, task(data, samples=samples))["metrics"]["samples"] == 8 * samples
    assert len({request.seed for request in model.asked}) == 8 * samples
    assert {request.temperature for request in model.asked} == ({0.0} if samples == 1 else {1.0})
