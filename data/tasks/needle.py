"""A needle in a haystack, in words or in pictures: what of a long document is found again at its end.

The haystack is library code of the installed Python (data/library.py). Every `APART` tokens a coloured shape
stands in it: as a small picture, or told in a sentence. One of them, the needle, has a shape that no other
has, and the question at the end asks for its colour. Both forms of a problem hold the same text, shapes and
depth.

Held out: which thing stands beside which needle, and the files of the haystack. The needle's own (colour,
shape) is of training on both sides: a small model answers for a pair it never saw with one that it did,
whatever the length, and length is what is measured. Control: `Haystack.without`, the same document with
another shape in the needle's place.
"""

from dataclasses import dataclass, replace
from functools import cache
from random import Random

from PIL import Image as PILImage

from earlyfusion.data.library import library
from earlyfusion.data.loading.order import held_out
from earlyfusion.data.sample import Image, Segment, Text
from earlyfusion.data.synth.graph import Pair, pairs
from earlyfusion.data.tasks.problem import Problem, Task, task
from earlyfusion.data.tasks.puzzles import draw_things

APART = 32
"""Tokens from one shape to the next."""
TEXT_BYTES = 48
"""Of text between two shapes: what a vocabulary of 2,048 hardly ever takes more than APART tokens for, with
the shape itself."""
LIBRARY_BYTES, FRACTION = 4_000_000, 0.1
"""As the source stdlib_code has them if not told otherwise: what it trains on is not in a test's haystack."""
SIDE = 32
"""Of a picture, in pixels."""
DEPTHS = 5
"""Parts of a document that depths are reported by."""


@cache
def hay(heldout: bool) -> tuple[str, ...]:
    """Lines of one side's files that are half small letters or more, with their ends, cut at TEXT_BYTES."""
    lines = []
    for name, text in library(LIBRARY_BYTES):
        if held_out(f"stdlib/{name}", FRACTION) == heldout:
            # Tables and names in capitals take several times as many tokens as words do.
            half = lambda line: sum(map(str.islower, line)) > len(line.strip()) / 2
            lines += [f"{line[: TEXT_BYTES - 1]}\n" for line in filter(half, text.splitlines())]
    return tuple(lines)


# Sixty pictures at most; a document of 4,000 shapes shows them again and again.
@cache
def tile(pair: Pair) -> PILImage.Image:
    """The picture of one shape."""
    return draw_things([pair], 1, SIDE, "white")


@dataclass(frozen=True)
class Haystack(Problem):
    """A needle problem. Text i stands before thing i; `picture` is that of the needle alone."""

    texts: tuple[str, ...] = ()
    things: tuple[Pair, ...] = ()
    needle: int = 0
    """Its place among the things."""

    def seen(self) -> tuple[Segment, ...]:
        """See Problem."""
        segments: list[Segment] = []
        for text, pair in zip(self.texts, self.things):
            segments += [Text(text, 0.0), Image(tile(pair)), Text("\n", 0.0)]
        return tuple(segments)

    def without(self) -> "Haystack":
        """The same document with the thing of another place where the needle was."""
        # Its neighbour once more: two equal ones stand side by side in any long haystack.
        stand_in = self.things[self.needle - 1]
        things = (*self.things[: self.needle], stand_in, *self.things[self.needle + 1 :])
        return replace(self, things=things, description=told(self.texts, things))


def told(texts: tuple[str, ...], things: tuple[Pair, ...]) -> str:
    """The document in words."""
    lines = [f"{text}the {shape} is {colour}.\n" for text, (colour, shape) in zip(texts, things)]
    return "".join(lines).removesuffix("\n")


@task("needle")
class Needle(Task):
    """The colour of the one shape that a long document shows once. Level i: 128 * 2^i tokens at most."""

    levels = tuple({"length": 128 << i} for i in range(12))

    def draw(self, rng, heldout, knobs):
        """See Task."""
        colour, shape = rng.choice(pairs(False))
        # One place fewer: the question and the answer stand there.
        count = knobs["length"] // APART - 1
        others = [pair for pair in pairs(False) if pair[1] != shape]
        things = [rng.choice(others) for _ in range(count)]
        needle = rng.randrange(count)
        things[needle] = colour, shape

        texts = _texts(rng, hay(heldout), count)
        depth = needle / (count - 1)
        part = min(int(depth * DEPTHS), DEPTHS - 1)
        return Haystack(
            f"what color is the {shape}?",
            tile((colour, shape)),
            told(texts, tuple(things)),
            colour,
            colour,
            f"needle/{colour}/{shape} beside {things[needle - 1]}",
            f"depth {part / DEPTHS:.1f} to {(part + 1) / DEPTHS:.1f}",
            {"length": knobs["length"], "depth": depth},
            texts=texts,
            things=tuple(things),
            needle=needle,
        )


def _texts(rng: Random, lines: tuple[str, ...], count: int) -> tuple[str, ...]:
    """`count` runs of whole lines that follow each other, from a place in the library on."""
    texts, at = [], rng.randrange(len(lines))
    for _ in range(count):
        text = ""
        while len(text) + len(lines[at]) <= TEXT_BYTES:
            text += lines[at]
            # A document longer than the library begins it again.
            at = (at + 1) % len(lines)
        texts.append(text)
    return tuple(texts)
