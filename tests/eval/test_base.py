"""Adding up: means over questions, limits spread over categories, and names that another harness serves."""

import pytest

from earlyfusion.eval.benchmarks.base import grouped, spread, standard_error, summarize
from earlyfusion.eval.protocol import EvalError
from earlyfusion.eval.registry import HARNESS_TASKS, build_task


@pytest.mark.parametrize("name", HARNESS_TASKS)
def test_a_text_benchmark_says_which_command_asks_it(name):
    with pytest.raises(EvalError, match=f"--harness lm-eval --tasks {name} --data {name}=PATH"):
        build_task(name)


def test_summaries_are_means_over_questions():
    records = [
        {"id": i, "repeat": r, "category": c, "score": s, "extracted": e, "target": "A", "chance": 0.25}
        for i, r, c, s, e in [
            ("1", 0, "x", 1.0, "A"),
            ("1", 1, "x", 0.0, None),
            ("2", 0, "y", 1.0, "A"),
            ("2", 1, "y", 1.0, "A"),
        ]
    ]
    found = summarize(records)
    assert (found["n"], found["samples"], found["score"], found["unextracted"]) == (2, 4, 0.75, 0.25)
    assert found["by_category"]["x"] == {"n": 1, "score": 0.5} and found["standard_error"] == pytest.approx(
        0.25
    )
    assert standard_error([1.0]) is None


def test_limits_are_spread_in_turn_and_groups_stay_together():
    categories = ["a", "a", "a", "b", "c", "c"]
    assert spread(list(range(6)), categories, 3) == [0, 3, 4]
    assert spread(list(range(6)), categories, 5) == [0, 1, 3, 4, 5]
    assert spread(list(range(6)), categories, None) == list(range(6))
    assert grouped([0, 1, 2, 3], ["b", "a", "b", "a"]) == [0, 2, 1, 3]
    with pytest.raises(EvalError, match="at least 1"):
        spread([1, 2], ["", ""], 0)
