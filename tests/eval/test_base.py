"""Adding up: means over questions, limits spread over categories, and names that another harness serves."""

import pytest

from earlyfusion.eval.benchmarks.base import (
    evenly,
    spread,
    summarize,
)


def test_summaries_are_means_over_questions():
    rows = [("1", "x", 1.0, "A"), ("1", "x", 0.0, None), ("2", "y", 1.0, "A"), ("2", "y", 1.0, "A")]
    records = [{"id": i, "category": c, "score": s, "extracted": e} for i, c, s, e in rows]
    found = summarize(records)
    assert (found["n"], found["samples"], found["score"], found["unextracted"]) == (2, 4, 0.75, 0.25)
    assert found["by_category"]["x"] == {"n": 1, "score": 0.5}
    assert found["standard_error"] == pytest.approx(0.25)
    assert summarize(records[:1])["standard_error"] is None


def test_limits_are_spread_in_turn():
    categories = ["a", "a", "a", "b", "c", "c"]
    for limit, chosen in ((3, [0, 3, 4]), (5, [0, 1, 3, 4, 5]), (None, list(range(6)))):
        assert spread(list(range(6)), categories, limit) == chosen
    assert evenly(list(range(6)), 3) == [0, 2, 4] and evenly([1, 2], 9) == [1, 2]
