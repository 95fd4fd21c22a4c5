"""Tasks over scenes of coloured shapes: counting, colour and shape queries, spatial relations.

Training scenes hold only (colour, shape) pairs of the training side; a test problem asks about a pair that
training never showed (for counting: about a scene that holds one). Wording is that of data/synth/scene.py
where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from earlyfusion.data.synth.graph import Graph, Question
from earlyfusion.data.synth.palette import COLOURS, SHAPES, pairs
from earlyfusion.data.synth.scene import Scene, Thing, ask_relation, relation
from earlyfusion.data.tasks.exam import Kind
from earlyfusion.data.tasks.problem import (
    MAX_OBJECTS,
    MAX_SIDE,
    MIN_SIDE,
    Drawn,
    Judged,
    Problem,
    Task,
    task,
)
from earlyfusion.data.tasks.scoring import rewards
from earlyfusion.data.tasks.scoring.text import first_line, parse_count

LARGER = 1.3  # areas of two objects must differ by this factor to be asked about
SMALL = {"min_side": 40, "max_side": 64}
MEDIUM = {"min_side": 48, "max_side": 96}


class SceneTask(Task):
    """What tasks over scenes share: the scene of a problem and that of an exam's question."""

    listed = 12

    def graph(self, rng: Random) -> Graph:
        """See Task."""
        return Scene.make(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, heldout=True, max_objects=MAX_OBJECTS)

    @staticmethod
    def scene(rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Scene:
        """A scene of the side; knobs min_side, max_side, max_objects."""
        sides = {name: knobs[name] for name in ("min_side", "max_side", "max_objects")}
        return Scene.make(rng, **sides, heldout=heldout)


def pair_key(thing: Thing) -> str:
    """The combination of a thing, as data/synth/palette.py holds it out."""
    return f"pair/{thing.colour}/{thing.shape}"


def on_side(scene: Scene, heldout: bool) -> list[Thing]:
    """The things of a scene whose pair belongs to the side."""
    allowed = pairs(heldout)
    return [thing for thing in scene.objects if (thing.colour, thing.shape) in allowed]


def scene_drawn(
    scene: Scene,
    question: str,
    answer: Any,
    target: str,
    combination: str,
    category: str,
    *,
    description: str | None = None,
    **meta: Any,
) -> Drawn:
    """A question about a scene: its picture, its twin (or `description`), its size."""
    meta = {"width": scene.width, "height": scene.height, "graph": scene, **meta}
    words = scene.words() if description is None else description
    return Drawn(question, scene.draw(), words, answer, target, combination, category, meta)


@task("counting")
class Counting(SceneTask):
    """How many objects, shapes, colours or pairs there are; answers are spread evenly over what the kind
    allows.

    Knobs: kinds (all, shape, colour, pair), most (largest answer), sides and number of objects.
    """

    levels = (
        {"kinds": ("all",), "most": 3, **SMALL, "max_objects": 3},
        {"kinds": ("all", "shape", "colour"), "most": 4, **SMALL, "max_objects": 4},
        {"kinds": ("shape", "colour", "pair"), "most": 4, **MEDIUM, "max_objects": 6},
        {
            "kinds": ("all", "shape", "colour", "pair"),
            "most": 6,
            "min_side": 64,
            "max_side": 128,
            "max_objects": 8,
        },
    )
    kinds = {
        "objects": Kind(r"^how many objects are there", lowest=1),
        "shape": Kind(r"^how many (?!objects)\w+ are there", lowest=0),
        "color": Kind(r"^how many \w+ objects are there", lowest=0),
    }
    answer_tokens = 8

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        kind = rng.choice(tuple(knobs["kinds"]))
        expected = rng.randint(1, knobs["most"]) if kind == "all" else rng.randint(0, min(knobs["most"], 3))
        for _ in range(400):  # scenes, until one has the number that was drawn
            scene = self.scene(rng, heldout, knobs)
            shown = on_side(scene, heldout)
            if not shown:
                continue

            # Something that is there, unless there is to be none of it; a pair must be of the side.
            colour, shape = rng.choice(tuple(COLOURS)), rng.choice(SHAPES)
            if expected:
                thing = rng.choice(scene.objects)
                colour, shape = thing.colour, thing.shape
            if kind == "pair" and expected:
                colour, shape = shown[0].colour, shown[0].shape
            elif kind == "pair":
                colour, shape = rng.choice(pairs(heldout))

            named = {"colour": colour, "shape": shape}
            asked = {name: value for name, value in named.items() if kind in (name, "pair")}
            question, count = scene.count(**asked)
            if count == (min(expected, 2) if kind == "pair" else expected):
                key = f"pair/{colour}/{shape}" if kind == "pair" else pair_key(shown[0])
                return scene_drawn(scene, question, count, str(count), key, kind)
        return None

    def score(self, problem: Problem, answer: str) -> float:
        """1 - |difference| / gold; see rewards.counting."""
        return rewards.counting(answer, problem.answer, problem.question)

    def judge(self, problem: Problem, text: str) -> Judged:
        """Exact number in the first line; the error of an answer without a number is that of saying 0, at
        least 1."""
        gold, number = int(problem.answer), parse_count(first_line(text))
        if number is None:
            return None, 0.0, {"mae": float(max(gold, 1)), "within_one": 0.0}
        error = abs(number - gold)
        return number, float(number == gold), {"mae": float(error), "within_one": float(error <= 1)}


@task("colour_shape")
class ColourShape(SceneTask):
    """The colour, shape or size of one object that its other property, or its place, names without doubt.

    Knobs: kinds (colour, shape, size, leftmost_colour, leftmost_shape), sides and number of objects; listed:
    "any order" mixes the objects in the twin, which otherwise names them from left to right, so that the
    first is the leftmost; alone: of the leftmost object only what no other object has is asked, so that not
    every other guess is right.
    """

    levels = (
        {"kinds": ("colour",), **SMALL, "max_objects": 2},
        {"kinds": ("colour", "shape"), **SMALL, "max_objects": 2},
        {"kinds": ("leftmost_colour",), **SMALL, "max_objects": 3},
        {"kinds": ("colour", "shape", "size"), **SMALL, "max_objects": 4},
        {"kinds": ("colour", "shape", "leftmost_colour", "leftmost_shape"), **MEDIUM, "max_objects": 6},
        {"kinds": ("leftmost_colour",), **SMALL, "max_objects": 3, "listed": "any order", "alone": True},
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        scene = self.scene(rng, heldout, knobs)
        shown = on_side(scene, heldout)
        if not shown:
            return None
        thing, kind = rng.choice(shown), rng.choice(tuple(knobs["kinds"]))
        asked = self._ask(scene, thing, kind, bool(knobs.get("alone")))
        if asked is None:
            return None

        described = scene
        if knobs.get("listed") == "any order":
            described = replace(scene, objects=tuple(rng.sample(scene.objects, len(scene.objects))))
        question, answer = asked
        key = pair_key(thing)
        return scene_drawn(scene, question, answer, answer, key, kind, description=described.words())

    @staticmethod
    def _ask(scene: Scene, thing: Thing, kind: str, alone: bool) -> Question | None:
        """The question, or None where it would leave doubt."""
        others = [other for other in scene.objects if other is not thing]
        if kind == "colour":
            return thing.ask_colour() if len(scene.having(shape=thing.shape)) == 1 else None
        if kind == "shape":
            return thing.ask_shape() if len(scene.having(colour=thing.colour)) == 1 else None
        if kind == "size":
            return thing.ask_size() if thing in scene.unique() else None

        part = kind.removeprefix("leftmost_")
        if not others or not all(other.box[0] > thing.box[0] + 1 for other in others):
            return None
        answer = getattr(thing, part)
        if alone and any(getattr(other, part) == answer for other in others):
            return None
        return f"what {'color' if part == 'colour' else part} is the leftmost object?", answer


@task("relation")
class Relation(SceneTask):
    """How two named objects stand to each other. With knob form = "yes_no" the wording of pretraining, yes
    and no in balance; with "which" one of four relations, asked only where the two share rows or columns, so
    that one holds."""

    levels = (
        {"form": "yes_no", **SMALL, "max_objects": 2},
        {"form": "which", **SMALL, "max_objects": 3},
        {"form": "which", **MEDIUM, "max_objects": 6},
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        scene = self.scene(rng, heldout, knobs)
        named = scene.unique()
        shown = [thing for thing in on_side(scene, heldout) if thing in named]
        if len(named) < 2 or not shown:
            return None

        a = rng.choice(shown)
        b = rng.choice([thing for thing in named if thing is not a])
        key = pair_key(a)
        if rng.random() < 0.5:
            a, b = b, a
        truth = relation(a, b)
        if truth is None:
            return None

        if knobs["form"] == "yes_no":
            question, answer = ask_relation(rng, a, b, truth)
        elif _apart_on_both(a, b):
            return None
        else:
            question = f"is the {a.name} left of, right of, above or below the {b.name}?"
            answer = truth
        return scene_drawn(scene, question, answer, answer, key, knobs["form"])

    def score(self, problem: Problem, answer: str) -> float:
        """The words of the relation; "left" counts as "left of"."""
        gold = problem.answer
        return max(rewards.words(answer, gold), rewards.words(answer, gold.removesuffix(" of")))


def _apart_on_both(a: Thing, b: Thing) -> bool:
    beside = a.box[2] <= b.box[0] or b.box[2] <= a.box[0]
    over = a.box[3] <= b.box[1] or b.box[3] <= a.box[1]
    return beside and over


def _larger(scene: Scene, rng: Random) -> Question | None:
    """Which of two named objects is larger, by the area of its box."""
    named = scene.unique()
    if len(named) < 2:
        return None
    a, b = rng.sample(named, 2)
    larger, smaller = max(a, b, key=lambda thing: thing.area), min(a, b, key=lambda thing: thing.area)
    if larger.area < LARGER * smaller.area:
        return None
    return f"which is larger, the {a.name} or the {b.name}?", larger.name


def _sorted(scene: Scene, rng: Random) -> Question | None:
    """Named objects from left to right or from top to bottom, where nothing is level."""
    if len(scene.unique()) != len(scene.objects) or len(scene.objects) < 2:
        return None
    axis, direction = rng.choice(((0, "left to right"), (1, "top to bottom")))
    listed = sorted(scene.objects, key=lambda thing: thing.centre[axis])
    if any(b.centre[axis] - a.centre[axis] < 4 for a, b in pairwise(listed)):
        return None
    return f"list the objects from {direction}.", ", ".join(thing.name for thing in listed)


@task("scene")
class SceneExam(SceneTask):
    """What is where: exact words."""

    kinds = {
        "color": Kind(r"^what color"),
        "shape": Kind(r"^what shape"),
        "size": Kind(r"^what size"),
        "exists": Kind(r"^is there", balanced=True),
        "relation": Kind(r"^is the .* (left of|right of|above|below) the", balanced=True),
        "comparison": Kind(ask=_larger),
        "sorting": Kind(ask=_sorted),
    }
    answer_tokens = 48
