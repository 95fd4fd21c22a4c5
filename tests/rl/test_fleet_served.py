"""A server of the OpenAI kind as an engine of a fleet, here our own: its answers with their
log-probabilities, new weights from a folder, and what it does not take."""

import pytest
import torch
from serve_model import Server, write_model

from earlyfusion.data.tokenizer import Tokenizer
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.engine.requests import Request, RequestError, SamplingParams, TokenPrompt
from earlyfusion.model.hub.folder import load_model, save_model
from earlyfusion.rl.fleet.fleet import Fleet
from earlyfusion.rl.fleet.served import Served, ServedOptions

pytestmark = pytest.mark.slow  # a server takes seconds to begin


def log_probabilities(net, prompt, ids):
    """By one forward pass."""
    every = torch.tensor([*prompt, *ids])
    with torch.no_grad():
        hidden = net.decoder(net.decoder.embed_tokens(every), Segments((len(every),)))
        return net.logits(hidden)[len(prompt) - 1 : -1].log_softmax(-1)[range(len(ids)), ids].tolist()


def test_a_server_answers_in_parts_and_takes_weights(tmp_path):
    folder, weights = write_model(tmp_path / "model"), tmp_path / "shared" / "weights"
    weights.parent.mkdir()
    net, tokenizer = load_model(folder, dtype=torch.float32), Tokenizer.load(folder)
    server = Server(folder, f"--weights-from {weights.parent}", key=None)
    try:
        options = ServedOptions(folder, weights, slots=8, context=256)
        fleet = Fleet([Served(server.url, options)], "context", chunk=7)
        params = SamplingParams(20, logprobs=True, n=3, ignore_eos=True)
        prompts = {f"r{i}": [0, 20 + i, 31, 40] for i in range(3)}
        requests = [Request(name, TokenPrompt(torch.tensor(ids)), params) for name, ids in prompts.items()]
        for version in (1, 2):
            with torch.no_grad():
                net.decoder.embed_tokens.weight.mul_(1.3)
            fleet.load_weights(net.state_dict(), version)
            found = fleet.generate(requests)
            # In three parts, the first of siblings together; a later one goes on from the earlier.
            assert len(found) == 9 and fleet.stats()["parts"] >= (3 + 18) * version
            for done in found:
                assert len(done.ids) == 20 and set(done.versions) == {version}
                assert done.text == tokenizer.decode(done.ids, skip_special=True)
                want = log_probabilities(net, prompts[done.request_id], done.ids)
                assert done.logprobs1 == pytest.approx(want, abs=1e-3)
            assert len({tuple(done.ids) for done in found}) == 9, "every answer has noise of its own"

        fleet.submit(requests[0])
        fleet.step()
        handle = fleet.resume(fleet.pause("r0"))
        fleet.end_sample("r0", 1)
        while fleet.has_work:
            fleet.step()
        assert [done.finish_reason for done in handle.completions] == ["length", "cancelled", "length"]

        warm = Request("warm", requests[0].prompt, SamplingParams(4, temperature=0.5, logprobs=True))
        fleet.submit(warm)
        with pytest.raises(RequestError, match="temperature 1"):
            fleet.step()
        # A folder elsewhere is not read; a model of another kind is told, and the server goes on.
        refused = server.post("./update_weights_from_disk", json={"model_path": str(folder)})
        assert refused.status_code == 403 and "--weights-from" in refused.text
        save_model(load_model("model/embedded/skills"), Tokenizer.load("model/embedded/skills"), weights)
        wrong = server.post("./update_weights_from_disk", json={"model_path": str(weights)})
        assert wrong.status_code == 400 and not wrong.json()["success"]
        assert len(fleet.generate(requests)) == 9
        server.close()
        # Nobody is left who could answer.
        fleet.instances[0].server.tries = 1
        with pytest.raises(Exception, match="no engine is left"):
            fleet.generate(requests)
        # Started again, it is asked again, with the weights that come next.
        server = Server(folder, f"--weights-from {weights.parent} --port {server.port}", key=None)
        handles = list(fleet.handles.values())
        fleet.load_weights(net.state_dict(), 3)
        while fleet.has_work:
            fleet.step()
        assert all(set(done.versions) == {3} for handle in handles for done in handle.completions)
        gone, there = (told.partition(":")[0] for told in fleet.told)
        assert (gone, there) == ("engine 0 is gone", "engine 0 is there again")
    finally:
        server.close()
