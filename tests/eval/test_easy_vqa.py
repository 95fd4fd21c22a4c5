"""easy-VQA: the official questions, put as in training, judged by whole answers; the control is blind."""

from collections import Counter

import easy_vqa as package
import numpy as np
import pytest
from eval_cases import Scripted

from earlyfusion.data.sample import Image, answer_text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.sources.embedded import load_split
from earlyfusion.eval.benchmarks.base import build_task
from earlyfusion.eval.benchmarks.easy_vqa import ANSWERS, majority_answers, questions_of
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import EvalError, LogProb, TaskOptions


def test_all_official_questions_are_asked_and_a_limit_spreads_over_them():
    texts, answers, pictures = package.get_test_questions()
    every, some = (list(build_task("easy_vqa").questions(limit)) for limit in (None, 200))
    asked = Counter((text, answer, entry.index) for entry, text, answer in questions_of("test"))
    assert asked == Counter(zip(texts, answers, pictures)) and set(ANSWERS) == set(package.get_answers())
    assert len({q.id for q in every}) == 9673
    assert Counter(q.category for q in every) == {"yes/no": 7136, "shape": 1257, "colour": 1280}
    assert len(some) == 200 and len({q.meta["picture"] for q in some}) > 180
    assert {q.category for q in some} == {"yes/no", "shape", "colour"}


def test_majority_answers_are_those_of_the_training_questions():
    texts, answers, _ = package.get_train_questions()
    counts = Counter(zip(texts, answers))
    found = majority_answers()
    assert set(found) == set(texts)
    for question, answer in found.items():
        assert counts[question, answer] == max(counts[question, other] for other in ANSWERS)


def test_questions_are_put_as_in_training():
    """Prompt and answer are the training document of that picture with this one question, cut in two."""
    source = build_source(SourceConfig(name="vqa", kind="easy_vqa"))
    asked = list(build_task("easy_vqa").questions())
    assert len({question.id for question in asked}) == 9673
    for index in (0, 500, 999):
        *prompt, answer = source.heldout(index).segments
        picture = load_split("test")[index].index
        assert any(
            q.meta["picture"] == picture
            and q.prompt[1].text == prompt[1].text
            and answer_text(q.target) == answer.text
            for q in asked
        )


def shown(prompt):
    (image,) = [segment for segment in prompt if isinstance(segment, Image)]
    return np.asarray(image.open())


def test_a_seer_scores_one_and_its_blind_control_does_not():
    """It answers right exactly when it is shown a picture that is not uniform."""
    gold = {}
    for question in build_task("easy_vqa").questions(500):
        gold[shown(question.prompt).tobytes(), question.prompt[1].text] = question.target

    def say(request):
        picture = shown(request.prompt)
        return gold.get((picture.tobytes(), request.prompt[1].text), "purple" if picture.std() == 0 else "")

    sums = run_task(Scripted(say), build_task("easy_vqa"), limit=500)["metrics"]
    assert (sums["score"], sums["blind_score"], sums["seeing"], sums["n"]) == (1.0, 0.0, 1.0, 500)
    assert sums["chance"] is None and set(sums["by_category"]) == {"yes/no", "shape", "colour"}
    # 0.669 on the whole split: one standard error of 500 questions is 0.021
    assert sums["majority"] == pytest.approx(0.669, abs=0.065)


def test_choice_among_the_answers_is_by_likelihood():
    """Every view has the 13 answers behind its own prompt; the likeliest is what counts."""
    task = build_task("easy_vqa", TaskOptions(form="choice"))
    for question in task.questions(6):
        requests = task.requests(question, 0)
        options = [answer_text(answer) for answer in ANSWERS]
        assert [request.continuation for request in requests] == options * 2
        assert [request.context is question.prompt for request in requests] == [True] * 13 + [False] * 13
        gold = options.index(answer_text(question.target))
        other = (gold + 1) % 13
        for seen, blind in ((gold, other), (other, gold)):
            values = [LogProb(-float(i not in (seen, 13 + blind))) for i in range(26)]
            record = task.score(question, 0, values)
            assert record["extracted"] == ANSWERS[seen] and record["score"] != record["blind_score"]
    with pytest.raises(EvalError, match="not one of generate, choice"):
        build_task("easy_vqa", TaskOptions(form="letters"))
