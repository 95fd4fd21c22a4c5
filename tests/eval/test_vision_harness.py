"""Visual tasks on a real model, through the evaluator's harness and on to compare."""

import json

import pytest
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer

from earlyfusion.eval.compare.analysis import Options, compare_arms
from earlyfusion.eval.compare.load import CompareError, load_arm
from earlyfusion.eval.harness import RunOptions, run_task
from earlyfusion.eval.models.engine import EngineModel
from earlyfusion.eval.protocol import EvalError, TaskOptions
from earlyfusion.eval.registry import build_task

TASKS = ("counting", "grounding", "video_qa", "twins")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def model_of(tokenizer, seed):
    return tiny_model(tiny_config(tokenizer), seed)


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """Two untrained models evaluated on a few questions of each task."""
    root = tmp_path_factory.mktemp("evals")
    for seed in (0, 1):
        model = EngineModel(model_of(tokenizer, seed), tokenizer, name=f"tiny-{seed}")
        for name in TASKS:
            run_task(
                model,
                build_task(name, TaskOptions(max_new_tokens=4)),
                RunOptions(limit=6),
                out=root / str(seed),
            )
    return root


def test_records_hold_every_view_and_the_summary_its_baselines(folders):
    for name in TASKS:
        rows = [
            json.loads(line) for line in (folders / "0" / name / "records.jsonl").read_text().splitlines()
        ]
        summary = json.loads((folders / "0" / name / "summary.json").read_text())
        assert len(rows) == 6 and all(
            {"id", "prompt_hash", "score", "metrics", "target"} <= set(row) for row in rows
        )
        assert (
            summary["metrics"]["n"] == 6
            and summary["metrics"]["majority"] is not None
            and summary["data_hash"]
        )
        if name != "twins":
            assert all({"blind_score", "words_score"} <= set(row) and len(row["output"]) == 3 for row in rows)


def test_what_the_harness_leaves_can_be_compared(folders):
    arms = [load_arm(name, str(folders / seed)) for name, seed in (("base", "0"), ("treated", "1"))]
    result = compare_arms(*arms, options=Options(draws=100, flips=100))
    lines = [entry["task"] for entry in result["tasks"]]
    assert any(entry["delta"]["discordance"] > 0 or entry["base"]["tokens"] for entry in result["tasks"])
    assert {
        "counting",
        "counting (blind)",
        "counting (words)",
        "counting (seeing)",
        "twins",
        "video_qa",
    } <= set(lines)
    assert all(entry["n"] == 6 and entry["verdict"] for entry in result["tasks"])


def test_other_generated_questions_are_refused_by_compare(folders, tokenizer, tmp_path):
    """Another seed makes other pictures: the data hash says so."""
    model = EngineModel(model_of(tokenizer, 0), tokenizer)
    run_task(
        model,
        build_task("counting", TaskOptions(max_new_tokens=4, seed=5)),
        RunOptions(limit=6),
        out=tmp_path,
    )
    with pytest.raises(CompareError, match="different data"):
        compare_arms(load_arm("base", str(folders / "0")), load_arm("treated", str(tmp_path)))


def test_a_model_without_eyes_is_turned_away_from_pictures_but_not_from_words(tokenizer):
    model = EngineModel(model_of(tokenizer, 0), tokenizer)
    model.capabilities = frozenset({"text", "generate", "score"})
    with pytest.raises(EvalError, match="needs a model with image"):
        run_task(model, build_task("counting"), RunOptions(limit=1))
    assert (
        run_task(model, build_task("twins", TaskOptions(max_new_tokens=2)), RunOptions(limit=3))["metrics"][
            "n"
        ]
        == 3
    )
