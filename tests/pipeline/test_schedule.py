"""Schedules against their closed forms, and the stage table."""

import math

import pytest

from earlyfusion.pipeline.config.schema import StageSection
from earlyfusion.pipeline.schedule import StageTable, lr_ratio

EXACT = 1e-12  # both sides are a handful of float64 operations


def stage(name="s", steps=100, **other) -> StageSection:
    return StageSection(name=name, steps=steps, length=8, tokens=8, **other)


def ratios(**given) -> list[float]:
    made = stage(**given)
    return [lr_ratio(made, step) for step in range(made.steps)]


@pytest.mark.parametrize(("steps", "warm", "final"), [(100, 10, 0.1), (101, 0, 0.0), (7, 3, 0.5)])
def test_cosine_matches_its_closed_form(steps, warm, final):
    got, last = ratios(steps=steps, warmup_steps=warm, final_lr_ratio=final), steps - 1
    for s in range(warm, steps):
        # cos^2 form of the half cosine
        angle = math.pi / 2 * (s - warm) / (last - warm)
        assert got[s] == pytest.approx(final + (1 - final) * math.cos(angle) ** 2, abs=EXACT)
    assert got[:warm] == pytest.approx([(s + 1) / warm for s in range(warm)], abs=EXACT)


def test_wsd_is_stable_then_falls_linearly_to_the_final_ratio():
    got = ratios(steps=20, schedule="wsd", warmup_steps=4, decay_steps=5, final_lr_ratio=0.5)
    assert got == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 12, 0.9, 0.8, 0.7, 0.6, 0.5], abs=EXACT)
    assert ratios(steps=20, schedule="wsd")[-1] == 1.0, "without a decay it stays at its peak"


@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_stages_have_a_learning_rate(steps):
    for shape in ({}, {"schedule": "wsd", "decay_steps": 1}):
        assert all(0 < ratio <= 1 for ratio in ratios(steps=steps, **shape))


def test_the_table_finds_stage_local_step_and_learning_rate():
    first = stage("joint", 10, warmup_steps=2, final_lr_ratio=0.1)
    second = stage("long", 6, lr=1e-4, schedule="wsd", decay_steps=3, final_lr_ratio=0.0)
    table = StageTable([first, second], lr=1e-2)
    assert table.starts == [0, 10, 16]
    assert [table.index(step) for step in (0, 9, 10, 15, 16)] == [0, 0, 1, 1, 1]  # a finished run at the end
    wanted = [0.5e-2, 1e-3, 1e-4, 0.0]
    assert [table.lr(step) for step in (0, 9, 10, 15)] == pytest.approx(wanted, abs=EXACT)
