"""Words for a scene: captions, questions with their answers, and the text twin. All are read off the scene
graph."""

from __future__ import annotations

from collections import Counter
from random import Random

from earlyfusion.data.synth.palette import COLOURS, SHAPES, Box, pairs
from earlyfusion.data.synth.scene import Scene, Thing, relation

Question = tuple[str, str]
"""(question, answer)"""

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def article(phrase: str) -> str:
    """ "a red circle", "an orange star"."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def join(parts: list[str]) -> str:
    """ "x", "x and y", "x, y and z"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def counted(number: int, name: str) -> str:
    """ "a red circle" or "three red circles"."""
    return article(name) if number == 1 else f"{_NUMBERS[number]} {name}s"


def caption(scene: Scene, rng: Random) -> str:
    """One sentence that names every object, with sizes, counts or places."""
    style = rng.randrange(3)
    if style == 0:
        counts = Counter(thing.name for thing in scene.objects)
        body = join([counted(number, name) for name, number in counts.items()])
    elif style == 1:
        body = join([article(f"{thing.size} {thing.name}") for thing in scene.objects])
    else:
        body = join([f"{article(thing.name)} at {corner(scene, thing)}" for thing in scene.objects])
    return f"{body} on {article(scene.background)} background."


def corner(scene: Scene, thing: Thing) -> str:
    """Which ninth of the picture the centre of the object lies in."""
    x, y = thing.centre
    column = ("left", "centre", "right")[min(2, int(3 * x / scene.width))]
    row = ("top", "middle", "bottom")[min(2, int(3 * y / scene.height))]
    return "the centre" if (row, column) == ("middle", "centre") else f"the {row} {column}"


def twin(scene: Scene) -> str:
    """The scene as text: what a reader must know to answer every question without the picture."""
    lines = [f"picture {scene.width} x {scene.height}, {scene.background} background"]
    lines += [f"{thing.size} {thing.name} {pixels(thing.box)}" for thing in scene.objects]
    return "\n".join(lines)


def pixels(box: Box) -> str:
    """ "[12, 30, 40, 58]"."""
    return "[" + ", ".join(str(x) for x in box) + "]"


def shares(box: tuple[float, float, float, float]) -> str:
    """ "[0.12, 0.30, 0.40, 0.58]"."""
    return "[" + ", ".join(f"{x:.2f}" for x in box) + "]"


def questions(scene: Scene, rng: Random, count: int) -> list[Question]:
    """Up to `count` questions, no text twice; kinds are drawn evenly, yes and no are balanced."""
    kinds = [_colour, _shape, _exists, _count, _relation, _size, _box]
    found: dict[str, str] = {}
    for _ in range(4 * count):
        if len(found) == count:
            break
        asked = rng.choice(kinds)(scene, rng)
        if asked is not None:
            found.setdefault(*asked)
    return list(found.items())


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _colour(scene: Scene, rng: Random) -> Question | None:
    thing = rng.choice(scene.objects)
    if sum(other.shape == thing.shape for other in scene.objects) != 1:
        return None
    return f"what color is the {thing.shape}?", thing.colour


def _shape(scene: Scene, rng: Random) -> Question | None:
    thing = rng.choice(scene.objects)
    if sum(other.colour == thing.colour for other in scene.objects) != 1:
        return None
    return f"what shape is the {thing.colour} object?", thing.shape


def _exists(scene: Scene, rng: Random) -> Question | None:
    present = {(thing.colour, thing.shape) for thing in scene.objects}
    colour, shape = rng.choice(sorted(present) if rng.random() < 0.5 else pairs(False))
    return f"is there {article(f'{colour} {shape}')}?", _yes((colour, shape) in present)


def _count(scene: Scene, rng: Random) -> Question | None:
    style = rng.randrange(3)
    if style == 0:
        return "how many objects are there?", str(len(scene.objects))
    if style == 1:
        shape = rng.choice([thing.shape for thing in scene.objects] + [rng.choice(SHAPES)])
        return f"how many {shape}s are there?", str(sum(thing.shape == shape for thing in scene.objects))
    colour = rng.choice([thing.colour for thing in scene.objects] + [rng.choice(tuple(COLOURS))])
    return f"how many {colour} objects are there?", str(
        sum(thing.colour == colour for thing in scene.objects)
    )


def _relation(scene: Scene, rng: Random) -> Question | None:
    named = scene.unique()
    if len(named) < 2:
        return None
    a, b = rng.sample(named, 2)
    truth = relation(a, b)
    if truth is None:
        return None
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    said = truth if rng.random() < 0.5 else opposite[truth]
    return f"is the {a.name} {said} the {b.name}?", _yes(said == truth)


def _size(scene: Scene, rng: Random) -> Question | None:
    named = scene.unique()
    if not named:
        return None
    thing = rng.choice(named)
    return f"what size is the {thing.name}?", thing.size


def _box(scene: Scene, rng: Random) -> Question | None:
    named = scene.unique()
    if not named:
        return None
    thing = rng.choice(named)
    if rng.random() < 0.5:
        return f"where is the {thing.name}, in pixels?", pixels(thing.box)
    return f"where is the {thing.name}?", shares(scene.relative_box(thing))
