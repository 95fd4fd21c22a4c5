"""Metrics of answers against closed forms, brute force and the published definitions."""

import random
import time
from functools import cache

import pytest

from earlyfusion.data.tasks import scoring as metrics
from earlyfusion.data.tasks import scoring as metrics_boxes
from earlyfusion.data.tasks.scoring import candidates, open_match


def test_counts_are_read_from_digits_and_words_and_nothing_else():
    for text, value in {
        " 3": 3,
        "There are twelve.": 12,
        "None": 0,
        "no circles": 0,
        "-2": -2,
        "07 of them": 7,
        "3.": 3,
        "Two or 3": 2,
        "3.5": None,
        "": None,
        "someone": None,
        "3rd": None,
        "x3": None,
        "twenty": 20,
    }.items():
        assert metrics.parse_count(text) == value, text


@pytest.mark.parametrize("seed", [0, 1])
def test_levenshtein_equals_the_recursion(seed):
    rng = random.Random(seed)

    @cache
    def slow(a, b):
        if not a or not b:
            return len(a or b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    for _ in range(150):
        a, b = ("".join(rng.choices("abc", k=rng.randint(0, 9))) for _ in range(2))
        assert metrics.levenshtein(a, b) == slow(a, b)
    assert metrics.levenshtein(["a", "b"], ["b"]) == 1


def test_error_rates_and_anls():
    assert metrics.error_rate("hat", "that") == 0.25
    assert metrics.error_rate("abcdef", "a") == 5.0  # may exceed 1
    assert metrics.error_rate("", "") == 0.0 and metrics.error_rate("x", "") == 1.0
    assert metrics.error_rate("the red cat".split(), "the cat".split()) == 0.5
    assert metrics.anls("Hat", "that") == 0.75
    assert metrics.anls("ab", "abcd") == 0.0  # half wrong: at the threshold, nothing
    assert metrics.anls("abc", "ABC ") == 1.0
    assert metrics.anls("", "") == 1.0


def test_containment_forgives_what_exact_match_does_not():
    assert metrics.contains("The text says:  BLUE\nbird.", "blue bird") and not metrics.exact_match(
        "it says blue bird", "blue bird"
    )
    assert metrics.exact_match(" The red circle.\nmore", "red circle") and metrics.exact_match("YES", "yes")
    assert not metrics.exact_match("", "yes")


def test_relaxed_accuracy_is_the_published_one_traps_included():
    right = [
        ("3", "3"),
        ("10.4", "10"),
        ("9.6", "10"),
        ("-9.6", "-10"),
        ("0.125", "12%"),
        ("12%", "12%"),
        ("Yes", "yes"),
    ]
    wrong = [
        ("10.6", "10"),
        ("12", "12%"),
        ("0.0", "0"),
        ("3 apples", "3"),
        ("", "3"),
        ("B", "A"),
        ("-10", "10"),
    ]
    assert all(metrics.relaxed_match(*pair) for pair in right)
    assert not any(metrics.relaxed_match(*pair) for pair in wrong)
    assert metrics.relaxed_match("0", "0")  # equal as text


def test_boxes_are_read_in_every_public_form():
    width, height = 200, 100
    expected = (20.0, 10.0, 60.0, 50.0)
    for text, units in (
        ("[20, 10, 60, 50]", "pixels"),
        ("It is at (20 10 60 50).", "pixels"),
        ("<box>(20,10),(60,50)</box>", "pixels"),
        ('{"bbox_2d": [20, 10, 60, 50], "label": "x"}', "pixels"),
        ("x1=20 y1=10 x2=60 y2=50", "pixels"),
        ('{"x_min": 20, "y_min": 10, "x_max": 60, "y_max": 50}', "pixels"),
        ("[0.10, .1, 0.30, 0.50]", "relative"),
        ("[60, 50, 20, 10]", "pixels"),  # corners the other way round
    ):
        assert metrics_boxes.parse_boxes(text, width, height, units) == [pytest.approx(expected)], text
    located = metrics_boxes.parse_boxes("<loc0102><loc0102><loc0512><loc0307>", width, height)
    assert located == [pytest.approx(expected, abs=0.2)]  # 1/1024 of a side
    two = metrics_boxes.parse_boxes("first [1, 2, 3, 4] then (5,6),(7,8)", width, height)
    assert two == [(1, 2, 3, 4), (5, 6, 7, 8)]


def test_grounding_scores():
    scores = metrics_boxes.grounding_scores((0, 0, 10, 10), (0, 0, 10, 20))
    assert scores == {
        "iou": 0.5,
        "acc@0.1": 1,
        "acc@0.3": 1,
        "acc@0.5": 1,
        "acc@0.7": 0,
        "acc@0.9": 0,
        "centre_in_box": 1,
    }
    assert set(metrics_boxes.grounding_scores(None, (0, 0, 1, 1)).values()) == {0.0}
    assert metrics_boxes.grounding_scores((90, 90, 100, 100), (0, 0, 50, 50))["centre_in_box"] == 0


def test_open_answers():
    assert open_match("The result is 12.5 kg", ["12.5"]) and open_match("x = 1,200", ["1200"])
    assert open_match("So the answer is Paris.", ["London", "paris"]) and not open_match("It is 13", ["12"])
    assert not open_match("", ["12"]) and not open_match("I cannot tell", ["Paris"])
    assert all(open_match("1,234.567 and -3e2 or .5", [gold]) for gold in ("1234.57", "-300", "0.5"))
    assert candidates("First. the final answer is blue") == ["blue"]


@pytest.mark.parametrize(
    "text", ["[1" + " " * 4000 + "1", "(" + ", ".join(["9" * 4000] * 4) + ")", "[1." + "1" * 9000]
)
def test_hostile_text_is_read_in_a_moment(text):
    started = time.process_time()
    metrics_boxes.parse_boxes(text, 100, 100)
    assert time.process_time() - started < 2
