"""Text twins: a reader of the words alone can answer every question about the picture."""

import re
from collections import Counter

import pytest

from earlyfusion.data.synth.graphs import twin
from earlyfusion.eval.benchmarks.questions import KINDS, make_items
from earlyfusion.eval.protocol import Generation, TaskOptions
from earlyfusion.eval.registry import build_task


def answer_from_words(text, question):
    """Answers from the twin's words, without the graph: a second way to every answer."""
    lines = text.splitlines()
    if lines[0].startswith("picture"):
        return _scene(lines, question)
    if lines[0].startswith("board"):
        return _board(lines, question)
    if "chart" in lines[0]:
        return _chart(lines, question)
    if lines[0].startswith("clip"):
        return _clip(lines, question)
    return re.search(r'"(.*)"', text)[1]


def _scene(lines, question):
    width, height = map(int, re.match(r"picture (\d+) x (\d+)", lines[0]).groups())
    things = []
    for line in lines[1:]:
        size, colour, shape, box = re.match(r"(\w+) (\w+) (\w+) \[(.*)\]", line).groups()
        things.append((size, colour, shape, [int(v) for v in box.split(", ")]))
    named = {f"{c} {s}": (size, box) for size, c, s, box in things}
    names = Counter(f"{c} {s}" for _, c, s, _ in things)
    if question.startswith("how many objects"):
        return str(len(things))
    if found := re.match(r"how many (\w+) objects", question):
        return str(sum(c == found[1] for _, c, _, _ in things))
    if found := re.match(r"how many (\w+)s are", question):
        return str(sum(s == found[1] for _, _, s, _ in things))
    if found := re.match(r"what color is the (\w+)\?", question):
        return next(c for _, c, s, _ in things if s == found[1])
    if found := re.match(r"what shape is the (\w+) object", question):
        return next(s for _, c, s, _ in things if c == found[1])
    if found := re.match(r"what size is the (\w+ \w+)", question):
        return named[found[1]][0]
    if found := re.match(r"is there an? (\w+ \w+)\?", question):
        return "yes" if names[found[1]] else "no"
    if found := re.match(r"is the (\w+ \w+) (left of|right of|above|below) the (\w+ \w+)", question):
        a, b = named[found[1]][1], named[found[3]][1]
        order = [a[2] <= b[0], a[0] >= b[2], a[3] <= b[1], a[1] >= b[3]]
        return "yes" if ["left of", "right of", "above", "below"][order.index(True)] == found[2] else "no"
    if found := re.match(r"which is larger, the (\w+ \w+) or the (\w+ \w+)", question):
        return max(
            found.groups(),
            key=lambda n: (named[n][1][2] - named[n][1][0]) * (named[n][1][3] - named[n][1][1]),
        )
    if question.startswith("list the objects"):
        axis = 0 if "left to right" in question else 1
        return ", ".join(sorted(named, key=lambda n: named[n][1][axis] + named[n][1][axis + 2]))
    box = named[re.search(r"where is the (\w+ \w+)", question)[1]][1]
    if "pixels" in question:
        return "[" + ", ".join(map(str, box)) + "]"
    return "[" + ", ".join(f"{v / s:.2f}" for v, s in zip(box, (width, height, width, height))) + "]"


def _board(lines, question):
    cells = {}
    for line in lines[1:]:
        colour, r, c = re.match(r"an? (\w+) square at row (\d+), column (\d+)", line).groups()
        cells[int(r), int(c)] = colour
    if found := re.match(r"what color is row (\d+), column (\d+)", question):
        return cells[int(found[1]), int(found[2])]
    if found := re.match(r"what is row (\d+)", question):
        return " ".join(colour for (r, _), colour in sorted(cells.items()) if r == int(found[1]))
    return str(list(cells.values()).count(re.match(r"how many cells are (\w+)", question)[1]))


def _chart(lines, question):
    values = {line[0]: int(line.split()[-1]) for line in lines[1:]}
    if found := re.match(r"what is the value of (\w)", question):
        return str(values[found[1]])
    if found := re.match(r"is (\w) larger than (\w)", question):
        return "yes" if values[found[1]] > values[found[2]] else "no"
    if question.startswith("what is the sum"):
        return str(sum(values.values()))
    choose = max if "largest" in question else min
    return choose(values, key=lambda label: values[label])


def _clip(lines, question):
    steps = []
    for line in lines[1:]:
        time, name, box, rest = re.match(r"([\d.]+) s: (\w+ \w+) \[(.*?)\](.*)", line).groups()
        steps.append((time, name, [int(v) for v in box.split(", ")], rest))
    dx, dy = (steps[-1][2][i] - steps[0][2][i] for i in (0, 1))
    if question.startswith("which way"):
        return ("right" if dx > 0 else "left") if dx else ("down" if dy > 0 else "up")
    if question.startswith("what moves"):
        return steps[0][1]
    if question.startswith("how many objects"):
        return "2" if steps[0][3] else "1"
    return str(abs(dx or dy)) if question.startswith("how far") else f"{steps[-1][0]} s"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("task", list(KINDS))
def test_the_words_alone_hold_every_answer(task, seed):
    for item in make_items(task, 60, seed):
        said, gold = answer_from_words(twin(item.graph), item.question), item.answer.removeprefix("the ")
        assert said == gold, (item.question, twin(item.graph))


def test_only_graphs_have_twins():
    with pytest.raises(TypeError, match="str has no text twin"):
        twin("a picture")


def test_the_twins_task_needs_no_eyes_and_mixes_all_kinds():
    task = build_task("twins")
    assert task.needs == frozenset()
    questions = list(task.questions(70, None, 0))
    assert len(questions) == len({q.id for q in questions}) == 70
    assert {q.category.split("/")[0] for q in questions} == set(KINDS)
    records = []
    for question in questions:
        (request,) = task.requests(question, 0)
        text, asked = request.prompt.rsplit("\nQ: ", 1)
        output = Generation(" " + answer_from_words(text, asked.removesuffix("\nA:")), 3, "stop")
        records.append(
            {"id": question.id, "category": question.category, **task.score(question, 0, [output])}
        )
    sums = task.aggregate(records)
    assert sums["score"] == 1.0 and sums["n"] == 70 and 0 < sums["majority"] < 0.5
    assert task.data_hash() != build_task("twins", TaskOptions(seed=1)).data_hash()
