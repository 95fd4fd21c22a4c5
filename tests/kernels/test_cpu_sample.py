"""Tokens chosen by sample.cpp are those of the sampler's torch operations, which say what is meant."""

import pytest
import torch
from cases import refused

from earlyfusion.kernels.cpu import program as build
from earlyfusion.kernels.cpu.program import sample
from earlyfusion.model.engine.requests import Controls, Needs, choose

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
# Fp32 log-probabilities of some thousand tokens.
ROUNDING = 3e-6


def drawn_case(seed, rows, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=generator)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    # Many equals.
    logits[:, ::3] = logits[:, ::3].round()
    temperature = torch.where(draw(rows) < 0.2, 0.0, 0.3 + 1.5 * draw(rows))
    top_p = torch.where(draw(rows) < 0.4, 1.0, 0.05 + 0.9 * draw(rows))
    min_p = torch.where(draw(rows) < 0.6, 0.0, 0.3 * draw(rows))
    keys = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator)
    return logits, keys, torch.randint(0, 100_000, (rows,), generator=generator), temperature, top_p, min_p


def by_torch(monkeypatch, logits, keys, positions, temperature, top_p, min_p, banned, drawn, logprobs):
    monkeypatch.setenv("EF_KERNELS", "torch")
    needs = Needs(drawn, bool((top_p < 1).any()), bool((min_p > 0).any()), logprobs)
    return choose(logits.clone(), Controls(keys, positions, temperature, top_p, min_p, needs), banned)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 3), (200, 37), (64, 2051), (5, 40_000)])
@pytest.mark.parametrize("drawn", [True, False])
def test_it_chooses_what_the_definition_chooses(rows, vocabulary, drawn, seed, monkeypatch):
    logits, *controls = drawn_case(seed, rows, vocabulary)
    # Ids for all rows, or a mask for each: grammars need the second.
    banned = torch.tensor([0, vocabulary - 1]) if seed % 2 else torch.rand(rows, vocabulary) < 0.3
    if banned.dtype == torch.bool:
        banned[:, 1] = False
    before = logits.clone()
    got = sample(logits, *controls, banned, drawn=drawn, logprobs=True)
    assert torch.equal(logits, before)
    expected = by_torch(monkeypatch, logits, *controls, banned, drawn, True)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1:], expected[1:], atol=ROUNDING * vocabulary**0.25, rtol=1e-6)
    monkeypatch.delenv("EF_KERNELS")
    without = sample(logits, *controls, banned, drawn=drawn, logprobs=False)
    assert torch.equal(without[0], got[0]) and without[1:].isnan().all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_its_bits_in_any_batch(threads):
    logits, *controls = drawn_case(7, 50, 301)
    banned = torch.tensor([5])
    whole = sample(logits, *controls, banned, drawn=True, logprobs=True)
    torch.set_num_threads(threads)
    try:
        for first, end in [(0, 1), (3, 17), (49, 50), (0, 50)]:
            part = [tensor[first:end] for tensor in (logits, *controls)]
            assert torch.equal(sample(*part, banned, drawn=True, logprobs=True), whole[:, first:end])
    finally:
        torch.set_num_threads(1)


def test_an_id_outside_the_vocabulary_is_not_written_outside_the_row():
    logits, *controls = drawn_case(0, 4, 9)
    run = lambda banned, logits=logits: sample(logits, *controls, banned, drawn=False, logprobs=True)
    cases = {
        "logits_BV is torch.float64": lambda: run(torch.tensor([0]), logits.double()),
        "keys_B is": lambda: run(torch.tensor([0]), logits[:3]),
        r"banned_BV is \(3, 9\); .* B = 4, V = 9": lambda: run(torch.zeros(3, 9, dtype=torch.bool)),
    }
    for stray in (9, 10**9, -1, -(10**6)):
        named = rf"banned: expected ids \[N\] in 0\.\.8, got \(2,\) from .*{stray}"
        cases[named] = lambda stray=stray: run(torch.tensor([3, stray]))
    refused(cases)
