"""Scores of pages: terms by hand, monotone under damage, floors low; no browser is needed."""

import random

import numpy as np
import pytest
from PIL import Image

from earlyfusion.eval.website.browser import Block, View
from earlyfusion.eval.website.score import (
    CLOSE,
    NOTHING,
    changed,
    close_pixels,
    difference,
    interaction,
    score,
    similarity,
)

pytest.importorskip("skimage", reason="pip install 'earlyfusion[website]'")
TEXTS = "one two|three four five|six|seven eight|nine ten eleven|twelve".split("|")


def view(texts=TEXTS, shift=0.0, colour=(10, 20, 30), ground=(250, 250, 250), height=200):
    blocks = [
        Block(text, (10 + shift, 20.0 * number, 6.0 * len(text), 12.0), colour, ground)
        for number, text in enumerate(texts)
    ]
    picture = Image.new("RGB", (240, height), ground)
    for block in blocks:
        left, top, width, tall = (int(one) for one in block.box)
        picture.paste(block.colour, (left, top, left + width, top + tall))
    return View((240, height), blocks, picture)


def test_a_page_is_like_itself_and_nothing_is_like_a_page():
    assert score(view(), view()).mean == 1
    blank = View((240, 180), [], Image.new("RGB", (240, 180), (250, 250, 250)))
    assert score(blank, view()) == NOTHING and score(blank, view()).mean == 0


def test_every_term_is_what_its_definition_says():
    """By hand: one of six texts is missing, all stand 12 pixels to the right of 240."""
    seen, wanted = view(TEXTS[1:], shift=12.0), view()
    seen.blocks[:] = [b for b in view(shift=12.0).blocks if b.text != TEXTS[0]]
    found = score(seen, wanted).terms
    areas = [6 * len(text) * 12 for text in TEXTS]
    assert found["area"] == pytest.approx(2 * sum(areas[1:]) / (2 * sum(areas) - areas[0]))
    letters = sum(map(len, TEXTS))
    gone = len(TEXTS[0])
    assert found["text"] == pytest.approx(2 * (letters - gone) / (2 * letters - gone))
    assert found["position"] == pytest.approx(5 / 6 * (1 - 12 / 240))
    assert found["colour"] == pytest.approx(5 / 6)


def test_colours_are_compared_by_ciede2000():
    """A pair of Sharma, Wu and Dalal's table holds for the library; here: black on white is 100 apart."""
    assert score(view(colour=(0, 0, 0)), view(colour=(255, 255, 255))).terms["colour"] == pytest.approx(
        0, abs=1e-3
    )


def test_without_pixels_the_ground_of_the_texts_is_paid_for():
    """A palette that is wrong behind half of the texts is wrong by half of a term."""
    bare = lambda ground: View((240, 200), [*view().blocks[:3], *view(ground=ground).blocks[3:]])
    found = score(bare((250, 250, 250 - CLOSE)), bare((250, 250, 250)))
    assert found.terms["ground"] == 0.5 and found.mean == pytest.approx(0.9)
    assert score(bare((250, 250, 251 - CLOSE)), bare((250, 250, 250))).mean == 1
    assert "ground" not in score(view(), view()).terms


def test_a_term_of_ones_own_joins_the_mean():
    found = score(view(), view(), clip=lambda seen, wanted: 0.25)
    assert found.terms["clip"] == 0.25 and found.mean == pytest.approx((5 + 0.25) / 6)


def test_pixels_that_one_page_lacks_differ():
    short, long = (Image.new("RGB", (240, height), (9, 9, 9)) for height in (100, 200))
    assert close_pixels(short, long) == close_pixels(long, short) == 0.5
    made = np.asarray(difference(short, long))
    assert (made[:100] == 0).all() and (made[100:] == 128).all()


def test_equal_texts_are_matched_where_they_stand():
    twice = ["go", "go", "go", "stop"]
    assert score(view(twice), view(twice)).mean == 1


@pytest.mark.parametrize("seed", range(5))
def test_more_damage_never_scores_higher(seed):
    rng, texts = random.Random(seed), list(TEXTS)
    last = 1.0
    for place in rng.sample(range(len(texts)), len(texts)):
        texts[place] = "zzzzzz"
        found = score(view(texts), view()).mean
        assert found < last
        last = found
    for shift in (0, 10, 40, 90):
        assert score(view(shift=shift), view()).mean <= 1
    means = [score(view(shift=shift), view()).mean for shift in (0, 10, 40, 90)]
    assert means == sorted(means, reverse=True)


def test_similarity_is_the_ratio_of_the_standard_library_or_nothing():
    from difflib import SequenceMatcher

    rng = random.Random(2)
    for _ in range(300):
        one, two = ("".join(rng.choices("abc ", k=rng.randint(0, 12))) for _ in range(2))
        ratio = SequenceMatcher(None, one, two, autojunk=False).ratio()
        assert similarity(one, two) == pytest.approx(ratio) or (ratio < 0.5 and similarity(one, two) == 0)


def test_actions_count_by_what_they_change():
    closed, opened = view(TEXTS[:4]), view(TEXTS)
    assert changed(closed, opened) == {*TEXTS[4:]}
    assert interaction([closed, opened], [closed, opened]) == 1
    # Nothing happened: only the looks are left, at 0.3.
    still = interaction([closed, closed], [closed, opened])
    assert still == pytest.approx(0.3 * score(closed, opened).mean)
    with pytest.raises(ValueError, match="at least two"):
        interaction([closed], [closed])
