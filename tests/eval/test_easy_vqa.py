"""easy-VQA: the official questions, put as in training, judged as greedy decoding would; the controls are
blind."""

from collections import Counter

import easy_vqa as package
import pytest
import torch
from fusion_cases import generate_ids, tiny_config, tiny_model, tiny_tokenizer

from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Sample, Text, answer_text, question_text
from earlyfusion.data.sources.base import SourceConfig, build_source
from earlyfusion.data.sources.easy_vqa import load_split, picture_of
from earlyfusion.data.vocabulary import train_bpe
from earlyfusion.eval.benchmarks import easy_vqa_probe as easy_vqa
from earlyfusion.eval.benchmarks.easy_vqa_probe import (
    ANSWERS,
    _Exam,
    evaluate_easy_vqa,
    majority_answers,
    questions_of,
)
from earlyfusion.eval.scoring import Score
from earlyfusion.model.generate import pack_prompts


@pytest.fixture(scope="module")
def tokenizer():
    """Answers are single tokens that all begin differently."""
    tokenizer = train_bpe(
        [f"{question_text(q)}{answer_text(a)}" for p in load_split("train") for q, a in p.questions], 355
    )
    assert len({tokenizer.encode(answer_text(a)) for a in ANSWERS}) == 13
    return tokenizer


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tiny_config(tokenizer))


def test_all_official_questions_are_asked():
    texts, answers, pictures = package.get_test_questions()
    asked = questions_of("test")
    assert len(asked) == 9673
    assert Counter((q.text, q.answer, q.picture) for q in asked) == Counter(zip(texts, answers, pictures))
    assert set(ANSWERS) == set(package.get_answers())
    kinds = Counter(q.kind for q in asked)
    assert kinds == {"yes/no": 7136, "shape": 1257, "colour": 1280}


def test_a_limit_spreads_over_the_whole_split():
    some = questions_of("test", 200)
    assert len(some) == len(set(some)) == 200
    assert len({q.picture for q in some}) > 180 and {q.kind for q in some} == {"yes/no", "shape", "colour"}
    assert questions_of("test", 10**6) == questions_of("test")
    with pytest.raises(ValueError, match="limit=0"):
        questions_of("test", 0)


def test_majority_answers_are_those_of_the_training_questions():
    texts, answers, _ = package.get_train_questions()
    counts = Counter(zip(texts, answers))
    found = majority_answers()
    assert set(found) == set(texts)
    for question, answer in found.items():
        assert counts[question, answer] == max(counts[question, other] for other in ANSWERS)


def test_questions_are_put_as_in_training(tokenizer, model):
    """The exam's document and answer are the training document of that picture with this one question, cut in
    two."""
    source = build_source(SourceConfig(name="vqa", kind="easy_vqa"))
    for index in (0, 500, 999):
        sample = source.heldout(index)
        whole = encode(sample, tokenizer, model.config.vision)
        picture = load_split("test")[index]
        question = next(
            easy_vqa.Question(picture.index, q, a)
            for q, a in picture.questions
            if [question_text(q), answer_text(a)] == [s.text for s in sample.segments[1:]]
        )
        asked = _Exam(model, tokenizer, "test", [question], 8192)._document(question, "seen")
        assert [*asked.ids, *asked.answer, tokenizer.eos_id] == whole.ids.tolist()
        assert list(asked.media_positions) == whole.media_positions.tolist()


def slow_answers(model, tokenizer, questions):
    """Greedy answers, one question after the other, by the real generation path."""
    found = []
    pictures = {entry.index: entry for entry in load_split("test")}
    for q in questions:
        sample = Sample([picture_of(pictures[q.picture]), Text(question_text(q.text))], "test", "0")
        prompt = encode(sample, tokenizer, model.config.vision, eos=False)
        silent = [
            tokenizer.bos_id,
            tokenizer.pad_id,
            tokenizer.media_begin_id,
            tokenizer.media_content_id,
            tokenizer.media_end_id,
        ]
        count = len(tokenizer.encode(answer_text(q.answer)))
        found.append(generate_ids(model, [prompt], max_new_tokens=count, silent_ids=silent)[0])
    return found


def test_accuracy_is_that_of_greedy_decoding_one_by_one(tokenizer, model):
    """Answers are set to what the model says for half of the questions, so about half are right."""
    questions = questions_of("test", 24)
    said = slow_answers(model, tokenizer, questions)
    exam = _Exam(model, tokenizer, "test", questions, 300)
    correct = []
    for index, (question, ids) in enumerate(zip(questions, said)):
        place = ANSWERS.index(question.answer)
        exam.answer_ids[place] = tuple(ids) if index % 2 else exam.answer_ids[place]
        (right,) = [s.said for s in exam._score([question], "seen")]
        assert right == (tuple(ids) == exam.answer_ids[place])
        correct.append(right)
    assert 12 <= sum(correct) < 24


def test_blind_answers_depend_on_the_question_alone(tokenizer, model, monkeypatch):
    asked = []
    real = easy_vqa.score_answers
    monkeypatch.setattr(
        easy_vqa, "score_answers", lambda m, a, p, **o: asked.append((a, p)) or real(m, a, p, **o)
    )
    questions = questions_of("test", 600)
    exam = _Exam(model, tokenizer, "test", questions, 8192)
    exam.said("grey")
    exam.said("removed")
    (grey, pictures), (removed, none) = asked
    assert len(grey) == len(removed) == len({(q.text, q.answer) for q in questions}) < 400
    assert len(pictures) == 1 and not none
    ((patches, _),) = pictures.values()
    assert len(patches.unique()) == 1 and 0 < int(patches.unique()) < 255  # one grey, and no other colour
    assert all(tokenizer.media_pad_id not in document.ids for document in removed)


def test_a_seer_scores_one_and_its_blind_control_does_not(tokenizer, model, monkeypatch):
    """Scoring replaced by one that is right exactly when it is shown a picture that is not uniform."""

    def seer(_, asked, pictures, candidates=(), **options):
        visible = {key: len(patches.unique()) > 1 for key, (patches, _) in pictures.items()}
        first = [a.answer[0] for a in asked]
        return [
            Score(
                visible.get(a.picture, False), 0.0, list(candidates).index(f) if visible.get(a.picture) else 0
            )
            for a, f in zip(asked, first)
        ]

    monkeypatch.setattr(easy_vqa, "score_answers", seer)
    result = evaluate_easy_vqa(model, tokenizer, limit=500, controls=("grey", "removed"))
    assert (result.accuracy, result.accuracy_of_13, result.blind_accuracy, result.removed_accuracy) == (
        1.0,
        1.0,
        0.0,
        0.0,
    )
    # 0.669 on the whole split: one standard error of 500 questions is 0.021
    assert result.majority_accuracy == pytest.approx(0.669, abs=0.065)
    assert sum(row["questions"] for row in result.by_kind.values()) == result.questions == 500
    assert result.questions_total == 9673
    for row in result.by_kind.values():
        assert row["accuracy"] == 1.0 and row["blind_accuracy"] == 0.0
    assert set(result.to_dict()) >= {
        "accuracy",
        "blind_accuracy",
        "majority_accuracy",
        "by_kind",
        "questions",
        "split",
    }


@pytest.mark.parametrize("merges", [0, 60])
def test_choice_among_the_answers_is_by_likelihood_when_they_begin_alike(merges):
    """Without merges all 13 answers begin with the byte of a space; then whole answers are compared."""
    tokenizer = tiny_tokenizer(267 + merges)
    model = tiny_model(tiny_config(tokenizer), seed=3)
    questions = questions_of("test", 6)
    exam = _Exam(model, tokenizer, "test", questions, 8192)
    assert not exam.distinct_starts
    chosen = exam.chosen_right()
    pictures = {entry.index: entry for entry in load_split("test")}
    for question, right in zip(questions, chosen, strict=True):
        likelihoods = []
        for answer in ANSWERS:
            segments = [
                picture_of(pictures[question.picture]),
                Text(question_text(question.text)),
                Text(answer_text(answer)),
            ]
            document = encode(Sample(segments, "test", "0"), tokenizer, model.config.vision, eos=False)
            count = len(tokenizer.encode(answer_text(answer)))
            with torch.no_grad():
                row = pack_prompts(model, [document])
                logp = model.logits(model.hidden(row)).log_softmax(-1)[-count - 1 : -1]
            likelihoods.append(float(logp.gather(1, document.ids[-count:, None]).sum()))
        assert right == (ANSWERS[max(range(13), key=likelihoods.__getitem__)] == question.answer)


def test_unknown_controls_are_named(tokenizer, model):
    with pytest.raises(ValueError, match=r"'gray'.*grey, removed"):
        evaluate_easy_vqa(model, tokenizer, controls=("gray",))
