"""The rule and the shelf: what each is answered from, and what it is not."""

import numpy as np
import pytest
from PIL import ImageChops

from earlyfusion.data.chat.template import Message
from earlyfusion.data.errors import DataError
from earlyfusion.data.programs import run_own
from earlyfusion.data.sources.base import SourceConfig
from earlyfusion.data.sources.tool_problems import ToolProblems
from earlyfusion.data.synth.graph import BACKGROUNDS, COLOURS
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.data.tasks.rule import facts_of, new_facts
from earlyfusion.data.tool_problems import tool_files, tool_messages


def patches(picture, names):
    """Names of the colours of a row of equal places, from the pixels."""
    pixels = np.asarray(picture).reshape(-1, 3)
    side = picture.size[1]
    found = []
    for left in range(0, picture.size[0], side):
        part = np.asarray(picture.crop((left, 0, left + side, side))).reshape(-1, 3)
        seen = {tuple(pixel) for pixel in part.tolist()} - set(BACKGROUNDS.values())
        found += [name for name in names if names[name] in seen]
    assert len(pixels)
    return found


@pytest.mark.parametrize("level", range(7))
def test_the_rule_is_in_the_picture_and_new_facts_are_where_they_belong(level):
    task = make_task("rule")
    for seed in range(60):
        problem = task.sample(seed, "train", level)
        seen = patches(problem.picture, COLOURS)
        if "color" in problem.question:
            assert ", ".join(seen) == problem.answer
            continue
        state, first = problem.question.split("from ")[1][0], problem.question.split("from ")[1][0]
        for colour in seen:
            state = facts_of("a")[colour, state]
        assert state == problem.answer and task.reward(problem, f" {state}") == 1.0
        if level in (0, 1):
            assert ((seen[0], first) in new_facts()) == (level == 1)
    assert len(new_facts()) == 36


def test_another_table_changes_the_answers_and_blind_pictures_show_nothing():
    plain, other, blind = (make_task("rule", **more) for more in ({}, {"table": "b"}, {"blind": True}))
    agree = 0
    for seed in range(300):
        one, two, three = (task.sample(seed, "train", 0) for task in (plain, other, blind))
        assert one.question == two.question and one.description == two.description
        agree += one.answer == two.answer
        assert patches(three.picture, COLOURS) == [] and three.answer == one.answer
        assert ImageChops.difference(one.picture, three.picture).getbbox()
    # One in eleven by chance, over 120 facts.
    assert agree < 60
    with pytest.raises(DataError, match="expected a or b"):
        make_task("rule", table="c")


def test_a_verbose_thought_says_the_row_first():
    task = make_task("rule", verbose=3)
    many = {task.sample(seed, "train", 3).thought.count("door") for seed in range(80)}
    assert many == {0, 1, 2, 3}


def test_a_letter_needs_the_picture_and_the_file():
    task = make_task("shelf")
    constant = 0
    for seed in range(200):
        problem = task.sample(seed, "train", 0)
        colour = problem.question.split("?")[0].split()[-1]
        place = patches(problem.picture, COLOURS).index(colour)
        (name,) = problem.meta["files"]
        letters = problem.meta["files"][name].split()
        assert letters[place] == problem.answer
        assert run_own(problem.meta["program"], texts=problem.meta["files"]) == repr(problem.answer)
        constant += letters[0] == problem.answer
        assert tool_files(problem, "picture") == {name: problem.meta["files"][name].encode()}
        # Nothing that is said holds the letters or, but for the words, the place.
        said = "".join(message.text for message in tool_messages(problem, "picture"))
        assert " ".join(letters) not in said and problem.description not in said
    # 3 or 4 places: a program that always takes the first is right in 29 % of them.
    assert 0.2 < constant / 200 < 0.4


def test_conversations_hold_the_call_and_what_it_really_gives():
    made = lambda task: SourceConfig(
        name="talks", kind="tool_problems", options={"tasks": {task: 1.0}, "forms": {"twin": 1.0}}
    )
    source = ToolProblems(made("shelf"), seed=0, val_fraction=0.1)
    sample = source.made(3, "k", heldout=False)
    text = "".join(getattr(part, "text", "") for part in sample.segments)
    assert 'open("letters.txt")' in text and "<|image" not in text
    with pytest.raises(DataError, match="have no program"):
        ToolProblems(made("counting"), seed=0, val_fraction=0.1).made(0, "k", heldout=False)
    assert isinstance(tool_messages(make_task("shelf").sample(0), "twin")[0], Message)


@pytest.mark.parametrize("level", range(3))
def test_a_map_in_characters_is_the_maze(level):
    """By a search over the characters alone: as many moves as the task's own shortest way."""
    task, blind = make_task("maze", compact=True), make_task("maze", blind=True)
    for seed in range(40):
        problem = task.sample(seed, "train", level)
        rows = problem.description.split("\n")
        ends = {row[x]: (y, x) for y, row in enumerate(rows) for x in range(len(row)) if row[x] in "gr"}
        line, goal = {ends["g"]: 0}, ends["r"]
        todo = [ends["g"]]
        for y, x in todo:
            for dy, dx in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                there = y + 2 * dy, x + 2 * dx
                if rows[y + dy][x + dx] != "#" and there not in line:
                    line[there] = line[y, x] + 1
                    todo.append(there)
        assert line[goal] == len(problem.answer)
        # The ends are shown, the walls are not.
        bare = blind.sample(seed, "train", level)
        assert bare.answer == problem.answer
        inside = np.asarray(bare.picture)[2:-2, 2:-2].reshape(-1, 3)
        assert tuple(COLOURS["black"]) not in {tuple(pixel) for pixel in inside.tolist()}
