"""The chat stage: from a model directory to one that speaks chat, by the loop of pretraining, resumed bit for
bit."""

import json
import signal

import pytest
from chat_cases import MODULE, chat_recipe, tune, write_chats, write_start
from forked import finish, ranks
from tiny_run import ACCELERATE, assert_same, environment, numbers, start, weights, write_recipe

from earlyfusion.data.chat.template import template_of
from earlyfusion.data.sample import Image
from earlyfusion.data.sources.base import build_source
from earlyfusion.kernels.errors import UserError
from earlyfusion.model.hub.config import load_config, model_folder
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.config.compose import compose, read_recipe, validate
from earlyfusion.pipeline.errors import EXIT_USER
from earlyfusion.pipeline.sft_start import with_start
from earlyfusion.pipeline.track import read_metrics

STEPS = 10
# Two processes add two micro-batches in another order: fp32 rounding, grown about tenfold a step by Muon and
# routing near ties (as in test_distributed.py, over four steps).
LOSS_RTOL, WEIGHT_RTOL = 3e-4, 5e-2
SAMPLES = "step_0000000.json"  # of the start, whose answers rounding does not reach


@pytest.fixture(scope="module")
def model_dir(folder, tokenizer):
    return write_start(folder / "start", tokenizer)


@pytest.fixture(scope="module")
def chats(folder):
    return write_chats(folder / "chats")


@pytest.fixture(scope="module")
def chat_file(folder, model_dir, chats):
    return write_recipe(folder / "chat.toml", chat_recipe(model_dir, chats))


@pytest.fixture(scope="module")
def unbroken(folder, chat_file):
    """The run that nobody stopped, with its evaluation and its report."""
    with pytest.MonkeyPatch.context() as patch:
        words = ('--eval.tasks ["answer_loss"] --eval.every 5',)
        assert tune(chat_file, folder / "unbroken", *words, monkeypatch=patch, report=True) == 0
    return folder / "unbroken"


def test_the_run_learns_the_answers_and_leaves_what_a_stage_leaves(unbroken):
    records = read_metrics(unbroken / "metrics.jsonl", "train")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert {"loss/image", "loss/text", "loss/source/chats"} <= {key for record in records for key in record}
    evals = [json.loads(path.read_text()) for path in sorted((unbroken / "eval").glob("answer_loss_*.json"))]
    assert [each["step"] for each in evals] == [0, 5, STEPS], "also before the first step"
    losses = [each["sources"]["chats"]["loss"] for each in evals]
    assert losses[-1] < losses[0] - 0.5
    report = (unbroken / "report.html").read_text()
    assert "Held-out answers" in report
    card = (unbroken / "model" / "README.md").read_text()
    assert "only answers were learned" in card and "made from" in card
    assert template_of(unbroken / "model") == "chat"


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit_under_accelerate_launch(chat_file, unbroken, tmp_path):
    """SIGKILL after step 4, between two checkpoints, with a prefetch that had run ahead; then --resume."""
    import time

    words = ("--data.prefetch thread",)
    process = start(chat_file, tmp_path, *words, module=MODULE)
    deadline = time.monotonic() + 120
    path = tmp_path / "metrics.jsonl"
    while not path.exists() or len(read_metrics(path, "train")) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL and len(numbers(tmp_path)) < STEPS
    code, errors = finish(start(chat_file, tmp_path, *words, "--resume", launcher=ACCELERATE, module=MODULE))
    assert code == 0, errors[-3000:]
    assert_same(tmp_path, unbroken)


@pytest.mark.slow
def test_shards_with_half_of_the_experts_each_are_tuned_like_one_process(chat_file, tmp_path, monkeypatch):
    """Losses step by step, the answers' held-out loss before and after, sample answers, and the weights."""
    words = ["--steps", "4", "--eval.tasks", '["answer_loss"]', "--eval.every", "4", "--eval.samples", "2"]
    assert tune(chat_file, tmp_path / "one", *words, monkeypatch=monkeypatch) == 0
    given = ["sft", str(chat_file), "--out", str(tmp_path / "two"), *words]
    given += ["--parallel.dp_shard", "2", "--parallel.ep", "2"]
    for code, errors in map(finish, ranks(cli.main, (given,), environment())):
        assert code == 0, errors[-4000:]
    ours, theirs = numbers(tmp_path / "two"), numbers(tmp_path / "one")
    assert [mine["step"] for mine in ours] == [1, 2, 3, 4]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=LOSS_RTOL), mine["step"]
        assert mine["tokens"] == other["tokens"]
    evals = [read_metrics(tmp_path / name / "metrics.jsonl", "eval") for name in ("two", "one")]
    assert [one["step"] for one in evals[0]] == [one["step"] for one in evals[1]] == [0, 4]
    for mine, other in zip(*evals, strict=True):
        for key in [key for key in other if "loss" in key or "heldout" in key]:
            assert mine[key] == pytest.approx(other[key], rel=10 * LOSS_RTOL), key
    shown = [json.loads((tmp_path / name / "samples" / SAMPLES).read_text()) for name in ("two", "one")]
    assert shown[0] == shown[1] and len(shown[0]["samples"]) == 2
    mine, other = weights(tmp_path / "two"), weights(tmp_path / "one")
    for name in [name for name in other if not name.endswith("e_score_correction_bias")]:
        far = (mine[name] - other[name]).float().norm() / other[name].float().norm().clamp_min(1e-6)
        assert far < WEIGHT_RTOL, (name, float(far))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--init-from /nowhere/model",), "/nowhere/model: not a model directory"),
        (("--run.init_from null",), "--init-from runs/nano/model"),
        (("--model.hidden_size 64",), "model.hidden_size = 64: the model comes from"),
        (("--vision.preset tiny",), "remove the section [vision]"),
        (('--eval.tasks ["answer_los"]',), "did you mean 'answer_loss'?"),
        (("--data.sources.chats.path /nowhere.jsonl",), "/nowhere.jsonl"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(chat_file, tmp_path, monkeypatch, capsys, words, said):
    assert tune(chat_file, tmp_path / "out", *words, monkeypatch=monkeypatch) == EXIT_USER
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and said in errors[0], errors
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_preset_is_compared_by_what_it_stands_for():
    """A recipe that extends the one of pretraining names a preset; the model directory names none."""
    vision = load_config(model_folder("embedded:skills")).vision.model_dump(mode="json")
    tree = {"run": {"init_from": "embedded:skills"}, "vision": {"preset": "tiny", **vision}}
    assert with_start(tree)["vision"] == vision
    with pytest.raises(UserError, match=r"vision.hidden_size = 8: the model comes from"):
        with_start({**tree, "vision": {**tree["vision"], "hidden_size": 8}})


def test_a_resolved_recipe_starts_the_same_run_again(unbroken, chat_file, tmp_path, monkeypatch):
    """recipe.toml of the output folder names model and vision too; they are those of the directory."""
    assert tune(unbroken / "recipe.toml", tmp_path, "--steps 2 --eval.every 0", monkeypatch=monkeypatch) == 0
    assert numbers(tmp_path) == numbers(unbroken)[:2]


def test_the_shipped_arms_have_the_same_budget_and_only_one_sees_pictures(model_dir):
    arms = {}
    for name in ("sft-zero-vision", "sft-vision"):
        tree = compose([name], [("run.init_from", str(model_dir))])
        arms[name] = validate(with_start(tree))
        assert read_recipe(name)["run"]["name"] == name
    zero, vision = arms["sft-zero-vision"], arms["sft-vision"]
    for one, other in zip(zero.stages, vision.stages, strict=True):
        assert (one.steps, one.tokens, one.lanes, one.length) == (
            other.steps,
            other.tokens,
            other.lanes,
            other.length,
        )
    weight = {arm: {s.kind: s.weight for s in arms[arm].data.sources} for arm in arms}
    assert weight["sft-zero-vision"]["chat_scenes"] == 0.0 and weight["sft-vision"]["chat_scenes"] > 0
    assert zero.stages[0].frozen == ["vision", "projector"] and vision.stages[0].frozen == []
    for config in zero.data.sources:
        source = build_source(config, seed=zero.data.seed)
        media = [part for i in range(30) for part in source.get(i, 0).segments if isinstance(part, Image)]
        assert bool(media) == (config.weight == 0), "zero-vision: no picture in anything it is trained on"
