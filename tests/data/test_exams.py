"""Exams: questions about held-out pictures hold in the graph, the pixels and the frames, and are balanced."""

import re
from collections import Counter

import numpy as np
import pytest

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Sample
from earlyfusion.data.synth.palette import BACKGROUNDS, COLOURS, pairs
from earlyfusion.data.tasks.problem import TaskError
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tasks.scoring.boxes import parse_boxes


def exam(name, count, seed=0, category=None):
    """Problems of the exam, of one category."""
    found = make_task(name).exam(count, seed)
    return [p for p in found if category in (None, p.meta["category"])]


def test_counting_is_balanced_and_counts_the_graph():
    problems = exam("counting", 240, 3)
    answers = Counter(problem.answer for problem in problems)
    assert set(answers) == {"0", "1", "2", "3", "4"} and max(answers.values()) < 0.33 * len(problems)
    for problem in problems:
        what = re.match(r"how many (.*) are there", problem.question)[1]
        things = problem.meta["graph"].objects
        if what == "objects":
            expected = len(things)
        elif what.endswith(" objects"):
            expected = sum(thing.colour == what.split()[0] for thing in things)
        else:
            expected = sum(thing.shape == what[:-1] for thing in things)
        assert str(expected) == problem.answer


def test_boxes_asked_for_hold_all_pixels_of_the_objects_colour():
    for problem in exam("grounding", 40, 1):
        graph = problem.meta["graph"]
        (box,) = parse_boxes(problem.answer, graph.width, graph.height)
        colour = re.search(r"the (\w+) \w+", problem.question)[1]
        if sum(thing.colour == colour for thing in graph.objects) == 1:
            ys, xs = np.nonzero((np.asarray(problem.picture) == COLOURS[colour]).all(-1))
            assert (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == pytest.approx(box, abs=0.6)


def test_sorting_and_comparison_hold_in_the_boxes():
    for problem in exam("scene", 210, 1):
        boxes = {thing.name: thing.box for thing in problem.meta["graph"].objects}
        if problem.meta["category"] == "sorting":
            axis = 0 if "left to right" in problem.question else 1
            centres = [boxes[name][axis] + boxes[name][axis + 2] for name in problem.answer.split(", ")]
            assert centres == sorted(centres) and len(centres) == len(boxes)
        elif problem.meta["category"] == "comparison":
            both = re.match(r"which is larger, the (.*) or the (.*)\?", problem.question).groups()
            sizes = {}
            for name in both:
                left, top, right, bottom = boxes[name]
                sizes[name] = (right - left) * (bottom - top)
            assert sizes[problem.answer] == max(sizes.values()) >= 1.3 * min(sizes.values())


def test_yes_and_no_are_balanced_and_every_scene_holds_a_held_out_pair():
    problems = exam("scene", 700, 5)
    answers = [problem.answer for problem in problems if problem.answer in ("yes", "no")]
    assert len(answers) == 200 and abs(answers.count("yes") / 200 - 0.5) < 0.11  # three standard errors
    for problem in problems[:30]:
        assert any((t.colour, t.shape) in pairs(True) for t in problem.meta["graph"].objects)


@pytest.mark.parametrize("seed", [0, 1])
def test_motion_holds_in_the_frames(seed):
    """Direction and distance from the pixels of the first and the last frame alone."""
    asked = [exam("video_qa", 60, seed, category) for category in ("direction", "distance")]
    for problem in [*asked[0], *asked[1]]:
        clip, frames = problem.meta["graph"], [np.asarray(frame) for frame in problem.media().frames]
        if clip.standing and clip.standing[0] == clip.colour:
            continue
        corners = []
        for frame in (frames[0], frames[-1]):
            ys, xs = np.nonzero((frame == COLOURS[clip.colour]).all(-1))
            corners.append((xs.min(), ys.min()))
        dx, dy = corners[1][0] - corners[0][0], corners[1][1] - corners[0][1]
        way = ("right" if dx > 0 else "left") if dx else ("down" if dy > 0 else "up")
        assert problem.answer == (way if problem in asked[0] else str(abs(dx or dy)))
        ground = (frames[0][0, 0] == BACKGROUNDS[clip.background]).all()
        assert ground or corners[0] == (0, 0) or clip.standing


def test_one_frame_does_not_tell_the_direction():
    """Over many clips every direction is equally common."""
    ways = [problem.answer for problem in exam("video_qa", 600, 3, "direction")]
    counts = [ways.count(way) for way in ("left", "right", "up", "down")]
    assert sum(counts) == 120 and max(counts) < 50  # 30 each expected, sd 4.7


def test_clip_answers_within_their_tolerance():
    def score(problem, text):
        return make_task("video_qa").judge(problem, text)[1]

    distance = next(p for p in exam("video_qa", 60, 0, "distance") if int(p.answer) > 20)
    gold = int(distance.answer)
    for value, right in ((gold, 1), (round(gold * 1.09), 1), (round(gold * 1.2), 0), (-gold, 0)):
        assert score(distance, f" {value} pixels") == right, value
    assert make_task("video_qa").judge(distance, "far")[0] is None
    time = exam("video_qa", 60, 0, "time")[0]
    seconds = float(time.answer.split()[0])
    cases = {f"{seconds} s": 1, f"at {seconds:.2f} seconds": 1, f"{seconds + 0.2:.1f}": 0, "": 0}
    assert {text: score(time, text) for text in cases} == cases
    objects = exam("video_qa", 60, 0, "objects")[0]
    assert score(objects, {"1": "one", "2": "two"}[objects.answer]) == 1
    direction = exam("video_qa", 60, 0, "direction")[0]
    assert score(direction, f" {direction.answer}.\nQ: what") == 1 and score(direction, "sideways") == 0


def test_clips_reach_the_model_as_frames_with_their_times(tokenizer, vision):
    for problem in exam("video_qa", 4):
        video = problem.media()
        assert len(video.frames) == len(video.timestamps) >= 5
        encoded = encode(Sample(problem.prompt("picture"), "eval", "0"), tokenizer, vision, eos=False)
        assert sum(grid[0] for grid in encoded.grids) == len(video.frames)


def test_an_exam_alone_gives_no_training_problems():
    with pytest.raises(TaskError, match="exam alone"):
        make_task("board").sample(0)
