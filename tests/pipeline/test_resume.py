"""A run that was stopped and resumed takes the same steps, bit for bit, as one that was never stopped.

Every record of metrics.jsonl is compared (losses by source, gradient norms, max logits, expert load, fill),
and the weights of the model directory. What a clock measured is left out.
"""

import json
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from forked import finish
from tiny_run import assert_same, losses, numbers, run_here, start, tiny_recipe, write_recipe

from earlyfusion.eval import harness
from earlyfusion.pipeline import build, evaluate, pretrain, update
from earlyfusion.pipeline.checkpoint import completed, latest, step_of
from earlyfusion.pipeline.errors import EXIT_REQUEUE
from earlyfusion.pipeline.state import weights as stored
from earlyfusion.pipeline.track import read_metrics

STEPS, BOUNDARY = 20, 8  # of tiny_run: the second stage begins after step 8


@pytest.fixture(scope="module")
def unbroken(folder, recipe) -> Path:
    """The run that nobody stopped."""
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(recipe, folder / "unbroken", monkeypatch=patch) == 0
    return folder / "unbroken"


def test_the_unbroken_run_exercises_what_a_resume_must_carry(unbroken):
    """Otherwise equality below would prove little: all sources, both stages, clipped heads, moved router
    biases."""
    records = numbers(unbroken)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["stage"] for record in records] == ["short"] * BOUNDARY + ["long"] * (STEPS - BOUNDARY)
    seen = {key for record in records for key in record if key.startswith("loss/")}
    assert seen == {"loss/image", "loss/text", "loss/source/vqa", "loss/source/manual", "loss/source/scenes"}
    assert sum(record["clipped_heads"] for record in records) > 0
    state = stored(latest(unbroken / "checkpoints"))
    biases = [value for name, value in state.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and all(bool(bias.any()) for bias in biases)
    assert records[-1]["loss"] < records[0]["loss"] - 0.5


def wait_for_step(process, out: Path, step: int) -> None:
    """Until metrics.jsonl tells of `step` and a checkpoint is complete."""
    path, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1][-3000:]
        records = read_metrics(path, "train") if path.exists() else []
        if records and records[-1]["step"] >= step and latest(out / "checkpoints") is not None:
            return
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not reached in two minutes")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["short", "long"])
def test_a_killed_run_resumes_bit_for_bit(recipe, unbroken, tmp_path, stage):
    """SIGKILL at a random moment after the first checkpoint; the prefetch had run ahead and is lost with the
    process."""
    # in the first half of the run: the other half is the margin in which the signal must arrive
    step = random.Random(stage).choice({"short": range(3, BOUNDARY), "long": range(BOUNDARY, 12)}[stage])
    out, words = tmp_path / "killed", ("--data.prefetch thread",)
    process = start(recipe, out, *words)
    wait_for_step(process, out, step)
    process.kill()
    code, _ = finish(process)
    assert code == -signal.SIGKILL and len(losses(out)) < STEPS
    assert 0 < step_of(latest(out / "checkpoints")) < STEPS

    code, errors = finish(start(recipe, out, *words, "--resume"))
    assert code == 0, errors
    assert_same(out, unbroken)


@pytest.mark.slow
def test_sigterm_saves_leaves_with_75_and_the_resume_is_exact(recipe, unbroken, tmp_path):
    out = tmp_path / "stopped"
    process = start(recipe, out, "--checkpoint.every 2 --data.prefetch thread")
    wait_for_step(process, out, 2)
    process.send_signal(signal.SIGTERM)
    code, errors = finish(process)
    assert code == EXIT_REQUEUE == 75, errors
    stopped = len(losses(out))
    assert step_of(latest(out / "checkpoints")) == stopped < STEPS, (
        "the checkpoint is that of the last step taken"
    )
    assert "SIGTERM" in errors and "--resume" in errors and not (out / "model").exists()

    code, errors = finish(start(recipe, out, "--resume --data.prefetch thread"))
    assert code == 0, errors
    assert_same(out, unbroken)


@pytest.mark.slow
def test_a_signal_in_an_evaluation_ends_it_and_the_resume_has_it_all(recipe, tmp_path, monkeypatch):
    """In the second chunk of questions, in the sources' held-out samples, and in the last evaluation; the
    resumed run evaluates at that step, and is the run that nobody stopped."""
    monkeypatch.setattr(evaluate, "run_task", partial(harness.run_task, chunk=2))
    words = ('--eval.tasks ["counting"] --eval.limits.counting 3 --eval.every 2 --steps 4 --eval.heldout 2',)
    assert run_here(recipe, tmp_path / "whole", *words, monkeypatch=monkeypatch) == 0
    out, asked, measured, resume = tmp_path / "cut", harness.answer, evaluate.Evaluator.measure, ()
    calls = {"answer": 0, "measure": 0}

    def signalled(real, name, at):
        def call(*given, **named):
            calls[name] += 1
            if calls[name] == at:
                signal.raise_signal(signal.SIGUSR1)
            return real(*given, **named)

        return call

    for home, name, real, at in (
        (harness, "answer", asked, 1),
        (evaluate.Evaluator, "measure", measured, 2),
        (harness, "answer", asked, 3),
    ):
        with monkeypatch.context() as patch:
            calls[name] = 0
            patch.setattr(home, name, signalled(real, name, at))
            assert run_here(recipe, out, *words, *resume, monkeypatch=monkeypatch) == EXIT_REQUEUE
        resume = ("--resume",)
    assert run_here(recipe, out, *words, *resume, monkeypatch=monkeypatch) == 0
    assert_same(out, tmp_path / "whole")
    timed = ("time", "seconds")
    evaluations = [
        [
            {k: v for k, v in one.items() if k not in timed}
            for one in read_metrics(run / "metrics.jsonl", "eval")
        ]
        for run in (out, tmp_path / "whole")
    ]
    assert evaluations[0] == evaluations[1] and [one["step"] for one in evaluations[0]] == [2, 4]


class Interrupted(Exception):
    """Stands for a process that dies: nothing after it runs."""


# where a process may die, besides between two steps
PLACES = [
    (pretrain, "forward_backward"),
    (update, "_held"),
    (update, "update_router_biases"),
    (build, "optimizer_metrics"),
]


@pytest.mark.parametrize(
    ("place", "call"), list(zip(PLACES, (5, 8, 9, 17))), ids=[name for _, name in PLACES]
)
def test_dying_inside_a_step_loses_only_the_steps_since_the_checkpoint(
    recipe, unbroken, tmp_path, monkeypatch, place, call
):
    home, name = place
    calls, real = 0, getattr(home, name)

    def dies(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise Interrupted
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(home, name, dies)
        with pytest.raises(Interrupted):
            run_here(recipe, tmp_path, monkeypatch=monkeypatch)
    assert run_here(recipe, tmp_path, "--resume", monkeypatch=monkeypatch) == 0
    assert_same(tmp_path, unbroken)


@pytest.mark.parametrize("steps", [1, BOUNDARY, 13])
def test_a_shorter_run_that_is_resumed_for_longer_equals_the_long_run(
    recipe, unbroken, tmp_path, monkeypatch, steps
):
    """--steps only stops the schedule early; a stop on the stage boundary begins the next stage afresh."""
    assert run_here(recipe, tmp_path, "--steps", str(steps), monkeypatch=monkeypatch) == 0
    assert len(losses(tmp_path)) == steps
    assert run_here(recipe, tmp_path, "--resume", monkeypatch=monkeypatch) == 0
    assert_same(tmp_path, unbroken)


def test_evaluations_and_checkpoints_do_not_change_the_run(recipe, unbroken, tmp_path, monkeypatch):
    """Sample pictures every third step, checkpoints at other steps, prefetch by a thread: the same
    numbers."""
    words = ("--eval.every 3 --eval.samples 2 --checkpoint.every 5 --data.prefetch thread",)
    assert run_here(recipe, tmp_path, *words, monkeypatch=monkeypatch) == 0
    assert len(list((tmp_path / "samples").glob("step_*.json"))) == STEPS // 3 + 1
    assert_same(tmp_path, unbroken)


def test_logging_less_often_resumes_with_the_same_window_means(recipe, tmp_path, monkeypatch):
    """The sums since the last log line are state: a stop between two log lines must not forget them."""
    words = ("--track.log_every 4 --stages.long.steps 4 --stages.long.decay_steps 0",)
    assert run_here(recipe, tmp_path / "whole", *words, monkeypatch=monkeypatch) == 0
    assert run_here(recipe, tmp_path / "parts", *words, "--steps 6", monkeypatch=monkeypatch) == 0
    assert run_here(recipe, tmp_path / "parts", *words, "--resume", monkeypatch=monkeypatch) == 0
    whole, parts = numbers(tmp_path / "whole"), numbers(tmp_path / "parts")
    assert [record["step"] for record in whole] == [4, 8, 12]
    extra = [
        record for record in parts if record["step"] == 6
    ]  # the last step of the short run is logged as well
    assert len(extra) == 1 and [r["step"] for r in parts] == [4, 6, 8, 12]
    assert [parts[0], parts[3]] == [whole[0], whole[2]]


def test_a_checkpoint_holds_everything_once_and_is_small(unbroken):
    """Retention keeps two; the lanes' cursors are JSON of a few kB; nothing is pickled."""
    paths = completed(unbroken / "checkpoints")
    assert [step_of(path) for path in paths] == [18, STEPS]
    run = json.loads((paths[-1] / "run.json").read_text())
    assert run["step"] == STEPS and not any(run["trainer"]["guard"]["recent_bad"])
    assert {file.suffix for file in paths[-1].iterdir()} <= {".json", ".safetensors", ""}


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_curriculum_of_lengths_stopped_at_a_border_resumes_bit_for_bit(
    tokenizer, tmp_path, monkeypatch, stop
):
    """Sources that only one stage reads, each with documents of its own length: stopped on the border between
    the stages, and one step before and behind it."""
    needles = {"kind": "problems", "weight": 0.0}
    options = {"tasks": {"needle": 1}, "forms": {"picture": 1, "twin": 1}}
    changes = {
        "data__sources": [{"name": "manual", "kind": "pydoc", "weight": 0.3}],
        "train__loss_weights": {},
    }
    recipe = tiny_recipe(tokenizer, **changes)
    for level, (stage, length) in enumerate(zip(recipe["stages"], (320, 640))):
        source = {"name": f"needle-{length}", **needles, "options": {**options, "difficulty": level}}
        recipe["data"]["sources"].append(source)
        weights = {"manual": 0.2, source["name"]: 0.8}
        stage |= {"steps": 4, "length": length, "tokens": 2 * length, "weights": weights, "decay_steps": 0}
    path = write_recipe(tmp_path / "curriculum.toml", recipe)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_here(path, whole, monkeypatch=monkeypatch) == 0
    for step, records in enumerate(numbers(whole), 1):
        read = f"loss/source/needle-{320 if step <= 4 else 640}"
        assert [key for key in records if key.startswith("loss/source/needle")] == [read]
    assert run_here(path, parts, "--steps", str(stop), monkeypatch=monkeypatch) == 0
    assert run_here(path, parts, "--resume", monkeypatch=monkeypatch) == 0
    assert_same(parts, whole)
