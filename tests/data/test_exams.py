"""Exams: questions about held-out pictures hold in the graph, the pixels and the frames, and are balanced."""

import pytest

from earlyfusion.data.synth.graph import pairs
from earlyfusion.data.tasks.problem import TaskError
from earlyfusion.data.tasks.registry import make_task


def exam(name, count, seed=0, category=None):
    """Problems of the exam, of one category."""
    found = make_task(name).exam(count, seed)
    return [p for p in found if category in (None, p.category)]


def test_yes_and_no_are_balanced_and_every_scene_holds_a_held_out_pair():
    problems = exam("scene", 700, 5)
    answers = [problem.answer for problem in problems if problem.answer in ("yes", "no")]
    assert len(answers) == 200 and abs(answers.count("yes") / 200 - 0.5) < 0.11  # three standard errors
    for problem in problems[:30]:
        assert any((t.colour, t.shape) in pairs(True) for t in problem.meta["graph"].objects)


@pytest.mark.parametrize("category", ["distance", "time", "objects", "direction"])
def test_clip_answers_within_their_tolerance(category):
    problem = next(
        p for p in exam("video_qa", 60, 0, category) if category != "distance" or int(p.answer) > 20
    )
    gold = problem.answer
    cases = {gold: 1, f" {gold}.\nQ: what": 1, "": 0, "sideways": 0}
    if category == "distance":
        cases |= {f"{int(gold) * 1.09:.0f} pixels": 1, f"{int(gold) * 1.2:.0f}": 0, f"-{gold}": 0}
    elif category == "time":
        seconds = float(gold.split()[0])
        cases |= {f"at {seconds:.2f} seconds": 1, f"{seconds + 0.2:.1f}": 0}
    elif category == "objects":
        cases[{"1": "one", "2": "two"}[gold]] = 1
    assert {text: make_task("video_qa").judge(problem, text)[1] for text in cases} == cases


def test_an_exam_alone_gives_no_training_problems():
    with pytest.raises(TaskError, match="of 0"):
        make_task("board").sample(0)
