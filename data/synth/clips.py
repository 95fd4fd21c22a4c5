"""Short clips: one or two shapes, of which one moves straight ahead at constant speed.

caption     "a red circle moves left. a blue star stands still."
questions   what moves, which way, how far, how many objects, how long
words       one line a frame: its time and where every object is
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from PIL import Image

from earlyfusion.data.sample import Video
from earlyfusion.data.synth.graph import (
    BACKGROUNDS,
    Box,
    Graph,
    Question,
    article,
    native_size,
    pairs,
    pixels,
)
from earlyfusion.data.synth.scene import Scene, Thing

DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


@dataclass(frozen=True)
class Clip(Graph):
    """`scenes[frame]` holds the standing object, if any, then the moving one where it is."""

    scenes: tuple[Scene, ...]
    direction: str
    timestamps: tuple[float, ...]
    """Seconds from the start."""

    @property
    def moving(self) -> Thing:
        """The one that moves, where it begins."""
        return self.scenes[0].objects[-1]

    @property
    def standing(self) -> tuple[Thing, ...]:
        """The other one, if any."""
        return self.scenes[0].objects[:-1]

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
    ) -> Clip:
        """A clip of `frames` frames, 1 / fps seconds apart; the moving (colour, shape) pair is of one side
        only."""
        width, height = native_size(rng, min_side, max_side)
        colour, shape = rng.choice(pairs(heldout))

        # Which way, and how far in one frame: the whole way stays inside the picture.
        direction = rng.choice(tuple(DIRECTIONS))
        dx, dy = DIRECTIONS[direction]
        h = max(6, round(min(width, height) * rng.uniform(0.2, 0.3)))
        w = min(width - frames, round(1.5 * h)) if shape == "rectangle" else h
        room, side = (width - w, height - h) if dx else (height - h, width - w)
        # At least a pixel a frame, at most the whole room in all frames.
        step = max(1, rng.randint(room // (2 * frames), room // frames))
        start = rng.randint(0, room - step * (frames - 1))
        along = [start + step * i for i in range(frames)]
        if dx + dy < 0:
            along.reverse()
        # It moves along one axis and stays where it is on the other.
        across = rng.randint(0, side)

        boxes = []
        for a in along:
            x, y = (a, across) if dx else (across, a)
            boxes.append((x, y, x + w, y + h))
        # Now and then a second object, which does not move.
        standing = _standing(rng, boxes, width, height) if rng.random() < 0.5 else ()
        empty = Scene(width, height, rng.choice(tuple(BACKGROUNDS)), ())
        scenes = [replace(empty, objects=(*standing, Thing(colour, shape, "", box))) for box in boxes]
        return cls(tuple(scenes), direction, tuple(i / fps for i in range(frames)))

    def frames(self) -> list[Image.Image]:
        """One RGB picture for each frame, all of one size."""
        return [scene.draw() for scene in self.scenes]

    def draw(self) -> Image.Image:
        """See Graph."""
        return self.scenes[0].draw()

    def media(self) -> Video:
        """All frames with their times."""
        return Video(self.frames(), self.timestamps)

    def words(self) -> str:
        """See Graph."""
        first = self.scenes[0]
        lines = [f"clip {first.width} x {first.height}, {first.background} background"]
        for time, scene in zip(self.timestamps, self.scenes):
            # The moving one first, as it is asked about.
            things = [f"{thing.name} {pixels(thing.box)}" for thing in reversed(scene.objects)]
            lines.append(f"{time:.1f} s: {'; '.join(things)}")
        return "\n".join(lines)

    def caption(self, rng: Random) -> str:
        """What moves where, and what does not."""
        told = [f"{article(self.moving.name)} moves {self.direction}."]
        return " ".join(told + [f"{article(thing.name)} stands still." for thing in self.standing])

    def questions(self, rng: Random, count: int) -> list[Question]:
        """About what moves, where to, how far and for how long."""
        (x0, y0, *_), (x1, y1, *_) = self.moving.box, self.scenes[-1].objects[-1].box
        asked = [
            ("which way does it move?", self.direction),
            ("what moves?", f"the {self.moving.name}"),
            ("how many objects are there?", str(len(self.scenes[0].objects))),
            ("how far does it move, in pixels?", str(abs(x1 - x0) + abs(y1 - y0))),
            ("when does the last frame come?", f"{self.timestamps[-1]:.1f} s"),
        ]
        rng.shuffle(asked)
        return asked[:count]


def _standing(rng: Random, boxes: list[Box], width: int, height: int) -> tuple[Thing, ...]:
    """A second object outside the path of the first, where there is room."""
    left, top, right, bottom = (pick(edge) for pick, edge in zip((min, min, max, max), zip(*boxes)))
    side = max(6, min(width, height) // 5)
    for _ in range(8):
        x, y = rng.randint(0, width - side), rng.randint(0, height - side)
        if x + side <= left or x >= right or y + side <= top or y >= bottom:
            # Of training pairs always, and no wide shape: it fits where there is room.
            colour, shape = rng.choice([pair for pair in pairs(False) if pair[1] != "rectangle"])
            return (Thing(colour, shape, "", (x, y, x + side, y + side)),)
    return ()
