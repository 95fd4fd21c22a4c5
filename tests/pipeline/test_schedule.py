"""Schedules against their closed forms, and the stage table."""

import math

import pytest

from earlyfusion.pipeline.config.schema import StageSection
from earlyfusion.pipeline.schedule import StageTable, cosine, wsd

EXACT = 1e-12  # both sides are a handful of float64 operations


def stage(name="s", steps=100, **other) -> StageSection:
    return StageSection(name=name, steps=steps, length=8, tokens=8, **other)


@pytest.mark.parametrize(("steps", "warm", "final"), [(100, 10, 0.1), (101, 0, 0.0), (7, 3, 0.5)])
def test_cosine_matches_its_closed_form(steps, warm, final):
    last = steps - 1
    assert cosine(warm, steps, warm, final) == pytest.approx(1.0, abs=EXACT)
    assert cosine(last, steps, warm, final) == pytest.approx(final, abs=EXACT)
    for s in range(warm, steps):
        # cos^2 form of the half cosine
        angle = math.pi / 2 * (s - warm) / (last - warm)
        assert cosine(s, steps, warm, final) == pytest.approx(
            final + (1 - final) * math.cos(angle) ** 2, abs=EXACT
        )
    falling = [cosine(s, steps, warm, final) for s in range(warm, steps)]
    assert falling == sorted(falling, reverse=True)


def test_wsd_is_stable_then_falls_linearly_to_the_final_ratio():
    ratios = [wsd(s, 20, warmup_steps=4, decay_steps=5, final_ratio=0.5) for s in range(20)]
    assert ratios[:4] == [0.25, 0.5, 0.75, 1.0]
    assert ratios[4:15] == [1.0] * 11
    assert ratios[15:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5], abs=EXACT)


def test_wsd_without_decay_stays_at_its_peak():
    assert wsd(19, 20, 0, 0, 0.1) == 1.0


@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_stages_have_a_learning_rate(steps):
    for s in range(steps):
        assert 0 < cosine(s, steps, 0, 0.1) <= 1 and 0 < wsd(s, steps, 0, 1, 0.1) <= 1


def test_the_table_finds_stage_local_step_and_learning_rate():
    first = stage("joint", 10, warmup_steps=2, final_lr_ratio=0.1)
    second = stage("long", 6, lr=1e-4, schedule="wsd", decay_steps=3, final_lr_ratio=0.0)
    table = StageTable([first, second], lr=1e-2)
    assert table.starts == [0, 10, 16]
    assert [table.index(step) for step in (0, 9, 10, 15, 16)] == [0, 0, 1, 1, 1]  # a finished run at the end
    assert table.lr(0) == pytest.approx(0.5e-2, abs=EXACT)
    assert table.lr(9) == pytest.approx(1e-3, abs=EXACT)
    assert table.lr(10) == pytest.approx(1e-4, abs=EXACT)
    assert table.lr(15) == pytest.approx(0.0, abs=EXACT)
