"""lm-evaluation-harness and our evaluator say the same about the same model, and its tasks run on our
directories."""

import json
import sys
from pathlib import Path

import pytest
from eval_cases import MMLU_PRO, hf_folder, hf_model, mmlu_pro_folder, own_model, write_jsonl

from earlyfusion.eval.benchmarks.base import choice_requests
from earlyfusion.eval.benchmarks.mmlu_pro import MmluPro
from earlyfusion.eval.protocol import EvalError, RollingRequest, ScoreRequest, TaskOptions
from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline import cli

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
LOGPROB = 1e-4  # the bar: fp32, sums over options of several tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf"), "llama", seed=4)


@pytest.fixture(scope="module")
def theirs(folder):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4)


def instances(requests):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type="loglikelihood", doc={}, arguments=(r.context, r.continuation), idx=i)
        for i, r in enumerate(requests)
    ]


@pytest.mark.parametrize("form", ["mcf", "cf"])
def test_every_log_probability_is_lm_evals(tmp_path, folder, theirs, form):
    made = MmluPro(TaskOptions(data=mmlu_pro_folder(tmp_path), form=form))
    model = hf_model(folder, batch_size=8)
    for question in made.questions(None, 3):
        requests = made.requests(question, 0)
        ours = model.loglikelihood(requests)
        expected = theirs.loglikelihood(instances(requests), disable_tqdm=True)
        assert [answer.sum for answer in ours] == pytest.approx([value for value, _ in expected], abs=LOGPROB)
        assert [answer.greedy for answer in ours] == [greedy for _, greedy in expected]
        best = max(range(len(ours)), key=lambda i: ours[i].sum)
        assert best == max(range(len(ours)), key=lambda i: expected[i][0])


@pytest.mark.skipif(not (MMLU_PRO / "test.jsonl").is_file(), reason="the MMLU-Pro files are not here")
def test_real_questions_give_lm_evals_log_probabilities(tmp_path, folder, theirs):
    made = MmluPro(TaskOptions(data=MMLU_PRO, form="mcf"))
    model = hf_model(folder, batch_size=8)
    for question in list(made.questions(14, 1)):
        requests = made.requests(question, 0)
        expected = theirs.loglikelihood(instances(requests), disable_tqdm=True)
        assert [a.sum for a in model.loglikelihood(requests)] == pytest.approx(
            [v for v, _ in expected], abs=LOGPROB
        )


def test_odd_contexts_are_split_as_lm_eval_splits_them(folder, theirs):
    requests = [
        *choice_requests("", ["the fox", "red"]),
        *choice_requests("the quick  ", ["fox", " brown"]),
        *choice_requests("a\n\n", ["b"]),
        *choice_requests("Q: what color\nA:", [" red", " teal blue", "red"]),
    ]
    expected = theirs.loglikelihood(instances(requests), disable_tqdm=True)
    ours = hf_model(folder).loglikelihood(requests)
    assert [answer.sum for answer in ours] == pytest.approx([value for value, _ in expected], abs=LOGPROB)


def test_whole_texts_cost_what_lm_eval_says(folder, theirs):
    from lm_eval.api.instance import Instance

    texts = ["the quick brown fox jumps over the lazy dog", "red"]
    given = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(t,), idx=i)
        for i, t in enumerate(texts)
    ]
    expected = theirs.loglikelihood_rolling(given, disable_tqdm=True)
    ours = hf_model(folder).rolling([RollingRequest(text) for text in texts])
    assert [answer.sum for answer in ours] == pytest.approx(expected, abs=LOGPROB)


def piqa_rows():
    words = "red teal blue circle fox dog lazy brown".split()
    return [
        {
            "goal": f"find the {words[n]}",
            "sol1": f"look {words[-n]} and {words[n - 3]}",
            "sol2": f"ask the {words[n - 1]}",
            "label": n % 2,
        }
        for n in range(8)
    ]


@pytest.mark.slow
def test_a_harness_task_gives_our_numbers_on_one_of_our_directories(tmp_path, capsys):
    wrapped = own_model(5)
    directory = save_model(wrapped.model, wrapped.tokenizer, tmp_path / "model")
    data = write_jsonl(tmp_path / "data" / "validation.jsonl", piqa_rows())
    out = tmp_path / "out"
    arguments = [
        "--model",
        str(directory),
        "--harness",
        "lm-eval",
        "--tasks",
        "piqa",
        "--data",
        f"piqa={data}",
    ]
    assert cli.main(["eval", *arguments, "--out", str(out)]) == 0
    assert "acc_norm" in capsys.readouterr().out
    (found,) = json.loads((out / "lm_eval.json").read_text())["results"].values()
    hits, normalised = [], []
    for row in piqa_rows():
        options = [f" {row[key]}" for key in ("sol1", "sol2")]
        prompt = f"Question: {row['goal']}\nAnswer:"
        sums = [score.sum for score in wrapped.loglikelihood([ScoreRequest(prompt, o) for o in options])]
        hits.append(sums.index(max(sums)) == row["label"])
        per_character = [value / len(option.strip()) for value, option in zip(sums, options)]
        normalised.append(per_character.index(max(per_character)) == row["label"])
    assert found["acc,none"] == pytest.approx(sum(hits) / len(hits))
    assert found["acc_norm,none"] == pytest.approx(sum(normalised) / len(normalised))


@pytest.mark.slow
def test_generating_tasks_and_groups_run_on_local_files(tmp_path):
    from earlyfusion.eval.benchmarks.lm_eval import evaluate, lm_eval_model

    folder = mmlu_pro_folder(tmp_path)
    found = evaluate(
        lm_eval_model(ShortAnswers(own_model(0))), ["mmlu_pro_math"], {"mmlu_pro": folder}, limit=2
    )
    (scores,) = found["results"].values()
    assert scores["exact_match,custom-extract"] == 0.5  # "B" is right for one of the first two


class ShortAnswers:
    """A Model whose generations say B."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def generate(self, requests):
        from earlyfusion.eval.protocol import Generation

        assert all(
            r.stop == ("Question:",) and r.max_new_tokens == 2048 and r.temperature == 0 for r in requests
        )
        assert all(r.prompt.count("Question:") == 6 for r in requests)
        return [Generation("The answer is (B).", 5, "stop") for _ in requests]


def test_private_benchmarks_are_refused(tmp_path):
    from earlyfusion.eval.benchmarks.lm_eval import evaluate, lm_eval_model

    with pytest.raises(EvalError, match="caches question text"):
        evaluate(lm_eval_model(own_model(0)), ["gpqa_diamond_zeroshot"], {})
    with pytest.raises(EvalError, match="no such task"):
        evaluate(lm_eval_model(own_model(0)), ["no_such_task"], {})


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    from earlyfusion.eval.benchmarks.lm_eval import require_lm_eval

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(EvalError, match=r"earlyfusion\[eval\]"):
        require_lm_eval()
    assert Path(lm_eval.__file__).is_file()
