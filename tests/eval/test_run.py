"""`earlyfusion eval` as a user starts it: tables, files, and one line for every mistake."""

import gzip
import json

import pytest
from eval_cases import hf_folder, mmlu_pro_folder, own_model, write_jsonl

from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.report.evaluation import data_paths


def main(words):
    return cli.main(["eval", *words])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """One of our model directories."""
    wrapped = own_model(3)
    return save_model(wrapped.model, wrapped.tokenizer, tmp_path_factory.mktemp("run") / "model")


def test_a_model_directory_is_evaluated_in_three_forms_and_resumed(tmp_path, directory, capsys):
    data, out = mmlu_pro_folder(tmp_path / "data"), tmp_path / "out"
    arguments = [
        "--model",
        str(directory),
        "--tasks",
        "mmlu_pro,mmlu_pro:mcf,mmlu_pro:cf",
        "--data",
        str(data),
    ]
    arguments += ["--out", str(out), "--max-new-tokens", "4", "--limit", "4"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for label in ("mmlu_pro", "mmlu_pro_mcf", "mmlu_pro_cf"):
        summary = json.loads((out / label / "summary.json").read_text())
        assert summary["metrics"]["n"] == 4 and len(summary["model"]["weights_sha256"]) == 64
        assert label in shown
    assert "chance" in shown and "majority" in shown and "unextracted" in shown
    before = (out / "mmlu_pro" / "records.jsonl").read_bytes()
    assert main([*arguments, "--quiet"]) == 0
    assert (out / "mmlu_pro" / "records.jsonl").read_bytes() == before


def test_a_directory_gives_what_its_weights_in_memory_give(tmp_path, directory):
    from earlyfusion.eval.harness import evaluate_in_memory

    data, out = mmlu_pro_folder(tmp_path / "data"), tmp_path / "out"
    main(
        [
            "--model",
            str(directory),
            "--tasks",
            "mmlu_pro:cf",
            "--data",
            str(data),
            "--out",
            str(out),
            "--quiet",
        ]
    )
    told = json.loads((out / "mmlu_pro_cf" / "summary.json").read_text())["metrics"]
    wrapped = own_model(3)
    assert evaluate_in_memory(wrapped.model, wrapped.tokenizer, ["mmlu_pro:cf"], data={"mmlu_pro": data}) == {
        "mmlu_pro_cf": told
    }


def test_a_transformers_checkpoint_is_evaluated(tmp_path, capsys):
    folder, data = hf_folder(tmp_path / "hf"), mmlu_pro_folder(tmp_path / "data")
    arguments = [
        "--model",
        f"hf:{folder}",
        "--tasks",
        "mmlu_pro",
        "--form",
        "mcf",
        "--data",
        f"mmlu_pro={data}",
    ]
    assert main([*arguments, "--exact", "--quiet", "--set", "note=x", "--shots", "2"]) == 0
    assert "mmlu_pro_mcf" in capsys.readouterr().out


def test_published_outputs_are_scored_without_a_model(tmp_path, capsys):
    rows = [
        {
            "question_id": n,
            "options": ["a", "b", "c"],
            "answer": "B",
            "category": "x",
            "pred": pred,
            "generated_text": text,
        }
        for n, (pred, text) in enumerate([("B", "the answer is (B)."), (None, "B?"), ("A", "answer is A")])
    ]
    path = tmp_path / "outputs.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--rescore", str(path), "--levels", "1"]) == 0
    assert "0 differ" in capsys.readouterr().out
    assert main(["--rescore", str(path), "--out", str(tmp_path)]) == 0
    assert "1 differ" in capsys.readouterr().out
    assert json.loads((tmp_path / "rescore.json").read_text())["score_strict"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--tasks"),
        (["--tasks", "gpqa"], "did you mean"),
        (["--tasks", "gsm8k", "--model", "x"], "--harness lm-eval"),
        (["--tasks", "mmlu_pro"], "--model is missing"),
        (["--tasks", "mmlu_pro", "--model", "/nowhere"], "not a model directory"),
        (["--tasks", "mmlu_pro", "--data", "a", "--data", "b"], "TASK=PATH"),
        (["--tasks", "mmlu_pro:essay", "--model", "x"], "not one of cot, mcf, cf"),
        (["--tasks", "mmlu_pro", "--samples", "0"], "greater than or equal to 1"),
        (["--rescore", "/nowhere.jsonl"], "no such file"),
        (["--tasks", "mmlu_pro", "--set", "levels"], "KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(arguments, said, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_missing_data_is_told_before_anything_is_written(tmp_path, directory, capsys):
    out = tmp_path / "out"
    assert main(["--model", str(directory), "--tasks", "mmlu_pro", "--out", str(out), "--quiet"]) == 2
    assert "--data" in capsys.readouterr().err and not out.exists()


def test_data_paths_are_told_apart(tmp_path):
    strange = tmp_path / "a=b"
    strange.mkdir()
    named, default = data_paths(["piqa=/x/y", str(strange)])
    assert {key: str(path) for key, path in named.items()} == {"piqa": "/x/y"} and default == strange


def test_the_list_names_every_task(capsys):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("mmlu_pro", "gpqa_diamond", "counting", "bits_per_byte"))


def test_text_written_by_hand_is_measured(tmp_path, directory, capsys):
    path = write_jsonl(tmp_path / "held.jsonl", [{"text": "the quick brown fox"}])
    assert main(["--model", str(directory), "--tasks", "bits_per_byte", "--data", str(path), "--quiet"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out


def test_data_that_is_not_the_pinned_data_is_refused(tmp_path, directory, capsys):
    data, out = mmlu_pro_folder(tmp_path / "data"), tmp_path / "out"
    words = [
        "--model",
        str(directory),
        "--tasks",
        "mmlu_pro:cf",
        "--data",
        str(data),
        "--out",
        str(out),
        "--quiet",
    ]
    assert main([*words, "--sha256", "mmlu_pro=0123456789"]) == 2
    assert "mmlu_pro: its data has the hash" in capsys.readouterr().err and not list(tmp_path.glob("out/*/*"))
    assert main(words) == 0
    told = json.loads((out / "mmlu_pro_cf" / "summary.json").read_text())["data_hash"]
    assert main([*words, "--sha256", f"mmlu_pro={told[:16]}"]) == 0
    assert main([*words, "--sha256", "mmlu_pro=0"]) == 2
