"""Two processes on one machine take the steps that one process takes; every launcher starts the same run.

Two lanes are two micro-batches of one step: one process accumulates them, two processes take one each. The
sums are formed in another order, so the numbers agree to fp32 rounding and not bit for bit.
"""

import signal
import time
from pathlib import Path

import pytest
import tiny_run
import torch
from forked import finish
from tiny_run import run_here, same, two_ranks, weights

from earlyfusion.data.loading.encode import PackedBatch
from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.pipeline import pretrain
from earlyfusion.pipeline.checkpoint import latest, step_of
from earlyfusion.pipeline.config.compose import load_config
from earlyfusion.pipeline.config.schema import RunConfig
from earlyfusion.pipeline.errors import EXIT_REQUEUE, EXIT_USER
from earlyfusion.pipeline.state import weights as stored
from earlyfusion.pipeline.track import read_metrics

STEPS, SCHEDULED = 5, 40
# Four lanes on two processes: (a + c) + (b + d) in place of ((a + b) + c) + d. What rounding changes (1e-7)
# grows about tenfold a step, because Muon lifts small singular values and routing near a tie flips; measured
# here after five steps: losses 2e-5, gradient norms 4e-4, weights 8e-3. A lane that is left out changes
# losses by 5e-3, weights by 0.5.
FIRST_RTOL = 1e-6
STEP_ATOL = (
    1e-7  # weights after the first step, whose updates are 3e-4 in the root mean square; measured 2e-8
)
LOSS_RTOL = 3e-4
NORM_RTOL = 1e-2
WEIGHT_RTOL = 5e-2
BIAS_ATOL = 6e-3  # a quantile of a histogram with bins of 2e-3: one token in another bin moves it by a bin


@pytest.fixture(scope="module")
def recipe(folder, tokenizer) -> Path:
    one_stage = [
        {"name": "all", "steps": SCHEDULED, "length": 96, "tokens": 112, "lanes": 4, "warmup_steps": 2}
    ]
    changes = {"stages": one_stage, "optim__lr": 3e-3, "data__prefetch": "thread"}
    changes |= {"checkpoint__every": 1, "checkpoint__keep": 9, "eval__heldout": 3}
    return tiny_run.write_recipe(folder / "tiny.toml", tiny_run.tiny_recipe(tokenizer, **changes))


@pytest.fixture(scope="module")
def alone(folder, recipe) -> Path:
    """Both lanes in one process."""
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(recipe, folder / "alone", "--steps", str(STEPS), monkeypatch=patch) == 0
    return folder / "alone"


def in_two(recipe: Path, out: Path, *words: str) -> None:
    for code, errors in map(finish, two_ranks(recipe, out, *words)):
        assert code == 0, errors[-4000:]


def assert_same_run(left: Path, right: Path) -> None:
    """Losses step by step, counts exactly, weights by name."""
    ours, theirs = (read_metrics(out / "metrics.jsonl", "train") for out in (left, right))
    assert [record["step"] for record in ours] == [record["step"] for record in theirs] != []
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        first = mine["step"] == 1
        for key in [key for key in mine if key.startswith("loss")]:
            assert mine[key] == pytest.approx(other[key], rel=FIRST_RTOL if first else LOSS_RTOL), (
                mine["step"],
                key,
            )
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=FIRST_RTOL if first else NORM_RTOL)
        for key in ("tokens", "patches", "samples", "lr"):
            assert mine[key] == pytest.approx(other[key], rel=1e-12), (mine["step"], key)
        assert mine["max_logit"]["2"] == pytest.approx(other["max_logit"]["2"], rel=NORM_RTOL)
    measured, theirs = (read_metrics(out / "metrics.jsonl", "eval")[-1] for out in (left, right))
    assert measured.keys() == theirs.keys()
    for key in [key for key in measured if key.startswith("heldout/")]:
        assert measured[key] == pytest.approx(theirs[key], rel=WEIGHT_RTOL), key
    assert "heldout/blind/vqa" in measured
    mine, other = weights(left), weights(right)
    assert mine.keys() == other.keys()
    for name in mine:
        if name.endswith("e_score_correction_bias"):
            assert torch.allclose(mine[name], other[name], rtol=0, atol=BIAS_ATOL), name
            continue
        difference = (mine[name] - other[name]).float().norm() / other[name].float().norm().clamp_min(1e-6)
        assert difference < WEIGHT_RTOL, (name, float(difference))


def steps_of(config: RunConfig, steps: int) -> list[list[PackedBatch]]:
    """The micro-batches of all lanes in the first steps of a recipe's first stage."""
    tokens, stage = Tokenizer.load(config.tokenizer.path), config.stages[0]
    sizes = {"length": stage.length, "tokens": stage.tokens, "max_patches": stage.max_patches}
    with Loader(config.data, tokens, config.vision, **sizes, lanes=stage.lanes, stage=0) as loader:
        return [loader.next_step() for _ in range(steps)]


def test_the_compared_run_holds_a_step_with_pictures_on_one_rank_only(recipe):
    """The case that hangs when a rank without pictures leaves out the vision parameters' all-reduce."""
    seen = []
    for micro_batches in steps_of(load_config([str(recipe)]), STEPS):
        seen.append([batch.num_patches > 0 for batch in micro_batches])
    by_rank = [(any(lanes[0::2]), any(lanes[1::2])) for lanes in seen]
    assert {(True, False), (False, True)} & set(by_rank), by_rank
    assert any(len(set(lanes[0::2])) == 2 for lanes in seen), (
        "one rank: pictures in one micro-batch, none in the other"
    )


@pytest.mark.slow
def test_two_processes_equal_one(recipe, alone, tmp_path):
    in_two(recipe, tmp_path, "--steps", str(STEPS))
    assert_same_run(tmp_path, alone)
    assert (tmp_path / "report.html").exists()
    assert len(list(latest(tmp_path / "checkpoints").glob("rank-*.json"))) == 2

    first, other = (stored(out / "checkpoints" / "step-000001") for out in (tmp_path, alone))
    biases = [name for name in first if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    for (
        name
    ) in biases:  # counts are integers: before rounding has had an effect, those of both ranks, exactly
        assert torch.equal(first[name], other[name]) and first[name].any(), name
    for name in first:
        torch.testing.assert_close(first[name], other[name], rtol=0, atol=STEP_ATOL, msg=name)


@pytest.mark.slow
def test_two_processes_take_over_the_checkpoint_of_one(recipe, alone, tmp_path, monkeypatch):
    """One process dies in its third step; weights, cursors and the sums since the last log line go to two."""
    words = ("--steps", str(STEPS), "--track.log_every", "1000")
    calls, real = [], pretrain.forward_backward

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise InterruptedError
        return real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(pretrain, "forward_backward", dies)
        run_here(recipe, tmp_path / "two", *words, monkeypatch=monkeypatch)
    assert step_of(latest(tmp_path / "two" / "checkpoints")) == 2
    in_two(recipe, tmp_path / "two", *words, "--resume")
    assert run_here(recipe, tmp_path / "one", *words, monkeypatch=monkeypatch) == 0
    assert same(weights(tmp_path / "one"), weights(alone)), "how often is logged changes nothing"
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_and_one_process_takes_over(recipe, tmp_path, monkeypatch):
    """Both leave with 75 at the same step; the checkpoint holds the cursors and the pending sums of both."""
    words = ("--track.log_every 1000",)  # one record at the end, with the means over every step of both ranks
    ranks = two_ranks(recipe, tmp_path / "two", *words)
    checkpoints, deadline = tmp_path / "two" / "checkpoints", time.monotonic() + 120
    while latest(checkpoints) is None:
        assert time.monotonic() < deadline and ranks[0].poll() is None, ranks[0].communicate()[1][-3000:]
        time.sleep(0.002)
    ranks[1].send_signal(signal.SIGTERM)
    assert [finish(rank)[0] for rank in ranks] == [EXIT_REQUEUE, EXIT_REQUEUE]
    stopped = step_of(latest(checkpoints))
    assert 1 <= stopped < SCHEDULED
    words += ("--steps", str(stopped + 1))
    assert run_here(recipe, tmp_path / "two", *words, "--resume", monkeypatch=monkeypatch) == 0
    assert run_here(recipe, tmp_path / "one", *words, monkeypatch=monkeypatch) == 0
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_lanes_that_the_processes_cannot_share_are_refused_in_one_line(recipe, tmp_path):
    ranks = two_ranks(recipe, tmp_path / "out", "--stages.all.lanes 5")
    for code, errors in map(finish, ranks):
        assert code == EXIT_USER, errors
        lines = [line for line in errors.splitlines() if line.startswith("error:")]
        assert len(lines) == 1 and "5 lanes cannot be shared evenly by 2 processes" in lines[0], errors
        assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()
