"""`earlyfusion bench balance` on the tiny recipe: its figures against the plan, and nothing of a run
touched."""

import json

from tiny_run import forget_processes

from earlyfusion.pipeline.bench import balance as bench_balance
from earlyfusion.pipeline.config.compose import load_config


def test_skewed_lanes_lie_unevenly_and_are_evened_out(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forget_processes()
    bench_balance.balance(recipe=str(recipe), out="out.json", steps=3, lanes=4)
    record = json.loads((tmp_path / "out.json").read_text())
    for name in ("as dealt", "skewed"):
        assert list(record[name]) == ["2 ranks", "4 ranks"]
        for row in record[name].values():
            assert row["before"] >= row["after_auto"] >= 1 and row["after"] >= 1, name
    two, four = record["skewed"].values()
    assert two["before"] == 2.0 and four["before"] >= 2.0, "half of the lanes hold text alone"
    assert two["after"] < two["before"] and four["after"] < four["before"] and two["exchanged_by_auto"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_auto_leaves_steps_alone_that_are_even_enough(recipe):
    config = load_config([str(recipe)])
    big, small = (1, 8, 8), (1, 6, 8)
    row = bench_balance.plan_of(config, [[[big, small], [big]]], 1e9, 2)
    assert row["exchanged_by_auto"] == 0 and row["after_auto"] == row["before"] > 1
    row = bench_balance.plan_of(config, [[[big, big], []], [[], []]], 1.1, 2)
    assert row["exchanged_by_auto"] == 1 and row["before"] == 2 and row["after"] == row["after_auto"] == 1
