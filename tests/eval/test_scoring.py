"""Scores of given answers agree with greedy decoding and with the loss; shared pictures change nothing."""

import pytest
import torch
from fusion_cases import generate_ids, tiny_config, tiny_model, tiny_tokenizer
from PIL import Image as PilImage

from earlyfusion.eval.scoring import Asked, score_answers
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.generate import Row
from earlyfusion.vision.patches import prepare_image

LIKELIHOOD = 2e-4  # fp32 sums of a few log-probabilities, packed against alone


@pytest.fixture(scope="module")
def exam():
    """A model and questions about three pictures of different sizes, with answers of one to three tokens."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(tokenizer)
    model = tiny_model(config, seed=1)
    torch.manual_seed(0)
    pictures, asked = {}, []
    for key, (height, width) in enumerate([(16, 32), (24, 24), (40, 16)]):
        image = PilImage.fromarray(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8).numpy())
        patches, grid = prepare_image(image, config.vision)
        pictures[key] = (patches, [grid])
        count = (grid[1] // 2) * (grid[2] // 2)
        for number in range(6):
            head = [
                tokenizer.bos_id,
                tokenizer.media_begin_id,
                *([tokenizer.media_pad_id] * count),
                tokenizer.media_end_id,
            ]
            ids = (*head, *torch.randint(11, 290, (5 + number,)).tolist())
            answer = tuple(torch.randint(11, 290, (1 + number % 3,)).tolist())
            asked.append(Asked(ids, answer, tuple(range(2, 2 + count)), key))
    asked.append(Asked((tokenizer.bos_id, 40, 41), (50, 51)))  # no picture at all
    return model, asked, pictures


def alone(model, question, pictures):
    """The likelihood by a pass over this question's whole document, through the model's own embedding."""
    ids = torch.tensor([*question.ids, *question.answer])
    patches, grids = pictures.get(question.picture, (torch.empty(0, 3, 8, 8, dtype=torch.uint8), []))
    row = Row(
        ids, Segments((len(ids),)), patches, grids, torch.tensor(question.media_positions, dtype=torch.long)
    )
    with torch.no_grad():
        logp = model.logits(model.hidden(row)).log_softmax(-1)
    at = torch.arange(len(question.ids) - 1, len(ids) - 1)
    return float(logp[at, torch.tensor(question.answer)].sum())


@pytest.mark.parametrize("tokens_per_batch", [1, 64, 10_000])
def test_likelihoods_equal_those_of_each_document_by_itself(exam, tokens_per_batch):
    model, asked, pictures = exam
    scores = score_answers(model, asked, pictures, tokens_per_batch=tokens_per_batch, patches_per_batch=20)
    for question, score in zip(asked, scores, strict=True):
        assert score.log_likelihood == pytest.approx(alone(model, question, pictures), abs=LIKELIHOOD)


def test_said_means_that_greedy_decoding_gives_the_answer(exam):
    model, asked, pictures = exam
    silent = [0, 1, 2]

    class Open:
        def __init__(self, question):
            self.ids, self.media_positions = (
                torch.tensor(question.ids),
                torch.tensor(question.media_positions).long(),
            )
            self.patches, self.grids = pictures.get(question.picture, (None, []))

    greedy = generate_ids(model, [Open(q) for q in asked], max_new_tokens=3, silent_ids=silent)
    right = [
        Asked(q.ids, tuple(g[: len(q.answer)]), q.media_positions, q.picture) for q, g in zip(asked, greedy)
    ]
    assert all(score.said for score in score_answers(model, right, pictures, silent_ids=silent))
    wrong = [Asked(q.ids, (*q.answer[:-1], q.answer[-1] + 1), q.media_positions, q.picture) for q in right]
    assert not any(score.said for score in score_answers(model, wrong, pictures, silent_ids=silent))


def test_candidates_are_compared_at_the_first_answer_token(exam):
    model, asked, pictures = exam
    candidates = [60, 100, 140, 180, 220]
    scores = score_answers(model, asked, pictures, candidates=candidates)
    for question, score in zip(asked, scores):
        each = [
            alone(model, Asked(question.ids, (c,), question.media_positions, question.picture), pictures)
            for c in candidates
        ]
        assert score.best == max(range(5), key=each.__getitem__)
    assert len({score.best for score in scores}) > 1


def test_pictures_are_not_mixed_up(exam):
    """The same document about another picture of the same size scores differently."""
    model, asked, pictures = exam
    torch.manual_seed(1)
    patches, grids = pictures[0]
    both = {**pictures, "other": (torch.randint_like(patches, 0, 256), grids)}
    question = asked[0]
    first, second = score_answers(
        model, [question, Asked(question.ids, question.answer, question.media_positions, "other")], both
    )
    assert abs(first.log_likelihood - second.log_likelihood) > 1e-3
    with pytest.raises(KeyError):
        score_answers(model, [question], {})


def test_the_model_keeps_its_mode_and_gets_no_gradient(exam):
    model, asked, pictures = exam
    model.train()
    score_answers(model, asked[:2], pictures)
    assert model.training and all(p.grad is None for p in model.parameters())
    model.eval()
