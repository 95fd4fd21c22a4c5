"""The text ladder: readers ask as published and add up right."""

import json
import math

import pytest
from eval_cases import SHARED, Scripted, own_model, write_jsonl

from earlyfusion.eval.benchmarks.base import grouped, spread, standard_error, summarize
from earlyfusion.eval.benchmarks.bpb import bits_per_byte as own_bits
from earlyfusion.eval.harness import RunOptions, run_task
from earlyfusion.eval.protocol import EvalError, TaskOptions, build_task

BBH, GSM8K = SHARED / "data" / "bbh", SHARED / "data" / "gsm8k"
BITS = 1e-5  # fp32 sums of ln p over differently packed rows


def task(name, data, **options):
    return build_task(name, TaskOptions(data=data, **options))


def test_bits_per_byte_are_those_of_the_training_loops_measure(tmp_path):
    model = own_model(0, batch_tokens=64)
    texts = ["the quick brown fox jumps over the lazy dog", "red circle, teal circle; ééé", "return 0\n" * 12]
    path = write_jsonl(tmp_path / "held.jsonl", [{"text": text} for text in texts])
    metrics = run_task(model, task("bits_per_byte", path))["metrics"]
    nats = -sum(answer.sum for answer in model.rolling([_rolling(text) for text in texts]))
    assert metrics["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / sum(len(t.encode()) for t in texts), rel=BITS
    )
    assert metrics["score"] == -metrics["bits_per_byte"]
    # the loop's measure also pays for [EOS] at the end of every document
    loop = own_bits(model.model, model.tokenizer, texts, max_length=64)
    ends = [
        ([model.begin_id, *model.encode(text, False)][-64:], [model.model.config.text.eos_token_id])
        for text in texts
    ]
    lengths = [len(model.encode(text, False)) for text in texts]
    if all(length < 64 for length in lengths):
        paid = -sum(answer.sum for answer in model.loglikelihood_ids(ends))
        assert loop.bits_per_byte == pytest.approx((nats + paid) / math.log(2) / loop.bytes, rel=BITS)


def _rolling(text):
    from earlyfusion.eval.protocol import RollingRequest

    return RollingRequest(text)


def test_blimp_compares_whole_sentences(tmp_path):
    rows = [
        {
            "sentence_good": f"cats sleep {n}",
            "sentence_bad": f"cats sleeps {n}",
            "UID": "agree",
            "pairID": str(n),
        }
        for n in range(4)
    ]
    write_jsonl(tmp_path / "agree.jsonl", rows)
    made = task("blimp", tmp_path)
    model = Scripted(value=lambda r: -2.0 if "sleeps" in r.continuation else -1.0)
    metrics = run_task(model, made)["metrics"]
    assert metrics["score"] == 1.0 and metrics["chance"] == 0.5 and metrics["majority"] is None
    assert {request.context for request in model.asked} == {""}


def test_piqa_reports_both_norms(tmp_path):
    rows = [{"goal": "open it", "sol1": "pull", "sol2": "pull " * 10 + "hard"}] * 2
    write_jsonl(tmp_path / "valid.jsonl", rows)
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    model = Scripted(value=lambda r: -4.0 if len(r.continuation) < 10 else -10.0)
    metrics = run_task(model, task("piqa", tmp_path))["metrics"]
    # per character the long one wins (10/54 < 4/4), by sums the short one; each is right once
    assert (metrics["score"], metrics["score_sum"]) == (0.5, 0.5)
    records = [made for made in model.asked]
    assert records[0].context == "Question: open it\nAnswer:" and records[0].continuation == " pull"


@pytest.mark.skipif(not BBH.is_dir(), reason="the BBH files are not here")
def test_bbh_files_are_read_and_options_found():
    made = task("bbh", BBH)
    assert len(made.tasks()) == 27 and sum(map(len, made.tasks().values())) == 6511
    questions = list(made.questions(None, None, 0))
    for question in questions:
        assert question.target in question.choices or question.category in (
            "ruin_names",
            "movie_recommendation",
        ), question.id
    by_task = {question.category: question.choices for question in questions}
    assert set(by_task["navigate"]) == {"Yes", "No"} and "dyck_languages" not in by_task
    assert by_task["logical_deduction_three_objects"] == ("(A)", "(B)", "(C)")
    assert by_task["object_counting"] == tuple(sorted(set(by_task["object_counting"])))


@pytest.mark.skipif(not BBH.is_dir(), reason="the BBH files are not here")
@pytest.mark.parametrize("form", ["mcf", "direct"])
def test_bbh_shots_are_not_asked(form):
    made = task("bbh", BBH, form=form, extra={"tasks": "navigate,object_counting"})
    rows = made.tasks()
    gold = {row["input"]: row["target"] for examples in rows.values() for row in examples}

    def asked(prompt):
        return prompt.rsplit("Q: ", 1)[1].removesuffix("\nA:")

    right = Scripted(
        say=lambda r: f" {gold[asked(r.prompt)]}",
        value=lambda r: 0.0 if r.continuation.strip() == gold[asked(r.context)] else -9.0,
    )
    metrics = run_task(right, made, RunOptions(limit=20))["metrics"]
    assert metrics["score"] == 1.0 and metrics["n"] == 20 and set(metrics["by_category"]) == set(rows)
    prompt = getattr(right.asked[0], "prompt", None) or right.asked[0].context
    assert prompt.count("Q: ") == 4 and all(row["input"] in prompt for row in next(iter(rows.values()))[:3])
    assert 0.3 < metrics["majority"] < 0.7


def test_bbh_worked_examples_come_from_the_users_folder(tmp_path):
    (tmp_path / "bbh").mkdir()
    rows = {"examples": [{"input": f"is {n} odd?", "target": "Yes" if n % 2 else "No"} for n in range(6)]}
    (tmp_path / "bbh" / "odd.json").write_text(json.dumps(rows))
    (tmp_path / "odd.txt").write_text(
        "canary\n-----\nTell odd from even.\n\nQ: is 7 odd?\nA: Let's think step by step.\nso the answer is"
        " Yes.\n\nQ: b\nA: c"
    )
    made = task("bbh", tmp_path / "bbh", form="cot", extra={"cot": str(tmp_path)})
    model = Scripted(say=lambda r: "Hm. So the answer is Yes.")
    metrics = run_task(model, made, RunOptions(shots=1))["metrics"]
    assert metrics["score"] == 0.5 and metrics["n"] == 6
    assert (
        model.asked[0].prompt
        == "Tell odd from even.\n\nQ: is 7 odd?\nA: Let's think step by step.\nso the answer is Yes.\n\n"
        "Q: is 0 odd?\nA: Let's think step by step.\n"
    )
    with pytest.raises(EvalError, match="did you mean 'odd'"):
        task("bbh", tmp_path / "bbh", extra={"tasks": "od"}).tasks()


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
def test_gsm8k_own_solutions_are_right():
    made = task("gsm8k", GSM8K)
    rows = {
        json.loads(line)["question"]: json.loads(line)["answer"]
        for line in (GSM8K / "test.jsonl").read_text().splitlines()
    }
    model = Scripted(say=lambda r: rows[r.prompt.rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")])
    metrics = run_task(model, made)["metrics"]
    assert metrics["n"] == 1319 and metrics["score"] == metrics["score_strict"] == 1.0
    assert model.asked[0].prompt.count("Question: ") == 6 and model.asked[0].stop[0] == "Question:"


# adding up


def test_summaries_are_means_over_questions():
    records = [
        {"id": i, "repeat": r, "category": c, "score": s, "extracted": e, "target": "A", "chance": 0.25}
        for i, r, c, s, e in [
            ("1", 0, "x", 1.0, "A"),
            ("1", 1, "x", 0.0, None),
            ("2", 0, "y", 1.0, "A"),
            ("2", 1, "y", 1.0, "A"),
        ]
    ]
    found = summarize(records)
    assert (found["n"], found["samples"], found["score"], found["unextracted"]) == (2, 4, 0.75, 0.25)
    assert found["by_category"]["x"] == {"n": 1, "score": 0.5} and found["standard_error"] == pytest.approx(
        0.25
    )
    assert standard_error([1.0]) is None


def test_limits_are_spread_in_turn_and_groups_stay_together():
    categories = ["a", "a", "a", "b", "c", "c"]
    assert spread(list(range(6)), categories, 3) == [0, 3, 4]
    assert spread(list(range(6)), categories, 5) == [0, 1, 3, 4, 5]
    assert spread(list(range(6)), categories, None) == list(range(6))
    assert grouped([0, 1, 2, 3], ["b", "a", "b", "a"]) == [0, 2, 1, 3]
    with pytest.raises(EvalError, match="at least 1"):
        spread([1, 2], ["", ""], 0)
