"""Arithmetic and geometry with whole numbers. Held out: the numbers of a problem with its kind, in either
order.

Geometry is drawn to scale with the given lengths and angles written beside it; the twin tells them in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import radians, tan
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from earlyfusion.data.synth.palette import COLOURS, font
from earlyfusion.data.tasks.problem import Drawn, Problem, Task, task
from earlyfusion.data.tasks.rendering import render_text
from earlyfusion.data.tasks.scoring import rewards

TRIPLES = (
    (3, 4, 5),
    (5, 12, 13),
    (6, 8, 10),
    (8, 15, 17),
    (7, 24, 25),
    (9, 12, 15),
    (20, 21, 29),
    (12, 16, 20),
    (10, 24, 26),
    (12, 35, 37),
    (15, 20, 25),
    (9, 40, 41),
    (15, 36, 39),
    (16, 30, 34),
    (18, 24, 30),
)
INK, PAPER, LABEL = (10, 10, 10), (255, 255, 255), 10


class NumberTask(Task):
    """What both tasks share: the reward is 1 for the number."""

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.number; "3 + 4 = 7" says 7."""
        return rewards.number(answer, problem.answer, problem.question)


@task("arithmetic")
class Arithmetic(NumberTask):
    """The value of an expression, seen as a picture of it.

    Knobs: terms, largest (number), operations (of "+-*"), size of the font in pixels. "*" binds more than "+"
    and "-".
    """

    levels = (
        {"terms": 2, "largest": 9, "operations": "+", "size": 16},
        {"terms": 2, "largest": 20, "operations": "+-", "size": 16},
        {"terms": 3, "largest": 20, "operations": "+-", "size": 14},
        {"terms": 3, "largest": 30, "operations": "+-*", "size": 14},
        {"terms": 4, "largest": 99, "operations": "+-*", "size": 12},
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        numbers = [rng.randint(1, knobs["largest"]) for _ in range(knobs["terms"])]
        signs = [rng.choice(knobs["operations"]) for _ in numbers[1:]]
        text = str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:]))
        result = evaluate(numbers, signs)
        key = f"arithmetic/{''.join(sorted(signs))}/{','.join(map(str, sorted(numbers)))}"
        picture = render_text(text, size=knobs["size"])
        category = f"{knobs['terms']} terms"
        return Drawn("what is the result?", picture, text, result, str(result), key, category)


def evaluate(numbers: list[int], signs: list[str]) -> int:
    """The value of numbers joined by "+", "-" and "*"."""
    total, product = 0, numbers[0]
    for sign, number in zip(signs, numbers[1:]):
        if sign == "*":
            product *= number
        else:
            total, product = total + product, number if sign == "+" else -number
    return total + product


@task("geometry")
class Geometry(NumberTask):
    """Perimeter and area of rectangles, the missing angle of a triangle, the hypotenuse of a right triangle.

    Knobs: kinds, largest (side of a rectangle), side of the picture in pixels.
    """

    levels = (
        {"kinds": ("perimeter",), "largest": 9, "side": 64},
        {"kinds": ("perimeter", "area"), "largest": 12, "side": 64},
        {"kinds": ("perimeter", "area", "angle"), "largest": 20, "side": 80},
        {"kinds": ("area", "angle", "hypotenuse", "missing"), "largest": 40, "side": 96},
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        kind, side = rng.choice(tuple(knobs["kinds"])), knobs["side"]
        if kind == "angle":
            a, b = rng.randint(25, 90), rng.randint(25, 90)
            answer = 180 - a - b
            if answer < 20:
                return None
            words, question = f"triangle with the angles {a}, {b} and x degrees", "how large is x?"
            picture = draw_triangle(a, b, side)
        elif kind == "hypotenuse":
            a, b, answer = rng.choice(TRIPLES)
            if rng.random() < 0.5:
                a, b = b, a
            words = f"right triangle with the legs {a} and {b} and the hypotenuse x"
            question = "how long is x?"
            picture = draw_right_triangle(a, b, side)
        else:
            a, b = rng.randint(1, knobs["largest"]), rng.randint(1, knobs["largest"])
            words, question, answer = self._rectangle(kind, a, b)
            inside = str(a * b) if kind == "missing" else ""
            picture = draw_rectangle(a, b, "x" if inside else str(b), inside, side)

        low, high = sorted((a, b))
        key = f"geometry/{kind}/{low}/{high}"
        return Drawn(question, picture, words, answer, str(answer), key, kind, {"numbers": (a, b)})

    @staticmethod
    def _rectangle(kind: str, a: int, b: int) -> tuple[str, str, int]:
        """(words, question, answer)"""
        words = f"rectangle of width {a} and height {b}"
        if kind == "perimeter":
            return words, "what is the perimeter?", 2 * (a + b)
        if kind == "area":
            return words, "what is the area?", a * b
        return f"rectangle of width {a}, height x and area {a * b}", "how long is x?", b


class Sheet:
    """A white square to draw a figure and its labels on."""

    def __init__(self, side: int) -> None:
        self.picture = Image.new("RGB", (side, side), PAPER)
        self.pen = ImageDraw.Draw(self.picture)

    def write(self, x: float, y: float, text: object, anchor: str, size: int = LABEL) -> None:
        """A label at a point in pixels; anchor: Pillow's two letters."""
        self.pen.text((x, y), str(text), fill=INK, font=font(size), anchor=anchor)

    def outline(self, *corners: tuple[float, float]) -> None:
        """A closed blue line."""
        self.pen.polygon(corners, outline=COLOURS["blue"], width=2)


def draw_rectangle(width: int, height: int, beside: str, inside: str, side: int) -> Image.Image:
    """A rectangle to scale, its width under it, other labels at its right and inside, RGB [side, side]."""
    sheet = Sheet(side)
    scale = (side - 24) / max(width, height)
    right, bottom = 4 + max(6, round(width * scale)), 4 + max(6, round(height * scale))
    sheet.pen.rectangle((4, 4, right, bottom), outline=COLOURS["blue"], width=2)
    sheet.write((4 + right) // 2, bottom + 3, width, "ma")
    sheet.write(right + 3, (4 + bottom) // 2, beside, "lm")
    sheet.write(side // 2 - 4, side // 2 - 6, inside, "mm")
    return sheet.picture


def draw_triangle(left: int, right: int, side: int) -> Image.Image:
    """A triangle with two angles (degrees) at its base written inside, "x" at the top, RGB [side, side]."""
    # The base as wide as the sheet, or as narrow as the height asks for.
    a, b = (tan(radians(angle)) if angle < 90 else 1e6 for angle in (left, right))
    share, base = b / (a + b), side - 8.0
    height = min(share * base * a, 1e6)
    scale = min(1.0, (side - 20) / height)
    base, height = base * scale, height * scale

    sheet = Sheet(side)
    x0, y0 = (side - base) / 2, side - 5.0
    top = (x0 + share * base, y0 - height)
    sheet.outline((x0, y0), (x0 + base, y0), top)
    sheet.write(x0 + 9, y0 - 4, left, "ls", 9)
    sheet.write(x0 + base - 9, y0 - 4, right, "rs", 9)
    sheet.write(top[0], top[1] - 2, "x", "ms")
    return sheet.picture


def draw_right_triangle(a: int, b: int, side: int) -> Image.Image:
    """Legs `a` (along the bottom) and `b` (at the left) to scale with their lengths, "x" at the
    hypotenuse."""
    sheet = Sheet(side)
    scale = (side - 36) / max(a, b)
    x0, y0 = 20, side - 16
    right, top = x0 + a * scale, y0 - b * scale
    sheet.outline((x0, y0), (right, y0), (x0, top))
    sheet.write((x0 + right) / 2, y0 + 3, a, "ma")
    sheet.write(x0 - 3, (y0 + top) / 2, b, "rm")
    sheet.write((x0 + right) / 2 + 4, (y0 + top) / 2 - 3, "x", "ls")
    return sheet.picture
