"""A whole run of two processes that exchange pictures: the run without, evaluated in between, resumed bit for
bit."""

from pathlib import Path

import pytest
import tiny_run
from forked import finish
from tiny_run import assert_same, numbers, same, two_ranks, weights

STEPS = 4
# Rounding only, as between one process and two (tests/pipeline/test_distributed.py), where it is measured.
FIRST_RTOL = 1e-6
LOSS_RTOL = 3e-4


@pytest.fixture(scope="module")
def recipe(folder, tokenizer) -> Path:
    """Two micro-batches a rank and step; rank 0 evaluates after every second step while rank 1 waits."""
    one_stage = [{"name": "all", "steps": STEPS, "length": 96, "tokens": 160, "lanes": 4, "warmup_steps": 2}]
    changes = {"stages": one_stage, "optim__lr": 3e-3, "checkpoint__every": 2, "checkpoint__keep": 9}
    changes |= {
        "eval__every": 2,
        "eval__tasks": ["counting"],
        "eval__limits": {"counting": 2},
        "eval__samples": 1,
    }
    return tiny_run.write_recipe(folder / "exchange.toml", tiny_run.tiny_recipe(tokenizer, **changes))


def train(recipe: Path, out: Path, *words: str) -> None:
    """Two processes that end, and end well."""
    ranks = two_ranks(recipe, out, *words)
    for code, errors in map(finish, ranks):
        assert code == 0, errors[-3000:]


@pytest.fixture(scope="module")
def runs(recipe, folder) -> dict[str, Path]:
    for setting in ("on", "off"):
        train(recipe, folder / setting, "--parallel.exchange_pictures", setting)
    return {setting: folder / setting for setting in ("on", "off")}


@pytest.mark.slow
def test_the_run_is_the_run_without(runs):
    """The same losses, up to rounding: that something was exchanged is seen by bits that differ."""
    on, off = numbers(runs["on"]), numbers(runs["off"])
    for number, (mine, other) in enumerate(zip(on, off, strict=True)):
        assert mine["loss"] == pytest.approx(other["loss"], rel=LOSS_RTOL if number else FIRST_RTOL)
        assert mine["patches"] == other["patches"] and mine["tokens"] == other["tokens"]
    assert not same(weights(runs["on"]), weights(runs["off"]))


@pytest.mark.slow
def test_a_resumed_run_exchanges_as_if_it_had_not_stopped(recipe, runs, tmp_path):
    out = tmp_path / "resumed"
    train(recipe, out, "--parallel.exchange_pictures on --steps 2")
    train(recipe, out, "--parallel.exchange_pictures on --resume")
    assert_same(out, runs["on"])
