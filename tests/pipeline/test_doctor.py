"""The doctor: covers every operation, passes here, and notices a kernel that breaks its law."""

import io
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.kernels import dispatch
from earlyfusion.kernels.kda import naive
from earlyfusion.pipeline import cli, doctor
from earlyfusion.pipeline.bench import case, cases


def test_the_doctor_finds_this_machine_well():
    done = subprocess.run(
        [sys.executable, "-m", "earlyfusion.pipeline.cli", "doctor", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"EF_KERNELS": "auto", "EF_ONEDNN": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch's own choice" in done.stdout and "oneDNN" not in done.stdout
    assert torch.__version__ in done.stdout and "all well" in done.stdout
    for op, backend, _ in dispatch.table("cpu"):
        assert any(op in line and backend in line and " ok " in line for line in done.stdout.splitlines()), op


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_word_of_a_table_is_cut(width):
    """Tables that do not fit get narrower columns or are told row by row; every word stands whole on one
    line."""
    table = Table(title="kernels")
    for column in ("operation", "where", "n", "blind_score", "words_score", "more"):
        table.add_column(column, justify="right" if column == "n" else "left")
    name = "linear_cross_entropy"
    row = [name, f"kernels.loss.chunked_ce:{name}", "17,512", "[red].7071[/]", "12.5 ± 3.1"]
    table.add_row(*row, "unextracted 0.0125, refused 17,512")
    console = Console(width=width, file=io.StringIO())
    print_table(table, console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    words = " ".join(lines).split()
    whole = ["blind_score", "words_score", row[0], row[1], "17,512", ".7071", "±", "unextracted", "0.0125,"]
    assert [cell for cell in whole if cell not in words] == []


def broken_conv(how):
    """The short convolution with a mistake in its outputs, in its gradients, or in one row."""

    def run(*given, **options):
        y, taps = naive.short_conv(*given, **options)
        match how:
            case "forward":
                y = y * 1.001
            case "backward":
                y = y.detach() + (y - y.detach()) * 1.001
            case "nan":
                y = torch.where(torch.arange(len(y))[:, None] == 3, torch.nan, y)
            case "raising":
                raise RuntimeError("0 active drivers")
        return y, taps

    return run


@pytest.mark.parametrize("broken", ["forward", "backward", "nan", "raising"])
def test_a_kernel_that_breaks_its_law_makes_exit_code_1(monkeypatch, capsys, broken):
    monkeypatch.setattr(case, "resolve", lambda op, device: broken_conv(broken))
    monkeypatch.setattr(doctor, "CASES", {"conv": cases.conv})
    monkeypatch.setattr(doctor, "table", lambda device: [("short_conv", "torch", "here:broken")])
    monkeypatch.setattr(doctor, "traps", lambda: [])
    assert cli.main(["doctor", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "short_conv break their law" in out and ("0 active drivers" in out) == (broken == "raising")


def test_a_torchvision_that_cannot_be_imported_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "has", lambda package: package == "torchvision")
    for works in (False, True):
        monkeypatch.setattr(doctor, "torchvision_works", lambda works=works: works)
        assert any("torchvision" in trap for trap in doctor.traps()) is not works


def test_a_device_that_is_not_here_is_the_user_s_error(capsys):
    assert cli.main(["doctor", "--device", "tpu"]) == 2 and "'cpu', 'cuda'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["doctor", "--device", "cuda"]) == 2 and "no GPU" in capsys.readouterr().err
