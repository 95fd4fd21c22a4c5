"""Odd one out: a board of shapes, all alike in some way but one. Held out: (colour, shape) pairs, as in
scenes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from earlyfusion.data.synth.grid import board_words
from earlyfusion.data.synth.palette import BACKGROUNDS, COLOURS, SHAPES, paint, pairs
from earlyfusion.data.tasks.problem import Drawn, Problem, Task, task
from earlyfusion.data.tasks.scoring import rewards

Pair = tuple[str, str]
"""(colour, shape)"""


def draw_things(cells: list[list[Pair]], side: int, background: str) -> Image.Image:
    """The board, RGB: one shape in the middle of each cell of `side` pixels."""
    picture = Image.new("RGB", (len(cells[0]) * side, len(cells) * side), BACKGROUNDS[background])
    pen = ImageDraw.Draw(picture)
    inset = max(1, side // 6)
    for r, row in enumerate(cells):
        for c, (colour, shape) in enumerate(row):
            flat = side // 4 if shape == "rectangle" else inset
            x, y = c * side, r * side
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

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        rows, columns, differ = knobs["rows"], knobs["columns"], rng.choice(tuple(knobs["differ"]))
        odd = rng.choice(pairs(heldout))
        others = self._others(rng, odd, differ, 2 if knobs["vary"] else 1)
        if others is None:
            return None
        place = rng.randrange(rows * columns)
        things = [rng.choice(others) for _ in range(rows * columns)]
        things[place] = odd

        # Exactly one stands out by what differs, and none by the other property.
        free = 1 if differ == "colour" else 0
        if min(Counter(thing[1 - free] for thing in things).values()) != 1:
            return None
        if knobs["vary"] and sorted(Counter(thing[free] for thing in things).values())[0] < 2:
            return None

        cells = [things[r * columns : (r + 1) * columns] for r in range(rows)]
        words = board_words([[" ".join(thing) for thing in row] for row in cells])
        answer = [place // columns + 1, place % columns + 1]
        picture = draw_things(cells, knobs["side"], rng.choice(tuple(BACKGROUNDS)))
        target, key = f"row {answer[0]}, column {answer[1]}", f"pair/{odd[0]}/{odd[1]}"
        return Drawn("which one is the odd one out?", picture, words, answer, target, key, differ)

    @staticmethod
    def _others(rng: Random, odd: Pair, differ: str, values: int) -> list[Pair] | None:
        """Training pairs that differ from `odd` in one property; `values` of them in the other, odd's own
        among these."""
        train = set(pairs(False))
        common = rng.choice(
            [x for x in (COLOURS if differ == "colour" else SHAPES) if x != odd[differ == "shape"]]
        )
        own = odd[differ == "colour"]
        free = [
            own,
            *rng.sample([x for x in (SHAPES if differ == "colour" else COLOURS) if x != own], values - 1),
        ]
        found = [(common, x) if differ == "colour" else (x, common) for x in free]
        return found if all(pair in train for pair in found) else None

    def score(self, problem: Problem, answer: str) -> float:
        """1 for exactly the two numbers, row first, with nothing behind them."""
        numbers = [int(part) for part in re.findall(r"\d+", rewards.tame(answer))]
        return float(numbers == problem.answer and rewards.ends(answer))
