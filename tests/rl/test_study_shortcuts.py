"""Rules that solve problems in words without reading them, found before a study calls them a skill."""

import pytest

from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval.measured import Measured
from earlyfusion.rl.study.analysis import shortcut


def told(prompt: str, target: str, category: str = "all") -> Measured:
    """A measured problem of which only words and answer matter."""
    return Measured(
        "t", "twin", f"{prompt}-{target}", category, prompt, target, "", 0.0, False, 0.0, 0.0, 0.0
    )


def test_the_rule_of_a_planted_place_is_found_with_its_exact_shares():
    rows = [
        told("red\nblue\ngreen", "blue"),
        told("green\nred", "red"),
        told("blue\nred red", "red"),
        told("red\ngreen", "green"),
        told("green\nblue", "green"),
    ]
    found = shortcut(rows)
    assert found["rule"] in ("answer word 2", "first answer word of line 2")
    assert found["solves"] == pytest.approx(4 / 5)
    assert found["at_random"] == pytest.approx((1 / 3 + 4 * 1 / 2) / 5)


def test_a_word_of_another_category_or_inside_another_word_is_no_answer():
    rows = [told("reddish circle red", "red", "colour"), told("red circle", "circle", "shape")]
    found = shortcut(rows)
    assert tuple(found.values()) == ("answer word 1", 1.0, 1.0)
    for prompt in ("", "nothing of the kind", "\n\n"):
        assert shortcut([told(prompt, "red"), told(prompt, "blue")]) is None


@pytest.mark.parametrize("seed", [0, 1])
def test_the_list_from_left_to_right_gives_the_leftmost_away_and_the_mixed_list_does_not(seed):
    def rows(level: int) -> list[Measured]:
        problems = [make_task("colour_shape").sample(seed * 1000 + i, "test", level) for i in range(150)]
        return [told(p.description, p.target, p.category) for p in problems]

    sorted_, mixed = shortcut(rows(2)), shortcut(rows(5))
    assert sorted_["rule"] == "first answer word of line 2" and sorted_["solves"] > 0.9
    assert mixed["solves"] < 0.75 and sorted_["at_random"] == pytest.approx(mixed["at_random"], abs=0.08)
