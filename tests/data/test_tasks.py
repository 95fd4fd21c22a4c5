"""Tasks: reproducible, disjoint splits, bounded rewards whatever is said."""

import json
import pickle
import random
import time
from itertools import product

import pytest

from earlyfusion.data.sample import Image, Text
from earlyfusion.data.synth.graph import on_side
from earlyfusion.data.tasks.problem import FORMS, Problem, TaskError
from earlyfusion.data.tasks.puzzles import TextMath, canonical, carve, door
from earlyfusion.data.tasks.registry import EXAMS, PROCEDURAL, make_task

# Corners are rounded to a tenth and seen on a grid of pixels; boxes have two decimals.
LEAST = {"polygon": 0.85, "grounding": 0.85, "pointing": 0.99}
SECONDS_PER_REWARD = 1.0
HOSTILE = {
    "empty": "",
    "blanks": " \n\t ",
    "nothing": "none",
    "brackets": "[]",
    "nan": "nan",
    "boxes of nan": "[nan, nan, nan, nan]",
    "infinity": "[1e400, -1e400, 1e400, 1e400]",
    "inf": "inf",
    "far away": "[-99999999, -99999999, 99999999, 99999999]",
    "huge number": "9" * 5000,
    "huge": "red circle 3 " * 40_000,
    "many boxes": "[1, 2, 30, 40] " * 300,
    "many points": "(3, 4) " * 500,
    "open brackets": "[" * 4000,
    "open boxes": "[1" + " " * 900 + "1" + " " * 900 + "1" + " " * 900 + "x",
    "digits": "[" + ",".join(["1" * 900] * 4) + "x",
    "half a box": "[1, 2, 3",
    "json": '{"label": "x", "box": [1, 2, "a", null]}',
    "braces": "{" * 2000,
    "boxed": "\\boxed{",
    "thinking": "<think> 3 red circle [1, 2, 3, 4]",
    "zero": "\x00\ud800",
    "emoji": "🟥" * 50,
    "negative": "-5",
    "fraction": "0.5",
    "one point": "[5, 5]",
    "a line": "[1, 1], [2, 2], [3, 3]",
    "moves": "up " * 3000,
    "letters": "UDLR" * 900,
    "permutation": "1 1 1 1",
    "dots": "[1.2.3, 4.5.6]",
    "roman": "Ⅳ",
    "arabic": "٣",
}


@pytest.mark.parametrize("name", PROCEDURAL)
def test_a_problem_depends_on_its_arguments_alone(name):
    """And the three prompts hold what they should, and it travels to another process."""
    task = make_task(name)
    for level, split, seed in product(range(len(task.levels)), ("train", "test"), (3, 11)):
        one = task.sample(seed, split, level)
        json.dumps(one.answer)
        for again in (make_task(name).sample(seed, split, level), pickle.loads(pickle.dumps(one))):
            assert again.prompt("twin") == one.prompt("twin") and again.answer == one.answer
            assert again.picture.tobytes() == one.picture.tobytes() and again.picture.mode == "RGB"
    kinds = [[type(part) for part in one.prompt(form)] for form in ("picture", "twin", "rendered")]
    assert kinds == [[Image, Text], [Text], [Image, Text]]


@pytest.mark.parametrize("name", sorted({*PROCEDURAL, *EXAMS, "text_math"}))
def test_the_answer_that_is_trained_earns_the_full_reward(name, tmp_path):
    """Every task, level, split, form of the prompt, with a thought before it or not; and every exam."""
    options = {}
    if name == "text_math":
        options["path"] = tmp_path / "sums.jsonl"
        rows = [json.dumps({"question": f"{i} + 1?", "answer": f"{i + 1}"}) for i in range(200)]
        options["path"].write_text("\n".join(rows))
    task = make_task(name, **options)
    for level, split, seed in product(range(len(task.levels)), ("train", "test"), range(8)):
        problem = task.sample(seed, split, level)
        for form, thought in product(FORMS, (False, True)):
            cue = problem.prompt(form, thought)[-1].text
            answer = problem.solution(thought).text
            assert cue.endswith("\nlook:" if thought else "\nA:")
            assert task.reward(problem, answer) >= LEAST.get(name, 1.0), (problem.key, answer)
    for problem in task.exam(40, 0) if task.kinds else ():
        assert task.judge(problem, problem.solution().text)[1] == 1.0, (problem.question, problem.answer)


@pytest.mark.parametrize("name", PROCEDURAL)
def test_training_and_test_share_no_combination_and_no_prompt(name):
    """The side of a combination is a function of its name, and all names seen are on the right side: so no
    other seed can break it. The prompts themselves are compared as well."""
    task = make_task(name)
    combinations, prompts = {"train": set(), "test": set()}, {"train": set(), "test": set()}
    for level, split, seed in product(range(len(task.levels)), ("train", "test"), range(60)):
        problem = task.sample(seed, split, level)
        key = problem.combination
        assert on_side(key, split == "test"), problem.key
        combinations[split].add(key)
        prompts[split].add(problem.prompt("twin")[0].text)
    assert not combinations["train"] & combinations["test"]
    assert not prompts["train"] & prompts["test"]
    assert len(combinations["test"]) > 2 and len(combinations["train"]) > 10


@pytest.mark.parametrize("seed", range(20))
def test_turned_and_mirrored_mazes_are_one_combination(seed):
    rng = random.Random(seed)
    rows, columns = rng.randint(2, 5), rng.randint(2, 5)
    doors = carve(rng, rows, columns, 0.1)
    quarter, mirror = lambda c: (c[1], rows - 1 - c[0]), lambda c: (c[0], columns - 1 - c[1])
    turned, mirrored = ({door(f(a), f(b)) for a, b in doors} for f in (quarter, mirror))
    name = canonical(doors, rows, columns)
    assert canonical(turned, columns, rows) == name == canonical(mirrored, rows, columns)


@pytest.mark.parametrize("name", PROCEDURAL)
def test_rewards_stay_between_0_and_1_and_quick_whatever_is_said(name):
    task = make_task(name)
    rng = random.Random(5)
    alphabet = '0123456789 []{}(),.-:"redblucircleupnoneA=\n<>/|eE'
    noise = {
        f"noise {i}": "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 300))) for i in range(60)
    }
    for split, seed in (("train", 0), ("test", 1)):
        problem = task.sample(seed, split, len(task.levels) - 1)
        for case, text in {**HOSTILE, **noise}.items():
            begun = time.perf_counter()
            value = task.reward(problem, text)
            assert 0.0 <= value <= 1.0, (case, value)
            assert time.perf_counter() - begun < SECONDS_PER_REWARD, case
        for case in ("empty", "blanks", "nan", "thinking", "huge", "boxed"):
            assert task.reward(problem, HOSTILE[case]) == 0.0, case
        assert task.reward(problem, None) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["grounding", "pointing"])
def test_nothing_to_find_must_be_said(name):
    task = make_task(name)
    problems = [task.sample(seed, split, 2) for split in ("train", "test") for seed in range(40)]
    empty = [problem for problem in problems if not problem.answer]
    assert len(empty) > 5
    for problem in empty:
        assert task.reward(problem, " none") == task.reward(problem, "[]") == 1.0
        assert (
            task.reward(problem, "")
            == task.reward(problem, "[1, 2, 30, 40]")
            == task.reward(problem, "yes")
            == 0.0
        )
    assert all(task.reward(problem, "none") == 0.0 for problem in problems if problem.answer)


def test_saying_everything_earns_nothing():
    everything = (
        "red green blue yellow black gray teal brown purple orange circle square star left of above yes no 0"
        " 1 2 3 4 5"
    )
    for name in ("counting", "colour_shape", "relation", "odd_one_out", "geometry", "arithmetic", "jigsaw"):
        task = make_task(name)
        for seed in range(10):
            assert task.reward(task.sample(seed, "test", 1), everything) == 0.0, name


def test_bad_arguments_are_one_line_errors():
    task = make_task("maze")
    problem, impossible = task.sample(0), make_task("maze")
    impossible.levels = ({**task.levels[0], "least": 99},)
    cases = [
        (lambda: make_task("mase"), "did you mean 'maze'"),
        (lambda: make_task("maze", size=3), "options"),
        (lambda: task.sample(0, "validation"), "split"),
        (lambda: task.sample(0, "train", 9), "difficulty 9 of 4"),
        (lambda: impossible.sample(0), "widen the knobs"),
        (lambda: problem.prompt("image"), "prompt form"),
    ]
    for call, words in cases:
        with pytest.raises(TaskError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_any_jsonl_gives_word_problems(tmp_path):
    file = tmp_path / "sums.jsonl"
    rows = [
        {"problem": f"What is {i} plus {i}?", "solution": f"It is {2 * i}.\n#### {2 * i:,}"}
        for i in range(1000)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    task = TextMath(file)
    train = {task.sample(seed, "train").description for seed in range(300)}
    test = {task.sample(seed, "test").description for seed in range(300)}
    assert not train & test and 50 < len(test) < 250
    problem = task.sample(4, "test")
    assert isinstance(problem, Problem) and problem.prompt("picture") == problem.prompt("twin")
    double = int(problem.description.split()[2]) * 2
    assert task.reward(problem, f"We add. 1 + 1 = 2. #### {double}") == 1.0
    assert task.reward(problem, f"{'so ' * 4000} the result is ${double:,}.") == 1.0
    assert (
        task.reward(problem, f"#### {double + 1}")
        == task.reward(problem, "")
        == task.reward(problem, "no")
        == 0.0
    )
    file.write_text('{"question": "why?", "answer": "because"}\n')
    with pytest.raises(TaskError, match="row 1"):
        TextMath(file)
    with pytest.raises(TaskError, match="no such file"):
        TextMath(tmp_path / "none.jsonl")


def test_a_folder_keeps_its_split_and_drops_what_training_has(tmp_path):
    row = lambda i: json.dumps({"prompt": f"Say {i}.", "target": i})
    (tmp_path / "train.jsonl").write_text("\n".join(map(row, range(20))))
    (tmp_path / "test.jsonl").write_text("\n".join(map(row, range(15, 25))))
    task = TextMath(tmp_path)
    assert {task.sample(seed, "test").answer for seed in range(80)} == {"20", "21", "22", "23", "24"}
    assert len({task.sample(seed, "train").answer for seed in range(300)}) == 20
