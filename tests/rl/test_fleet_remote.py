"""Engines in processes of their own: the same answers, new weights, and a process that is killed with -9."""

import pytest
import torch
from engine_cases import by_sample, equal_bits

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import Request, RequestError, SamplingParams, TokenPrompt
from earlyfusion.model.hub.config import model_folder
from earlyfusion.model.hub.folder import load_model
from earlyfusion.rl.fleet.fleet import Fleet
from earlyfusion.rl.fleet.remote import EngineOptions, Process, Remote

FOLDER = model_folder("embedded:skills")


def asked(count: int) -> list[Request]:
    params = SamplingParams(48, temperature=1.0, n=4, logprobs=True, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)
    prompts = [TokenPrompt(torch.randint(20, 200, (12,), generator=generator)) for _ in range(count)]
    return [Request(f"r{i}", prompt, params, capture_routing=i == 0) for i, prompt in enumerate(prompts)]


pytestmark = pytest.mark.slow  # a process takes seconds to begin


@pytest.fixture(scope="module")
def fleet():
    options = EngineOptions(str(FOLDER), engine={"max_slots": 8, "page_size": 16, "max_pages": 128})
    fleet = Fleet([Remote(Process(options)) for _ in range(2)], "context", chunk=12)
    yield fleet
    fleet.close()


def test_other_processes_answer_take_weights_and_may_die(fleet):
    net, tokenizer = load_model(FOLDER), Tokenizer.load(FOLDER)
    torch.set_num_threads(1)
    ours = Engine(net, tokenizer, max_slots=64, page_size=16)
    base = by_sample(ours.generate(asked(8)))
    found = by_sample(fleet.generate(asked(8)))
    equal_bits(base, found)
    assert (found["r0", 0].routing == base["r0", 0].routing).all() and fleet.stats()["moves"] > 0

    # New weights: other answers, those of the trainer's own engine, and their version beside every token.
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.01)
    fleet.load_weights(net.state_dict(), 3)
    ours.load_weights(net.state_dict(), 3)
    newer = by_sample(ours.generate(asked(8)))
    found = by_sample(fleet.generate(asked(8)))
    equal_bits(newer, found)
    assert newer["r1", 0].ids != base["r1", 0].ids or newer["r1", 0].logprobs != base["r1", 0].logprobs
    assert {version for done in found.values() for version in done.versions} == {3}

    # A request that is taken out of its process in the middle.
    fleet.submit(asked(2)[1])
    for _ in range(5):
        fleet.step()
    handle = fleet.resume(fleet.pause("r1"))
    while fleet.has_work:
        fleet.step()
    equal_bits({("r1", i): newer["r1", i] for i in range(4)}, by_sample(handle.completions))

    # What an engine refuses is told, and costs no engine.
    fleet.submit(Request("empty", TokenPrompt(torch.zeros(0, dtype=torch.long))))
    with pytest.raises(RequestError, match="has no tokens"):
        for _ in range(100):
            fleet.step()
    assert not (fleet.lost or fleet.has_work or fleet.parts)

    # kill -9 while both write: what was there goes on in the other process.
    handles = [fleet.submit(request) for request in asked(8)]
    while not fleet.parts:
        fleet.step()
    fleet.instances[0].process.process.kill()
    while fleet.has_work:
        fleet.step()
    equal_bits(newer, by_sample(done for handle in handles for done in handle.completions))
    assert list(fleet.lost) == [0] and fleet.stats()["lost"] == 1

    # Another in its place, with the weights that come next; it writes what all would write.
    gone = fleet.instances[0]
    assert gone.next.told.poll(120)
    fleet.load_weights(net.state_dict(), 4)
    assert not fleet.lost and fleet.instances[0] is not gone
    assert [told.partition(" is ")[::2] for told in fleet.told][1:] == [("engine 0", "there again")]
    again = fleet.generate(asked(8))
    assert {done.versions[0] for done in again} == {4}
    assert [done.ids for done in again] == [done.ids for done in newer.values()]
    assert fleet.instances[0].process.process.is_alive()


def test_who_does_not_know_the_token_gets_nothing(monkeypatch):
    process = Process(EngineOptions(str(FOLDER), engine={"max_slots": 2, "max_pages": 16}))
    port, address = process.ready()
    monkeypatch.setattr(process, "ready", lambda: (port, address._replace(token="guessed")))
    with pytest.raises(OSError):
        Remote(process)
    process.close()


def test_an_engine_that_cannot_load_its_model_is_told(tmp_path):
    process = Process(EngineOptions(str(tmp_path)))
    with pytest.raises(OSError, match="did not load"):
        process.ready()
