"""The needle task: one thing in one place, the same in words and pictures, within its length, and gone in the
control."""

import re
from itertools import product

import numpy as np
import pytest

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Image, Sample, Text
from earlyfusion.data.synth.graph import COLOURS, on_side, pairs
from earlyfusion.data.tasks.needle import APART, hay
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.vocabulary import embedded_tokenizer
from earlyfusion.vision.config import VisionConfig

TASK = make_task("needle")
SENTENCE = re.compile(r"^the (\w+) is (\w+)\.$", re.MULTILINE)
CASES = list(product((0, 3, 5), ("train", "test"), (3, 11)))


def read(problem):
    """(colour, shape) of every thing of the form in pictures: its colour by its middle pixel."""
    names = {rgb: name for name, rgb in COLOURS.items()}
    found = []
    for part in problem.prompt("picture"):
        if isinstance(part, Image):
            pixels = np.asarray(part.image)
            found.append(names[tuple(map(int, pixels[len(pixels) // 2, len(pixels) // 2]))])
    return found


@pytest.mark.parametrize(("level", "split", "seed"), CASES)
def test_both_forms_hold_one_needle_among_the_same_things(level, split, seed):
    problem = TASK.sample(seed, split, level)
    assert problem == TASK.sample(seed, split, level)
    (twin,) = problem.prompt("twin")
    told = SENTENCE.findall(twin.text)
    assert [(colour, shape) for shape, colour in told] == list(problem.things)
    assert read(problem) == [colour for _, colour in told]

    asked = problem.question.removeprefix("what color is the ").rstrip("?")
    assert [colour for shape, colour in told if shape == asked] == [problem.answer]
    assert problem.things[problem.needle] == (problem.answer, asked)
    assert problem.meta["depth"] == problem.needle / (len(told) - 1)
    # The text between the things is one and the same.
    words = "".join(part.text for part in problem.prompt("picture") if isinstance(part, Text))
    assert words.replace("\n", "") == SENTENCE.sub("", twin.text).replace("\n", "")


@pytest.mark.parametrize(("level", "split", "seed"), CASES)
def test_the_control_differs_from_the_problem_in_its_needle_alone(level, split, seed):
    problem = TASK.sample(seed, split, level)
    without = problem.without()
    asked = problem.things[problem.needle][1]
    assert asked not in [shape for shape, _ in SENTENCE.findall(without.description)]
    differing = [i for i, (a, b) in enumerate(zip(problem.things, without.things)) if a != b]
    assert differing == [problem.needle] and without.question == problem.question
    assert len(without.prompt("picture")) == len(problem.prompt("picture"))


def test_training_and_test_share_no_arrangement_and_no_line_of_their_haystacks():
    """Lines that many files hold ("import os") are on both sides; runs of four of them are not."""
    for split in ("train", "test"):
        for seed in range(40):
            problem = TASK.sample(seed, split, 0)
            assert on_side(problem.combination, split == "test")
            # What other exams hold out is never shown here.
            assert set(problem.things) <= set(pairs(False))
    runs = [set(zip(*(hay(side)[i:] for i in range(4)))) for side in (False, True)]
    assert len(runs[0] & runs[1]) < 0.02 * len(runs[1])


def test_needles_lie_everywhere():
    drawn = [TASK.sample(seed, "test", 3) for seed in range(310)]
    places = np.bincount([problem.needle for problem in drawn], minlength=1024 // APART - 1)
    # 310 draws of 31 places, 10 each: 5 standard deviations.
    assert abs(places - 10).max() < 5 * 10**0.5
    assert len({problem.category for problem in drawn}) == 5


@pytest.mark.parametrize("form", ["picture", "twin"])
def test_a_document_fits_its_length(form):
    tokenizer, vision = embedded_tokenizer(2048), VisionConfig(**{**VisionConfig.preset("tiny").model_dump()})
    for level, seed in product((0, 3, 5), range(20)):
        problem = TASK.sample(seed, "train", level)
        sample = Sample([*problem.prompt(form), problem.solution()], "needle", "")
        length = problem.meta["length"]
        # Filler is dear: documents are not far shorter either.
        assert 0.35 * length < len(encode(sample, tokenizer, vision)) <= length


def test_a_conversation_holds_the_text_between_the_pictures():
    problem = TASK.sample(0, "train", 0)
    (message,) = problem.chat()
    assert message.content == (*problem.prompt()[:-1], Text(problem.question, 0.0))
