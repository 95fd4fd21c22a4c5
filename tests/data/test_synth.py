from itertools import product
from random import Random

import numpy as np
import pytest

from earlyfusion.data.synth.graph import BACKGROUNDS, COLOURS, DIRECTIONS, SHAPES, Clip, Scene, pairs
from earlyfusion.data.synth.panels import ASK_TEXT, Board, Chart, Sign

SEEDS = range(60)
SIDES = {"min_side": 40, "max_side": 96}


def pixels_of(image, colour):
    """Rows and columns where the picture has exactly this colour."""
    return np.nonzero((np.asarray(image) == np.array(colour)).all(-1))


def bounds(image, colour):
    rows, columns = pixels_of(image, colour)
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def make_scene(seed, **kw):
    return Scene.make(Random(seed), **SIDES, **{"max_objects": 4, **kw})


@pytest.mark.parametrize("seed", SEEDS)
def test_boxes_are_the_bounds_of_the_drawn_pixels(seed):
    made = make_scene(seed)
    image = made.draw()
    assert image.size == (made.width, made.height)
    for thing in made.objects:
        left, top, right, bottom = thing.box
        inside = image.crop(thing.box)
        assert bounds(inside, COLOURS[thing.colour]) == (0, 0, right - left, bottom - top)
    drawn = np.asarray(image).copy()
    for thing in made.objects:  # nothing is drawn outside the boxes
        drawn[thing.box[1] : thing.box[3], thing.box[0] : thing.box[2]] = BACKGROUNDS[made.background]
    assert (drawn == np.array(BACKGROUNDS[made.background])).all()


def test_train_and_held_out_combinations_are_disjoint_and_cover_all():
    train, held = set(pairs(False)), set(pairs(True))
    assert not train & held and len(train | held) == len(COLOURS) * len(SHAPES) and 3 <= len(held) <= 15
    assert {c for c, _ in train} == set(COLOURS) and {s for _, s in train} == set(SHAPES)
    for seed, heldout in product(SEEDS, (False, True)):
        shown = {thing.pair for thing in make_scene(seed, heldout=heldout).objects}
        clip = Clip.make(Random(seed), **SIDES, heldout=heldout)
        assert bool(shown & held) == heldout == (clip.moving.pair in held)
        assert {thing.pair for thing in clip.standing} <= train


def test_held_out_charts_boards_and_signs_never_occur_in_training():
    def seen(make, key, heldout):
        return {key(make(Random(f"{heldout}{i}"), **SIDES, heldout=heldout)) for i in range(1500)}

    for make, key in (
        (Chart.make, lambda c: (c.kind, c.values)),
        (Board.make, lambda b: b.cells[0]),
        (Sign.make, lambda s: s.text),
    ):
        train, held = seen(make, key, False), seen(make, key, True)
        assert len(held) > 25 and not train & held


@pytest.mark.parametrize("seed", SEEDS)
def test_bars_are_exactly_as_tall_as_their_values(seed):
    chart = Chart.make(Random(seed), **SIDES)
    image = chart.draw()
    assert image.size == (chart.width, chart.height) and chart.unit >= 2
    shown = (np.asarray(image)[: chart.baseline] == COLOURS[chart.colour]).all(-1)
    for i, value in enumerate(chart.values):
        left, _, right, _ = chart.bar(i)
        column = np.append(shown[:, (left + right) // 2], True)
        if chart.kind == "line":
            assert column[chart.baseline - value * chart.unit]
        else:
            assert column.sum() - 1 == value * chart.unit


@pytest.mark.parametrize("seed", SEEDS)
def test_board_cells_have_the_colours_they_should(seed):
    board = Board.make(Random(seed), **SIDES)
    image = board.draw()
    assert max(image.size) <= 96
    for r, row in enumerate(board.cells):
        for c, colour in enumerate(row):
            centre = (c * board.cell + board.cell // 2, r * board.cell + board.cell // 2)
            assert image.getpixel(centre) == COLOURS[colour]


@pytest.mark.parametrize("seed", SEEDS)
def test_rendered_words_lie_whole_inside_the_picture(seed):
    sign = Sign.make(Random(seed), **SIDES)
    image = sign.draw()
    assert image.size == (sign.width, sign.height) and max(image.size) <= 96 and min(image.size) >= 40
    ink = (np.asarray(image) != np.array(BACKGROUNDS[sign.background])).any(-1)
    assert ink.sum() > 10
    assert not (ink[0].any() or ink[-1].any() or ink[:, 0].any() or ink[:, -1].any())  # nothing is cut off
    assert sign.questions(Random(0), 4)[0] == (ASK_TEXT, sign.text)


@pytest.mark.parametrize("seed", SEEDS)
def test_clips_move_steadily_the_way_they_say(seed):
    clip = Clip.make(Random(seed), **SIDES, frames=5 + seed % 12, heldout=seed % 2 == 0)
    frames, direction = clip.frames(), DIRECTIONS[clip.direction]
    assert list(clip.timestamps) == [i / 2 for i in range(len(frames))] and len(frames) >= 5
    boxes = np.array([scene.objects[-1].box for scene in clip.scenes])
    (step,) = set(map(tuple, np.diff(boxes, axis=0)[:, :2].tolist()))
    assert tuple(np.sign(step)) == direction
    for box, frame in zip(boxes.tolist(), frames, strict=True):
        assert frame.size == clip.scenes[0].extent
        shape = bounds(frame.crop(box), COLOURS[clip.moving.colour])
        assert shape == (0, 0, box[2] - box[0], box[3] - box[1])
