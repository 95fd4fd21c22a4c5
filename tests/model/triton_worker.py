"""Run as a process of its own with TRITON_INTERPRET=1: one training step of small models per kernel backend.

Triton looks at the variable when a kernel is defined, so it must stand before the first import; a test
process that already holds compiled kernels cannot turn it on. Writes {case: {backend: {"values", "gradients",
"called"}}} to the path given as argument.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from earlyfusion.kernels import dispatch
from tests.model.tiny import build, document, pack, tiny_fusion

HEADS = dict(num_heads=2, head_dim=8, short_conv_kernel_size=4, kda_layers=[1], full_attn_layers=[2])
BOUNDED = {**HEADS, "head_dim": 16, "gate_lower_bound": -5.0, "full_rank_output_gate": True}
BLOCK = dict(num_hidden_layers=2, linear_attn_config=HEADS, attn_res="block", attn_res_block_size=1)
# one KDA layer with a dense feed-forward and one MLA layer with
# experts: what an interpreted kernel costs counts
CASES: dict[str, dict[str, Any]] = {
    "block": dict(text=BLOCK, documents=(11, 1, 6), grids=[(1, 4, 6), (1, 2, 2)]),
    "one block, recomputed": dict(
        text={**BLOCK, "attn_res_block_size": 2, "mla_output_gate": True, "q_lora_rank": 10},
        documents=(5, 9),
        grids=[(2, 2, 4)],
        recompute=True,
    ),
    "full, bounded gates": dict(
        text={**BLOCK, "attn_res": "full", "linear_attn_config": BOUNDED},
        documents=(9,),
        grids=[(1, 2, 6)],
        seed=1,
    ),
    "plain stream, no image": dict(text={**BLOCK, "attn_res": "none"}, documents=(3, 8), grids=[], seed=1),
    "half precision": dict(text=BLOCK, documents=(11, 4), grids=[(1, 4, 6)], autocast=torch.float16),
}


def _watched(
    load: Callable[[str], Callable[..., Any]], called: set[str]
) -> Callable[[str], Callable[..., Any]]:
    """A loader of implementations that notes the path of each one when it is called."""

    def watched(path: str) -> Callable[..., Any]:
        function = load(path)

        def run(*arguments: Any, **named: Any) -> Any:
            called.add(path.removeprefix("earlyfusion.kernels."))
            return function(*arguments, **named)

        return run

    return watched


def step(case: dict[str, Any], backend: str) -> dict[str, Any]:
    """Loss, per-token losses and log-probabilities, all gradients, and the implementations that were
    called."""
    os.environ[dispatch.ENVIRONMENT] = backend
    called: set[str] = set()
    load, seed = dispatch.load, case.get("seed", 0)
    dispatch.load = _watched(load, called)  # type: ignore[assignment]
    config = tiny_fusion(**case["text"])
    model = build(config, seed).train()
    model.decoder.recompute = case.get("recompute", False)
    first, *others = case["documents"]
    batch = pack(
        [document(first, case["grids"], config, seed), *(document(n, [], config, n) for n in others)]
    )
    dtype = case.get("autocast")
    mixed = torch.autocast("cpu", dtype=dtype) if dtype is not None else contextlib.nullcontext()
    try:
        with mixed:
            out = model(batch)
            logp_T, entropy_T = model.token_log_probs(batch, temperature=0.7)
        (out.loss_sum - logp_T.square().sum()).backward()
    finally:
        dispatch.load = load
    values = {"loss": out.loss_sum.detach(), "nll": out.nll_T, "logp": logp_T.detach(), "entropy": entropy_T}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"values": values, "gradients": gradients, "called": called}


def main(path: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, case in CASES.items():
        results[name] = {backend: step(case, backend) for backend in ("naive", "triton")}
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1])
