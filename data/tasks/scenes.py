"""Tasks over scenes of coloured shapes: counting, colour and shape queries, spatial relations.

Training scenes hold only (colour, shape) pairs of the training side; a test problem asks about a pair that
training never showed (for counting: about a scene that holds one). Wording is that of data/synth/scene.py
where it has one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

from earlyfusion.data.synth.graph import COLOURS, SHAPES, Pair, Question, pair_key, pairs
from earlyfusion.data.synth.scene import Scene, Thing, ask_relation, relations
from earlyfusion.data.tasks.problem import MAX_OBJECTS, Kind, Knobs, Task, about, task
from earlyfusion.data.tasks.scoring import rewards
from earlyfusion.data.tasks.scoring.text import first_line, parse_count

# Below that two shapes of different outline look alike in size.
LARGER = 1.3  # areas of two objects must differ by this factor to be asked about
SMALL = {"min_side": 40, "max_side": 64}
MEDIUM = {"min_side": 48, "max_side": 96}
LARGE = {"min_side": 64, "max_side": 128}


class SceneTask(Task):
    """What tasks over scenes share: the scene of a problem, and the one thing of the side it asks about."""

    listed = 12
    make = partial(Scene.make, max_objects=MAX_OBJECTS)

    @staticmethod
    def scene(rng: Random, heldout: bool, knobs: Knobs) -> tuple[Scene, list[Thing]]:
        """A scene, and its things whose pair belongs to the side: at least one, and in training all."""
        sides = {name: knobs[name] for name in ("min_side", "max_side", "max_objects")}
        scene = Scene.make(rng, **sides, heldout=heldout)
        # The first object that is placed is of the side, so there is always one to ask about.
        return scene, [thing for thing in scene.objects if thing.pair in pairs(heldout)]


def part_of(pair: Pair, part: str) -> dict[str, str]:
    """What is asked for by name: the colour, the shape, both ("pair") or neither."""
    named = zip(("colour", "shape"), pair)
    return {name: value for name, value in named if part in (name, "pair")}


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
        {"kinds": ("all", "shape", "colour", "pair"), "most": 6, **LARGE, "max_objects": 8},
    )
    kinds = {
        "objects": Kind(r"^how many objects are there", lowest=1),
        "shape": Kind(r"^how many (?!objects)\w+ are there", lowest=0),
        "color": Kind(r"^how many \w+ objects are there", lowest=0),
    }
    answer_tokens = 8
    scorer = staticmethod(rewards.counting)

    def draw(self, rng, heldout, knobs):
        """See Task."""
        kind = rng.choice(knobs["kinds"])
        # "How many objects" is never none; of a shape or colour there may be none.
        least, most = (1, knobs["most"]) if kind == "all" else (0, min(knobs["most"], 3))
        expected = rng.randint(least, most)
        for _ in range(400):  # scenes, until one has the number that was drawn
            scene, shown = self.scene(rng, heldout, knobs)

            # Something that is there, unless there is to be none of it; a pair must be of the side.
            pair = rng.choice(tuple(COLOURS)), rng.choice(SHAPES)
            if expected:
                pair = rng.choice(scene.objects).pair
            side = shown[0].pair
            if kind == "pair":
                pair = side = side if expected else rng.choice(pairs(heldout))

            # A pair is asked by both words, a colour or shape by one.
            question, count = scene.count(**part_of(pair, kind))
            # More than two of one pair are too rare to wait for.
            if count == (min(expected, 2) if kind == "pair" else expected):
                return about(scene, question, count, str(count), pair_key(side), kind)
        return None

    def judge(self, problem, text):
        """Exact number in the first line; the error of an answer without a number is that of saying 0, at
        least 1."""
        gold, number = int(problem.answer), parse_count(first_line(text))
        # An answer that cannot be read is not near to anything.
        if number is None:
            return None, 0.0, {"mae": float(max(gold, 1)), "within_one": 0.0}
        error = abs(number - gold)
        return number, float(error == 0), {"mae": float(error), "within_one": float(error <= 1)}


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

    def draw(self, rng, heldout, knobs):
        """See Task."""
        scene, shown = self.scene(rng, heldout, knobs)
        thing, kind = rng.choice(shown), rng.choice(knobs["kinds"])
        # "leftmost_colour": named by its place, not by a property.
        prefix, _, part = kind.rpartition("_")
        asked = _leftmost(scene, thing, part, "alone" in knobs) if prefix else scene.ask(thing, kind)
        if asked is None:
            return None

        drawn = about(scene, *asked, asked[1], pair_key(thing.pair), kind)
        if "listed" in knobs:
            # In the order of a sentence the first object would be the answer.
            mixed = rng.sample(scene.objects, len(scene.objects))
            drawn = replace(drawn, description=replace(scene, objects=mixed).words())
        return drawn


def _leftmost(scene: Scene, thing: Thing, part: str, alone: bool) -> Question | None:
    """What the leftmost object's `part` is, or None where that would leave doubt."""
    others = [other for other in scene.objects if other is not thing]
    # Alone or level by a pixel, nothing is leftmost.
    if not others or min(other.box[0] for other in others) <= thing.box[0] + 1:
        return None
    answer = getattr(thing, part)
    # Otherwise a colour that is there twice would be right more often than it should.
    if alone and any(getattr(other, part) == answer for other in others):
        return None
    return f"what {part.replace('colour', 'color')} is the leftmost object?", answer


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

    def draw(self, rng, heldout, knobs):
        """See Task."""
        scene, shown = self.scene(rng, heldout, knobs)
        named = scene.unique()
        # A name that fits two objects asks about neither.
        shown = [thing for thing in shown if thing in named]
        if len(named) < 2 or not shown:
            return None

        a = rng.choice(shown)
        b = rng.choice([thing for thing in named if thing is not a])
        key = pair_key(a.pair)
        # The held-out one is named first or last.
        if rng.random() < 0.5:
            a, b = b, a
        truths = relations(a, b)
        if not truths:
            return None

        question = f"is the {a.name} left of, right of, above or below the {b.name}?"
        answer = truths[0]
        if knobs["form"] == "yes_no":
            question, answer = ask_relation(rng, a, b, answer)
        # Two relations hold at once where the boxes are apart both ways: "left of" and "above".
        elif len(truths) > 1:
            return None
        return about(scene, question, answer, answer, key, knobs["form"])

    def score(self, problem, answer):
        """The words of the relation; "left" counts as "left of"."""
        gold = problem.answer
        return rewards.words(answer, gold) or rewards.words(answer, gold.removesuffix(" of"))


def _larger(scene: Scene, rng: Random) -> Question | None:
    """Which of two named objects is larger, by the area of its box."""
    named = scene.unique()
    if len(named) < 2:
        return None
    a, b = rng.sample(named, 2)
    smaller, larger = sorted((a, b), key=lambda thing: thing.area)
    if larger.area < LARGER * smaller.area:
        return None
    return f"which is larger, the {a.name} or the {b.name}?", larger.name


def _sorted(scene: Scene, rng: Random) -> Question | None:
    """Named objects from left to right or from top to bottom, where nothing is level."""
    if len(scene.unique()) != len(scene.objects) or len(scene.objects) < 2:
        return None
    axis, direction = rng.choice(((0, "left to right"), (1, "top to bottom")))
    listed = sorted(scene.objects, key=lambda thing: thing.centre[axis])
    # Four pixels: what the eye can order at these sizes.
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
