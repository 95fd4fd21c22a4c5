"""What a run does with a loss that is not a number: skip the update, stop, or go back to the last
checkpoint."""

import math
from pathlib import Path

import torch
from tiny_run import losses, numbers, same

from earlyfusion.pipeline import cli, pretrain, update
from earlyfusion.pipeline.checkpoint import latest, step_of
from earlyfusion.pipeline.errors import EXIT_FAILURE, EXIT_OK
from earlyfusion.pipeline.track import read_metrics


def poison(run: pretrain.Pretraining, *steps: int) -> dict[int, dict[str, torch.Tensor]]:
    """Make the loss of these steps (counted as they are taken) not a number; returns the states before each
    step."""
    real, before, calls = run.fusion.forward, {}, [0]

    def forward(batch):
        calls[0] += 1
        before[calls[0]] = {name: value.clone() for name, value in run.fusion.state_dict().items()}
        out = real(batch)
        return (
            type(out)(out.loss_sum * math.nan, out.weight_sum, out.nll_T * math.nan)
            if calls[0] in steps
            else out
        )

    run.fusion.forward = forward
    return before


def guard_events(out: Path) -> list[dict]:
    return read_metrics(out / "metrics.jsonl", "guard")


def test_the_guard_skips_a_bad_step_without_a_trace_in_the_weights(training, monkeypatch):
    """Weights, router biases and clip statistics as before it; the next batch goes on."""
    monkeypatch.setattr(pretrain.evaluate, "write_outputs", lambda *_: [])
    run = training(("run.steps", 7), ("guard.policy", "skip"), ("checkpoint.every", 0))
    before = poison(run, 4)
    assert run.train() == EXIT_OK
    assert same(before[4], before[5]) and not same(before[3], before[4]) and not same(before[5], before[6])
    assert len(before) == 7 and len(losses(run.out)) == 7 and losses(run.out)[3] is None
    (event,) = guard_events(run.out)
    assert event["step"] == 4 and event["action"] == "skip" and "nan" in event["message"]
    assert all(math.isfinite(loss) for loss in losses(run.out)[4:])


def test_a_skipped_step_does_not_poison_the_means_of_its_window(training, monkeypatch):
    monkeypatch.setattr(pretrain.evaluate, "write_outputs", lambda *_: [])
    run = training(("run.steps", 6), ("track.log_every", 3))
    poison(run, 5)
    assert run.train() == EXIT_OK
    record = numbers(run.out)[1]
    means = {key: value for key, value in record.items() if key.startswith("loss")}
    assert record["step"] == 6 and len(means) >= 4 and None not in means.values(), means


def test_the_guard_stops_with_one_line_and_exit_code_1(training, capsys):
    run = training(("run.steps", 7), ("guard.policy", "stop"))
    before = poison(run, 5)
    assert cli.guarded(run.train) == EXIT_FAILURE
    assert same(before[5], run.fusion.state_dict()), "the update of the bad step was not made"
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "step 5" in lines[0] and "loss is nan" in lines[0]
    assert step_of(latest(run.out / "checkpoints")) == 3 and not (run.out / "model").exists()
    assert guard_events(run.out)[0]["action"] == "stop"


def test_the_guard_rolls_back_to_the_checkpoint_and_passes_the_bad_batch_over(training, monkeypatch):
    monkeypatch.setattr(pretrain.evaluate, "write_outputs", lambda *_: [])
    run = training(("run.steps", 7), ("guard.policy", "rollback"))
    saved = {}
    real = run.checkpoints.save

    def save(step, **state):
        weights = state["model"].state_dict()
        saved.setdefault(step, {name: value.clone() for name, value in weights.items()})
        return real(step, **state)

    monkeypatch.setattr(run.checkpoints, "save", save)
    before = poison(run, 5)  # checkpoint at 3: back to it, then steps 4..7 on batches that follow the bad one
    assert run.train() == EXIT_OK
    assert same(before[6], saved[3]) and not same(before[6], before[5])
    assert len(before) == 5 + 4, "five steps, then the four after step 3 again"
    records = numbers(run.out)
    assert [record["step"] for record in records] == list(range(1, 8)), "each step is told once"
    assert all(math.isfinite(record["loss"]) for record in records)
    (event,) = guard_events(run.out)
    assert event["action"] == "rollback" and "nan" in event["message"]


def test_a_rollback_across_a_stage_boundary_does_not_read_old_data_again(training, monkeypatch):
    """Back into the first stage: its cursor stands where it was left, so no batch comes twice; the bad one
    neither."""
    monkeypatch.setattr(pretrain.evaluate, "write_outputs", lambda *_: [])
    words = [
        ("stages.short.steps", 4),
        ("stages.short.warmup_steps", 1),
        ("checkpoint.every", 3),
        ("run.steps", 7),
    ]
    run = training(*words, ("guard.policy", "rollback"))
    seen, real = [], run.loaders.at

    def at(index):
        loader = real(index)
        if not hasattr(loader, "_watched"):
            original = loader.next_step

            def next_step():
                batches = original()
                seen.append((index, tuple(batches[0].ids.tolist())))
                return batches

            loader.next_step, loader._watched = next_step, True
        return loader

    monkeypatch.setattr(run.loaders, "at", at)
    poison(run, 5)  # the first step of the second stage; the checkpoint is of step 3
    assert run.train() == EXIT_OK
    assert [index for index, _ in seen] == [0, 0, 0, 0, 1, 0, 1, 1, 1]
    assert len(set(seen)) == len(seen), "a batch was trained on twice"
    assert run.step == 7 and run.guard.rollbacks == 1


def test_too_many_bad_steps_stop_whatever_the_policy(training, capsys, monkeypatch):
    run = training(("guard.policy", "skip"))
    monkeypatch.setattr(update, "MAX_SKIPS", 2)
    poison(run, *range(2, 20))
    assert cli.guarded(run.train) == EXIT_FAILURE
    assert run.step == 4 and "bad steps lately: 3" in capsys.readouterr().err


def test_another_mixture_inside_a_stage_has_another_loss(training, monkeypatch):
    """A loss is held against those of the mixture that is read now: pictures after words are no spike."""
    monkeypatch.setattr(pretrain.evaluate, "write_outputs", lambda *_: [])
    change = [{"at": 0.5, "vision_share": 1.0}]
    stage = [("steps", 6), ("warmup_steps", 1), ("vision_share", 0.0), ("mix", change)]
    run = training(*((f"stages.short.{key}", value) for key, value in stage), ("run.steps", 5))
    assert [run.stages.mixture(step) for step in range(8)] == [(0, 0)] * 3 + [(0, 1)] * 3 + [(1, 0)] * 2
    # What it holds a loss against, before every step.
    lengths, real = [], run.guard.check

    def check(*given, **options):
        lengths.append(len(run.guard.history))
        return real(*given, **options)

    monkeypatch.setattr(run.guard, "check", check)
    assert run.train() == EXIT_OK
    assert lengths == [0, 1, 2, 0, 1]
