"""Tasks whose answer is a place: grounding boxes, pointing, outlining. Scenes and held-out pairs as in
scenes.py."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from earlyfusion.data.synth.graph import shares
from earlyfusion.data.synth.palette import Box, corners, pair_key, pairs
from earlyfusion.data.synth.scene import Scene, Thing
from earlyfusion.data.tasks.exam import Kind
from earlyfusion.data.tasks.problem import Drawn, Judged, Knobs, Problem, about, list_pixels, task
from earlyfusion.data.tasks.scenes import MEDIUM, SMALL, SceneTask
from earlyfusion.data.tasks.scoring import rewards
from earlyfusion.data.tasks.scoring.boxes import grounding_scores, parse_boxes
from earlyfusion.data.tasks.scoring.text import first_line


# One way to choose what is looked for serves boxes, points and outlines.
class PlaceTask(SceneTask):
    """A scene and the things that are asked for. Knob what: "one" object named without doubt; "all" of a
    colour, shape or pair; "absent" pairs, where the answer is "none"."""

    def draw(self, rng: Random, heldout: bool, knobs: Knobs) -> Drawn | None:
        """See Task."""
        scene, shown = self.scene(rng, heldout, knobs)
        what = rng.choice(tuple(knobs["what"])) if "what" in knobs else "one"
        # What is named is of the side; whatever shares its name is asked for with it.
        thing = rng.choice(shown)
        part = rng.choice(("colour", "shape", "pair")) if what == "all" else "pair"
        pair = rng.choice(pairs(heldout)) if what == "absent" else thing.pair

        # The name leaves out what is not asked for: "red objects", "circles", "red circles".
        asked = {name: value for name, value in zip(("colour", "shape"), pair) if part in (name, "pair")}
        things = scene.having(**asked)
        name = f"{asked.get('colour', '')} {asked.get('shape', 'object')}".strip()
        # Nothing may fit what is absent, and only one what is called "the".
        if (what == "absent" and things) or (what == "one" and len(things) > 1):
            return None
        name = f"the {name}" if what == "one" else f"all {name}s"
        return self.ask(scene, things, name, pair_key(pair), {**knobs, "what": what})

    def ask(self, scene: Scene, things: list[Thing], name: str, key: str, knobs: Knobs) -> Drawn | None:
        """The question about `things`, called `name`."""
        raise NotImplementedError


def named_box(problem: Problem) -> tuple[Box, Scene, str]:
    """(exact box in pixels, its scene, units asked for) of an exam's question about one object."""
    scene = problem.meta["graph"]
    # The exam's question names its object; the graph knows where that is.
    asked = problem.question.split(",")[0].rstrip("?")
    (thing,) = [thing for thing in scene.unique() if asked.endswith(f"the {thing.name}")]
    return thing.box, scene, "pixels" if "in pixels" in problem.question else "relative"


@task("grounding")
class Grounding(PlaceTask):
    """Boxes of what is named. Reward: F1 with IoU as soft matches over the best one-to-one matching.

    Knobs: what, units ("pixels" or "relative"), sides and number of objects.
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

    def ask(self, scene: Scene, things: list[Thing], name: str, key: str, knobs: Knobs) -> Drawn:
        """See PlaceTask."""
        boxes = [list(thing.box) for thing in things]
        question = f"where {'is' if knobs['what'] == 'one' else 'are'} {name}"
        if knobs["units"] == "relative":
            # Shares with two decimals, as pretraining writes them.
            target = ", ".join(shares(scene.relative_box(thing)) for thing in things)
        else:
            question, target = f"{question}, in pixels", list_pixels(boxes)
        units, target = knobs["units"], target or "none"
        return about(scene, f"{question}?", boxes, target, key, knobs["what"], units=units)

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.boxes."""
        meta = problem.meta
        return rewards.boxes(answer, problem.answer, meta["graph"].extent, meta["units"])

    def judge(self, problem: Problem, text: str) -> Judged:
        """The first box of the answer, in the units the question asks for, against the exact box of the
        graph."""
        gold, scene, units = named_box(problem)
        # One object was asked for: the first box said is the answer.
        box = next(iter(parse_boxes(first_line(text), *scene.extent, units)), None)
        scores = grounding_scores(box, gold)
        return box and list(box), scores["acc@0.5"], scores


@task("pointing")
class Pointing(PlaceTask):
    """The centre of what is named, in pixels. Reward: F1 of Gaussian weights, sigma a share of the object's
    size (knob sigma times the root of its box's area, at least 2 pixels)."""

    levels = (
        {"what": ("one",), "sigma": 0.5, **SMALL, "max_objects": 2},
        {"what": ("one", "all"), "sigma": 0.35, **SMALL, "max_objects": 4},
        {"what": ("one", "all", "all", "absent"), "sigma": 0.25, **MEDIUM, "max_objects": 6},
    )
    least_sigma = 2.0

    def ask(self, scene: Scene, things: list[Thing], name: str, key: str, knobs: Knobs) -> Drawn:
        """See PlaceTask."""
        centres = [list(thing.centre) for thing in things]
        # A small object must be met more closely, but no closer than two pixels.
        sigmas = [max(self.least_sigma, knobs["sigma"] * thing.area**0.5) for thing in things]
        target = list_pixels(centres) or "none"
        return about(scene, f"point at {name}.", centres, target, key, knobs["what"], sigmas=sigmas)

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.points."""
        meta = problem.meta
        return rewards.points(answer, problem.answer, meta["sigmas"], meta["graph"].extent)


@task("polygon")
class Polygon(PlaceTask):
    """The outline of the object that is named, as corners in pixels. Reward: IoU of the masks.

    Knobs: shapes (which are asked for), sides and number of objects. The twin tells the corners of every
    object.
    """

    levels = (
        {"shapes": ("square", "rectangle"), **SMALL, "max_objects": 2},
        {"shapes": ("square", "rectangle", "triangle", "diamond"), **SMALL, "max_objects": 4},
        {"shapes": ("triangle", "diamond", "star", "circle"), **MEDIUM, "max_objects": 6},
    )

    def ask(self, scene: Scene, things: list[Thing], name: str, key: str, knobs: Knobs) -> Drawn | None:
        """See PlaceTask."""
        sought, lines = things[0], []
        # Squares have four corners to say, stars ten.
        if sought.shape not in knobs["shapes"]:
            return None
        for thing in scene.objects:
            # Boxes are not enough here: the twin must hold what the answer needs.
            told = list_pixels(corners(thing.shape, thing.box))
            lines.append(f"{thing.size} {thing.name} with corners {told}")
        outline = [list(point) for point in corners(sought.shape, sought.box)]
        drawn = about(scene, f"outline {name}.", outline, list_pixels(outline), key, sought.shape)
        return replace(drawn, description=scene.listed(lines))

    def score(self, problem: Problem, answer: str) -> float:
        """See rewards.polygon."""
        return rewards.polygon(answer, problem.answer, problem.meta["graph"].extent)
