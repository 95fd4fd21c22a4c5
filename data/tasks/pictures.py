"""Tasks about generated pictures: scenes of shapes (counts, properties, relations, places), signs, charts,
boards and clips.

Training scenes hold only (colour, shape) pairs of the training side; a test problem asks about a pair that
training never showed (for counting: about a scene that holds one). Wording is that of data/synth/graph.py
where it has one. Also held out: words of signs; values of a chart with its kind; first rows of boards; what
moves in a clip.

Most questions about a clip need more than one frame. Its blind view has grey frames with the same timestamps
(the time question can be answered from those: it says whether timestamps are read); the words tell every
frame's boxes.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

from earlyfusion.data.synth.graph import (
    COLOURS,
    SHAPES,
    Box,
    Clip,
    Pair,
    Question,
    Scene,
    Thing,
    ask_relation,
    corners,
    named,
    pair_key,
    pairs,
    relations,
    shares,
)
from earlyfusion.data.synth.panels import ASK_TEXT, Board, Chart, Sign
from earlyfusion.data.tasks import scoring
from earlyfusion.data.tasks.problem import (
    MAX_OBJECTS,
    MAX_SIDE,
    MIN_SIDE,
    Kind,
    Knobs,
    Problem,
    Task,
    about,
    task,
)
from earlyfusion.data.tasks.scoring import first_line, grounding_scores, parse_boxes, parse_count

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
    scorer = staticmethod(scoring.counting)

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
        return scoring.words(answer, gold) or scoring.words(answer, gold.removesuffix(" of"))


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
        """See scoring.boxes."""
        extent = problem.meta["graph"].extent
        return scoring.boxes(answer, problem.answer, extent, problem.meta["units"])

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
        """See scoring.points."""
        extent = problem.meta["graph"].extent
        return scoring.points(answer, problem.answer, problem.meta["sigmas"], extent)


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
        """See scoring.polygon."""
        return scoring.polygon(answer, problem.answer, problem.meta["graph"].extent)


KINDS = {
    "value": Kind(r"^what is the value"),
    "extreme": Kind(r"^which value"),
    "sum": Kind(r"^what is the sum"),
}
"""What both the task and the exam ask about a chart."""
ALL = (*KINDS, "difference")


def _text_of(several: bool, sign: Sign, rng: object) -> Question | None:
    return (ASK_TEXT, sign.text) if (" " in sign.text) == several else None


@task("ocr")
class Ocr(Task):
    """What a sign says. Reward: 1 - edit distance / longer length, case counts. Knobs: most_words, sides.

    Training shows no word of the test side; a number stands alone and is held out like a word.
    """

    levels = (
        {"most_words": 1, "min_side": 32, "max_side": 64},
        {"most_words": 2, "min_side": 40, "max_side": 80},
        {"most_words": 3, "min_side": 48, "max_side": 128},
    )
    # One word and several are reported apart: a long text is another skill.
    kinds = {"word": Kind(ask=partial(_text_of, False)), "words": Kind(ask=partial(_text_of, True))}
    make = Sign.make
    answer_tokens = 32

    def draw(self, rng, heldout, knobs):
        """See Task."""
        sign = Sign.make(rng, min_side=knobs["min_side"], max_side=knobs["max_side"], heldout=heldout)
        words = sign.text.split()
        # Drawn anew rather than cut: a cut text would not fill its picture.
        if len(words) > knobs["most_words"]:
            return None
        return about(sign, ASK_TEXT, sign.text, sign.text, f"word/{words[0]}", f"{len(words)} words")

    def score(self, problem, answer):
        """See scoring.similarity; quotation marks around the answer are not part of it."""
        # Near misses earn their share, or there would be nothing to learn from at first.
        return scoring.similarity(answer.strip().strip("\"'"), problem.answer)

    def judge(self, problem, said):
        """Containment (OCRBench); error rates and ANLS are over the first line."""
        answer, gold = scoring.first_line(said), problem.answer
        metrics = {
            # Containment pays for long answers; these beside it do not.
            "exact": float(scoring.exact_match(answer, gold)),
            "cer": scoring.error_rate(answer, gold),
            "wer": scoring.error_rate(answer.split(), gold.split()),
            "anls": scoring.anls(answer, gold),
        }
        return answer or None, float(scoring.contains(said, gold)), metrics


@task("chart_value")
class ChartValue(Task):
    """One value, the label of an extreme, the sum or a difference of a bar or line chart.

    Reward: 1 - relative error for numbers, exact for labels. Knobs: chart (bar, line), most (values), kinds,
    sides.
    """

    levels = (
        {"chart": ("bar",), "most": 3, "kinds": ("value",), "min_side": 48, "max_side": 64},
        {"chart": ("bar", "line"), "most": 5, "kinds": ("value", "extreme"), **MEDIUM},
        {"chart": ("bar", "line"), "most": 5, "kinds": ALL, "min_side": 48, "max_side": 128},
    )

    def draw(self, rng, heldout, knobs):
        """See Task."""
        chart = Chart.make(rng, min_side=knobs["min_side"], max_side=knobs["max_side"], heldout=heldout)
        kind = rng.choice(knobs["kinds"])
        if chart.kind not in knobs["chart"] or len(chart.values) > knobs["most"]:
            return None

        if kind == "difference":
            i, j = rng.sample(range(len(chart.values)), 2)
            if chart.values[i] < chart.values[j]:
                i, j = j, i
            question = f"how much larger is {chart.labels[i]} than {chart.labels[j]}?"
            target = str(chart.values[i] - chart.values[j])
        else:
            # The wording of the exam, which is that of pretraining.
            asked = KINDS[kind].choose(chart, rng, self.listed)
            if asked is None:
                return None
            question, target = asked

        # An extreme is a letter, all else a number.
        answer = target if kind == "extreme" else int(target)
        return about(chart, question, answer, target, f"chart/{chart.kind}/{chart.values}", kind)

    def score(self, problem, answer):
        """See scoring.value and scoring.words."""
        scorer = scoring.words if isinstance(problem.answer, str) else scoring.value
        return scorer(answer, problem.answer, problem.question)


@task("chart")
class ChartExam(Task):
    """Values, extremes, sums and comparisons in bar and line charts."""

    kinds = {**KINDS, "comparison": Kind(r"^is ", balanced=True)}
    make = Chart.make
    answer_tokens = 8

    def judge(self, problem, said):
        """ChartQA's relaxed correctness of the first line."""
        # "7." is 7 to a reader and no number to the published script.
        answer = scoring.first_line(said).rstrip(".")
        metrics = {"exact": float(scoring.exact_match(answer, problem.answer))}
        return answer or None, float(scoring.relaxed_match(answer, problem.answer)), metrics


@task("board")
class BoardExam(Task):
    """Cells, rows and counts on boards of coloured squares: exact words."""

    kinds = {
        "cell": Kind(r"^what color"),
        "row": Kind(r"^what is row"),
        "count": Kind(r"^how many cells"),
    }
    make = Board.make


DISTANCE_TOLERANCE = 0.1
TIME_TOLERANCE = 0.05  # seconds


@task("video_qa")
class VideoQa(Task):
    """direction, object, objects, time: exact words (time as "2.5 s" or any number within 0.05 s). distance:
    pixels between the first and the last frame, within 10 % (at least 1 pixel), with its absolute error."""

    kinds = {
        "direction": Kind(r"^which way"),
        "object": Kind(r"^what moves"),
        "objects": Kind(r"^how many objects"),
        "distance": Kind(r"^how far"),
        "time": Kind(r"^when does"),
    }
    video = True

    def graph(self, rng):
        """See Task."""
        # Five to eight frames at three rates: time must be read, it cannot be counted.
        frames, fps = rng.randint(5, 8), rng.choice((1.0, 2.0, 4.0))
        return Clip.make(rng, min_side=MIN_SIDE, max_side=MAX_SIDE, heldout=True, frames=frames, fps=fps)

    def judge(self, problem, said):
        """By category."""
        answer, category = scoring.first_line(said), problem.category
        if category == "objects":
            # "two" is 2.
            count = scoring.parse_count(answer)
            return count, float(count == int(problem.answer)), {}
        if category not in ("distance", "time"):
            return super().judge(problem, said)

        # Numbers are compared with their tolerance; of the time, the unit may be left out.
        expected, found = float(problem.answer.split()[0]), re.search(r"-?\d+(?:\.\d+)?", answer)
        value = float(found[0]) if found else None
        # No number said is as wrong as having said 0.
        error = expected if value is None else abs(value - expected)
        limit, metrics = TIME_TOLERANCE + 1e-9, {}
        if category == "distance":
            limit, metrics = max(1.0, DISTANCE_TOLERANCE * expected), {"pixel_error": error}
        return value, float(value is not None and error <= limit), metrics
