"""Weights and vision share by step: what the schedule says, and what comes out of a real loader."""

import random

import pytest

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.loader import Loader
from earlyfusion.data.loading.mixture import Blend, Mixture, Point, Schedule

SHAPE = {"length": 192, "tokens": 1024, "max_patches": 4096}
SHARE_ATOL = 0.01
"""Realised shares over a stretch of steps: the pool reorders documents by a few micro-batches."""


def test_a_schedule_holds_jumps_and_ramps():
    schedule = Schedule(
        [
            Point(0, {"a": 3, "b": 1}, 0.0),
            Point(10, None, 0.5),
            Point(20, {"a": 1, "b": 3}, None, linear=True),
            Point(30, {"b": 1}, 0.1, linear=True),
        ]
    )
    assert schedule.weights(0) == {"a": 0.75, "b": 0.25} and schedule.vision_share(9.99) == 0.0
    assert schedule.weights(10) == {"a": 0.5, "b": 0.5}
    assert schedule.weights(20) == {"a": 0.25, "b": 0.75}
    assert schedule.weights(25) == {"a": 0.125, "b": 0.875}
    assert schedule.weights(1000) == {"b": 1.0}
    assert schedule.vision_share(10) == 0.5 and schedule.vision_share(20) == pytest.approx(0.3)
    assert schedule.vision_share(30) == 0.1
    assert Schedule([Point(0, {"a": 1})]).vision_share(5) is None


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([Point(1, {"a": 1})], "begin at 0"),
        ([Point(0, {"a": 1}), Point(5, {"a": 2}), Point(4, {"a": 1})], "begin at 0 and go up"),
        (
            [Point(0, {"a": 1}), Point(5, None, 0.5, linear=True)],
            "first vision_share cannot be a linear ramp",
        ),
        ([Point(0, {"a": 1}, 1.5)], "expected 0 to 1"),
        ([Point(0, {"a": 0})], "not all 0"),
    ],
)
def test_a_schedule_without_sense_is_refused(points, message):
    with pytest.raises(DataError, match=message):
        Schedule(points)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([Point(0, {"pic": 1}, 0.5)], "asks for text documents"),
        ([Point(0, {"txt": 1}, 0.0), Point(3, None, 0.2)], "asks for vision documents"),
        ([Point(0, {"pic": 1}, 0.0)], "asks for text documents"),
        ([Point(0, {"pix": 1})], "did you mean 'pic'"),
    ],
)
def test_a_share_that_no_source_can_give_is_refused_at_once(points, message):
    with pytest.raises(DataError, match=message):
        Blend({"pic": 1, "txt": 1}, ["pic"], Schedule(points))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_ramp_is_followed_to_within_one_document(seed):
    """Oracle: the integral of the shares over the tokens given so far."""
    rng = random.Random(seed)
    mixture, due = Mixture({"a": 1, "b": 1, "c": 1}), dict.fromkeys("abc", 0.0)
    given = dict.fromkeys("abc", 0)
    for step in range(4000):
        u = step / 4000
        weights = {"a": 1 - u, "b": u * u, "c": 0.3 if 1000 < step < 3000 else 0.0}
        mixture.move(weights)
        name = mixture.pick("abc")
        tokens = rng.randint(1, 80)
        mixture.add(name, tokens)
        given[name] += tokens
        for other, weight in weights.items():
            due[other] += tokens * weight / sum(weights.values())
    assert all(abs(due[name] - given[name]) <= 2 * 80 for name in "abc"), (due, given)


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


def test_an_account_with_a_schedule_survives_saving():
    schedule = Schedule(
        [Point(0, {"a": 2, "b": 1, "c": 1}, 0.2), Point(40, {"a": 1, "b": 5, "c": 1}, 0.8, linear=True)]
    )
    one, two = (Blend({"a": 1, "b": 1, "c": 1}, ["a"], schedule) for _ in range(2))
    for step in range(60):
        name = one.pick("abc", step)
        one.add(name, 7 + step, name == "a")
        if step == 23:
            two.load_state_dict(one.state_dict())
        if step > 23:
            assert two.pick("abc", step) == name
            two.add(name, 7 + step, name == "a")
    assert one.state_dict() == two.state_dict()


def vision_by_step(loader, steps):
    """Tokens in documents with a picture, and all tokens, of every step."""
    rows = []
    for _ in range(steps):
        batches = loader.next_step()
        rows.append((sum(int(b.has_image.sum()) for b in batches), sum(b.num_tokens for b in batches)))
    return rows


def share(rows):
    return sum(vision for vision, _ in rows) / sum(total for _, total in rows)


def test_a_real_loader_follows_a_vision_schedule_at_the_steps_it_names(tokenizer, vision, mix):
    schedule = Schedule(
        [Point(0, None, 0.0), Point(20, None, 0.4), Point(60, None, 0.4), Point(100, None, 0.0, linear=True)]
    )
    one = Loader(mix(), tokenizer, vision, lanes=2, schedule=schedule, **SHAPE)
    rows = vision_by_step(one, 110)
    assert share(rows[:16]) == 0, (
        "nothing comes before its time but for the packer's lookahead of 4 micro-batches"
    )
    assert share(rows[24:60]) == pytest.approx(0.4, abs=SHARE_ATOL)
    assert share(rows[60:100]) == pytest.approx(0.2, abs=SHARE_ATOL)
    slope, pool = 0.4 / 40, 4  # a document of the pool may come up to so many steps sooner or later
    assert share(rows[80:100]) == pytest.approx(0.1, abs=pool * slope)
    stats = one.stats()
    assert stats["vision_share"] == pytest.approx(share(rows), rel=1e-12)
    assert sum(stats["vision_tokens"].values()) == sum(vision for vision, _ in rows)
    assert 0 < stats["media_share"] < stats["vision_share"]


def test_text_and_vision_tokens_are_counted_apart_as_they_came(tokenizer, vision, mix):
    one = Loader(mix(), tokenizer, vision, **SHAPE)
    media, seen = dict.fromkeys(one.sources, 0), dict.fromkeys(one.sources, 0)
    for _ in range(20):
        for batch in one.next_step():
            names = list(one.sources)
            for name, i in zip(names, range(len(names))):
                seen[name] += int((batch.source_ids == i).sum())
                media[name] += int((batch.source_ids[batch.media_positions] == i).sum())
    stats = one.stats()
    assert stats["tokens"] == seen and stats["media_tokens"] == media
    assert media["pydoc"] == 0 < media["easy_vqa"] and stats["vision_tokens"]["pydoc"] == 0
    assert stats["vision_tokens"]["synth_scenes"] < seen["synth_scenes"], "written twins are text"


def test_weights_of_a_schedule_cannot_be_set_by_hand(tokenizer, vision, mix):
    one = Loader(mix(), tokenizer, vision, schedule=Schedule([Point(0, None, 0.3)]), **SHAPE)
    with pytest.raises(DataError, match="weights follow a schedule"):
        one.set_weights({"pydoc": 1.0})
