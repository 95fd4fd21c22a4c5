"""Tasks whose answer is a place: grounding boxes, pointing, outlining. Scenes and held-out pairs as in
scenes.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from earlyfusion.data.synth.graph import shares
from earlyfusion.data.synth.palette import Box, corners, pairs
from earlyfusion.data.synth.scene import Scene, Thing
from earlyfusion.data.tasks.exam import Kind
from earlyfusion.data.tasks.problem import Drawn, Judged, Problem, list_pixels, task
from earlyfusion.data.tasks.scenes import MEDIUM, SMALL, SceneTask, on_side, pair_key, scene_drawn
from earlyfusion.data.tasks.scoring import rewards
from earlyfusion.data.tasks.scoring.boxes import grounding_scores, parse_boxes
from earlyfusion.data.tasks.scoring.text import first_line


@dataclass(frozen=True)
class Sought:
    """What is asked for, the things it names, and the combination."""

    name: str
    things: list[Thing]
    key: str


def ask_for(scene: Scene, rng: Random, heldout: bool, what: str) -> Sought | None:
    """Things to look for. what: "one" object named without doubt; "all" of a colour, shape or pair; "absent"
    pairs."""
    shown = on_side(scene, heldout)
    if not shown:
        return None
    thing = rng.choice(shown)
    if what == "absent":
        colour, shape = rng.choice(pairs(heldout))
        if scene.having(colour=colour, shape=shape):
            return None
        return Sought(f"{colour} {shape}s", [], f"pair/{colour}/{shape}")
    if what == "one":
        return Sought(thing.name, [thing], pair_key(thing)) if thing in scene.unique() else None

    part = rng.choice(("colour", "shape", "pair"))
    if part == "colour":
        name, things = f"{thing.colour} objects", scene.having(colour=thing.colour)
    elif part == "shape":
        name, things = f"{thing.shape}s", scene.having(shape=thing.shape)
    else:
        name, things = f"{thing.name}s", scene.having(name=thing.name)
    return Sought(name, things, pair_key(thing))


def named_box(problem: Problem) -> tuple[Box, Scene, str]:
    """(exact box in pixels, its scene, units asked for) of an exam's question about one object."""
    scene = cast(Scene, problem.meta["graph"])
    asked = problem.question.split(",")[0].rstrip("?")
    (thing,) = [thing for thing in scene.unique() if asked.endswith(f"the {thing.name}")]
    return thing.box, scene, "pixels" if "in pixels" in problem.question else "relative"


@task("grounding")
class Grounding(SceneTask):
    """Boxes of what is named. Reward: F1 with IoU as soft matches over the best one-to-one matching.

    Knobs: what (kinds of `ask_for`), units ("pixels" or "relative"), sides and number of objects. Where
    nothing fits, the answer is "none".
    """

    levels = (
        {"what": ("one",), "units": "pixels", **SMALL, "max_objects": 2},
        {"what": ("one", "all"), "units": "pixels", **SMALL, "max_objects": 4},
        {"what": ("one", "all", "all", "absent"), "units": "relative", **MEDIUM, "max_objects": 6},
    )
    kinds = {
        "pixels": Kind(r"^where is .*, in pixels"),
        "relative": Kind(r"^where is (?!.*in pixels)"),
    }
    answer_tokens = 40

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        scene = self.scene(rng, heldout, knobs)
        what = rng.choice(tuple(knobs["what"]))
        sought = ask_for(scene, rng, heldout, what)
        if sought is None:
            return None

        boxes = [list(thing.box) for thing in sought.things]
        target = list_pixels(boxes)
        question = f"where is the {sought.name}" if what == "one" else f"where are all {sought.name}"
        if knobs["units"] == "relative":
            target = ", ".join(shares(scene.relative_box(thing)) for thing in sought.things)
        else:
            question += ", in pixels"
        units = {"units": knobs["units"]}
        return scene_drawn(scene, question + "?", boxes, target or "none", sought.key, what, **units)

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.boxes; shares of the sides and pixels are told apart by the question."""
        size = problem.meta["width"], problem.meta["height"]
        return rewards.boxes(answer, list(map(tuple, problem.answer)), *size, units=problem.meta["units"])

    def judge(self, problem: Problem, text: str) -> Judged:
        """The first box of the answer, in the units the question asks for, against the exact box of the
        graph."""
        gold, scene, units = named_box(problem)
        boxes = parse_boxes(first_line(text), scene.width, scene.height, units)
        scores = grounding_scores(boxes[0] if boxes else None, gold)
        return list(boxes[0]) if boxes else None, scores["acc@0.5"], scores


@task("pointing")
class Pointing(SceneTask):
    """The centre of what is named, in pixels. Reward: F1 of Gaussian weights, sigma a share of the object's
    size (knob sigma times the root of its box's area, at least 2 pixels)."""

    levels = (
        {"what": ("one",), "sigma": 0.5, **SMALL, "max_objects": 2},
        {"what": ("one", "all"), "sigma": 0.35, **SMALL, "max_objects": 4},
        {"what": ("one", "all", "all", "absent"), "sigma": 0.25, **MEDIUM, "max_objects": 6},
    )
    least_sigma = 2.0

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        scene = self.scene(rng, heldout, knobs)
        what = rng.choice(tuple(knobs["what"]))
        sought = ask_for(scene, rng, heldout, what)
        if sought is None:
            return None

        centres = [list(thing.centre) for thing in sought.things]
        sigmas = [max(self.least_sigma, knobs["sigma"] * thing.area**0.5) for thing in sought.things]
        question = f"point at {'the' if what == 'one' else 'all'} {sought.name}."
        target = list_pixels(centres) or "none"
        return scene_drawn(scene, question, centres, target, sought.key, what, sigmas=sigmas)

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.points."""
        meta = problem.meta
        gold = list(map(tuple, problem.answer))
        return rewards.points(answer, gold, meta["sigmas"], meta["width"], meta["height"])


@task("polygon")
class Polygon(SceneTask):
    """The outline of the object that is named, as corners in pixels. Reward: IoU of the masks.

    Knobs: shapes (which are asked for), sides and number of objects. The twin tells the corners of every
    object.
    """

    levels = (
        {"shapes": ("square", "rectangle"), **SMALL, "max_objects": 2},
        {"shapes": ("square", "rectangle", "triangle", "diamond"), **SMALL, "max_objects": 4},
        {"shapes": ("triangle", "diamond", "star", "circle"), **MEDIUM, "max_objects": 6},
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See Task."""
        scene = self.scene(rng, heldout, knobs)
        sought = ask_for(scene, rng, heldout, "one")
        if sought is None or sought.things[0].shape not in knobs["shapes"]:
            return None

        lines, outlines = [], {}
        for thing in scene.objects:
            outlines[thing.name] = [list(point) for point in corners(thing.shape, thing.box)]
            lines.append(f"{thing.size} {thing.name} with corners {list_pixels(outlines[thing.name])}")
        outline, shape = outlines[sought.name], sought.things[0].shape
        question, target = f"outline the {sought.name}.", list_pixels(outline)
        words = scene.listed(lines)
        return scene_drawn(scene, question, outline, target, sought.key, shape, description=words)

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.polygon."""
        gold = list(map(tuple, problem.answer))
        return rewards.polygon(answer, gold, problem.meta["width"], problem.meta["height"])
