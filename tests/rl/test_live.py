"""The view of a running run: a table that stays in place, or one plain line an update."""

import io
import re

import pytest
from rich.console import Console

from earlyfusion.rl import live
from earlyfusion.rl.live import BARS, REMEMBERED, Curve, LiveView, sparkline

RECORD = {
    "reward": 0.5,
    "reward/counting/0/picture": 0.75,
    "reward/ocr/1/twin": 0.25,
    "score/counting/0/picture": 0.8,
    "length": 4.25,
    "length_max": 8,
    "cut": 0.015,
    "entropy": 0.53,
    "mismatch_kl": 1.2e-4,
    "mismatch_max": 3e-2,
    "staleness": 0.5,
    "clip_share": 0.021,
    "k3": 2e-3,
    "grad_norm": 0.314,
    "lr": 5e-4,
    "temperature": 1.0,
    "informative": 0.62,
    "tokens_per_s": 12345.0,
    "samples_per_s": 678.9,
    "updates_per_min": 30.0,
    "time/rollout_s": 1.0,
    "time/score_s": 0.1,
    "time/train_s": 0.8,
    "time/other_s": 0.1,
    "engine_idle": 0.06,
    "memory_gib": 1.5,
    "ptx_loss": 2.125,
    "stage": "text is passed over",
}


def plain() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal(width: int = 100, height: int = 40) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, legacy_windows=False)


def screen(view: LiveView, width: int = 100, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(view.table())
    return console.file.getvalue()


def test_without_a_terminal_each_update_is_one_plain_line():
    view = LiveView(plain(), total=100, title="skills")
    view.update(10, RECORD)
    view.close()
    assert (
        view.console.file.getvalue()
        == "update 10/100 | reward 0.500 | counting/0/picture 0.75 | ocr/1/twin 0.25 | length 4.2 (max 8, cut"
        " 1.5%) | entropy 0.530 | informative 62% | T 1.00 | stale 0.50 | mismatch KL 1.2e-04 (max"
        " 3.0e-02) | clipped 2.10% | k3 2.0e-03 | |g| 0.314 | lr 5.0e-04 | ptx 2.125 | 12,345 tok/s |"
        " 678.9 answers/s | 30.0 updates/min | 1.50 GiB | engine idle 6% | rollout 50% score 5% train 40%"
        " other 5% | ETA 3m00s\n"
    )


def test_many_kinds_of_prompts_do_not_fill_the_plain_line():
    view = LiveView(plain(), total=9, title="t")
    view.update(1, {f"reward/task{i}/0/picture": i / 20 for i in range(20)})
    assert "14 more" in view.line() and view.line().count("/picture") == 6


def test_the_table_holds_everything_that_is_promised():
    view = LiveView(terminal(), total=100, title="skills [red]")
    for update in range(1, 11):
        view.update(update, RECORD | {"reward/counting/0/picture": update / 10})
    view.close()
    shown = screen(view)
    for text in (
        "skills [red]",
        "update 10/100",
        "ETA 3m00s",
        "counting/0/picture",
        "ocr/1/twin",
        "length 4.2",
        "entropy 0.530",
        "mismatch KL 1.2e-04",
        "stale 0.50",
        "clipped 2.10%",
        "12,345 tok/s",
        "1.50 GiB",
        "engine idle 6%",
        "rollout 50%",
        "score 5%",
        "train 40%",
        "all",
    ):
        assert text in shown, text
    (row,) = [line for line in shown.splitlines() if "counting" in line]
    assert row.split()[1:] == ["▁▂▃▄▅▅▆▇██", "1.00", "0.10", "0.80"]
    assert "update 10/100" in view.console.file.getvalue()


@pytest.mark.parametrize(("width", "height"), [(60, 16), (80, 24), (200, 50)])
def test_it_fits_the_screen_whatever_its_size(width, height):
    view = LiveView(terminal(width, height), total=10_000, title="a run with quite a long name")
    rewards = {f"reward/odd_one_out/{i}/rendered/thought": i / 40 for i in range(40)}
    for update in range(60):
        view.update(update, RECORD | rewards)
    lines = screen(view, width, height).splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) <= height + 2
    assert re.search(r"\d+ more", "\n".join(lines)) or height == 50


def test_messages_stand_above_and_the_last_state_stays():
    view = LiveView(terminal(), total=2, title="t")
    view.update(1, {"reward": 0.125})
    view.say("checkpoint [bold]saved[/bold]")
    view.update(2, {"reward": 0.875})
    view.close()
    view.close()
    text = view.console.file.getvalue()
    assert "checkpoint [bold]saved[/bold]" in text and "update 2/2" in text[text.index("saved") :]


def test_it_draws_at_most_four_times_a_second(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    view = LiveView(terminal(), total=1000, title="t")
    drawn = []
    monkeypatch.setattr(view, "_draw", lambda: (drawn.append(view.number), setattr(view, "_drawn", now[0])))
    for update in range(1, 101):
        now[0] += 0.01
        view.update(update, {"reward": 0.5})
    assert 4 <= len(drawn) <= 5


def test_the_time_left_comes_from_the_clock_when_no_rate_is_given(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    view = LiveView(plain(), total=100, title="t")
    view.update(41, {"reward": 0.1})  # a resumed run
    assert view.seconds_left() is None
    now[0] = 9.0
    view.update(44, {"reward": 0.1})
    assert view.seconds_left() == pytest.approx(56 * 3.0)
    view.update(44, {"updates_per_min": 60.0})
    assert view.seconds_left() == pytest.approx(56.0)


def test_one_slow_update_does_not_throw_the_time_left_off():
    view = LiveView(plain(), total=100, title="t")
    for update in range(1, 51):
        view.update(update, {"updates_per_min": 60.0})
    view.update(51, {"updates_per_min": 6.0})  # a measurement took 10 s
    assert 49 < view.seconds_left() < 2 * 49


def test_what_was_contained_is_told():
    view = LiveView(plain(), total=9, title="t")
    view.update(1, {"rewards/timeout": 3.0, "prompts/too_long": 2.0})
    assert view.line() == "update 1/9 | prompts/too_long 2 | rewards/timeout 3"
    assert "rewards/timeout 3" in screen(view)


def test_a_quiet_console_of_another_process_shows_nothing():
    console = Console(file=io.StringIO(), force_terminal=True, quiet=True)
    view = LiveView(console, total=3, title="t")
    view.update(1, RECORD)
    view.say("nothing")
    view.close()
    assert console.file.getvalue() == ""


def test_missing_and_broken_numbers_are_left_out():
    view = LiveView(plain(), total=0, title="t")
    view.update(
        1, {"reward": float("nan"), "entropy": None, "length": 3.0, "cut": True, "time/rollout_s": 0.0}
    )
    assert view.line() == "update 1/0 | length 3.0"
    assert "length 3.0" in screen(view)


def test_a_sparkline_is_the_mean_of_each_share_on_a_common_scale():
    assert sparkline([0.0, 1.0], 10) == BARS[0] + BARS[-1]
    assert sparkline([0, 0, 0, 1, 1, 1, 0.5, 0.5, 0.5], 3) == BARS[0] + BARS[-1] + BARS[4]
    assert sparkline([0.50, 0.51], 5) == BARS[4] * 2  # noise is not blown up
    assert sparkline([-1.0, 0.0, 1.0], 5) == BARS[0] + BARS[4] + BARS[-1]  # and what lies outside widens it
    assert sparkline([], 5) == "" and sparkline([1.0], 0) == ""


def test_a_long_curve_needs_no_more_memory_and_keeps_its_shape():
    curve, count = Curve(), 5 * REMEMBERED + 3
    for index in range(count):
        curve.add(index / count)
    assert len(curve.values) < REMEMBERED and curve.first == 0 and curve.last == (count - 1) / count
    assert curve.text(8) == BARS
