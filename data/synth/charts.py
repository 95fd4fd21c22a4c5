"""Bar and line charts with exact values: one unit of value is a whole number of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from earlyfusion.data.loading.order import held_out
from earlyfusion.data.synth.palette import COLOURS, HELDOUT_FRACTION, Box, font, native_size

TOP_VALUE = 9
_LABEL_HEIGHT, _LEFT, _PAPER, _INK = 12, 12, (255, 255, 255), (10, 10, 10)


@dataclass(frozen=True)
class Chart:
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
        step = (self.width - _LEFT) / len(self.values)
        left = round(_LEFT + index * step + step * 0.15)
        right = max(left + 2, round(_LEFT + (index + 1) * step - step * 0.15))
        return left, self.baseline - self.values[index] * self.unit, right, self.baseline


def make_chart(rng: Random, *, min_side: int, max_side: int, heldout: bool = False) -> Chart:
    """A chart of 3 to 5 values; (kind, values) of training and held-out charts never coincide."""
    width, height = native_size(rng, max(min_side, 40), max(max_side, 40))
    while True:
        kind = rng.choice(("bar", "line"))
        values = tuple(rng.randint(0, TOP_VALUE) for _ in range(rng.randint(3, 5)))
        if held_out(f"chart/{kind}/{values}", HELDOUT_FRACTION) == heldout:
            return Chart(kind, values, rng.choice(tuple(COLOURS)), width, height)


def draw_chart(chart: Chart) -> Image.Image:
    """The picture, RGB: axes, marks at 0, 5 and 9, a letter under each value."""
    image = Image.new("RGB", (chart.width, chart.height), _PAPER)
    draw = ImageDraw.Draw(image)
    draw.line((_LEFT - 2, 1, _LEFT - 2, chart.baseline), fill=_INK)
    draw.line((_LEFT - 2, chart.baseline, chart.width - 1, chart.baseline), fill=_INK)
    for value in (0, 5, TOP_VALUE):
        y = chart.baseline - value * chart.unit
        draw.text((1, y), str(value), fill=_INK, font=font(9), anchor="lm")
    centres = []
    for i, label in enumerate(chart.labels):
        left, top, right, bottom = chart.bar(i)
        centres.append(((left + right) // 2, top))
        if chart.kind == "bar" and bottom > top:
            draw.rectangle((left, top, right - 1, bottom - 1), fill=COLOURS[chart.colour])
        draw.text(((left + right) // 2, chart.height - 1), label, fill=_INK, font=font(10), anchor="mb")
    if chart.kind == "line":
        draw.line(centres, fill=COLOURS[chart.colour], width=2)
        for x, y in centres:
            draw.rectangle((x - 1, y - 1, x + 1, y + 1), fill=COLOURS[chart.colour])
    return image


def chart_table(chart: Chart) -> str:
    """ "bar chart: A 3, B 7, C 0"."""
    return f"{chart.kind} chart: " + ", ".join(f"{label} {v}" for label, v in zip(chart.labels, chart.values))


def chart_questions(chart: Chart, rng: Random, count: int) -> list[tuple[str, str]]:
    """Up to `count` questions about single values, extremes, number and sum."""
    values, labels = chart.values, chart.labels
    asked = [(f"what is the value of {label}?", str(value)) for label, value in zip(labels, values)]
    asked += [
        ("how many values are shown?", str(len(values))),
        ("what is the sum of all values?", str(sum(values))),
    ]
    if values.count(max(values)) == 1:
        asked.append(("which value is the largest?", labels[values.index(max(values))]))
    if values.count(min(values)) == 1:
        asked.append(("which value is the smallest?", labels[values.index(min(values))]))
    a, b = rng.sample(range(len(values)), 2)
    asked.append((f"is {labels[a]} larger than {labels[b]}?", "yes" if values[a] > values[b] else "no"))
    rng.shuffle(asked)
    return asked[:count]
