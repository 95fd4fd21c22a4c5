"""lm-evaluation-harness and our evaluator say the same about the same model, and its tasks run on our
directories."""

import json

import pytest
from eval_cases import MMLU_PRO, hf_folder, hf_model, mmlu_pro_folder, own_model, write_jsonl

from earlyfusion.eval.benchmarks.base import choice_requests, score_choices
from earlyfusion.eval.benchmarks.lm_eval import evaluate, lm_eval_model
from earlyfusion.eval.benchmarks.mmlu_pro import MmluPro
from earlyfusion.eval.protocol import EvalError, Generation, RollingRequest, TaskOptions
from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline import cli

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
LOGPROB = 1e-4  # the bar: fp32, sums over options of several tokens


@pytest.fixture(scope="module", autouse=True)
def one_index():
    """The list of all its tasks, which takes seconds to read."""
    from lm_eval import tasks

    made = tasks.TaskManager
    index = made()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TaskManager", lambda **given: made(**given) if given else index)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf"), "llama", seed=4)


@pytest.fixture(scope="module")
def theirs(folder):
    """A function that asks the harness' own model: kind, argument tuples -> answers."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4)

    def ask(kind, arguments):
        asked = [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]
        return getattr(model, kind)(asked, disable_tqdm=True)

    return ask


def same(theirs, model, requests):
    expected = theirs("loglikelihood", [(r.context, r.continuation) for r in requests])
    ours = model.loglikelihood(requests)
    assert [answer.sum for answer in ours] == pytest.approx([value for value, _ in expected], abs=LOGPROB)
    assert [answer.greedy for answer in ours] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("form", ["mcf", "cf"])
def test_every_log_probability_is_lm_evals(tmp_path, folder, theirs, form):
    made = MmluPro(TaskOptions(data=mmlu_pro_folder(tmp_path), form=form, shots=3))
    model = hf_model(folder, batch_size=8)
    for question in made.questions():
        same(theirs, model, made.requests(question, 0))


@pytest.mark.skipif(not (MMLU_PRO / "test.jsonl").is_file(), reason="the MMLU-Pro files are not here")
def test_real_questions_give_lm_evals_log_probabilities(folder, theirs):
    made = MmluPro(TaskOptions(data=MMLU_PRO, form="mcf", shots=1))
    model = hf_model(folder, batch_size=8)
    for question in made.questions(14):
        same(theirs, model, made.requests(question, 0))


def test_odd_contexts_are_split_as_lm_eval_splits_them(folder, theirs):
    odd = {"": ["the fox", "red"], "the quick  ": ["fox", " brown"], "a\n\n": ["b"]}
    odd["Q: what color\nA:"] = [" red", " teal blue", "red"]
    requests = []
    for context, continuations in odd.items():
        requests += choice_requests(context, continuations)
    same(theirs, hf_model(folder), requests)


def test_whole_texts_cost_what_lm_eval_says(folder, theirs):
    texts = ["the quick brown fox jumps over the lazy dog", "red"]
    expected = theirs("loglikelihood_rolling", [(text,) for text in texts])
    ours = hf_model(folder).rolling([RollingRequest(text) for text in texts])
    assert [answer.sum for answer in ours] == pytest.approx(expected, abs=LOGPROB)


@pytest.mark.slow
def test_a_harness_task_gives_our_numbers_on_one_of_our_directories(tmp_path, capsys):
    wrapped, words = own_model(5), "red teal blue circle fox dog lazy brown".split()
    directory = save_model(wrapped.model, wrapped.tokenizer, tmp_path / "model")
    rows, records = [], []
    for n, word in enumerate(words):
        options = [f"look {words[-n]} and {words[n - 3]}", f"ask the {words[n - 1]}"]
        rows.append({"goal": f"find the {word}", "sol1": options[0], "sol2": options[1], "label": n % 2})
        asked = choice_requests(f"Question: find the {word}\nAnswer:", [f" {option}" for option in options])
        records.append(score_choices(options, wrapped.loglikelihood(asked), n % 2, letters=False))
    data = write_jsonl(tmp_path / "data" / "validation.jsonl", rows)
    arguments = ["--model", directory, "--harness", "lm-eval", "--tasks", "piqa", "--data", f"piqa={data}"]
    assert cli.main(["eval", *map(str, arguments), "--out", str(tmp_path / "out")]) == 0
    assert "acc_norm" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "out" / "lm_eval.json").read_text())["results"].values()
    for name, key in (("acc", "score_sum"), ("acc_norm", "score")):
        assert found[f"{name},none"] == pytest.approx(sum(record[key] for record in records) / 8)


@pytest.mark.slow
def test_generating_tasks_and_groups_run_on_local_files(tmp_path):
    model = own_model(0)

    def generate(requests):
        for r in requests:
            assert (r.stop, r.max_new_tokens, r.temperature) == (("Question:",), 2048, 0)
            assert r.prompt.count("Question:") == 6
        return [Generation("The answer is (B).", 5, "stop") for _ in requests]

    model.generate = generate
    data = {"mmlu_pro": mmlu_pro_folder(tmp_path)}
    (scores,) = evaluate(lm_eval_model(model), ["mmlu_pro_math"], data, limit=2)["results"].values()
    assert scores["exact_match,custom-extract"] == 0.5  # "B" is right for one of the first two


def test_private_and_unknown_benchmarks_are_refused():
    names = {"gpqa_diamond_zeroshot": "caches question text", "no_such_task": "no such task"}
    for name, message in names.items():
        with pytest.raises(EvalError, match=message):
            evaluate(lm_eval_model(own_model(0)), [name], {})
