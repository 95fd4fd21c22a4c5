"""Run as a process of its own with TRITON_INTERPRET=1: the engine on the Triton decode kernels and on plain
torch.

Writes {case: {"torch": completions, "triton": completions, "moved": completions, "called": names}} to the
given path, where completions are {(request, sample): (ids, log-probabilities at temperature 1)} and "moved"
ones were begun on one backend and finished on the other.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the tests' own helpers, as pytest finds them

import torch
from engine_cases import SHAPE, TOKENIZER, drawn, model, tokens

from earlyfusion.kernels import dispatch
from earlyfusion.model import cache
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import PausedRequest, Request

SMALL = dict(SHAPE, hidden_size=16, intermediate_size=16, num_hidden_layers=2, kv_lora_rank=8)
HEADS = dict(num_heads=4, head_dim=8, short_conv_kernel_size=4, kda_layers=[1], full_attn_layers=[2])
BOUNDED = {**HEADS, "gate_lower_bound": -5.0, "full_rank_output_gate": True, "short_conv_kernel_size": 3}
CASES = {
    "softplus gate": dict(SMALL, linear_attn_config=HEADS, num_experts=0),
    "bounded gate, plain stream": dict(SMALL, linear_attn_config=BOUNDED, attn_res="none", num_experts=0),
}


def engine(net, backend: str) -> Engine:
    os.environ[dispatch.ENVIRONMENT] = backend
    return Engine(net, TOKENIZER, max_slots=3, page_size=8, prefill_chunk=8)


def requests() -> list[Request]:
    """Prompts shorter and longer than a chunk and the taps, a group, more than there are slots."""
    given = [Request(f"r{n}", tokens(n), drawn(4)) for n in (2, 11)]
    return [*given, Request("group", tokens(5), drawn(4, n=2))]


def facts(completions) -> dict:
    return {(c.request_id, c.index): (c.ids, c.logprobs1) for c in completions}


def moved(net) -> dict:
    """Begun by the kernels, taken out after some steps, finished by torch; and the other way round."""
    found = {}
    for first, second in (("triton", "torch"), ("torch", "triton")):
        here, given = engine(net, first), requests()[1:]
        for request in given:
            here.submit(request)
        for _ in range(3):
            here.step()
        parts = [here.pause(request.id).to_bytes() for request in given]
        there = engine(net, second)
        handles = [there.resume(PausedRequest.from_bytes(*part)) for part in parts]
        while there.has_work:
            there.step()
        found[first] = facts(c for handle in handles for c in handle.completions)
    return found


def main(path: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, shape in CASES.items():
        net, called = model(1, **shape), set()
        plain = facts(engine(net, "torch").generate(requests()))
        load, decode = dispatch.load, cache.decode

        def watched(where, load=load, called=called):
            called.add(where.removeprefix("earlyfusion.kernels."))
            return load(where)

        def watched_decode(*arguments, decode=decode, called=called, **named):
            called.add("kda.decode:decode")
            return decode(*arguments, **named)

        dispatch.load, cache.decode = watched, watched_decode
        kernels = facts(engine(net, "triton").generate(requests()))
        dispatch.load, cache.decode = load, decode
        results[name] = {
            "torch": plain,
            "triton": kernels,
            "moved": moved(net) if name == "softplus gate" else {},
            "called": called,
        }
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1])
