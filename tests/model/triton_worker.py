"""Run as a process of its own with TRITON_INTERPRET=1: small models by the kernels of several backends.

Triton looks at the variable when a kernel is defined, so it must stand before the first import; a test
process that already holds compiled kernels cannot turn it on. Writes {"steps": ..., "answers": ...} to the
path given as argument: of one training step {case: {backend: {"values", "gradients", "called"}}}, of the
engine {case: {"torch", "triton", "moved", "called"}}, where answers are {(request, sample): (ids,
log-probabilities at temperature 1)} and "moved" ones were begun on one backend and finished on the other.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))  # the tests' own helpers, as pytest finds them

import torch
from engine_cases import SHAPE, TOKENIZER, drawn, model, tokens

from earlyfusion.kernels import dispatch
from earlyfusion.model import cache
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.requests import PausedRequest, Request
from tests.model.tiny import build, document, pack, tiny_fusion

HEADS = dict(num_heads=2, head_dim=8, short_conv_kernel_size=4, kda_layers=[1], full_attn_layers=[2])
BOUNDED = {**HEADS, "head_dim": 16, "gate_lower_bound": -5.0, "full_rank_output_gate": True}
BLOCK = dict(num_hidden_layers=2, linear_attn_config=HEADS, attn_res="block", attn_res_block_size=1)
# one KDA layer with a dense feed-forward and one MLA layer with
# experts: what an interpreted kernel costs counts
CASES: dict[str, dict[str, Any]] = {
    "block": dict(text=BLOCK, documents=(5, 1, 3), grids=[(1, 2, 4), (1, 2, 2)]),
    "one block, recomputed": dict(
        text={**BLOCK, "attn_res_block_size": 2, "mla_output_gate": True, "q_lora_rank": 10},
        documents=(5, 9),
        grids=[(2, 2, 4)],
        recompute="block",
    ),
    "full, bounded gates": dict(
        text={**BLOCK, "attn_res": "full", "linear_attn_config": BOUNDED},
        documents=(9,),
        grids=[(1, 2, 6)],
        seed=1,
    ),
    "plain stream, no image": dict(text={**BLOCK, "attn_res": "none"}, documents=(3, 8), grids=[], seed=1),
    "half precision": dict(text=BLOCK, documents=(5, 4), grids=[(1, 2, 4)], autocast=torch.float16),
}


# The engine's: one layer of each kind without experts.
SMALL = dict(SHAPE, hidden_size=16, intermediate_size=16, num_hidden_layers=2, kv_lora_rank=8, num_experts=0)
FOUR = {**HEADS, "num_heads": 4}
SHORT = {**BOUNDED, "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 3}
ENGINE_CASES = {
    "softplus gate": dict(SMALL, linear_attn_config=FOUR),
    "bounded gate, plain stream": dict(SMALL, linear_attn_config=SHORT, attn_res="none"),
}


@contextlib.contextmanager
def backend_of(name: str) -> Iterator[set[str]]:
    """Kernels of one backend; the implementations that are called."""
    called: set[str] = set()

    def noted(path: str, function: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            called.add(path.removeprefix("earlyfusion.kernels."))
            return function(*arguments, **named)

        return run

    load = dispatch.load
    watched = mock.patch.object(dispatch, "load", lambda path: noted(path, load(path)))
    decoding = mock.patch.object(cache, "decode", noted("kda.decode:decode", cache.decode))
    with watched, decoding, mock.patch.dict(os.environ, {dispatch.ENVIRONMENT: name}):
        yield called


def step(case: dict[str, Any], backend: str) -> dict[str, Any]:
    """Loss, per-token losses and log-probabilities, and all gradients."""
    config, seed = tiny_fusion(**case["text"]), case.get("seed", 0)
    net = build(config, seed).train()
    net.recompute(case.get("recompute", "no"))
    first, *others = case["documents"]
    documents = [document(first, case["grids"], config, seed)]
    documents += [document(n, [], config, n) for n in others]
    batch, dtype = pack(documents), case.get("autocast")
    with backend_of(backend) as called:
        with torch.autocast("cpu", dtype=dtype) if dtype is not None else contextlib.nullcontext():
            out = net(batch)
            logp_T, entropy_T = net.token_log_probs(batch, temperature=0.7)
        (out.loss_sum - logp_T.square().sum()).backward()
    values = {"loss": out.loss_sum.detach(), "nll": out.nll_T, "logp": logp_T.detach(), "entropy": entropy_T}
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {"values": values, "gradients": gradients, "called": called}


def answers(net: Any, first: str, second: str | None = None) -> dict[str, Any]:
    """Prompts shorter and longer than a chunk and the taps, a group, more than there are slots; with a second
    backend taken out after some steps and finished there."""
    given = [Request(f"r{n}", tokens(n), drawn(4)) for n in (2, 11)]
    given.append(Request("group", tokens(5), drawn(4, n=2)))
    options: dict[str, Any] = dict(max_slots=3, page_size=8, prefill_chunk=8)
    with backend_of(first) as called:
        engine = Engine(net, TOKENIZER, **options)
        if second is None:
            done = engine.generate(given)
        else:
            for request in given[1:]:
                engine.submit(request)
            for _ in range(3):
                engine.step()
            parts = [engine.pause(request.id).to_bytes() for request in given[1:]]
    if second is not None:
        with backend_of(second):
            engine = Engine(net, TOKENIZER, **options)
            handles = [engine.resume(PausedRequest.from_bytes(*part)) for part in parts]
            while engine.has_work:
                engine.step()
        done = [completion for handle in handles for completion in handle.completions]
    return {"called": called, "said": {(c.request_id, c.index): (c.ids, c.logprobs1) for c in done}}


def main(path: str) -> None:
    torch.set_num_threads(1)
    steps: dict[str, Any] = {}
    served: dict[str, Any] = {}
    for name, case in CASES.items():
        steps[name] = {backend: step(case, backend) for backend in ("naive", "triton")}
    for name, shape in ENGINE_CASES.items():
        net = model(1, **shape)
        served[name] = {backend: answers(net, backend) for backend in ("torch", "triton")}
        if name == "softplus gate":
            served[name]["to torch"] = answers(net, "triton", "torch")
            served[name]["to triton"] = answers(net, "torch", "triton")
    torch.save({"steps": steps, "answers": served}, path)


if __name__ == "__main__":
    main(sys.argv[1])
