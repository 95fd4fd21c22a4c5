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


@task("arithmetic")
class Arithmetic(Task):
    """The value of an expression, seen as a picture of it. Reward: 1 for the number.

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
        kind = f"{knobs['terms']} terms"
        picture = render_text(text, size=knobs["size"])
        return Drawn("what is the result?", picture, text, result, str(result), key, kind)

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.number; "3 + 4 = 7" says 7."""
        return rewards.number(answer, problem.answer, problem.question)


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
class Geometry(Task):
    """Perimeter and area of rectangles, the missing angle of a triangle, the hypotenuse of a right triangle.

    Reward: 1 for the number. Knobs: kinds, largest (side of a rectangle), side of the picture in pixels.
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
        if kind in ("perimeter", "area", "missing"):
            a, b = rng.randint(1, knobs["largest"]), rng.randint(1, knobs["largest"])
            told, question, answer = self._rectangle(kind, a, b)
            label = str(b) if kind != "missing" else "x"
            picture, numbers = draw_rectangle(a, b, str(a), label, side), (a, b)
            if kind == "missing":
                pen = ImageDraw.Draw(picture)
                pen.text((side // 2 - 4, side // 2 - 6), str(a * b), fill=INK, font=font(LABEL), anchor="mm")
        elif kind == "angle":
            a, b = rng.randint(25, 90), rng.randint(25, 90)
            if not 20 <= 180 - a - b:
                return None
            told, answer = f"triangle with the angles {a}, {b} and x degrees", 180 - a - b
            question, numbers = "how large is x?", (a, b)
            picture = draw_triangle(a, b, side)
        else:
            a, b, answer = rng.choice(TRIPLES)
            if rng.random() < 0.5:
                a, b = b, a
            told = f"right triangle with the legs {a} and {b} and the hypotenuse x"
            question, numbers = "how long is x?", (a, b)
            picture = draw_right_triangle(a, b, side)
        low, high = sorted(numbers)
        key = f"geometry/{kind}/{low}/{high}"
        return Drawn(question, picture, told, answer, str(answer), key, kind, {"numbers": numbers})

    @staticmethod
    def _rectangle(kind: str, a: int, b: int) -> tuple[str, str, int]:
        told = f"rectangle of width {a} and height {b}"
        if kind == "perimeter":
            return told, "what is the perimeter?", 2 * (a + b)
        if kind == "area":
            return told, "what is the area?", a * b
        return f"rectangle of width {a}, height x and area {a * b}", "how long is x?", b

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.number."""
        return rewards.number(answer, problem.answer, problem.question)


def _sheet(side: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", (side, side), PAPER)
    return picture, ImageDraw.Draw(picture)


def draw_rectangle(width: float, height: float, below: str, beside: str, side: int) -> Image.Image:
    """A rectangle to scale with one label under it and one at its right, RGB [side, side]."""
    picture, pen = _sheet(side)
    room = side - 24
    scale = room / max(width, height)
    right, bottom = 4 + max(6, round(width * scale)), 4 + max(6, round(height * scale))
    pen.rectangle((4, 4, right, bottom), outline=COLOURS["blue"], width=2)
    pen.text(((4 + right) // 2, bottom + 3), below, fill=INK, font=font(LABEL), anchor="ma")
    pen.text((right + 3, (4 + bottom) // 2), beside, fill=INK, font=font(LABEL), anchor="lm")
    return picture


def draw_triangle(left: float, right: float, side: int) -> Image.Image:
    """A triangle with two angles (degrees) at its base written inside, "x" at the top, RGB [side, side]."""
    picture, pen = _sheet(side)
    a, b = tan(radians(left)) if left < 90 else 1e6, tan(radians(right)) if right < 90 else 1e6
    share, base = b / (a + b), side - 8.0
    height = min(share * base * a, 1e6)
    scale = min(1.0, (side - 20) / height)
    base, height = base * scale, height * scale
    x0, y0 = (side - base) / 2, side - 5.0
    top = (x0 + share * base, y0 - height)
    pen.polygon([(x0, y0), (x0 + base, y0), top], outline=COLOURS["blue"], width=2)
    small = font(9)
    pen.text((x0 + 9, y0 - 4), str(round(left)), fill=INK, font=small, anchor="ls")
    pen.text((x0 + base - 9, y0 - 4), str(round(right)), fill=INK, font=small, anchor="rs")
    pen.text((top[0], top[1] - 2), "x", fill=INK, font=font(LABEL), anchor="ms")
    return picture


def draw_right_triangle(a: float, b: float, side: int) -> Image.Image:
    """Legs `a` (along the bottom) and `b` (at the left) to scale with their lengths, "x" at the
    hypotenuse."""
    picture, pen = _sheet(side)
    scale = (side - 36) / max(a, b)
    x0, y0 = 20, side - 16
    right, top = x0 + a * scale, y0 - b * scale
    pen.polygon([(x0, y0), (right, y0), (x0, top)], outline=COLOURS["blue"], width=2)
    pen.text(((x0 + right) / 2, y0 + 3), str(round(a)), fill=INK, font=font(LABEL), anchor="ma")
    pen.text((x0 - 3, (y0 + top) / 2), str(round(b)), fill=INK, font=font(LABEL), anchor="rm")
    pen.text(((x0 + right) / 2 + 4, (y0 + top) / 2 - 3), "x", fill=INK, font=font(LABEL), anchor="ls")
    return picture
