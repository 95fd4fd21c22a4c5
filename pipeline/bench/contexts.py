"""Part 2 of `earlyfusion bench engine`: decoding at long contexts, the hybrid against the same model with MLA
everywhere.

The comparison of Kimi Linear's own table (arXiv 2510.26692, figure 1 and section 5.6): time per output token
over context length, at equal batch and with the memory that the hybrid saves spent on a larger batch. The
memory is filled with random states and latents: a step's time does not depend on what they hold.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from earlyfusion.model.cache import KdaSlots
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.sampler import Needs
from earlyfusion.pipeline.bench.peer import our_model
from earlyfusion.pipeline.bench.record import Result
from earlyfusion.pipeline.bench.timing import default_device, now

PAGE = 64


def all_mla(shape: dict[str, Any]) -> dict[str, Any]:
    """The same shape with MLA in every layer."""
    linear = {**shape["linear_attn_config"], "kda_layers": [], "full_attn_layers": None}
    return {**shape, "linear_attn_config": linear}


def bytes_per_sequence(engine: Engine, context: int) -> int:
    """Memory that one sequence of `context` tokens holds: its slot, and its pages in every MLA layer."""
    total = 0
    for layer in engine.pools.layers:
        if isinstance(layer, KdaSlots):
            total += sum(tensor[0].nbytes for tensor in layer.tensors())
        else:
            total += context * layer.latents_XR[0].nbytes
    return total


def step_seconds(model: Any, context: int, batch: int, steps: int) -> tuple[float, int]:
    """Median seconds of a decode step of `batch` sequences with `context` tokens each, and bytes per
    sequence.

    Every sequence has pages of its own, in shuffled order.
    """
    pages = context // PAGE + 1
    engine = Engine(model, None, max_slots=batch, max_pages=pages * batch, page_size=PAGE)
    runner = engine.runner

    # Fill the memory as if the sequences had been read.
    generator = torch.Generator(device=runner.device).manual_seed(0)
    for layer in engine.pools.layers:
        tensors = layer.tensors() if isinstance(layer, KdaSlots) else (layer.latents_XR,)
        for tensor in tensors:
            tensor.normal_(0.0, 0.1, generator=generator)
    runner.length_S.fill_(context)
    runner.length_S[0] = 0
    shuffled = torch.randperm(pages * batch, generator=generator, device=runner.device) + 1
    runner.table_SP[1:, :pages] = shuffled.view(batch, pages)
    runner.last_S.fill_(7)

    # A step as the runner takes it: slots filled up to a bucket, slot 0 is a dummy.
    slots = torch.arange(1, batch + 1, device=runner.device)
    slots = torch.cat([slots, slots.new_zeros(runner.bucket(batch) - batch)])
    needs = Needs(drawn=True, top_p=False, min_p=False, logprobs=False)
    seconds = []
    with torch.no_grad():
        for _ in range(steps + 1):
            start = now()
            if runner.graphs is not None:
                runner.graphs.run(slots, context + 1, needs)
            else:
                runner.decode_step(slots, context + 1, needs, runner.banned, batch)
            seconds.append(now() - start)
            runner.length_S[1:] = context
    return statistics.median(seconds[1:]), bytes_per_sequence(engine, context)


def measure_contexts(
    shape: dict[str, Any],
    contexts: list[int],
    steps: int,
    seed: int,
    most_batch: int,
    dtype: torch.dtype = torch.float32,
) -> list[Result]:
    """One record per context: seconds per step and token, memory, and the batch that fits where one sequence
    of the all-MLA model does."""
    device = default_device()
    hybrid, full = (
        our_model(each, seed, device, dtype, drawn_there=True) for each in (shape, all_mla(shape))
    )

    # One sequence each, then as many of the hybrid as fit where one of the other does.
    records = []
    for context in contexts:
        hybrid_s, hybrid_bytes = step_seconds(hybrid, context, 1, steps)
        full_s, full_bytes = step_seconds(full, context, 1, steps)
        batch = max(1, min(most_batch, full_bytes // hybrid_bytes))
        larger_s = step_seconds(hybrid, context, batch, steps)[0] if batch > 1 else hybrid_s
        records.append(
            {
                "context": context,
                "batch": 1,
                "hybrid_step_s": hybrid_s,
                "all_mla_step_s": full_s,
                "ratio_equal_batch": full_s / hybrid_s,
                "hybrid_bytes": hybrid_bytes,
                "all_mla_bytes": full_bytes,
                "larger_batch": batch,
                "hybrid_token_s": larger_s / batch,
                "all_mla_token_s": full_s,
                "ratio_equal_memory": full_s / (larger_s / batch),
            }
        )
    return records
