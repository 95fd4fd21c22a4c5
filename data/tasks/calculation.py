"""Arithmetic and geometry with whole numbers. Held out: the numbers of a problem with its kind, in either
order.

Geometry is drawn to scale with the given lengths and angles written beside it; the twin tells them in words.
"""

from __future__ import annotations

from math import radians, tan

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import COLOURS, font
from earlyfusion.data.tasks.problem import Problem, Task, task
from earlyfusion.data.tasks.rendering import INK, PAPER, render_text
from earlyfusion.data.tasks.scoring import rewards

# Whole numbers on all three sides, so that the answer is a whole number too.
TRIPLES = "3-4-5 5-12-13 6-8-10 8-15-17 7-24-25 9-12-15 20-21-29 12-16-20 10-24-26 12-35-37 15-20-25 9-40-41"
TRIPLES += " 15-36-39 16-30-34 18-24-30"
LABEL = 10
Mark = tuple[float, float, object, str, int]
"""A label: x, y in pixels, what it says, Pillow's anchor, size of the font."""


@task("arithmetic")
class Arithmetic(Task):
    """The value of an expression, seen as a picture of it.

    Knobs: terms, largest (number), operations (of "+-*"), size of the font in pixels. "*" binds more than "+"
    and "-".
    """

    # "3 + 4 = 7" says 7.
    scorer = staticmethod(rewards.number)
    levels = (
        {"terms": 2, "largest": 9, "operations": "+", "size": 16},
        {"terms": 2, "largest": 20, "operations": "+-", "size": 16},
        {"terms": 3, "largest": 20, "operations": "+-", "size": 14},
        {"terms": 3, "largest": 30, "operations": "+-*", "size": 14},
        {"terms": 4, "largest": 99, "operations": "+-*", "size": 12},
    )

    def draw(self, rng, heldout, knobs):
        """See Task."""
        # From 1 on: a term of 0 would leave nothing to calculate.
        numbers = [rng.randint(1, knobs["largest"]) for _ in range(knobs["terms"])]
        signs = [rng.choice(knobs["operations"]) for _ in numbers[1:]]

        text = str(numbers[0])
        for sign, number in zip(signs, numbers[1:]):
            text += f" {sign} {number}"
        # Only numbers and signs of our own: Python's rules are those of school.
        result = eval(text)

        # Sorted, so that 3 + 4 and 4 + 3 stand on one side of the split.
        key = f"arithmetic/{''.join(sorted(signs))}/{','.join(map(str, sorted(numbers)))}"
        picture = render_text(text, size=knobs["size"])
        category = f"{knobs['terms']} terms"
        return Problem("what is the result?", picture, text, result, str(result), key, category)


@task("geometry")
class Geometry(Task):
    """Perimeter and area of rectangles, the missing angle of a triangle, the hypotenuse of a right triangle.

    Knobs: kinds, largest (side of a rectangle), side of the picture in pixels.
    """

    scorer = staticmethod(rewards.number)
    levels = (
        {"kinds": ("perimeter",), "largest": 9, "side": 64},
        {"kinds": ("perimeter", "area"), "largest": 12, "side": 64},
        {"kinds": ("perimeter", "area", "angle"), "largest": 20, "side": 80},
        {"kinds": ("area", "angle", "hypotenuse", "missing"), "largest": 40, "side": 96},
    )

    def draw(self, rng, heldout, knobs):
        """See Task."""
        kind, side = rng.choice(knobs["kinds"]), knobs["side"]
        if kind == "hypotenuse":
            a, b, answer = map(int, rng.choice(TRIPLES.split()).split("-"))
            # The longer leg may lie along either side.
            if rng.random() < 0.5:
                a, b = b, a
            words = f"right triangle with the legs {a} and {b} and the hypotenuse x"
            question, picture = "how long is x?", draw_right_triangle(a, b, side)
        elif kind == "angle":
            a, b = rng.randint(25, 90), rng.randint(25, 90)
            answer = 180 - a - b
            # A sharper angle at the top leaves no room for its label.
            if answer < 20:
                return None
            words = f"triangle with the angles {a}, {b} and x degrees"
            question, picture = "how large is x?", draw_triangle(a, b, side)
        else:
            a, b = rng.randint(1, knobs["largest"]), rng.randint(1, knobs["largest"])
            words, question = f"rectangle of width {a} and height {b}", f"what is the {kind}?"
            answer, beside, inside = 2 * (a + b), str(b), ""
            if kind == "area":
                answer = a * b
            elif kind == "missing":
                words, question = f"rectangle of width {a}, height x and area {a * b}", "how long is x?"
                answer, beside, inside = b, "x", str(a * b)
            picture = draw_rectangle(a, b, beside, inside, side)

        # Without order: a rectangle of 3 by 4 and one of 4 by 3 have one answer.
        key = f"geometry/{kind}/{min(a, b)}/{max(a, b)}"
        return Problem(question, picture, words, answer, str(answer), key, kind)


def figure(side: int, corners: list[tuple[float, float]], *marks: Mark) -> Image.Image:
    """A white square, RGB [side, side], with a closed blue line and labels."""
    picture = Image.new("RGB", (side, side), PAPER)
    pen = ImageDraw.Draw(picture)
    # A rectangle is told by two corners, all else by its outline.
    if len(corners) == 2:
        pen.rectangle(corners, outline=COLOURS["blue"], width=2)
    else:
        pen.polygon(corners, outline=COLOURS["blue"], width=2)
    for x, y, text, anchor, size in marks:
        pen.text((x, y), str(text), fill=INK, font=font(size), anchor=anchor)
    return picture


def draw_rectangle(width: int, height: int, beside: str, inside: str, side: int) -> Image.Image:
    """A rectangle to scale, its width under it, other labels at its right and inside."""
    scale = (side - 24) / max(width, height)
    # At least six pixels wide, or the lines of a thin one would meet.
    right, bottom = 4 + max(6, round(width * scale)), 4 + max(6, round(height * scale))
    return figure(
        side,
        [(4, 4), (right, bottom)],
        ((4 + right) // 2, bottom + 3, width, "ma", LABEL),
        (right + 3, (4 + bottom) // 2, beside, "lm", LABEL),
        (side // 2 - 4, side // 2 - 6, inside, "mm", LABEL),
    )


def draw_triangle(left: int, right: int, side: int) -> Image.Image:
    """A triangle with two angles (degrees) at its base written inside, "x" at the top."""
    # The base as wide as the picture, or as narrow as the height asks for.
    # The height over the base is shared as the slopes of the two sides are.
    a, b = (tan(radians(angle)) if angle < 90 else 1e6 for angle in (left, right))
    share, base = b / (a + b), side - 8.0
    height = min(share * base * a, 1e6)
    scale = min(1.0, (side - 20) / height)
    base, height = base * scale, height * scale

    x, y = (side - base) / 2, side - 5.0
    top = (x + share * base, y - height)
    return figure(
        side,
        [(x, y), (x + base, y), top],
        (x + 9, y - 4, left, "ls", 9),
        (x + base - 9, y - 4, right, "rs", 9),
        (top[0], top[1] - 2, "x", "ms", LABEL),
    )


def draw_right_triangle(a: int, b: int, side: int) -> Image.Image:
    """Legs `a` (along the bottom) and `b` (at the left) to scale with their lengths, "x" at the
    hypotenuse."""
    # What is left beside the labels of the two legs.
    scale = (side - 36) / max(a, b)
    x, y = 20, side - 16
    right, top = x + a * scale, y - b * scale
    return figure(
        side,
        [(x, y), (right, y), (x, top)],
        ((x + right) / 2, y + 3, a, "ma", LABEL),
        (x - 3, (y + top) / 2, b, "rm", LABEL),
        ((x + right) / 2 + 4, (y + top) / 2 - 3, "x", "ls", LABEL),
    )
