"""Tasks over scenes of coloured shapes: counting, colour and shape queries, spatial relations.

Training scenes hold only (colour, shape) pairs of the training side; a test problem asks about a pair that
training never showed (for counting: about a scene that holds one). Wording is that of data/synth/describe.py
where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from earlyfusion.data.synth import describe
from earlyfusion.data.synth.palette import COLOURS, SHAPES, pairs
from earlyfusion.data.synth.scene import Scene, Thing, draw_scene, make_scene, relation
from earlyfusion.data.tasks.problem import BaseTask, Drawn, Problem
from earlyfusion.data.tasks.scoring import rewards as scoring

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def scene_of(rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Scene:
    """A scene of the side; knobs min_side, max_side, max_objects."""
    sides = {name: knobs[name] for name in ("min_side", "max_side", "max_objects")}
    return make_scene(rng, **sides, heldout=heldout)


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
    told: Scene | None = None,
    **meta: Any,
) -> Drawn:
    """A question about a scene: its picture, its twin, its size. told: the scene as the twin lists it, if
    otherwise."""
    meta = {"width": scene.width, "height": scene.height, "graph": scene, **meta}
    words = describe.twin(scene if told is None else told)
    return Drawn(question, draw_scene(scene), words, answer, target, combination, category, meta)


class Counting(BaseTask):
    """How many objects, shapes, colours or pairs there are; answers are spread evenly over what the kind
    allows.

    Knobs: kinds (all, shape, colour, pair), most (largest answer), sides and number of objects.
    """

    name = "counting"
    levels = (
        {"kinds": ("all",), "most": 3, "min_side": 40, "max_side": 64, "max_objects": 3},
        {"kinds": ("all", "shape", "colour"), "most": 4, "min_side": 40, "max_side": 64, "max_objects": 4},
        {"kinds": ("shape", "colour", "pair"), "most": 4, "min_side": 48, "max_side": 96, "max_objects": 6},
        {
            "kinds": ("all", "shape", "colour", "pair"),
            "most": 6,
            "min_side": 64,
            "max_side": 128,
            "max_objects": 8,
        },
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See BaseTask."""
        kind = rng.choice(tuple(knobs["kinds"]))
        wanted = rng.randint(1, knobs["most"]) if kind == "all" else rng.randint(0, min(knobs["most"], 3))
        for _ in range(400):
            scene = scene_of(rng, heldout, knobs)
            shown = on_side(scene, heldout)
            if not shown:
                continue
            colour, shape = rng.choice(tuple(COLOURS)), rng.choice(SHAPES)
            if wanted:
                thing = rng.choice(scene.objects)
                colour, shape = thing.colour, thing.shape
            if kind == "pair" and wanted:
                colour, shape = shown[0].colour, shown[0].shape
            elif kind == "pair":
                colour, shape = rng.choice(pairs(heldout))
            name, fits = self._kind(kind, colour, shape)
            count = sum(fits(thing) for thing in scene.objects)
            if count == min(wanted, 2) if kind == "pair" else count == wanted:
                key = f"pair/{colour}/{shape}" if kind == "pair" else pair_key(shown[0])
                return scene_drawn(scene, f"how many {name} are there?", count, str(count), key, kind)
        return None

    @staticmethod
    def _kind(kind: str, colour: str, shape: str):  # type: ignore[no-untyped-def]
        """(what is counted, whether a thing belongs to it)."""
        return {
            "all": ("objects", lambda thing: True),
            "shape": (f"{shape}s", lambda thing: thing.shape == shape),
            "colour": (f"{colour} objects", lambda thing: thing.colour == colour),
            "pair": (f"{colour} {shape}s", lambda thing: (thing.colour, thing.shape) == (colour, shape)),
        }[kind]

    def score(self, problem: Problem, said: str) -> float:
        """1 - |difference| / gold; see scoring.counting."""
        return scoring.counting(said, problem.answer, problem.question)


class ColourShape(BaseTask):
    """The colour, shape or size of one object that its other property, or its place, names without doubt.

    Knobs: kinds (colour, shape, size, leftmost_colour, leftmost_shape), sides and number of objects; listed:
    "any order" mixes the objects in the twin, which otherwise names them from left to right, so that the
    first is the leftmost; alone: of the leftmost object only what no other object has is asked, so that not
    every other guess is right.
    """

    name = "colour_shape"
    levels = (
        {"kinds": ("colour",), "min_side": 40, "max_side": 64, "max_objects": 2},
        {"kinds": ("colour", "shape"), "min_side": 40, "max_side": 64, "max_objects": 2},
        {"kinds": ("leftmost_colour",), "min_side": 40, "max_side": 64, "max_objects": 3},
        {"kinds": ("colour", "shape", "size"), "min_side": 40, "max_side": 64, "max_objects": 4},
        {
            "kinds": ("colour", "shape", "leftmost_colour", "leftmost_shape"),
            "min_side": 48,
            "max_side": 96,
            "max_objects": 6,
        },
        {
            "kinds": ("leftmost_colour",),
            "min_side": 40,
            "max_side": 64,
            "max_objects": 3,
            "listed": "any order",
            "alone": True,
        },
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See BaseTask."""
        scene = scene_of(rng, heldout, knobs)
        shown = on_side(scene, heldout)
        if not shown:
            return None
        thing, kind = rng.choice(shown), rng.choice(tuple(knobs["kinds"]))
        same = [other for other in scene.objects if other is not thing]
        if kind == "colour" and all(other.shape != thing.shape for other in same):
            question, answer = f"what color is the {thing.shape}?", thing.colour
        elif kind == "shape" and all(other.colour != thing.colour for other in same):
            question, answer = f"what shape is the {thing.colour} object?", thing.shape
        elif kind == "size" and all(other.name != thing.name for other in same):
            question, answer = f"what size is the {thing.name}?", thing.size
        elif kind.startswith("leftmost") and same and all(other.box[0] > thing.box[0] + 1 for other in same):
            part = kind.removeprefix("leftmost_")
            question = f"what {'color' if part == 'colour' else part} is the leftmost object?"
            answer = getattr(thing, part)
            if knobs.get("alone") and any(getattr(other, part) == answer for other in same):
                return None
        else:
            return None
        told = scene
        if knobs.get("listed") == "any order":
            told = replace(scene, objects=tuple(rng.sample(scene.objects, len(scene.objects))))
        return scene_drawn(scene, question, answer, answer, pair_key(thing), kind, told=told)

    def score(self, problem: Problem, said: str) -> float:
        """The one word."""
        return scoring.words(said, problem.answer)


class Relation(BaseTask):
    """How two named objects stand to each other. With knob form = "yes_no" the wording of pretraining, yes
    and no in balance; with "which" one of four relations, asked only where the two share rows or columns, so
    that one holds."""

    name = "relation"
    levels = (
        {"form": "yes_no", "min_side": 40, "max_side": 64, "max_objects": 2},
        {"form": "which", "min_side": 40, "max_side": 64, "max_objects": 3},
        {"form": "which", "min_side": 48, "max_side": 96, "max_objects": 6},
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See BaseTask."""
        scene = scene_of(rng, heldout, knobs)
        named = scene.unique()
        asked = [thing for thing in on_side(scene, heldout) if thing in named]
        if len(named) < 2 or not asked:
            return None
        a = rng.choice(asked)
        b = rng.choice([thing for thing in named if thing is not a])
        key = pair_key(a)
        if rng.random() < 0.5:
            a, b = b, a
        truth = relation(a, b)
        if truth is None:
            return None
        if knobs["form"] == "yes_no":
            said = truth if rng.random() < 0.5 else OPPOSITE[truth]
            answer, question = "yes" if said == truth else "no", f"is the {a.name} {said} the {b.name}?"
        elif _apart_on_both(a, b):
            return None
        else:
            answer, question = truth, f"is the {a.name} left of, right of, above or below the {b.name}?"
        return scene_drawn(scene, question, answer, answer, key, knobs["form"])

    def score(self, problem: Problem, said: str) -> float:
        """The words of the relation; "left" counts as "left of"."""
        gold = problem.answer
        return max(scoring.words(said, gold), scoring.words(said, gold.removesuffix(" of")))


def _apart_on_both(a: Thing, b: Thing) -> bool:
    beside = a.box[2] <= b.box[0] or b.box[2] <= a.box[0]
    over = a.box[3] <= b.box[1] or b.box[3] <= a.box[1]
    return beside and over
