"""`earlyfusion eval` as a user starts it: tables, files, and one line for every mistake."""

import json

import pytest
from eval_cases import hf_folder, mmlu_pro_folder, own_model

from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline import cli


def main(*words):
    return cli.main(["eval", *map(str, words)])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """One of our model directories."""
    wrapped = own_model(3)
    return save_model(wrapped.model, wrapped.tokenizer, tmp_path_factory.mktemp("run") / "model")


@pytest.fixture
def data(tmp_path):
    return mmlu_pro_folder(tmp_path / "data")


def test_a_model_directory_is_evaluated_in_three_forms_and_resumed(tmp_path, directory, data, capsys):
    out = tmp_path / "out"
    words = ["--model", directory, "--tasks", "mmlu_pro,mmlu_pro:mcf,mmlu_pro:cf", "--data", data]
    words += ["--out", out, "--max-new-tokens", 4, "--limit", 4]
    assert main(*words) == 0
    shown = capsys.readouterr().out
    for label in ("mmlu_pro", "mmlu_pro_mcf", "mmlu_pro_cf"):
        summary = json.loads((out / label / "summary.json").read_text())
        assert summary["metrics"]["n"] == 4 and len(summary["model"]["weights_sha256"]) == 64
        assert label in shown
    assert all(head in shown for head in ("chance", "majority", "unextracted"))
    before = (out / "mmlu_pro" / "records.jsonl").read_bytes()
    assert main(*words, "--quiet") == 0
    assert (out / "mmlu_pro" / "records.jsonl").read_bytes() == before


def test_a_transformers_checkpoint_is_evaluated(tmp_path, data, capsys):
    out = tmp_path / "out"
    words = [
        "--model",
        f"hf:{hf_folder(tmp_path / 'hf')}",
        "--tasks",
        "mmlu_pro",
        "--form",
        "mcf",
        "--out",
        out,
    ]
    assert main(*words) == 2  # missing data are told before anything is written
    assert "--data" in capsys.readouterr().err and not out.exists()
    words += [
        "--data",
        f"mmlu_pro={data}",
        "--exact",
        "--no-chat",
        "--quiet",
        "--set",
        "note=x",
        "--shots",
        2,
    ]
    assert main(*words) == 0
    assert "mmlu_pro_mcf" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        ("", "--tasks"),
        ("--tasks gpqa", "did you mean"),
        ("--tasks gsm8k --model x", "--harness lm-eval"),
        ("--tasks counting", "--model is missing"),
        ("--tasks counting --model /nowhere", "not a model directory"),
        ("--tasks mmlu_pro --data a --data b", "TASK=PATH"),
        ("--tasks mmlu_pro:essay --model x", "not one of cot, mcf, cf"),
        ("--tasks mmlu_pro --samples 0", "greater than or equal to 1"),
        ("--tasks mmlu_pro --set note", "KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(words, said, capsys):
    assert main(*words.split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
