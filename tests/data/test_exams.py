"""Exams: questions about held-out pictures hold in the graph, the pixels and the frames, and are balanced."""

from collections import Counter

import pytest

from earlyfusion.data.synth.graph import pairs
from earlyfusion.data.tasks.problem import TaskError
from earlyfusion.data.tasks.registry import make_task


def exam(name, count, seed=0, category=None):
    """Problems of the exam, of one category."""
    found = make_task(name).exam(count, seed)
    return [p for p in found if category in (None, p.category)]


def test_counting_is_balanced():
    problems = exam("counting", 240, 3)
    answers = Counter(problem.answer for problem in problems)
    assert set(answers) == {"0", "1", "2", "3", "4"} and max(answers.values()) < 0.33 * len(problems)


def test_yes_and_no_are_balanced_and_every_scene_holds_a_held_out_pair():
    problems = exam("scene", 700, 5)
    answers = [problem.answer for problem in problems if problem.answer in ("yes", "no")]
    assert len(answers) == 200 and abs(answers.count("yes") / 200 - 0.5) < 0.11  # three standard errors
    for problem in problems[:30]:
        assert any((t.colour, t.shape) in pairs(True) for t in problem.meta["graph"].objects)


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


def test_an_exam_alone_gives_no_training_problems():
    with pytest.raises(TaskError, match="exam alone"):
        make_task("board").sample(0)
