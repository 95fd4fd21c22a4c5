"""Bar and line charts with exact values: one unit of value is a whole number of pixels.

caption     "bar chart: A 3, B 7, C 0"
questions   single values, extremes, their number and sum, comparisons
words       "bar chart with 3 values" and "A has the value 4", one line a value
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.synth.graph import COLOURS, Box, Graph, Question, font, native_size, on_side, yes_no

# One digit: reading a value is not arithmetic.
TOP_VALUE = 9
_LABEL_HEIGHT, _LEFT, _PAPER, _INK = 12, 12, (255, 255, 255), (10, 10, 10)


@dataclass(frozen=True)
class Chart(Graph):
    """Labels A, B, C, ... with whole values 0..9."""

    kind: str
    """bar or line"""
    values: tuple[int, ...]
    colour: str
    width: int
    height: int

    @property
    def labels(self) -> str:
        """One letter for each value."""
        return "ABCDEFGH"[: len(self.values)]

    @property
    def unit(self) -> int:
        """Pixels of one unit of value."""
        return (self.height - _LABEL_HEIGHT - 3) // TOP_VALUE

    @property
    def baseline(self) -> int:
        """Row of value 0."""
        return self.height - _LABEL_HEIGHT

    def bar(self, index: int) -> Box:
        """Box of bar `index`; as tall as value * unit pixels."""
        # Equal columns with a gap of 15 % at each side of a bar.
        step = (self.width - _LEFT) / len(self.values)
        left = round(_LEFT + index * step + step * 0.15)
        right = max(left + 2, round(_LEFT + (index + 1) * step - step * 0.15))
        return left, self.baseline - self.values[index] * self.unit, right, self.baseline

    @classmethod
    def make(cls, rng: Random, *, min_side: int, max_side: int, heldout: bool = False) -> Chart:
        """A chart of 3 to 5 values; (kind, values) of training and held-out charts never coincide."""
        # Below 40 pixels the letters under the bars would overlap.
        width, height = native_size(rng, max(min_side, 40), max(max_side, 40))
        while True:
            kind = rng.choice(("bar", "line"))
            values = tuple(rng.randint(0, TOP_VALUE) for _ in range(rng.randint(3, 5)))
            if on_side(f"chart/{kind}/{values}", heldout):
                return cls(kind, values, rng.choice(tuple(COLOURS)), width, height)

    def draw(self) -> Image.Image:
        """Axes, marks at 0, 5 and 9, a letter under each value."""
        image = Image.new("RGB", (self.width, self.height), _PAPER)
        draw = ImageDraw.Draw(image)
        draw.line((_LEFT - 2, 1, _LEFT - 2, self.baseline), fill=_INK)
        draw.line((_LEFT - 2, self.baseline, self.width - 1, self.baseline), fill=_INK)
        # Marks enough to read a height by.
        for value in (0, 5, TOP_VALUE):
            y = self.baseline - value * self.unit
            draw.text((1, y), str(value), fill=_INK, font=font(9), anchor="lm")

        colour, tops = COLOURS[self.colour], []
        for i, label in enumerate(self.labels):
            left, top, right, bottom = self.bar(i)
            middle = (left + right) // 2
            tops.append((middle, top))
            # A value of 0 has no bar; Pillow would draw one line.
            if self.kind == "bar" and bottom > top:
                draw.rectangle((left, top, right - 1, bottom - 1), fill=colour)
            draw.text((middle, self.height - 1), label, fill=_INK, font=font(10), anchor="mb")

        if self.kind == "line":
            draw.line(tops, fill=colour, width=2)
            for x, y in tops:
                draw.rectangle((x - 1, y - 1, x + 1, y + 1), fill=colour)
        return image

    def words(self) -> str:
        """See Graph."""
        lines = [f"{label} has the value {value}" for label, value in zip(self.labels, self.values)]
        return "\n".join([f"{self.kind} chart with {len(self.values)} values", *lines])

    def caption(self, rng: Random) -> str:
        """The whole table."""
        cells = [f"{label} {value}" for label, value in zip(self.labels, self.values)]
        return f"{self.kind} chart: {', '.join(cells)}"

    def questions(self, rng: Random, count: int) -> list[Question]:
        """About single values, extremes, number and sum."""
        values, labels = self.values, self.labels
        asked = [(f"what is the value of {label}?", str(value)) for label, value in zip(labels, values)]
        asked.append(("how many values are shown?", str(len(values))))
        asked.append(("what is the sum of all values?", str(sum(values))))
        for name, extreme in (("largest", max(values)), ("smallest", min(values))):
            # Of two largest none can be named.
            if values.count(extreme) == 1:
                asked.append((f"which value is the {name}?", labels[values.index(extreme)]))
        a, b = rng.sample(range(len(values)), 2)
        asked.append((f"is {labels[a]} larger than {labels[b]}?", yes_no(values[a] > values[b])))
        rng.shuffle(asked)
        return asked[:count]
