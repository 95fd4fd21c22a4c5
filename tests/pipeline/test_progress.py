"""The view of a running loop: a block that stays in place on a terminal, or one plain line."""

import io

import pytest
from rich.console import Console

from earlyfusion.pipeline.progress import Progress

PRETRAINING = {
    "stage": "joint",
    "loss": 1.5,
    "loss/image": 1.25,
    "loss/text": 2.0,
    "lr": 1e-3,
    "tokens_per_s": 12345.0,
    "patches_per_s": 678.0,
    "mfu": 0.256,
    "memory_gib": 1.5,
    "step_s": 2.0,
}
RL = {
    "reward": 0.5,
    "reward/counting/0/picture": 0.75,
    "reward/ocr/1/twin": 0.25,
    "length": 4.25,
    "cut": 0.015,
    "mismatch_kl": 1.2e-4,
    "time/train_s": 0.8,
    "rewards/timeout": 3.0,
    "prompts/too_long": 2.0,
    "step_s": 2.0,
}


def terminal(width: int = 100, height: int = 40) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, legacy_windows=False)


def screen(view: Progress, width: int, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(view.view())
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("unit", "record", "line"),
    [
        (
            "step",
            PRETRAINING,
            "step 10/100 | joint | loss 1.500 | img 1.250 | txt 2.000 | lr 1.00e-03 | 12,345 tok/s"
            " | 678 patch/s | MFU 25.6% | 1.50 GiB | ETA 3m00s",
        ),
        (
            "update",
            RL,
            "update 10/100 | reward 0.500 | length 4.2 | cut 1.5% | mismatch KL 1.2e-04 | train 0.80s"
            " | prompts/too_long 2 | rewards/timeout 3 | counting/0/picture 0.75 | ocr/1/twin 0.25"
            " | ETA 3m00s",
        ),
        (
            "step",
            {"loss": float("nan"), "entropy": None, "length": 3.0, "cut": True},
            "step 10/100 | length 3.0",
        ),
    ],
)
def test_a_record_is_one_plain_line_and_holds_what_is_a_number(unit, record, line):
    view = Progress(Console(file=io.StringIO()), 100, unit=unit)
    view.update(10, record)
    assert view.line() == line


@pytest.mark.parametrize(("width", "height"), [(40, 16), (80, 24), (200, 50)])
@pytest.mark.parametrize("record", [PRETRAINING, RL])
def test_no_number_is_cut_whatever_the_screen(record, width, height):
    view = Progress(terminal(width, height), 100, title="a run [red]")
    many = {f"reward/odd_one_out/{i}/rendered": i / 30 for i in range(28)} if record is RL else {}
    view.update(10, record | many)
    shown = screen(view, width, height)
    assert all(len(line) <= width for line in shown.splitlines())
    words = " ".join(shown.split())
    assert all(fact in words for fact in [*view.facts(), "a run [red] step 10/100", "ETA 3m00s"])
    assert ("24 more" in words) == (record is RL)


def test_an_evaluation_shows_how_far_it_is():
    log, screen_ = Console(file=io.StringIO()), terminal(80)
    for console in (log, screen_):
        view = Progress(console, 10)
        view.busy("evaluating easy_vqa (1/2)")
        view.busy("evaluating easy_vqa (1/2)", 3200, 9673)
        view.close()
    assert log.file.getvalue() == "evaluating easy_vqa (1/2) ...\n", "a log gets one line"
    assert "evaluating easy_vqa (1/2) 3,200/9,673" in screen_.file.getvalue()
