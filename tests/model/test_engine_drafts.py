"""Drafts of siblings: the automaton beside counting by hand, the same bits with and without drafts whatever
becomes of them, and that they stop where they do not pay."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from engine_cases import (
    SHAPES,
    all_returned,
    by_sample,
    drain,
    drawn,
    engine_of,
    equal_bits,
    joined,
    model,
    requests,
    tokens,
    trained_logits,
)
from test_engine_logits import MORE_SHAPES

from earlyfusion.kernels.cpu import program as build
from earlyfusion.model.engine import drafts as automaton
from earlyfusion.model.engine.drafts import Drafts, StepCost, SuffixAutomaton
from earlyfusion.model.engine.requests import Request, SamplingParams
from earlyfusion.model.layers import moe_layers
from earlyfusion.rl.fleet.bench import widen

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
EVERY = {**SHAPES, **MORE_SHAPES}


@pytest.mark.parametrize("seed", range(6))
def test_the_automaton_counts_what_follows_every_ending(seed, monkeypatch):
    """Several texts that grow in turn, as siblings do, over few letters, so that all of them repeat."""
    monkeypatch.setattr(automaton, "CHAIN", 1000)  # in a run only the longest endings are counted
    rng = random.Random(seed)
    texts: list[list[int]] = [[] for _ in range(4)]
    ends = [0] * 4
    text = SuffixAutomaton()
    for _ in range(160):
        which = rng.randrange(4)
        token = rng.randrange(2 + seed % 3)
        texts[which].append(token)
        ends[which] = text.extend(ends[which], token)

    occurrences: Counter[tuple[int, ...]] = Counter()
    for each in texts:
        for start in range(len(each)):
            for end in range(start + 1, len(each) + 1):
                occurrences[tuple(each[start:end])] += 1
    for each, end in zip(texts, ends):
        # The longest ending of the text that something follows somewhere.
        endings = [tuple(each[start:]) for start in range(len(each))]
        followed = [one for one in endings if any(occurrences[(*one, token)] for token in range(4))]
        state = text.known(end)
        assert text.longest[state] == max(map(len, followed), default=0)
        if state:
            ending = tuple(each[len(each) - text.longest[state] :])
            found = {token: text.count[after] for token, after in text.follows[state].items()}
            assert found == {t: occurrences[(*ending, t)] for t in range(4) if occurrences[(*ending, t)]}
    assert len(text.link) <= 2 * sum(map(len, texts))


class Guesses(Drafts):
    """Drafts right and wrong by the known continuation, whatever they cost."""

    def __init__(self, known, right: float, seed: int) -> None:
        super().__init__()
        self.known, self.share, self.rng = known, right, random.Random(seed)

    def propose(self, running):
        drafts = []
        for sample in running:
            ids = self.known[sample.parent.request.id, sample.index].ids
            draft = ids[len(sample.ids) : len(sample.ids) + self.rng.randrange(6)][: sample.left - 1]
            drafts.append([token if self.rng.random() < self.share else 13 for token in draft])
        self.kinds = [[0] * len(draft) for draft in drafts]
        return drafts if any(drafts) else None


def guessing(net, given, base, right: float, seed: int, **options):
    engine = engine_of(net, speculate=True, **options)
    assert engine.drafts is not None
    engine.drafts = Guesses({(done.request_id, done.index): done for done in base}, right, seed)
    return engine, engine.generate(given)


@needs_compiler
@pytest.mark.parametrize("shape", list(EVERY))
def test_drafts_change_no_bit(shape):
    """Ids, both log-probabilities and routing, greedy and drawn, of groups, for drafts that are mostly right,
    half and never; threads; a state taken back reads on as if nothing had been."""
    net = model(0, **EVERY[shape])
    for temperature, options in ((0.0, {}), (1.0, {"top_p": 0.8}), (1.4, {"banned_ids": (20, 21)})):
        params = drawn(40, temperature=temperature, n=3, **options)
        given = requests([5, 31, 64], params, capture_routing=bool(moe_layers(net)))
        base = engine_of(net, max_slots=9).generate(given)
        for right, seed, threads in ((0.95, 0, 1), (0.5, 1, 2), (0.0, 2, 3)):
            torch.set_num_threads(threads)
            try:
                engine, found = guessing(net, given, base, right, seed, max_slots=9)
            finally:
                torch.set_num_threads(1)
            equal_bits(by_sample(base), by_sample(found))
            stats = engine.stats()
            assert stats["drafted_tokens"] > 100 and stats["decoded_tokens"] == 3 * 3 * 39
            assert (stats["accepted_drafts"] > 0.7 * stats["drafted_tokens"]) == (right > 0.9)
            all_returned(engine)
            for one, other in zip(base, found):
                assert (one.routing is None) or (one.routing == other.routing).all()


@needs_compiler
def test_ends_states_and_pauses_are_those_without_drafts():
    """A stop id in a draft's way, a state left behind and gone on from, a request taken out in the middle."""
    net = model(1)
    params = SamplingParams(40, temperature=1.0, logprobs=True, stop_ids=(30, 40, 50, 60, 70), n=2, seed=3)
    given = [Request(f"r{i}", tokens(20 + i, 3), params, keep_state=True) for i in range(4)]
    base_engine = engine_of(net, prefix_cache=16)
    base = base_engine.generate(given)
    assert {done.finish_reason for done in base} == {"stop", "length"}
    engine, found = guessing(net, given, base, 0.7, 0, prefix_cache=16)
    equal_bits(by_sample(base), by_sample(found))

    # Another turn of the answer: what the prefix cache kept of both is the same state.
    longer = [Request("longer", joined(given[0].prompt, base[0].ids, [17, 18]), params)]
    engine.drafts = None
    first, second = base_engine.generate(longer), engine.generate(longer)
    assert first[0].cached_tokens == second[0].cached_tokens > 0
    equal_bits(by_sample(first), by_sample(second))

    engine, _ = guessing(net, [], base, 0.7, 1)
    handles = [engine.submit(request) for request in given]
    for _ in range(3):
        engine.step()
    paused = [engine.pause(request.id) for request in given]
    other = engine_of(net)
    handles = [other.resume(each) for each in paused]
    drain(other)
    equal_bits(by_sample(base), by_sample(done for handle in handles for done in handle.completions))


def of_one_group(prompt, params, count: int, name: str = "g"):
    """As `rl/fleet` asks: every answer a request, with the noise of their group."""
    return [Request(f"{name}/{i}", prompt, params, noise=name, numbers=(i,)) for i in range(count)]


@needs_compiler
@pytest.mark.parametrize("pausing", (False, True))
def test_an_answer_learns_from_those_of_its_group_that_began_before(pausing, monkeypatch):
    """Greedy answers to one prompt, one after another: the first says all of the others, also of one that
    goes on as another request. Of ended groups the oldest are forgotten."""
    net, prompt = model(3), tokens(30, 2)
    engine = engine_of(net, max_slots=1, speculate=True)
    engine.drafts.cost.share = lambda rows: 1e-3  # everything would pay
    monkeypatch.setattr("earlyfusion.model.engine.drafts.Worth.asks", lambda self: True)
    params = SamplingParams(40, temperature=0.0, ignore_eos=True)
    first, *others = of_one_group(prompt, params, 4)
    (said,) = engine.generate([first])
    before, steps = engine.stats(), engine.stats()["host_syncs"]
    if pausing:
        done = []
        for request in others:
            engine.submit(request)
            for _ in range(3):
                engine.step()
            handle = engine.resume(engine.pause(request.id))
            drain(engine)
            done += handle.completions
    else:
        done = engine.generate(others)
    assert all(each.ids == said.ids for each in done)
    drafted, accepted = (engine.stats()[k] - before[k] for k in ("drafted_tokens", "accepted_drafts"))
    # The first token comes with the prompt, and one of every step is the model's own.
    assert accepted == drafted and accepted >= 3 * 32
    assert engine.stats()["host_syncs"] - steps <= 3 * 8
    text = engine.drafts.groups["g"]
    # The end of the last one is read when somebody drafts again.
    assert sorted(read for _, read in text.known.values())[1:] == [40] * 3 and len(text.known) == 4

    # What is asked again is written anew, from its own beginning.
    steps = engine.stats()["host_syncs"]
    (again,) = engine.generate([others[0]])
    # The prompt with one token, then 39 at sixteen a step.
    assert again.ids == said.ids and engine.stats()["host_syncs"] - steps == 4

    monkeypatch.setattr("earlyfusion.model.engine.drafts.KEPT", 0)
    engine.generate(of_one_group(tokens(30, 4), params, 2, "another"))
    assert list(engine.drafts.groups) == ["another"]


@needs_compiler
def test_requests_with_stop_strings_are_left_alone():
    """A string may end inside of a draft, and the state would stand behind it."""
    net = model(0)
    params = drawn(30, temperature=0.0, stop=("zzz",), n=2)
    engine = engine_of(net, speculate=True)
    engine.drafts.cost.share = lambda rows: 1e-3  # everything would pay
    engine.generate(requests([20, 30], params))
    assert engine.stats()["drafted_tokens"] == 0


@needs_compiler
def test_what_is_drawn_with_drafts_follows_the_models_distribution():
    """The second of three tokens, where the likeliest is drafted: chi-square beside the exact
    probabilities."""
    net, prompt = model(2), tokens(12, 5)
    params = SamplingParams(3, temperature=0.03, n=8, ignore_eos=True)
    engine = engine_of(net, speculate=True)
    first = engine_of(net).generate([Request("q", prompt, SamplingParams(1, temperature=0.0))])[0].ids[0]
    logits_V = trained_logits(net, prompt, [first, first])[1]
    logits_V[engine.runner.banned] = float("-inf")

    engine.drafts.kinds = [[0]] * 8
    engine.drafts.propose = lambda running: [[int(logits_V.argmax())] * (one.left == 2) for one in running]
    seconds: Counter[int] = Counter()
    for number in range(150):
        for done in engine.generate([Request(f"q{number}", prompt, params)]):
            seconds[done.ids[1]] += done.ids[0] == first
    total = seconds.total()
    expected_V = (logits_V / params.temperature).softmax(-1) * total
    assert 0.1 < engine.stats()["accepted_drafts"] / 1200 < 0.9
    seen_V = torch.tensor([seconds[token] for token in range(len(expected_V))])
    # What is expected fewer than five times stands together.
    often = expected_V >= 5
    expected = torch.cat([expected_V[often], expected_V[~often].sum()[None]])
    seen = torch.cat([seen_V[often], seen_V[~often].sum()[None]])
    chi, free = float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1
    assert total > 200 and free >= 3
    # Wilson and Hilferty: about normal. Beyond 3.3 lies one in two thousand.
    normal = ((chi / free) ** (1 / 3) - 1 + 2 / (9 * free)) / (2 / (9 * free)) ** 0.5
    assert abs(normal) < 3.3


def test_the_cost_of_a_row_is_found_from_steps_of_several_sizes():
    cost = StepCost()
    for step in range(401):
        rows = 4 + step % 9
        cost.learn(rows, 0.010 + 0.002 * rows)
    for rows in (4, 8, 16):
        # Belief counts for a good part beside a hundred steps that are remembered.
        assert cost.share(rows) == pytest.approx(0.002 / (0.010 + 0.002 * rows), rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_go_on_only_where_they_pay(seed):
    """A machine whose pace drifts by half; drafts that cost a little more for every token, such that spare
    some, and such that begin to."""
    for first, then, least, most in ((1.03, 1.03, 0.001, 0.02), (0.9, 0.9, 0.8, 0.96), (1.2, 0.8, 0.5, 0.9)):
        drafts, rng, drafted = Drafts(), random.Random(seed), 0
        for step in range(40_000):
            with_drafts = drafts.worth[4].asks()
            drafted += with_drafts
            drift = 1 + 0.5 * np.sin(step / 300 + seed) + rng.gauss(0, 0.1)
            # The last change comes after a tenth of the steps.
            pace = first if step < 4_000 else then
            drafts.account(8, 8, 8, drift * (pace if with_drafts else 1.0))
        assert least <= drafted / 40_000 <= most


def test_wider_experts_say_the_same():
    net, prompt, ids = model(3), tokens(9), list(range(20, 30))
    small = trained_logits(net, prompt, ids)
    widen(net, 3)
    assert moe_layers(net)[0].experts.down_proj.shape[-1] == 3 * net.config.text.moe_intermediate_size
    torch.testing.assert_close(trained_logits(net, prompt, ids), small, rtol=0, atol=1e-5)
