"""Conversations with a Python tool: outputs are what the programs give, answers are true, the two arms are
one."""

import ast
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from earlyfusion.data.chat.template import chat_sample
from earlyfusion.data.programs import NO_OUTPUT, run_own, tool_text
from earlyfusion.data.sample import Image
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.synth.graph import BACKGROUNDS, COLOURS, Scene, pairs
from earlyfusion.data.tool_tasks import CELL, FILE, GRID_KINDS, Grid, filled, grid_facts, grid_sizes

TALKS = 300


def source(kind, seed=0, **options):
    return build_source(SourceConfig(name=kind, kind=kind, options=options), seed=seed)


@pytest.fixture(scope="module", params=["zero_vision", "chat_scenes"])
def arm(request):
    return source(request.param)


def groups(mask, steps):
    """Connected groups by union of labels: another way than the programs' flood fill."""
    label = {tuple(p): i for i, p in enumerate(np.argwhere(mask).tolist())}
    changed = True
    while changed:
        changed = False
        for (y, x), own in list(label.items()):
            low = min([own, *(label[(y + i, x + j)] for i, j in steps if (y + i, x + j) in label)])
            if low < own:
                label[(y, x)], changed = low, True
    return len(set(label.values()))


def scene_truth(scene: Scene, task):
    """The answer read off the graph and the pixels one by one, without the program."""
    pixels = np.asarray(scene.draw()).astype(int)
    shown = (pixels != BACKGROUNDS[scene.background]).any(2)
    facts = task.facts
    match task.kind:
        case "crop":
            left, top, right, bottom = facts["box"]
            return str(shown[top:bottom, left:right].sum())
        case "count":
            return str(len(scene.objects))
        case "measure":
            (box,) = [thing.box for thing in scene.objects if thing.colour == facts["colour"]]
            return f"{box[2] - box[0]} x {box[3] - box[1]}"
        case "binarise":
            return str((pixels @ (299, 587, 114) < 1000 * facts["level"] - 500).sum())
        case "colour":
            (colour,) = [t.colour for t in scene.objects if [*map(int, t.centre)] == [facts["x"], facts["y"]]]
            return colour
        case "compare":
            counts = [(pixels == COLOURS[name]).all(2).sum() for name in facts["names"]]
            return larger(*facts["names"], *counts)


def larger(one, other, p, q):
    return "equal" if p == q else one if p > q else other


def grid_truth(grid: Grid, task):
    cells, facts = grid.array, task.facts
    above = cells > facts.get("level", 0)
    match task.kind:
        case "crop":
            return str(cells[facts["top"] : facts["bottom"], facts["left"] : facts["right"]].sum())
        case "count":
            return str(groups(above, [(0, 1), (1, 0), (0, -1), (-1, 0)]))
        case "measure":
            return " x ".join(str(np.ptp(axis) + 1) for axis in reversed(np.nonzero(above)))
        case "binarise":
            return str(above.sum())
        case "value":
            return str(cells[facts["row"], facts["column"]])
        case "compare":
            sums, half = cells.sum(0), facts["half"]
            return larger("left", "right", sums[:half].sum(), sums[-half:].sum())


@pytest.mark.parametrize("heldout", [False, True])
def test_every_answer_is_true(arm, heldout):
    seen = Counter()
    for number in range(TALKS):
        talk = arm.talk(number, heldout)
        for turn in talk.turns:
            truth = scene_truth if isinstance(talk.subject, Scene) else grid_truth
            assert turn.answer == truth(talk.subject, turn), (number, turn)
            seen[type(talk.subject).__name__, turn.kind] += 1
    kinds = {"crop", "count", "measure", "binarise", "compare"}
    assert set(seen) == {(s, k) for s in ("Scene", "Grid") for k in kinds} | {
        ("Scene", "colour"),
        ("Grid", "value"),
    }
    assert min(seen.values()) >= 10


def test_equal_halves_are_called_equal():
    same = Grid(((200, 10, 200, 10),) * 3)
    task = filled(GRID_KINDS, "compare", grid_facts(same, "compare", Random(0)))
    output = run_own(f"import numpy as np\na = np.array({list(same.values)})\n{task.code}", {})
    assert output == "630 630\n'equal'" and replace(task, output=output).answer == "equal"


def test_numbers_describe_an_array_exactly():
    grids = source("zero_vision", arrays=1.0)
    for number in range(30):
        grid = grids.talk(number).subject
        typed = [[int(v) for v in line.split()] for line in grid.words().splitlines()[1:]]
        assert np.array_equal(np.kron(typed, np.ones((CELL, CELL))), np.array(grid.draw())[..., 1])


def test_the_arms_hold_the_same_conversations():
    zero, shown = source("zero_vision", seed=3), source("chat_scenes", seed=3)
    for number in range(80):
        a, b = zero.talk(number), shown.talk(number)
        assert a.subject == b.subject and [t.answer for t in a.turns] == [t.answer for t in b.turns]
        assert all(q.question.endswith(p.question) for p, q in zip(a.turns, b.turns))
        assert not any(isinstance(s, Image) for s in zero.get(number, 0).segments)
        assert sum(isinstance(s, Image) for s in shown.get(number, 0).segments) == 1
    assert not zero.config.has_pictures and shown.config.has_pictures


def test_a_program_of_the_picture_arm_never_has_the_numbers_typed_in():
    shown = source("chat_scenes", arrays=1.0)
    codes = [turn.code for number in range(60) for turn in shown.talk(number).turns]
    assert all(FILE in code and "np.array([[" not in code for code in codes)


def test_training_and_held_out_conversations_are_disjoint(arm):
    held_pairs = set(pairs(True))
    assert grid_sizes(True) and not set(grid_sizes(True)) & set(grid_sizes(False))
    for number in range(TALKS):
        for heldout in (False, True):
            subject = arm.talk(number, heldout).subject
            if isinstance(subject, Grid):
                assert (subject.array.shape in grid_sizes(True)) == heldout
            else:
                assert any((t.colour, t.shape) in held_pairs for t in subject.objects) == heldout


def test_a_conversation_depends_on_seed_and_number_alone(arm):
    kind, count = arm.config.kind, len(arm)
    other, short = source(kind, seed=1), source(kind, count=5)
    assert short.get(2, 3).text == arm.get(17, 0).text
    assert arm.get(1, 1).text == chat_sample(arm.talk(count + 1).messages, source="", key="").text
    assert other.get(0, 0).text != arm.get(0, 0).text
    assert other.heldout(4).text == arm.heldout(4).text  # one held-out set for all seeds


def test_a_tool_turn_joins_what_was_printed_the_value_and_the_error():
    assert tool_text("a\n\n", "3") == "a\n3" and tool_text("", "", "line 1: X") == "line 1: X"
    assert tool_text("", "") == NO_OUTPUT and run_own("x = 1", {}) == NO_OUTPUT
    assert ast.literal_eval(run_own("print(1)\n(2, 'b')", {}).splitlines()[-1]) == (2, "b")


def test_our_own_programs_leave_the_output_of_other_threads_alone(capsys):
    import sys

    before = sys.stdout
    assert run_own("print('inside')", {}) == "inside"
    assert sys.stdout is before and capsys.readouterr().out == ""
