"""Odd one out: a board of shapes, all alike in some way but one. Held out: (colour, shape) pairs, as in
scenes."""

from __future__ import annotations

from collections import Counter

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import BACKGROUNDS, COLOURS, SHAPES, Pair, paint, pair_key, pairs
from earlyfusion.data.synth.grid import board_words
from earlyfusion.data.tasks.problem import Problem, Task, task
from earlyfusion.data.tasks.scoring import rewards


def draw_things(things: list[Pair], columns: int, side: int, background: str) -> Image.Image:
    """The board in reading order, RGB: one shape in the middle of each cell of `side` pixels."""
    size = columns * side, len(things) // columns * side
    picture = Image.new("RGB", size, BACKGROUNDS[background])
    pen = ImageDraw.Draw(picture)
    # Shapes of neighbouring cells must not touch.
    inset = max(1, side // 6)
    for index, (colour, shape) in enumerate(things):
        # A rectangle is flatter than a square, or the two could not be part apart.
        flat = side // 4 if shape == "rectangle" else inset
        x, y = index % columns * side, index // columns * side
        paint(pen, shape, (x + inset, y + flat, x + side - inset, y + side - flat), COLOURS[colour])
    return picture


@task("odd_one_out")
class OddOneOut(Task):
    """Which cell is not like the others; the answer is its row and column, and nothing else earns a reward.

    Knobs: rows, columns, differ (colour, shape), vary (the other property takes two values at random, each at
    least twice, so that only one property tells), side of a cell in pixels.
    """

    levels = (
        {"rows": 2, "columns": 2, "differ": ("colour",), "vary": False, "side": 24},
        {"rows": 3, "columns": 3, "differ": ("colour", "shape"), "vary": False, "side": 20},
        {"rows": 3, "columns": 3, "differ": ("colour", "shape"), "vary": True, "side": 20},
        {"rows": 4, "columns": 4, "differ": ("colour", "shape"), "vary": True, "side": 20},
    )

    def draw(self, rng, heldout, knobs):
        """See Task."""
        rows, columns, differ = knobs["rows"], knobs["columns"], rng.choice(knobs["differ"])
        # The odd one carries the combination; the others are always of training.
        odd = rng.choice(pairs(heldout))

        # The others share another value of what differs; in the other property, odd's own value is one.
        part = ("colour", "shape").index(differ)
        values = tuple(COLOURS), SHAPES
        common = rng.choice([value for value in values[part] if value != odd[part]])
        free = [value for value in values[1 - part] if value != odd[1 - part]]
        free = [odd[1 - part], *rng.sample(free, 1 if knobs["vary"] else 0)]
        others = [(common, value) if part == 0 else (value, common) for value in free]
        if not set(others) <= set(pairs(False)):
            return None
        # Any place, so that no corner is the better guess.
        place = rng.randrange(rows * columns)
        things = [rng.choice(others) for _ in range(rows * columns)]
        things[place] = odd

        # Exactly one stands out by what differs, and none by the other property.
        if knobs["vary"] and min(Counter(thing[1 - part] for thing in things).values()) < 2:
            return None

        # The twin lists all cells: it does not say which one is odd.
        words = board_words([" ".join(thing) for thing in things], columns)
        answer = [place // columns + 1, place % columns + 1]
        picture = draw_things(things, columns, knobs["side"], rng.choice(tuple(BACKGROUNDS)))
        target = f"row {answer[0]}, column {answer[1]}"
        return Problem("which one is the odd one out?", picture, words, answer, target, pair_key(odd), differ)

    def score(self, problem, answer):
        """1 for exactly the two numbers, row first, with nothing behind them."""
        return float(rewards.integers(answer) == problem.answer)
