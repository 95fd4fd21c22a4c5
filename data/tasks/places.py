"""Tasks whose answer is a place: grounding boxes, pointing, outlining. Scenes and held-out pairs as in
scenes.py."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from earlyfusion.data.synth import describe
from earlyfusion.data.synth.palette import corners, pairs
from earlyfusion.data.synth.scene import Scene, Thing
from earlyfusion.data.tasks.problem import BaseTask, Drawn, Problem, list_pixels
from earlyfusion.data.tasks.scenes import on_side, pair_key, scene_drawn, scene_of
from earlyfusion.data.tasks.scoring import rewards as scoring

Found = tuple[str, list[Thing], str]
"""(what is asked for, the things, the combination)"""


def ask_for(scene: Scene, rng: Random, heldout: bool, what: str) -> Found | None:
    """Things to look for. what: "one" object named without doubt; "all" of a colour, shape or pair; "absent"
    pairs."""
    shown = on_side(scene, heldout)
    if not shown:
        return None
    thing = rng.choice(shown)
    if what == "absent":
        colour, shape = rng.choice(pairs(heldout))
        if any((other.colour, other.shape) == (colour, shape) for other in scene.objects):
            return None
        return f"{colour} {shape}s", [], f"pair/{colour}/{shape}"
    if what == "one":
        return (thing.name, [thing], pair_key(thing)) if thing in scene.unique() else None
    part = rng.choice(("colour", "shape", "pair"))
    if part == "colour":
        return (
            f"{thing.colour} objects",
            [t for t in scene.objects if t.colour == thing.colour],
            pair_key(thing),
        )
    if part == "shape":
        return f"{thing.shape}s", [t for t in scene.objects if t.shape == thing.shape], pair_key(thing)
    return f"{thing.name}s", [t for t in scene.objects if t.name == thing.name], pair_key(thing)


class Grounding(BaseTask):
    """Boxes of what is named. Reward: F1 with IoU as soft matches over the best one-to-one matching.

    Knobs: what (kinds of `ask_for`), units ("pixels" or "relative"), sides and number of objects. Where
    nothing fits, the answer is "none".
    """

    name = "grounding"
    levels = (
        {"what": ("one",), "units": "pixels", "min_side": 40, "max_side": 64, "max_objects": 2},
        {"what": ("one", "all"), "units": "pixels", "min_side": 40, "max_side": 64, "max_objects": 4},
        {
            "what": ("one", "all", "all", "absent"),
            "units": "relative",
            "min_side": 48,
            "max_side": 96,
            "max_objects": 6,
        },
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See BaseTask."""
        scene = scene_of(rng, heldout, knobs)
        what = rng.choice(tuple(knobs["what"]))
        found = ask_for(scene, rng, heldout, what)
        if found is None:
            return None
        name, things, key = found
        boxes = [thing.box for thing in things]
        relative = knobs["units"] == "relative"
        shares = (describe.shares(scene.relative_box(thing)) for thing in things)
        target = (", ".join(shares) if relative else list_pixels(boxes)) or "none"
        question = f"where is the {name}" if what == "one" else f"where are all {name}"
        question += "?" if relative else ", in pixels?"
        answer = [list(box) for box in boxes]
        return scene_drawn(scene, question, answer, target, key, what, units=knobs["units"])

    def score(self, problem: Problem, said: str) -> float:
        """See scoring.boxes; shares of the sides and pixels are told apart by the question."""
        size = problem.meta["width"], problem.meta["height"]
        gold = [(box[0], box[1], box[2], box[3]) for box in problem.answer]
        return scoring.boxes(said, gold, *size, units=problem.meta["units"])


class Pointing(BaseTask):
    """The centre of what is named, in pixels. Reward: F1 of Gaussian weights, sigma a share of the object's
    size (knob sigma times the root of its box's area, at least 2 pixels)."""

    name = "pointing"
    levels = (
        {"what": ("one",), "sigma": 0.5, "min_side": 40, "max_side": 64, "max_objects": 2},
        {"what": ("one", "all"), "sigma": 0.35, "min_side": 40, "max_side": 64, "max_objects": 4},
        {
            "what": ("one", "all", "all", "absent"),
            "sigma": 0.25,
            "min_side": 48,
            "max_side": 96,
            "max_objects": 6,
        },
    )
    least_sigma = 2.0

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See BaseTask."""
        scene = scene_of(rng, heldout, knobs)
        what = rng.choice(tuple(knobs["what"]))
        found = ask_for(scene, rng, heldout, what)
        if found is None:
            return None
        name, things, key = found
        centres = [list(thing.centre) for thing in things]
        sigmas = [self._sigma(thing, knobs["sigma"]) for thing in things]
        question = f"point at the {name}." if what == "one" else f"point at all {name}."
        return scene_drawn(scene, question, centres, list_pixels(centres) or "none", key, what, sigmas=sigmas)

    def _sigma(self, thing: Thing, share: float) -> float:
        left, top, right, bottom = thing.box
        return max(self.least_sigma, share * ((right - left) * (bottom - top)) ** 0.5)

    def score(self, problem: Problem, said: str) -> float:
        """See scoring.points."""
        gold = [(point[0], point[1]) for point in problem.answer]
        meta = problem.meta
        return scoring.points(said, gold, meta["sigmas"], meta["width"], meta["height"])


class Polygon(BaseTask):
    """The outline of the object that is named, as corners in pixels. Reward: IoU of the masks.

    Knobs: shapes (which are asked for), sides and number of objects. The twin tells the corners of every
    object.
    """

    name = "polygon"
    levels = (
        {"shapes": ("square", "rectangle"), "min_side": 40, "max_side": 64, "max_objects": 2},
        {
            "shapes": ("square", "rectangle", "triangle", "diamond"),
            "min_side": 40,
            "max_side": 64,
            "max_objects": 4,
        },
        {
            "shapes": ("triangle", "diamond", "star", "circle"),
            "min_side": 48,
            "max_side": 96,
            "max_objects": 6,
        },
    )

    def draw(self, rng: Random, heldout: bool, knobs: Mapping[str, Any]) -> Drawn | None:
        """See BaseTask."""
        scene = scene_of(rng, heldout, knobs)
        found = ask_for(scene, rng, heldout, "one")
        if found is None or found[1][0].shape not in knobs["shapes"]:
            return None
        name, (thing,), key = found
        outline = [list(point) for point in corners(thing.shape, thing.box)]
        made = scene_drawn(scene, f"outline the {name}.", outline, list_pixels(outline), key, thing.shape)
        lines = [f"picture {scene.width} x {scene.height}, {scene.background} background"]
        lines += [
            f"{t.size} {t.name} with corners {list_pixels(corners(t.shape, t.box))}" for t in scene.objects
        ]
        return Drawn(**{**vars(made), "description": "\n".join(lines)})

    def score(self, problem: Problem, said: str) -> float:
        """See scoring.polygon."""
        gold = [(point[0], point[1]) for point in problem.answer]
        return scoring.polygon(said, gold, problem.meta["width"], problem.meta["height"])
