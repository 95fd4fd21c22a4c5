"""Answers are read as the published scripts read them."""

import random
import re

import pytest

from earlyfusion.data.tasks.scoring import gsm8k_number, mmlu_pro_letter, normal_number, option_letter


def official(text):
    """The three regular expressions of the official script, applied one after the other."""
    for pattern, flags in (
        (r"answer is \(?([A-J])\)?", 0),
        (r".*[aA]nswer:\s*([A-J])", 0),
        (r"(\b[A-J]\b)(?!.*\b[A-J]\b)", re.DOTALL),
    ):
        if match := re.search(pattern, text, flags):
            return match.group(1)
    return None


@pytest.mark.parametrize("seed", [0, 1])
def test_random_texts_give_what_the_official_expressions_give(seed):
    rng = random.Random(seed)
    parts = [
        "answer is ",
        "(",
        ")",
        "A",
        "B",
        "J",
        "K",
        "nswer: ",
        "Answer: ",
        "\n",
        " ",
        "I",
        ".",
        "so ",
        "aA",
        "é",
    ]
    for _ in range(3000):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(0, 12)))
        found = mmlu_pro_letter(text)
        assert (found[0] if found else None) == official(text), repr(text)


def test_the_level_that_found_is_told_and_fewer_levels_find_less():
    assert mmlu_pro_letter("The answer is (C). The answer is (D).") == ("C", 1)
    assert mmlu_pro_letter("Answer: C") == ("C", 2) and mmlu_pro_letter("A or\nJ") == ("J", 3)
    assert mmlu_pro_letter("Answer: C", levels=1) is None
    assert mmlu_pro_letter("B", levels=2) is None


def test_the_options_of_gpqa():
    assert option_letter("Answer: A is tempting\nSo, **Answer: $C$**", True) == "C"
    assert option_letter("ANSWER : d", True) == "D" and option_letter("(A) no, (D) yes (E)", False) == "D"
    for text, worked in (("Answer: Apples", True), ("Answer: E", True), ("A", False)):
        assert option_letter(text, worked) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 * 4 = 12\n#### 1,200.00", "1200"),
        ("she pays $3.50 in total.", "3.5"),
        ("#### -7", "-7"),
        ("nothing", None),
    ],
)
def test_numbers_of_word_problems(text, value):
    assert gsm8k_number(text) == value


def test_equal_numbers_are_equal_strings():
    assert {normal_number(x) for x in ("18", "18.0", "$18", "018", "18.")} == {"18"}
    assert normal_number("-0.0") == "0"
    assert normal_number(".") is None
