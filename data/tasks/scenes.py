"""Tasks over scenes of coloured shapes: counting, colour and shape queries, spatial relations.

Training scenes hold only (colour, shape) pairs of the training side; a test problem asks about a pair that
training never showed (for counting: about a scene that holds one). Wording is that of data/synth/scene.py
where it has one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

from earlyfusion.data.synth.graph import Graph, Question
from earlyfusion.data.synth.palette import COLOURS, SHAPES, pair_key, pairs
from earlyfusion.data.synth.scene import Scene, Thing, ask_relation, relation
from earlyfusion.data.tasks.exam import Kind
from earlyfusion.data.tasks.problem import (
    MAX_OBJECTS,
    MAX_SIDE,
    MIN_SIDE,
    Drawn,
    Judged,
    Knobs,
    Problem,
    Task,
    about,
    task,
)
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

    def graph(self, rng: Random) -> Graph:
        """See Task."""
        return Scene.make(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, heldout=True, max_objects=MAX_OBJECTS)

    @staticmethod
    def scene(rng: Random, heldout: bool, knobs: Knobs) -> tuple[Scene, list[Thing]]:
        """A scene, and its things whose pair belongs to the side: at least one, and in training all."""
        sides = {name: knobs[name] for name in ("min_side", "max_side", "max_objects")}
        scene = Scene.make(rng, **sides, heldout=heldout)
        # The first object that is placed is of the side, so there is always one to ask about.
        return scene, [thing for thing in scene.objects if thing.pair in pairs(heldout)]


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

    def draw(self, rng: Random, heldout: bool, knobs: Knobs) -> Drawn | None:
        """See Task."""
        kind = rng.choice(tuple(knobs["kinds"]))
        # "How many objects" is never none; of a shape or colour there may be none.
        least, most = (1, knobs["most"]) if kind == "all" else (0, min(knobs["most"], 3))
        expected = rng.randint(least, most)
        for _ in range(400):  # scenes, until one has the number that was drawn
            scene, shown = self.scene(rng, heldout, knobs)

            # Something that is there, unless there is to be none of it; a pair must be of the side.
            pair = rng.choice(tuple(COLOURS)), rng.choice(SHAPES)
            if expected:
                pair = rng.choice(scene.objects).pair
            if kind == "pair":
                pair = shown[0].pair if expected else rng.choice(pairs(heldout))

            # A pair is asked by both words, a colour or shape by one.
            named = {"colour": pair[0], "shape": pair[1]}
            asked = {name: value for name, value in named.items() if kind in (name, "pair")}
            question, count = scene.count(**asked)
            # More than two of one pair are too rare to wait for.
            if count == (min(expected, 2) if kind == "pair" else expected):
                key = pair_key(pair if kind == "pair" else shown[0].pair)
                return about(scene, question, count, str(count), key, kind)
        return None

    def score(self, problem: Problem, answer: str) -> float:
        """1 - |difference| / gold; see rewards.counting."""
        return rewards.counting(answer, problem.answer, problem.question)

    def judge(self, problem: Problem, text: str) -> Judged:
        """Exact number in the first line; the error of an answer without a number is that of saying 0, at
        least 1."""
        gold, number = int(problem.answer), parse_count(first_line(text))
        error = max(gold, 1) if number is None else abs(number - gold)
        # An answer that cannot be read is not near to anything.
        near = number is not None and error <= 1
        return number, float(number == gold), {"mae": float(error), "within_one": float(near)}


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

    def draw(self, rng: Random, heldout: bool, knobs: Knobs) -> Drawn | None:
        """See Task."""
        scene, shown = self.scene(rng, heldout, knobs)
        thing, kind = rng.choice(shown), rng.choice(tuple(knobs["kinds"]))
        # "leftmost_colour": named by its place, not by a property.
        prefix, _, part = kind.rpartition("_")
        asked = self._leftmost(scene, thing, part, knobs.get("alone")) if prefix else scene.ask(thing, kind)
        if asked is None:
            return None

        drawn = about(scene, *asked, asked[1], pair_key(thing.pair), kind)
        if knobs.get("listed") == "any order":
            # In the order of a sentence the first object would be the answer.
            mixed = tuple(rng.sample(scene.objects, len(scene.objects)))
            drawn = replace(drawn, description=replace(scene, objects=mixed).words())
        return drawn

    @staticmethod
    def _leftmost(scene: Scene, thing: Thing, part: str, alone: bool | None) -> Question | None:
        """The question, or None where it would leave doubt."""
        others = [other for other in scene.objects if other is not thing]
        # Alone or level by a pixel, nothing is leftmost.
        if not others or not all(other.box[0] > thing.box[0] + 1 for other in others):
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

    def draw(self, rng: Random, heldout: bool, knobs: Knobs) -> Drawn | None:
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
        truth = relation(a, b)
        if truth is None:
            return None

        if knobs["form"] == "yes_no":
            question, answer = ask_relation(rng, a, b, truth)
        # Two relations hold at once where the boxes are apart both ways: "left of" and "above".
        elif apart(a, b, 0) and apart(a, b, 1):
            return None
        else:
            question = f"is the {a.name} left of, right of, above or below the {b.name}?"
            answer = truth
        return about(scene, question, answer, answer, key, knobs["form"])

    def score(self, problem: Problem, answer: str) -> float:
        """The words of the relation; "left" counts as "left of"."""
        gold = problem.answer
        return max(rewards.words(answer, gold), rewards.words(answer, gold.removesuffix(" of")))


def apart(a: Thing, b: Thing, axis: int) -> bool:
    """Whether no column (axis 0) or no row (axis 1) meets both."""
    return a.box[axis + 2] <= b.box[axis] or b.box[axis + 2] <= a.box[axis]


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
