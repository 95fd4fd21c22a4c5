"""Tasks whose answer is a place: grounding boxes, pointing, outlining. Scenes and held-out pairs as in
scenes.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from earlyfusion.data.synth.graph import Box, corners, pair_key, pairs, shares
from earlyfusion.data.synth.scene import Scene, Thing, named
from earlyfusion.data.tasks.problem import Kind, Knobs, Problem, about, task
from earlyfusion.data.tasks.scenes import MEDIUM, SMALL, SceneTask, part_of
from earlyfusion.data.tasks.scoring import rewards
from earlyfusion.data.tasks.scoring.rewards import grounding_scores, parse_boxes
from earlyfusion.data.tasks.scoring.text import first_line


# One way to choose what is looked for serves boxes, points and outlines.
class PlaceTask(SceneTask):
    """A scene and the things that are asked for. Knob what: "one" object named without doubt; "all" of a
    colour, shape or pair; "absent" pairs, where the answer is "none"."""

    def draw(self, rng, heldout, knobs):
        """See Task."""
        scene, shown = self.scene(rng, heldout, knobs)
        what = rng.choice(knobs["what"]) if "what" in knobs else "one"
        # What is named is of the side; whatever shares its name is asked for with it.
        pair = rng.choice(shown).pair
        part = rng.choice(("colour", "shape", "pair")) if what == "all" else "pair"
        if what == "absent":
            pair = rng.choice(pairs(heldout))

        # The name leaves out what is not asked for: "red objects", "circles", "red circles".
        asked = part_of(pair, part)
        things, name = scene.having(**asked), named(**asked)
        # Nothing may fit what is absent, and only one what is called "the".
        if (what == "absent" and things) or (what == "one" and len(things) > 1):
            return None
        name = f"the {name}" if what == "one" else f"all {name}s"
        return self.ask(scene, things, name, pair_key(pair), {**knobs, "what": what})

    def ask(self, scene: Scene, things: list[Thing], name: str, key: str, knobs: Knobs) -> Problem | None:
        """The question about `things`, called `name`."""
        raise NotImplementedError


def list_pixels(points: Sequence[Sequence[float]]) -> str:
    """ "[12, 30], [40, 58.5]": points or boxes in pixels, with one decimal where they are not whole."""
    listed = []
    for point in points:
        numbers = [f"{x:.1f}".removesuffix(".0") for x in point]
        listed.append(f"[{', '.join(numbers)}]")
    return ", ".join(listed)


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

    def ask(self, scene, things, name, key, knobs):
        """See PlaceTask."""
        boxes = [list(thing.box) for thing in things]
        question = f"where {'is' if knobs['what'] == 'one' else 'are'} {name}"
        if knobs["units"] == "relative":
            # Shares with two decimals, as pretraining writes them.
            target = ", ".join(shares(scene.relative_box(thing)) for thing in things)
        else:
            question, target = f"{question}, in pixels", list_pixels(boxes)
        what, units = knobs["what"], knobs["units"]
        return about(scene, f"{question}?", boxes, target or "none", key, what, units=units)

    def score(self, problem, answer):
        """See rewards.boxes."""
        extent = problem.meta["graph"].extent
        return rewards.boxes(answer, problem.answer, extent, problem.meta["units"])

    def judge(self, problem, text):
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

    def ask(self, scene, things, name, key, knobs):
        """See PlaceTask."""
        centres = [list(thing.centre) for thing in things]
        # A small object must be met more closely, but no closer than two pixels.
        sigmas = [max(2.0, knobs["sigma"] * thing.area**0.5) for thing in things]
        target = list_pixels(centres) or "none"
        return about(scene, f"point at {name}.", centres, target, key, knobs["what"], sigmas=sigmas)

    def score(self, problem, answer):
        """See rewards.points."""
        extent = problem.meta["graph"].extent
        return rewards.points(answer, problem.answer, problem.meta["sigmas"], extent)


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

    def ask(self, scene, things, name, key, knobs):
        """See PlaceTask."""
        sought = things[0]
        # Squares have four corners to say, stars ten.
        if sought.shape not in knobs["shapes"]:
            return None
        lines = []
        for thing in scene.objects:
            # Boxes are not enough here: the twin must hold what the answer needs.
            outline = corners(thing.shape, thing.box)
            lines.append(f"{thing.size} {thing.name} with corners {list_pixels(outline)}")
        answer = list(map(list, corners(sought.shape, sought.box)))
        drawn = about(scene, f"outline {name}.", answer, list_pixels(answer), key, sought.shape)
        return replace(drawn, description=scene.listed(lines))

    def score(self, problem, answer):
        """See rewards.polygon."""
        return rewards.polygon(answer, problem.answer, problem.meta["graph"].extent)
