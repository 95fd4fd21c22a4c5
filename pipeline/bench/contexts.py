"""Part 2 of `earlyfusion bench engine`: decoding at long contexts, the hybrid against the same model with MLA
everywhere.

The comparison of Kimi Linear's own table (arXiv 2510.26692, figure 1 and section 5.6): time per output token
over context length, at equal batch and with the memory that the hybrid saves spent on a larger batch. The
memory is filled with random states and latents: a step's time does not depend on what they hold.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from earlyfusion.model.cache import KdaSlots
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.sampler import Needs
from earlyfusion.model.fusion import NativeFusion
from earlyfusion.pipeline.bench.peer import our_model
from earlyfusion.pipeline.bench.record import Result
from earlyfusion.pipeline.bench.timing import default_device, now

PAGE = 64
MOST_BATCH = 16
"""Largest batch for the memory saved."""


def model_pair(shape: dict[str, Any], dtype: torch.dtype) -> list[NativeFusion]:
    """The model of a shape, and the same with MLA in every layer."""
    linear = {**shape["linear_attn_config"], "kda_layers": [], "full_attn_layers": None}
    full = {**shape, "linear_attn_config": linear}
    return [our_model(each, default_device(), dtype, drawn_there=True) for each in (shape, full)]


def step_seconds(model: NativeFusion, context: int, batch: int, steps: int) -> tuple[float, int]:
    """Median seconds of a decode step of `batch` sequences with `context` tokens each, and the bytes that one
    sequence holds: its slot, and its pages in every MLA layer.

    Every sequence has pages of its own, in shuffled order.
    """
    pages = context // PAGE + 1
    engine = Engine(model, None, max_slots=batch, max_pages=pages * batch, page_size=PAGE)
    runner = engine.runner

    # Fill the memory as if the sequences had been read.
    generator = torch.Generator(device=runner.device).manual_seed(0)
    held = 0
    for layer in engine.pools.layers:
        if isinstance(layer, KdaSlots):
            tensors, share = list(layer.tensors()), 1
        else:
            tensors, share = [layer.latents_XR], context
        for tensor in tensors:
            tensor.normal_(0.0, 0.1, generator=generator)
            held += share * tensor[0].nbytes
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
    return statistics.median(seconds[1:]), held


def measure_context(models: Sequence[NativeFusion], context: int, steps: int) -> Result:
    """Of the pair: seconds per step and token, memory, and the batch of the hybrid that fits where one
    sequence of the all-MLA model does."""
    hybrid, full = models
    hybrid_s, hybrid_bytes = step_seconds(hybrid, context, 1, steps)
    full_s, full_bytes = step_seconds(full, context, 1, steps)

    # As many of the hybrid as fit where one of the other does.
    # Beyond this the step is no longer bound by memory.
    batch = max(1, min(MOST_BATCH, full_bytes // hybrid_bytes))
    token_s = step_seconds(hybrid, context, batch, steps)[0] / batch
    return {
        "hybrid_step_s": hybrid_s,
        "all_mla_step_s": full_s,
        "ratio_equal_batch": full_s / hybrid_s,
        "hybrid_bytes": hybrid_bytes,
        "all_mla_bytes": full_bytes,
        "larger_batch": batch,
        "hybrid_token_s": token_s,
        "ratio_equal_memory": full_s / token_s,
    }
