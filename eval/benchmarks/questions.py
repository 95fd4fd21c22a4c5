"""Questions about generated pictures, with answers read off the exact graph: one kind of question at a time.

Graphs come from data/synth on its held-out side (colour-shape pairs, words, chart values and boards that
training never draws); an item depends on (seed, kind, index) alone. Questions that training also asks keep
its wording; comparison and sorting are new kinds. Counting is balanced over the answers 0 to 4 and yes/no
questions over yes and no, so that a constant answer earns little.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from PIL import Image as PILImage

from earlyfusion.data.sample import Image, Video
from earlyfusion.data.synth import describe
from earlyfusion.data.synth.charts import chart_questions, make_chart
from earlyfusion.data.synth.clips import clip_questions, make_clip
from earlyfusion.data.synth.graphs import Graph, render
from earlyfusion.data.synth.grid import board_questions, make_board
from earlyfusion.data.synth.scene import Scene, make_scene
from earlyfusion.data.synth.words import make_sign, sign_questions

MIN_SIDE, MAX_SIDE, MAX_OBJECTS = 40, 96, 5
GREY = 128
TRIES = 2000
LARGER = 1.3  # areas of two objects must differ by this factor to be asked about

Asked = tuple[str, str]
"""(question, answer)"""


@dataclass(frozen=True)
class Item:
    """One question about one picture or clip."""

    graph: Graph
    question: str
    answer: str
    category: str

    def media(self) -> Image | Video:
        """The picture, or the clip with its times."""
        return render(self.graph)

    def blind(self) -> Image | Video:
        """A grey picture (clip) of the same size: the same number of image tokens that tell nothing but the
        size."""
        return grey(self.media())


def grey(media: Image | Video, level: int = GREY) -> Image | Video:
    """The same sizes and times, all pixels grey (0 to 255)."""
    blank = lambda picture: PILImage.new("RGB", Image(picture).open().size, (level, level, level))
    if isinstance(media, Image):
        return Image(blank(media.image))
    return Video([blank(frame) for frame in media.frames], media.timestamps)


def make_items(task: str, count: int, seed: int) -> list[Item]:
    """`count` items of a task (a key of KINDS), its categories in turn. Raises KeyError for an unknown
    task."""
    kinds = KINDS[task]
    names = list(kinds)
    items = []
    for index in range(count):
        category = names[index % len(names)]
        items.append(_item(kinds[category], category, Random(f"eval/{task}/{seed}/{index}")))
    return items


def _item(ask: Callable[[Random], tuple[Graph, Asked] | None], category: str, rng: Random) -> Item:
    for _ in range(TRIES):
        found = ask(rng)
        if found is not None:
            graph, (question, answer) = found
            return Item(graph, question, answer, category)
    raise RuntimeError(f"no {category!r} question in {TRIES} generated pictures; the generator has changed")


def _scene(rng: Random) -> Scene:
    return make_scene(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, max_objects=MAX_OBJECTS, heldout=True)


def _from_scene(pattern: str, accept: Callable[[Asked, Random], bool] | None = None):  # type: ignore[no-untyped-def]
    """A kind of question of data/synth/describe.py, told by its wording; `accept` may refuse an answer."""
    expression = re.compile(pattern)

    def ask(rng: Random) -> tuple[Graph, Asked] | None:
        scene = _scene(rng)
        fitting = [asked for asked in describe.questions(scene, rng, 12) if expression.search(asked[0])]
        asked = rng.choice(fitting) if fitting else None
        return (scene, asked) if asked and (accept is None or accept(asked, rng)) else None

    return ask


def _balanced_yes(asked: Asked, rng: Random) -> bool:
    return asked[1] == ("yes", "no")[rng.random() < 0.5]


def _counting(pattern: str, lowest: int):  # type: ignore[no-untyped-def]
    """Counting questions, their answers spread evenly from `lowest` to 4."""

    expression = re.compile(pattern)

    def ask(rng: Random) -> tuple[Graph, Asked] | None:
        wanted = str(rng.randint(lowest, 4))
        for _ in range(TRIES):
            scene = _scene(rng)
            fitting = [
                a for a in describe.questions(scene, rng, 12) if expression.search(a[0]) and a[1] == wanted
            ]
            if fitting:
                return scene, rng.choice(fitting)
        return None

    return ask


def _larger(rng: Random) -> tuple[Graph, Asked] | None:
    """Which of two named objects is larger, by the area of its box."""
    scene = _scene(rng)
    named = scene.unique()
    if len(named) < 2:
        return None
    a, b = rng.sample(named, 2)
    area = {thing.name: (thing.box[2] - thing.box[0]) * (thing.box[3] - thing.box[1]) for thing in (a, b)}
    if max(area.values()) < LARGER * min(area.values()):
        return None
    return scene, (f"which is larger, the {a.name} or the {b.name}?", max(area, key=lambda name: area[name]))


def _sorted(rng: Random) -> tuple[Graph, Asked] | None:
    """Named objects from left to right or from top to bottom, where nothing is level."""
    scene = _scene(rng)
    if len(scene.unique()) != len(scene.objects) or len(scene.objects) < 2:
        return None
    axis, words = rng.choice(((0, "left to right"), (1, "top to bottom")))
    listed = sorted(scene.objects, key=lambda thing: thing.centre[axis])
    if any(b.centre[axis] - a.centre[axis] < 4 for a, b in pairwise(listed)):
        return None
    return scene, (f"list the objects from {words}.", ", ".join(thing.name for thing in listed))


def _from_chart(pattern: str, balanced: bool = False):  # type: ignore[no-untyped-def]
    def ask(rng: Random) -> tuple[Graph, Asked] | None:
        chart = make_chart(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, heldout=True)
        fitting = [asked for asked in chart_questions(chart, rng, 99) if re.search(pattern, asked[0])]
        asked = rng.choice(fitting) if fitting else None
        return (chart, asked) if asked and (not balanced or _balanced_yes(asked, rng)) else None

    return ask


def _from_sign(lines: bool):  # type: ignore[no-untyped-def]
    """Reading: one word, or several."""

    def ask(rng: Random) -> tuple[Graph, Asked] | None:
        sign = make_sign(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, heldout=True)
        several = len(sign.text.split()) > 1
        return (sign, sign_questions(sign, rng, 1)[0]) if several == lines else None

    return ask


def _from_board(pattern: str):  # type: ignore[no-untyped-def]
    def ask(rng: Random) -> tuple[Graph, Asked] | None:
        board = make_board(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, heldout=True)
        fitting = [asked for asked in board_questions(board, rng, 99) if re.search(pattern, asked[0])]
        return (board, rng.choice(fitting)) if fitting else None

    return ask


def _from_clip(pattern: str):  # type: ignore[no-untyped-def]
    def ask(rng: Random) -> tuple[Graph, Asked] | None:
        frames, fps = rng.randint(5, 8), rng.choice((1.0, 2.0, 4.0))
        clip = make_clip(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, frames=frames, fps=fps, heldout=True)
        fitting = [asked for asked in clip_questions(clip, rng, 99) if re.search(pattern, asked[0])]
        return (clip, rng.choice(fitting)) if fitting else None

    return ask


KINDS: dict[str, dict[str, Callable[[Random], tuple[Graph, Asked] | None]]] = {
    "counting": {
        "objects": _counting(r"^how many objects are there", 1),
        "shape": _counting(r"^how many (?!objects)\w+ are there", 0),
        "color": _counting(r"^how many \w+ objects are there", 0),
    },
    "scene": {
        "color": _from_scene(r"^what color"),
        "shape": _from_scene(r"^what shape"),
        "size": _from_scene(r"^what size"),
        "exists": _from_scene(r"^is there", _balanced_yes),
        "relation": _from_scene(r"^is the .* (left of|right of|above|below) the", _balanced_yes),
        "comparison": _larger,
        "sorting": _sorted,
    },
    "grounding": {
        "pixels": _from_scene(r"^where is .*, in pixels"),
        "relative": _from_scene(r"^where is (?!.*in pixels)"),
    },
    "ocr": {"word": _from_sign(False), "words": _from_sign(True)},
    "chart": {
        "value": _from_chart(r"^what is the value"),
        "extreme": _from_chart(r"^which value"),
        "sum": _from_chart(r"^what is the sum"),
        "comparison": _from_chart(r"^is ", True),
    },
    "board": {
        "cell": _from_board(r"^what color"),
        "row": _from_board(r"^what is row"),
        "count": _from_board(r"^how many cells"),
    },
    "video_qa": {
        "direction": _from_clip(r"^which way"),
        "object": _from_clip(r"^what moves"),
        "objects": _from_clip(r"^how many objects"),
        "distance": _from_clip(r"^how far"),
        "time": _from_clip(r"^when does"),
    },
}
"""task -> category -> how to make one question."""
