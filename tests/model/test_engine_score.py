"""Judging given continuations: what the training forward says, the same bits alone and among others."""

from dataclasses import replace

import pytest
import torch
from engine_cases import (
    TOKENIZER,
    all_returned,
    drain,
    drawn,
    engine_of,
    joined,
    model,
    pictured,
    tokens,
    trained_logits,
)

from earlyfusion.model.engine.requests import (
    TOP,
    Request,
    RequestError,
    SamplingParams,
    ScoreRequest,
    TokenPrompt,
)

FORMS = pytest.mark.usefixtures("way")
TOLERANCE = 1.3e-5  # nats; fp32, two orders of summation


def engine(**options):
    return engine_of(model(), **{"max_slots": 4, "prefix_cache": 2, **options})


def requests() -> list[ScoreRequest]:
    """Letters after prompts with a common beginning, longer answers, pictures, and an empty continuation."""
    letters = [[20], [21], [22]]
    asked = [ScoreRequest(joined(tokens(41), tokens(n, seed=1)), letters, shared=40) for n in (1, 9, 30, 17)]
    longer = [[30, 31, 32], [33], [], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49], [50, 51], [52, 53], [54, 55]]
    return [*asked, ScoreRequest(tokens(7), longer), ScoreRequest(pictured(3), longer[:2])]


@FORMS
def test_scores_are_those_of_the_training_forward():
    serving = engine()
    asked = requests()
    result = serving.score(asked, states=True, banned_ids=[20])
    for request, scores in zip(asked, result):
        for ids, score in zip(request.continuations, scores):
            assert len(score.logprobs) == len(score.likeliest) == len(ids)
            if not ids:
                assert score.greedy and score.states is None
                continue
            logits = trained_logits(serving.model, request.prompt, list(ids))
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(score.logprobs), expected, rtol=0, atol=TOLERANCE)
            best = logits.index_fill(1, torch.tensor([20]), float("-inf")).argmax(-1)
            assert score.likeliest == (best == torch.tensor(ids)).tolist()
            with torch.no_grad():
                again = serving.model.logits(score.states)
            torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    serving.prefix.clear()
    all_returned(serving)


@FORMS
def test_alone_and_among_others_the_bits_are_the_same():
    together = engine().score(requests())
    for request, scores in zip(requests(), together):
        (alone,) = engine(max_slots=7).score([request])
        assert [score.logprobs for score in alone] == [score.logprobs for score in scores]
        assert [score.likeliest for score in alone] == [score.likeliest for score in scores]


@FORMS
def test_the_likeliest_beside_each_token_are_those_of_the_training_forward():
    """For who asks; others of the same batch get none, and the same tokens as without."""
    asking = [drawn(9, seed=n, top_logprobs=count) for n, count in enumerate((3, 0, TOP))]
    given = [Request(f"r{n}", tokens(5 + n), params) for n, params in enumerate(asking)]
    serving = engine()
    for request in given:
        serving.submit(request)
    told = {request.id: [] for request in given}
    for event in drain(serving):
        told[event.request_id] += event.tokens
    for request, params in zip(given, asking):
        ids = [token.id for token in told[request.id]]
        logits = trained_logits(serving.model, request.prompt, ids).log_softmax(-1)
        expected = logits.topk(params.top_logprobs)
        found = torch.tensor([token.top for token in told[request.id]]).reshape(9, params.top_logprobs, 2)
        torch.testing.assert_close(found[..., 1], expected.values, rtol=0, atol=TOLERANCE)
        assert (found[..., 0] == expected.indices).float().mean().nan_to_num(1) > 0.9  # but for near ties
    plain = engine().generate([replace(given[0], params=drawn(9, seed=0))])
    assert plain[0].ids == [token.id for token in told["r0"]]
    with pytest.raises(RequestError, match="top_logprobs=1: 0 to 20, with logprobs"):
        SamplingParams(top_logprobs=1)


def test_what_is_shared_is_read_once():
    serving = engine()
    serving.score(requests()[:4])
    lengths = [42, 50, 71, 58]
    assert serving.stats()["read_tokens"] == sum(lengths) - 3 * 40
    before = serving.stats()["read_tokens"]
    (greedy,) = serving.generate([Request("g", tokens(7), SamplingParams(5, temperature=0, ignore_eos=True))])
    (scores,) = serving.score([ScoreRequest(tokens(7), [greedy.ids, [*greedy.ids[:-1], 5]])])
    assert scores[0].greedy and not scores[1].greedy
    assert serving.stats()["read_tokens"] - before == 7 + 7 + 4 + 4


def test_what_cannot_be_judged_is_refused_and_leaves_the_engine_idle():
    serving = engine(max_pages=8)
    with pytest.raises(RequestError, match="pages"):
        serving.score([ScoreRequest(tokens(65), [[3]])])
    with pytest.raises(RequestError, match=r"0\.\."):
        serving.score([ScoreRequest(tokens(5), [[TOKENIZER.vocab_size]])])
    with pytest.raises(RequestError, match="no tokens"):
        serving.score([ScoreRequest(TokenPrompt(torch.zeros(0, dtype=torch.long)), [[3]])])
    serving.submit(Request("r", tokens(5), SamplingParams(2)))
    with pytest.raises(RuntimeError, match="idle"):
        serving.score([])
    drain(serving)
