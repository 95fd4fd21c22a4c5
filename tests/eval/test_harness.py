"""A run goes on where it stopped, refuses to mix settings, and evaluates weights in memory without touching
them."""

import json

import pytest
import torch
from eval_cases import Scripted, mmlu_pro_folder, own_model

from earlyfusion.eval.benchmarks.mmlu_pro import MmluPro
from earlyfusion.eval.harness import (
    RECORDS,
    RunOptions,
    append_records,
    evaluate_in_memory,
    label_of,
    read_records,
    run_task,
)
from earlyfusion.eval.protocol import EvalError, GenerateRequest, ScoreRequest, TaskOptions, prompt_hash
from earlyfusion.eval.registry import build_task, known_benchmarks


def say(request):
    return f"thinking {len(request.prompt)}. The answer is ({'ABC'[len(request.prompt) % 3]})."


def task(folder, **options):
    return MmluPro(TaskOptions(data=folder, **options))


class Stopping(Scripted):
    """Fails after some questions, as a killed process does."""

    def __init__(self, after):
        super().__init__(say=say)
        self.after = after

    def generate(self, requests):
        if len(self.asked) + len(requests) > self.after:
            raise KeyboardInterrupt
        return super().generate(requests)


@pytest.mark.parametrize("after", [0, 3, 5])
@pytest.mark.parametrize("torn", [False, True])
def test_a_stopped_run_goes_on_and_ends_like_one_that_was_not(tmp_path, after, torn):
    folder = mmlu_pro_folder(tmp_path / "data")
    whole = run_task(Scripted(say=say), task(folder), RunOptions(chunk=1), out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_task(Stopping(after), task(folder), RunOptions(chunk=1), out=tmp_path / "parts")
    records = tmp_path / "parts" / "mmlu_pro" / "records.jsonl"
    assert len(records.read_text().splitlines()) == after
    if torn:
        with records.open("a") as file:
            file.write('{"id": "10", "rep')
    model = Scripted(say=say)
    resumed = run_task(model, task(folder), RunOptions(chunk=1), out=tmp_path / "parts")
    assert len(model.asked) == 8 - after
    assert resumed["metrics"] == whole["metrics"]
    lines = {
        place: (tmp_path / place / "mmlu_pro" / "records.jsonl").read_text() for place in ("whole", "parts")
    }
    assert lines["whole"] == lines["parts"]


def test_a_finished_run_asks_nothing_again(tmp_path):
    folder = mmlu_pro_folder(tmp_path / "data")
    first = run_task(Scripted(say=say), task(folder), out=tmp_path / "out")
    model = Scripted(say=say)
    assert run_task(model, task(folder), out=tmp_path / "out")["metrics"] == first["metrics"]
    assert model.asked == []


def test_a_larger_limit_goes_on_a_smaller_one_is_refused(tmp_path):
    folder = mmlu_pro_folder(tmp_path / "data")
    run_task(Scripted(say=say), task(folder), RunOptions(limit=3), out=tmp_path / "out")
    model = Scripted(say=say)
    summary = run_task(model, task(folder), RunOptions(limit=7), out=tmp_path / "out")
    assert len(model.asked) == 4 and summary["metrics"]["n"] == 7
    with pytest.raises(EvalError, match="limit: 7 there, 2 now"):
        run_task(Scripted(say=say), task(folder), RunOptions(limit=2), out=tmp_path / "out")


@pytest.mark.parametrize("change", ["seed", "model", "data", "temperature"])
def test_a_folder_is_not_continued_with_other_settings(tmp_path, change):
    folder = mmlu_pro_folder(tmp_path / "data")
    run_task(Scripted(say=say), task(folder), out=tmp_path / "out")
    model, options, given = Scripted(say=say), RunOptions(), {}
    if change == "seed":
        options = RunOptions(seed=1)
    elif change == "model":
        model.identity = lambda: {"weights_sha256": "other"}
    elif change == "data":
        mmlu_pro_folder(tmp_path / "data", per_category=5)
    else:
        given = {"temperature": 0.5}
    with pytest.raises(EvalError, match="holds another run"):
        run_task(model, task(folder, **given), options, out=tmp_path / "out")


def test_answers_to_another_prompt_are_not_taken_over(tmp_path):
    folder = mmlu_pro_folder(tmp_path / "data")
    run_task(Scripted(say=say), task(folder), out=tmp_path / "out")
    path = tmp_path / "out" / "mmlu_pro" / "records.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    record = json.loads(first) | {"prompt_hash": "0" * 16}
    path.write_text(json.dumps(record) + "\n" + "".join(rest))
    with pytest.raises(EvalError, match="another prompt"):
        run_task(Scripted(say=say), task(folder), out=tmp_path / "out")


def test_records_hold_what_is_needed_to_judge_them_again(tmp_path):
    folder = mmlu_pro_folder(tmp_path / "data")
    run_task(Scripted(say=say), task(folder), out=tmp_path / "out")
    records = read_records(tmp_path / "out" / "mmlu_pro" / "records.jsonl")
    assert len(records) == 8
    for record in records.values():
        assert {
            "id",
            "prompt_hash",
            "output",
            "extracted",
            "score",
            "category",
            "seed",
            "tokens",
        } <= record.keys()
    summary = json.loads((tmp_path / "out" / "mmlu_pro" / "summary.json").read_text())
    assert summary["data_hash"] == task(folder).data_hash() and summary["model"]["kind"] == "scripted"


def test_a_model_without_the_ability_is_refused(tmp_path):
    model = Scripted()
    model.capabilities = frozenset({"text", "score"})
    with pytest.raises(EvalError, match="generate"):
        run_task(model, task(mmlu_pro_folder(tmp_path)))


def test_prompt_hashes_tell_prompts_apart_and_nothing_else():
    a = GenerateRequest("x", 4)
    assert prompt_hash([a]) == prompt_hash([GenerateRequest("x", 4, shared=1, seed=9)])
    others = [
        GenerateRequest("y", 4),
        GenerateRequest("x", 5),
        GenerateRequest("x", 4, stop=("z",)),
        ScoreRequest("x", "4"),
    ]
    assert len({prompt_hash([r]) for r in [a, *others]}) == 5
    assert prompt_hash([ScoreRequest("ab", "c")]) != prompt_hash([ScoreRequest("a", "bc")])


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
def test_weights_in_memory_are_evaluated_and_left_as_they_are(tmp_path, mode):
    wrapped = own_model(0)
    model = wrapped.model.train(mode)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder = mmlu_pro_folder(tmp_path)
    data = {"mmlu_pro": folder}
    names = ["mmlu_pro:mcf", "mmlu_pro:cf"]
    found = evaluate_in_memory(model, wrapped.tokenizer, names, 6, data=data)
    assert set(found) == {"mmlu_pro_mcf", "mmlu_pro_cf"} and found["mmlu_pro_cf"]["n"] == 6
    assert model.training == mode
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():  # other weights, other result: nothing is remembered
        for parameter in model.parameters():
            parameter.mul_(0.0)
    zero = evaluate_in_memory(model, wrapped.tokenizer, names, 6, data=data, out=tmp_path / "out")
    rows = read_records(tmp_path / "out" / "mmlu_pro_mcf" / "records.jsonl").values()
    assert all(max(row["logprobs"]) - min(row["logprobs"]) < 1e-4 for row in rows)
    assert zero["mmlu_pro_mcf"]["n"] == 6


def test_labels_name_the_form_when_it_is_not_the_default(tmp_path):
    assert label_of(task(tmp_path)) == "mmlu_pro"
    assert label_of(task(tmp_path, form="cf")) == "mmlu_pro_cf"


def test_a_record_may_hold_any_line_end_and_half_a_character(tmp_path):
    record = {"id": "half \ud83d", "repeat": 0, "answer": "one\u2028two\x85three\x0bfour\r"}
    append_records(tmp_path / RECORDS, [record, {**record, "repeat": 1}])
    with (tmp_path / RECORDS).open("ab") as file:
        file.write(b'{"id": "torn')
    assert read_records(tmp_path / RECORDS) == {
        (record["id"], 0): record,
        (record["id"], 1): {**record, "repeat": 1},
    }
