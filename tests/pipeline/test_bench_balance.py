"""`earlyfusion bench balance` on the tiny recipe: its figures against the plan, and nothing of a run
touched."""

import json

import pytest
from tiny_run import forget_processes

from earlyfusion.pipeline import cli
from earlyfusion.pipeline.bench import balance as bench_balance
from earlyfusion.pipeline.config.compose import load_config


def bench(recipe, out, **options) -> dict:
    forget_processes()
    bench_balance.balance(recipe=str(recipe), out=str(out), **options)
    return json.loads(out.read_text())


def test_skewed_lanes_lie_unevenly_and_are_evened_out(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = bench(recipe, tmp_path / "out.json", steps=3, batches=0, lanes=4)
    for name, rows in record["plan"].items():
        assert [(row["ranks"], row["micro_batches"], row["steps"]) for row in rows] == [(2, 2, 3), (4, 1, 3)]
        for row in rows:
            assert row["worst_before"] >= row["before"] >= row["after_auto"] >= 1 and row["after"] >= 1, name
    two, four = record["plan"]["skewed"]
    assert two["before"] == 2.0 and four["before"] >= 2.0, "half of the lanes hold text alone"
    assert two["after"] < two["before"] and four["after"] < four["before"] and two["exchanged_by_auto"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_auto_leaves_steps_alone_that_are_even_enough(recipe):
    config = load_config([str(recipe)])
    big, small = (1, 8, 8), (1, 6, 8)
    (row,) = bench_balance.plans(config, [[[big, small], [big]]], 1e9)
    assert row["exchanged_by_auto"] == 0 and row["after_auto"] == row["before"] > 1
    (row,) = bench_balance.plans(config, [[[big, big], []], [[], []]], 1.1)
    assert row["exchanged_by_auto"] == 1 and row["before"] == 2 and row["after"] == row["after_auto"] == 1
    assert row["patches_moved"] == 0.5


@pytest.mark.slow
def test_two_processes_encode_skewed_pictures_at_home_and_exchanged(recipe, tmp_path):
    part = bench(recipe, tmp_path / "out.json", steps=0, batches=2, tokens=384)["exchange"]
    assert part["before"] == 2.0 and 1 <= part["after"] < 1.5
    assert part["home_cpu_s"] > 0 and part["exchanged_cpu_s"] > 0 and part["plan_s"] > 0
    assert len(part["by_rank"]) == 2 and all(len(record["home"]) == 2 for record in part["by_rank"])


def test_one_lane_cannot_be_spread(tmp_path, capsys):
    assert cli.main(["bench", "balance", "--lanes", "1", "--out", str(tmp_path / "out.json")]) == 2
    assert "--lanes 1: " in capsys.readouterr().err
