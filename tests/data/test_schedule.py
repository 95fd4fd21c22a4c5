"""Weights and vision share: the account alone, by step, and what comes out of a real loader."""

import random

import pytest

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import Blend, Mixture, Point, Schedule


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("moving", [False, True])
def test_shares_are_followed_to_within_one_document(seed, moving):
    """Constant weights and a ramp. Oracle: the integral of the shares over the tokens given so far."""
    rng, longest = random.Random(seed), {"a": 900, "b": 60, "c": 15}
    mixture = Mixture({"a": 5.0, "b": 3.0, "c": 2.0})
    due, given = dict.fromkeys("abc", 0.0), dict.fromkeys("abc", 0)
    weights = mixture.weights
    for step in range(4000):
        if moving:
            u = step / 4000
            weights = {"a": 1 - u, "b": u * u, "c": 0.3 if 1000 < step < 3000 else 0.0}
            mixture.move(weights)
        name = mixture.pick("abc")
        tokens = rng.randint(1, longest[name])
        mixture.emitted[name] += tokens
        given[name] += tokens
        for other, weight in weights.items():
            due[other] += tokens * weight / sum(weights.values())
    assert all(abs(due[name] - given[name]) <= 2 * 900 for name in "abc"), (due, given)


def test_an_exhausted_source_leaves_its_share_to_the_others():
    mixture = Mixture({"a": 2, "b": 1, "c": 1})
    for _ in range(300):
        mixture.emitted[mixture.pick({"b", "c"})] += 1
    assert mixture.emitted == {"a": 0, "b": 150, "c": 150}
    assert mixture.pick(set()) is None and mixture.pick({"a"}) == "a"


def test_a_schedule_holds_jumps_and_ramps():
    schedule = Schedule(
        [
            Point(0, {"a": 3, "b": 1}, 0.0),
            Point(10, None, 0.5),
            Point(20, {"a": 1, "b": 3}, None, linear=True),
            Point(30, {"b": 1}, 0.1, linear=True),
        ]
    )
    for step, weights, vision in (
        (0, {"a": 0.75, "b": 0.25}, 0.0),
        (10, {"a": 0.5, "b": 0.5}, 0.5),
        (20, {"a": 0.25, "b": 0.75}, 0.3),
        (25, {"a": 0.125, "b": 0.875}, 0.2),
        (30, {"b": 1.0}, 0.1),
    ):
        sources, kinds = schedule.at(step)
        assert sources == pytest.approx(weights) and kinds["vision"] == pytest.approx(vision)
    assert Schedule([Point(0, {"a": 1})]).at(5) == ({"a": 1.0}, None)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([Point(0, {"pic": 1}, 0.5)], "asks for .* of text documents"),
        ([Point(0, {"txt": 1}, 0.0), Point(3, None, 0.2)], "asks for .* of vision documents"),
        ([Point(0, {"pic": 1}, 0.0)], "asks for .* of text documents"),
    ],
)
def test_a_share_that_no_source_can_give_is_refused_at_once(points, message):
    with pytest.raises(DataError, match=message):
        Blend({"pic": 1, "txt": 1}, ["pic"], Schedule(points))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_vision_share_counts_documents_that_hold_a_picture_whatever_their_source(seed):
    """A source of pictures gives text now and then (a written twin): vision must still come out at its
    share."""
    rng = random.Random(seed)
    blend = Blend({"pic": 5, "twin": 5, "txt": 1}, ["pic", "twin"], Schedule([Point(0, None, 0.3)]))
    count = {True: 0, False: 0}
    for _ in range(5000):
        name = blend.pick({"pic", "twin", "txt"}, 0)
        picture = name == "pic" or (name == "twin" and rng.random() < 0.6)
        tokens = rng.randint(5, 200)
        blend.add(name, tokens, picture)
        count[picture] += tokens
    assert count[True] / sum(count.values()) == pytest.approx(0.3, abs=0.001)


def test_sources_of_pictures_without_pictures_are_told():
    blend = Blend({"pic": 1, "txt": 1}, ["pic"], Schedule([Point(0, None, 0.5)]))
    with pytest.raises(DataError, match="hold none, so vision_share cannot be reached; set vision = false"):
        for _ in range(1000):
            blend.add(blend.pick({"pic", "txt"}, 0), 10, False)


def test_text_and_vision_tokens_are_counted_apart_as_they_came(loader):
    one = loader(tokens=1024, max_patches=4096)
    media, seen = dict.fromkeys(one.sources, 0), dict.fromkeys(one.sources, 0)
    for batch in [batch for _ in range(20) for batch in one.next_step()]:
        for i, name in enumerate(one.sources):
            seen[name] += int((batch.source_ids == i).sum())
            media[name] += int((batch.source_ids[batch.media_positions] == i).sum())
    stats = one.stats()
    for name in one.sources:
        assert (stats["tokens"][name], stats["media_tokens"][name]) == (seen[name], media[name])
    assert media["pydoc"] == 0 < media["easy_vqa"] and stats["vision_tokens"]["pydoc"] == 0
    assert stats["vision_tokens"]["synth_scenes"] < seen["synth_scenes"], "written twins are text"
