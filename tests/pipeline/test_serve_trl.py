"""TRL's client of `vllm serve` on our endpoint: prompts as ids in, ids and their log-probabilities out."""

import httpx
import pytest
import torch
from serve_model import Server, write_model

from earlyfusion.kernels.segments import Segments
from earlyfusion.pipeline.load import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="module")
def server(folder):
    made = Server(folder, "--max-new-tokens 4000 --context 5000", key=None)
    yield made
    made.close()


def by_hand(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities of an answer by one forward pass."""
    decoder, ids = model.model.decoder, torch.tensor(prompt + answer)
    with torch.no_grad():
        hidden = decoder(decoder.embed_tokens(ids), Segments((len(ids),)))
        logits = model.model.logits(hidden)[len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(answer)), answer]


def test_ids_come_back_with_their_log_probabilities(server, folder):
    """What TRL's client posts, without TRL: two prompts, two answers each."""
    prompts = [[0, 9, 12, 30], [0, 41]]
    body = {"model": "model", "prompt": prompts, "n": 2, "max_tokens": 5, "logprobs": 0, "seed": 3}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body |= {"top_k": 0, "repetition_penalty": 1.0}
    choices = httpx.post(f"{server.url}/completions", json=body, timeout=60).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[i // 2] for i in range(4)]
    model = load(folder)
    for choice in choices:
        told = choice["logprobs"]
        assert told["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert told["top_logprobs"] == [{t: v} for t, v in zip(told["tokens"], told["token_logprobs"])]
        expected = by_hand(model, choice["prompt_token_ids"], choice["token_ids"])
        torch.testing.assert_close(torch.tensor(told["token_logprobs"]), expected, atol=1e-3, rtol=1e-3)
    refused = httpx.post(f"{server.url}/completions", json=body | {"repetition_penalty": 1.2}, timeout=60)
    assert refused.status_code == 400 and "repetition_penalty" in refused.text


def test_trl_generates_and_chats_with_it(server, folder, monkeypatch):
    pytest.importorskip("trl")
    from trl.generation import vllm_client

    # It asks for vLLM's package, which a client of another server has no use for.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_: True)
    client = vllm_client.VLLMClient(base_url=server.url.removesuffix("/v1"))
    prompts = [[0, 9, 12, 30], [0, 41]]
    found = client.generate(prompts, n=2, max_tokens=6, temperature=1.0)
    assert found["prompt_ids"] == prompts and len(found["completion_ids"]) == 4
    for i, (ids, values, named) in enumerate(
        zip(found["completion_ids"], found["logprobs"], found["logprob_token_ids"])
    ):
        assert [each[0] for each in named] == ids
        expected = by_hand(load(folder), prompts[i // 2], ids)
        torch.testing.assert_close(torch.tensor([v[0] for v in values]), expected, atol=1e-3, rtol=1e-3)
    told = client.chat([[{"role": "user", "content": "hello"}]], max_tokens=4, n=2)
    assert len(told["completion_ids"]) == 2 and told["prompt_ids"][0][0] == 0
