"""Visual benchmarks: the controls are blind, an all-knowing model scores 1, a constant one its majority, and
what the harness leaves can be compared."""

import json

import numpy as np
import pytest
from eval_cases import ask_all, own_model

from earlyfusion.data.sample import Image, question_text
from earlyfusion.data.tasks.registry import EXAMS, make_task
from earlyfusion.eval.benchmarks.base import build_task
from earlyfusion.eval.compare import compare_arms, load_arm
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import Generation, TaskOptions, prompt_hash, prompt_text


def pixels(prompt):
    """All pictures of a prompt, uint8 [H, W, 3] each."""
    media = [] if isinstance(prompt, str) else [part for part in prompt if not hasattr(part, "text")]
    frames = []
    for part in media:
        frames += [part.open()] if isinstance(part, Image) else part.frames
    return [np.asarray(frame) for frame in frames]


@pytest.mark.parametrize("name", [*EXAMS, "easy_vqa"])
def test_an_answer_that_the_limit_cut_off_is_no_answer(name):
    """Its beginning is right; where it would have gone is not known."""
    task = build_task(name)
    for question in task.questions(8):
        outputs = [Generation(f" {question.target}", 8, "length") for _ in task.requests(question, 0)]
        record = task.score(question, 0, outputs)
        assert record["score"] == record["blind_score"] == 0.0 and record["extracted"] is None
        if name == "easy_vqa":
            longer = [Generation(f" {question.target} wss\n", 8, "stop")] * 2
            assert task.score(question, 0, longer)["score"] == 0.0
        else:
            assert record["metrics"]["cut"] == 1.0


@pytest.mark.parametrize("name", EXAMS)
def test_views_are_told_apart_and_blind_pictures_tell_only_their_size(name):
    """A model that answers everywhere, nowhere, or only where it gets a picture or words scores exactly
    there."""
    task = build_task(name)
    assert task.needs == frozenset({"video" if name == "video_qa" else "image"})
    seen = lambda prompt: any(picture.std((0, 1)).any() for picture in pixels(prompt))
    models = {
        (1, 1, 1): lambda q, r: f" {q.target}\n",
        (0, 0, 0): lambda q, r: "",
        (1, 0, 0): lambda q, r: q.target if seen(r.prompt) else "",
        (0, 0, 1): lambda q, r: q.target if isinstance(r.prompt, str) else "",
    }
    for scores, model in models.items():
        records, sums = ask_all(task, model, 24)
        assert (sums["score"], sums["blind_score"], sums["words_score"]) == scores
        assert sums["seeing"] == scores[0] - scores[1] and sums["unextracted"] == 1 - scores[0]
        json.dumps([records, sums])

    for question in task.questions(6):
        shown, blind, words = (request.prompt for request in task.requests(question, 0))
        asked = question_text(question.meta["problem"].question)
        assert [p.shape for p in pixels(shown)] == [p.shape for p in pixels(blind)]
        assert all((p == 128).all() for p in pixels(blind))
        assert prompt_text(shown) == prompt_text(blind) == asked
        assert words.endswith(asked) and len(words) > len(asked)


@pytest.mark.parametrize("name", EXAMS)
def test_tasks_repeat_exactly_and_depend_on_the_seed_and_a_shorter_run_is_their_beginning(name):
    made = []
    for seed, limit in ((0, 9), (0, 6), (1, 6)):
        task = build_task(name, TaskOptions(seed=seed))
        made.append((task.data_hash(), [prompt_hash(task.requests(q, 0)) for q in task.questions(limit)]))
    (data, nine), (again, six), (other, others) = made
    assert data == again and nine[:6] == six and len(nine) == 9
    assert other != data and others != six


def test_the_twins_task_needs_no_eyes_and_mixes_all_kinds():
    task = build_task("twins")
    questions = list(task.questions(70))
    assert task.needs == frozenset() and len({q.id for q in questions}) == 70
    assert {q.category.split("/")[0] for q in questions} == set(EXAMS)
    for question in questions[:7]:
        (request,) = task.requests(question, 0)
        (problem,) = make_task(question.category.split("/")[0]).exam(1, 0)
        assert question.id == f"twins/{problem.key}"
        assert request.prompt == problem.description + question_text(problem.question)
    _, sums = ask_all(task, lambda q, r: f" {q.target}", 70)
    assert sums["score"] == 1.0 and sums["n"] == 70 and 0 < sums["majority"] < 0.5
    assert task.data_hash() != build_task("twins", TaskOptions(seed=1)).data_hash()


# through the harness, on real models


TASKS = ("counting", "grounding", "video_qa", "twins")


def evaluated(name, model_seed, out, **options):
    task = build_task(name, TaskOptions(max_new_tokens=4, **options))
    return run_task(own_model(model_seed), task, limit=6, out=out)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two untrained models evaluated on a few questions of each task."""
    root = tmp_path_factory.mktemp("evals")
    for name in TASKS:
        for seed in (0, 1):
            metrics = evaluated(name, seed, root / str(seed))["metrics"]
            assert metrics["n"] == 6 and metrics["majority"] is not None
    return root


def test_what_the_harness_leaves_holds_every_view_and_can_be_compared(folders):
    arms = [load_arm(name, str(folders / seed)) for name, seed in (("base", "0"), ("treated", "1"))]
    entries = compare_arms(*arms)["tasks"]
    views = {f"counting ({view})" for view in ("blind", "words", "seeing")}
    assert {"counting", "twins", "video_qa"} | views <= {entry["task"] for entry in entries}
    assert all(entry["n"] == 6 and entry["verdict"] for entry in entries)
