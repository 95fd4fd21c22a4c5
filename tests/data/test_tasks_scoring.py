"""Rewards against brute force: every matching tried, every pixel asked, edit distance by its recursion."""

import math
import random
from itertools import permutations

import numpy as np
import pytest
from PIL import Image, ImageDraw

from earlyfusion.data.formats import write_regions
from earlyfusion.data.sample import Region, Regions
from earlyfusion.data.synth.graph import SHAPES, corners, paint
from earlyfusion.data.tasks import scoring
from earlyfusion.data.tasks.puzzles import parse_moves
from earlyfusion.data.tasks.registry import PROCEDURAL, make_task

EXACT = 1e-9  # the same sums in another order
# share of pixels that painted shapes and masks must agree on; shapes of 9 pixels are mostly boundary
BOUNDARY = 0.75


def random_boxes(rng, count, side=60):
    found = []
    for _ in range(count):
        left, top = rng.randint(0, side - 8), rng.randint(0, side - 8)
        found.append((left, top, left + rng.randint(2, 30), top + rng.randint(2, 30)))
    return found


def pixel_iou(a, b):
    """By counting the pixels of whole boxes."""
    cells = lambda box: {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}
    return len(cells(a) & cells(b)) / len(cells(a) | cells(b))


def best_by_trying(table):
    """Largest sum over all one-to-one matchings of rows to columns."""
    rows, columns = len(table), len(table[0])
    if rows > columns:
        return best_by_trying([list(column) for column in zip(*table)])
    return max(sum(table[r][c] for r, c in enumerate(order)) for order in permutations(range(columns), rows))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["boxes", "points"])
def test_f1_is_the_best_of_all_matchings(kind, seed):
    rng = random.Random(seed)
    point = lambda: (round(rng.uniform(0, 60), 1), round(rng.uniform(0, 60), 1))
    for _ in range(40):
        n, m = rng.randint(1, 4), rng.randint(1, 5)
        if kind == "boxes":
            gold, more, weight = random_boxes(rng, n), (), pixel_iou
            said = [rng.choice([*gold, box, box]) for box in random_boxes(rng, m)]
        else:
            gold, said = [point() for _ in range(n)], [point() for _ in range(m)]
            more = ([rng.uniform(2, 12) for _ in gold],)
            sigma = dict(zip(gold, more[0]))
            weight = lambda p, g, s=sigma: math.exp(-(math.dist(p, g) ** 2) / (2 * s[g] * s[g]))
        expected = 2 * best_by_trying([[weight(a, b) for b in gold] for a in said]) / (n + m)
        text = "I see " + " and ".join(str(list(place)) for place in said)
        assert getattr(scoring, kind)(text, gold, *more, (100, 100)) == pytest.approx(expected, abs=EXACT)


def test_a_box_said_twice_or_far_away_counts_as_one_said():
    gold = [(0, 0, 10, 10)]
    for spare in ("[0, 0, 10, 10]", "[9999999, 0, 99999999, 10]"):
        assert scoring.boxes(f"{spare}, [0, 0, 10, 10]", gold, (50, 50)) == pytest.approx(2 / 3)


def test_points_are_read_in_the_form_of_training():
    trained = write_regions(Regions([Region("a", point=(12, 30))]), (100, 100), (100, 100))
    one_sigma = math.exp(-0.5)
    for text, score in ((trained, 1), ("the box [10, 20, 14, 40]", 1), ("(15, 30)", one_sigma)):
        assert scoring.points(text, [(12.0, 30.0)], [3.0], (100, 100)) == pytest.approx(score)


def even_odd(point, polygon):
    """One ray to the right, one pixel at a time."""
    x, y = point
    inside = False
    for (x0, y0), (x1, y1) in zip(polygon, polygon[1:] + polygon[:1]):
        if (y0 <= y < y1 or y1 <= y < y0) and x < x0 + (y - y0) * (x1 - x0) / (y1 - y0):
            inside = not inside
    return inside


@pytest.mark.parametrize("seed", [0, 1])
def test_masks_are_those_of_a_ray_for_every_pixel(seed):
    """Also for polygons that cross themselves and reach out of the picture."""
    rng = random.Random(seed)
    for _ in range(30):
        width, height = rng.randint(5, 23), rng.randint(5, 23)
        said = [(rng.uniform(-5, 28), rng.uniform(-5, 28)) for _ in range(rng.randint(3, 8))]
        slow = [[even_odd((x + 0.5, y + 0.5), said) for x in range(width)] for y in range(height)]
        assert (scoring.mask(said, width, height) == slow).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_corners_outline_what_is_painted(shape):
    for side in (9, 17, 40):
        picture = Image.new("L", (50, 50))
        paint(ImageDraw.Draw(picture), shape, (4, 5, 4 + side, 5 + side), 255)  # type: ignore[arg-type]
        painted = np.asarray(picture) > 0
        told = scoring.mask(corners(shape, (4, 5, 4 + side, 5 + side)), 50, 50)
        assert scoring.mask_iou(painted, told) > (0.65 if shape == "star" and side == 9 else BOUNDARY)


def test_polygons_without_area_and_of_any_form():
    square = [(2.0, 2.0), (8.0, 2.0), (8.0, 8.0), (2.0, 8.0)]
    assert scoring.polygon("2, 2, 8, 2, 8, 8, 2, 8", square, (10, 10)) == 1.0
    assert scoring.polygon("[[2, 2], [8, 2], [8, 8], [2, 8]]", square, (10, 10)) == 1.0
    for text in "[2, 2], [8, 8]|[2, 2], [5, 5], [8, 8]|2, 2, 8|[1e9, 0], [0, 1e9], [1, 1]|nan|".split("|"):
        assert scoring.polygon(text, square, (10, 10)) == 0.0, text
    assert scoring.mask_iou(np.zeros((3, 3), bool), np.zeros((3, 3), bool)) == 0.0


def test_counting_and_values_fall_linearly_to_zero():
    shares = [scoring.counting(str(n), 4) for n in range(10)]
    assert shares == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0]
    threes = {"three": 1, "There are 3.": 1, "3, 3": 1, "3 or 4": 0, "3.5": 0, "-3": 0, "": 0, "none": 0}
    assert {text: scoring.counting(text, 3) for text in threes} == threes
    assert scoring.counting("none", 0) == scoring.counting("zero", 0) == 1 != scoring.counting("1", 0)
    assert (scoring.value("6", 8), scoring.value("20", 8), scoring.value("0", 0)) == (0.75, 0, 1)


def test_numbers_must_be_the_number():
    right = "7| 7|7.0|007|3 + 4 = 7|x = 7.|Answer: 7|<think>3 or 9?</think> 7|\\boxed{7}|+7".split("|")
    wrong = "6|7 or 8|17|7.5|-7|3 + 4 = 8|seven||nan|inf|Answer: 7. Answer: 8".split("|")
    for text in [*right, *wrong, "7" * 30]:
        assert scoring.number(scoring.final_answer(text), 7) == (text in right), text
    assert scoring.number("-1,204", -1204) == 1.0


def test_nothing_may_stand_behind_what_was_asked():
    """A scorer that reads the beginning pays a policy for going on; closing punctuation and the question's
    words do."""
    for name in PROCEDURAL:
        task = make_task(name)
        for level in range(len(task.levels)):
            for seed in range(6):
                problem = task.sample(seed, "test", level)
                full = task.reward(problem, problem.target)
                for closing in (".", "\n", " ", '."', "!"):
                    if name != "ocr":  # what is read is compared character by character
                        assert task.reward(problem, problem.target + closing) == full, (problem.key, closing)
                for more in ("wsslonment for", " wsslonment for", "\nQ: wss", ", and then some"):
                    assert task.reward(problem, problem.target + more) < min(full, 0.999), (problem.key, more)
    asked = "how many red circles are there?"
    for said, score in (("There are 3 red circles.", 1), ("three red circles", 1), ("3 blue dogs", 0)):
        assert scoring.counting(said, 3, asked) == score
    assert scoring.final_answer("\\boxed{3}.") == "3" and scoring.final_answer("\\boxed{3} wsslonment") == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" red", "red"),
        ("<think>blue</think> red", "red"),
        ("<think>red", ""),
        ("scene: a red circle. Answer: red", "red"),
        ("The answer is red.", "red."),
        ("\\boxed{\\text{a}}", "\\text{a}"),
        ("\\boxed{open", ""),
        ("x" * 5000, ""),
        ("thinking " * 1000 + "Answer: 4", "4"),
        ("answer: 3 answer: 5", "5"),
    ],
)
def test_final_answers(text, answer):
    assert scoring.final_answer(text) == answer


def test_maze_rewards_order_answers_as_they_should_be():
    task = make_task("maze")
    for seed in range(20):
        problem = task.sample(seed, "test", 1)
        way, opposite = problem.answer, {"up": "down", "down": "up", "left": "right", "right": "left"}
        detour, blocked = [way[0], opposite[way[0]], *way], [*way[:-1], opposite[way[-1]]]
        reward = lambda moves, p=problem: task.reward(p, " ".join(moves))
        assert reward(way) == 1.0 > reward([*way, "up", "up"])
        assert reward(detour) == pytest.approx(0.5 + 0.5 * len(way) / len(detour))
        assert 0.0 <= reward(blocked) <= 0.3 and reward(["up", "down", "left", "right"] * 200) == 0.0
    assert parse_moves("R, R then D") == ["right", "right"]
    assert parse_moves("Go UP, then left") == ["up", "left"] and parse_moves("UL") == ["up", "left"]


def test_jigsaw_rewards_only_permutations():
    task = make_task("jigsaw")
    problem = task.sample(0, "test", 1)
    swapped = " ".join(map(str, [problem.answer[1], problem.answer[0], *problem.answer[2:]]))
    cases = {swapped: 0.5, "1 1 1 1": 0, "1 2 3": 0, "1 2 3 4 5": 0}
    assert {text: task.reward(problem, text) for text in cases} == cases
