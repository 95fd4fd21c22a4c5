"""A run goes on where it stopped, refuses to mix settings, evaluates weights in memory without touching them,
and adds up by questions."""

import json

import pytest
from eval_cases import Scripted, mmlu_pro_folder, own_model

from earlyfusion.eval.benchmarks.base import build_task, evenly, known_benchmarks, spread, summarize
from earlyfusion.eval.benchmarks.mmlu_pro import MmluPro
from earlyfusion.eval.harness import RECORDS, append_records, read_records, run_task
from earlyfusion.eval.models.engine import EngineModel
from earlyfusion.eval.models.tokens import weights_of
from earlyfusion.eval.protocol import EvalError, GenerateRequest, ScoreRequest, TaskOptions, prompt_hash


def say(request):
    return f"thinking {len(request.prompt)}. The answer is ({'ABC'[len(request.prompt) % 3]})."


@pytest.fixture
def data(tmp_path):
    return mmlu_pro_folder(tmp_path / "data")


def run(data, out=None, model=None, *, chunk=64, limit=None, **options):
    task = MmluPro(TaskOptions(data=data, **options))
    return run_task(model or Scripted(say=say), task, out=out, chunk=chunk, limit=limit)


class Stopping(Scripted):
    """Fails after some questions, as a killed process does."""

    after = 0

    def generate(self, requests):
        if len(self.asked) + len(requests) > self.after:
            raise KeyboardInterrupt
        return super().generate(requests)


@pytest.mark.parametrize("after, torn", [(0, False), (3, True), (5, False)])
def test_a_stopped_run_goes_on_and_ends_like_one_that_was_not(data, tmp_path, after, torn):
    whole = run(data, tmp_path / "whole", chunk=1)
    stopped = Stopping(say=say)
    stopped.after = after
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "parts", stopped, chunk=1)
    first, second = (tmp_path / place / "mmlu_pro" / RECORDS for place in ("whole", "parts"))
    assert len(second.read_text().splitlines()) == after
    if torn:
        with second.open("a") as file:
            file.write('{"id": "10", "rep')
    model = Scripted(say=say)
    assert run(data, tmp_path / "parts", model, chunk=1)["metrics"] == whole["metrics"]
    assert len(model.asked) == 8 - after and first.read_text() == second.read_text()
    again = Scripted(say=say)
    assert run(data, tmp_path / "parts", again)["metrics"] == whole["metrics"] and again.asked == []


def test_a_larger_limit_goes_on_a_smaller_one_is_refused(data, tmp_path):
    run(data, tmp_path, limit=3)
    model = Scripted(say=say)
    assert run(data, tmp_path, model, limit=7)["metrics"]["n"] == 7 and len(model.asked) == 4
    with pytest.raises(EvalError, match="limit: 7 there, 2 now"):
        run(data, tmp_path, limit=2)


@pytest.mark.parametrize("change", ["seed", "model", "data", "temperature"])
def test_a_folder_is_not_continued_with_other_settings(data, tmp_path, change):
    run(data, tmp_path / "out")
    model, given = Scripted(say=say), {"seed": {"seed": 1}, "temperature": {"temperature": 0.5}}
    if change == "model":
        model.identity = lambda: {"weights_sha256": "other"}
    if change == "data":
        mmlu_pro_folder(data, per_category=5)
    with pytest.raises(EvalError, match="holds another run"):
        run(data, tmp_path / "out", model, **given.get(change, {}))


def test_answers_to_another_prompt_are_not_taken_over(data, tmp_path):
    run(data, tmp_path)
    path = tmp_path / "mmlu_pro" / RECORDS
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(first) | {"prompt_hash": "0" * 16}) + "\n" + "".join(rest))
    with pytest.raises(EvalError, match="another prompt"):
        run(data, tmp_path)


def test_prompt_hashes_tell_prompts_apart_and_nothing_else():
    asked = [GenerateRequest("x", 4), GenerateRequest("x", 4, shared=1, seed=9)]  # equal but for hints
    asked += [GenerateRequest("y", 4), GenerateRequest("x", 5), GenerateRequest("x", 4, stop=("z",))]
    asked += [ScoreRequest("x", "4"), ScoreRequest("ab", "c"), ScoreRequest("a", "bc")]
    hashes = [prompt_hash([request]) for request in asked]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 7


def test_every_registered_task_can_be_built():
    for name in known_benchmarks():
        try:
            made = build_task(name)
        except EvalError as error:  # tasks that look into their data at once
            assert "--data" in str(error)
            continue
        assert made.name == name and made.kind in ("generate", "score", "rolling")
    with pytest.raises(EvalError, match="did you mean 'mmlu_pro'"):
        build_task("mmlupro")


@pytest.mark.parametrize("mode", [True, False])
def test_weights_in_memory_are_evaluated_and_left_as_they_are(data, tmp_path, mode):
    wrapped = own_model(0)
    model = wrapped.model.train(mode)
    before = weights_of(model)

    def logprobs(place):
        for form in ("mcf", "cf"):
            # As the training loop asks: an engine of its own every time.
            own = EngineModel(model, wrapped.tokenizer)
            assert run(data, tmp_path / place, own, form=form, limit=6)["metrics"]["n"] == 6
        rows = read_records(tmp_path / place / "mmlu_pro_mcf" / RECORDS).values()
        return [row["logprobs"] for row in rows]

    known = logprobs("before")
    assert model.training == mode and weights_of(model) == before
    for parameter in model.parameters():  # other weights, other result: nothing is remembered
        parameter.data.zero_()
    assert all(max(row) - min(row) < 1e-4 for row in logprobs("after"))
    assert not all(max(row) - min(row) < 1e-4 for row in known)


def test_a_record_counts_once_and_may_hold_any_line_end_and_half_a_character(tmp_path):
    record = {"id": "half \ud83d", "repeat": 0, "answer": "one\u2028two\x85three\x0bfour\r"}
    append_records(tmp_path / RECORDS, [{**record, "answer": ""}, record, {**record, "repeat": 1}])
    with (tmp_path / RECORDS).open("ab") as file:
        file.write(b'{"id": "torn')
    expected = {(record["id"], repeat): {**record, "repeat": repeat} for repeat in (0, 1)}
    assert read_records(tmp_path / RECORDS) == expected


def test_summaries_are_means_over_questions():
    rows = [("1", "x", 1.0, "A"), ("1", "x", 0.0, None), ("2", "y", 1.0, "A"), ("2", "y", 1.0, "A")]
    records = [{"id": i, "category": c, "score": s, "extracted": e} for i, c, s, e in rows]
    found = summarize(records)
    assert (found["n"], found["samples"], found["score"], found["unextracted"]) == (2, 4, 0.75, 0.25)
    assert found["by_category"]["x"] == {"n": 1, "score": 0.5, "standard_error": None}
    assert found["standard_error"] == pytest.approx(0.25)
    assert summarize(records[:1])["standard_error"] is None


def test_limits_are_spread_in_turn():
    categories = ["a", "a", "a", "b", "c", "c"]
    for limit, chosen in ((3, [0, 3, 4]), (5, [0, 1, 3, 4, 5]), (None, list(range(6)))):
        assert spread(list(range(6)), categories, limit) == chosen
    assert evenly(list(range(6)), 3) == [0, 2, 4] and evenly([1, 2], 9) == [1, 2]
