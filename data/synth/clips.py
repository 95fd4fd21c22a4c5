"""Short clips: one or two shapes, of which one moves straight ahead at constant speed.

caption     "a red circle moves left. a blue star stands still."
questions   what moves, which way, how far, how many objects, how long
words       one line a frame: its time and where every object is
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from earlyfusion.data.sample import Video
from earlyfusion.data.synth.graph import Graph, Question, article, pixels
from earlyfusion.data.synth.palette import BACKGROUNDS, COLOURS, Box, native_size, paint, pairs

DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


@dataclass(frozen=True)
class Clip(Graph):
    """`boxes[frame]` is where the moving object is; the standing one, if any, stays in `standing_box`."""

    width: int
    height: int
    background: str
    colour: str
    shape: str
    direction: str
    boxes: tuple[Box, ...]
    timestamps: tuple[float, ...]
    """Seconds from the start."""
    standing: tuple[str, str] | None = None
    standing_box: Box | None = None

    @property
    def name(self) -> str:
        """ "red circle": the one that moves."""
        return f"{self.colour} {self.shape}"

    @classmethod
    def make(
        cls,
        rng: Random,
        *,
        min_side: int,
        max_side: int,
        heldout: bool = False,
        frames: int = 6,
        fps: float = 2.0,
        **own: Any,
    ) -> Clip:
        """A clip of `frames` frames, 1 / fps seconds apart; the moving (colour, shape) pair is of one side
        only."""
        width, height = native_size(rng, min_side, max_side)
        colour, shape = rng.choice(pairs(heldout))

        # Which way, and how far in one frame: the whole way stays inside the picture.
        direction = rng.choice(tuple(DIRECTIONS))
        dx, dy = DIRECTIONS[direction]
        side = max(6, round(min(width, height) * rng.uniform(0.2, 0.3)))
        w = min(width - frames, round(1.5 * side)) if shape == "rectangle" else side
        room = (width - w) if dx else (height - side)
        step = max(1, rng.randint(room // (2 * frames), room // frames))
        travel = step * (frames - 1)
        start = rng.randint(0, room - travel)
        along = [start + step * i for i in range(frames)]
        if dx + dy < 0:
            along = along[::-1]
        across = rng.randint(0, (height - side) if dx else (width - w))
        corners = [(a, across) if dx else (across, a) for a in along]

        # Now and then a second object, which does not move.
        standing, standing_box = None, None
        if rng.random() < 0.5:
            standing, standing_box = _standing(rng, corners, (w, side), (width, height))
        return cls(
            width=width,
            height=height,
            background=rng.choice(tuple(BACKGROUNDS)),
            colour=colour,
            shape=shape,
            direction=direction,
            boxes=tuple((x, y, x + w, y + side) for x, y in corners),
            timestamps=tuple(i / fps for i in range(frames)),
            standing=standing,
            standing_box=standing_box,
        )

    def frames(self) -> list[Image.Image]:
        """One RGB picture for each frame, all of one size."""
        pictures = []
        for box in self.boxes:
            image = Image.new("RGB", (self.width, self.height), BACKGROUNDS[self.background])
            draw = ImageDraw.Draw(image)
            if self.standing is not None and self.standing_box is not None:
                paint(draw, self.standing[1], self.standing_box, COLOURS[self.standing[0]])
            paint(draw, self.shape, box, COLOURS[self.colour])
            pictures.append(image)
        return pictures

    def draw(self) -> Image.Image:
        """See Graph."""
        return self.frames()[0]

    def media(self) -> Video:
        """All frames with their times."""
        return Video(self.frames(), self.timestamps)

    def words(self) -> str:
        """See Graph."""
        standing = ""
        if self.standing is not None and self.standing_box is not None:
            standing = f"; {' '.join(self.standing)} {pixels(self.standing_box)}"
        lines = [f"clip {self.width} x {self.height}, {self.background} background"]
        for time, box in zip(self.timestamps, self.boxes):
            lines.append(f"{time:.1f} s: {self.name} {pixels(box)}{standing}")
        return "\n".join(lines)

    def caption(self, rng: Random) -> str:
        """What moves where, and what does not."""
        moves = f"{article(self.name)} moves {self.direction}."
        return moves if self.standing is None else f"{moves} {article(' '.join(self.standing))} stands still."

    def questions(self, rng: Random, count: int) -> list[Question]:
        """About what moves, where to, how far and for how long."""
        (x0, y0, *_), (x1, y1, *_) = self.boxes[0], self.boxes[-1]
        asked = [
            ("which way does it move?", self.direction),
            ("what moves?", f"the {self.name}"),
            ("how many objects are there?", "1" if self.standing is None else "2"),
            ("how far does it move, in pixels?", str(abs(x1 - x0) + abs(y1 - y0))),
            ("when does the last frame come?", f"{self.timestamps[-1]:.1f} s"),
        ]
        rng.shuffle(asked)
        return asked[:count]


def _standing(
    rng: Random, corners: list[tuple[int, int]], moving: tuple[int, int], size: tuple[int, int]
) -> tuple[tuple[str, str] | None, Box | None]:
    """A second object outside the path of the first, where there is room."""
    left, right = min(x for x, _ in corners), max(x for x, _ in corners) + moving[0]
    top, bottom = min(y for _, y in corners), max(y for _, y in corners) + moving[1]
    side = max(6, min(size) // 5)
    for _ in range(8):
        x, y = rng.randint(0, size[0] - side), rng.randint(0, size[1] - side)
        if x + side <= left or x >= right or y + side <= top or y >= bottom:
            pair = rng.choice([pair for pair in pairs(False) if pair[1] != "rectangle"])
            return pair, (x, y, x + side, y + side)
    return None, None
