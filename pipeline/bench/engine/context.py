"""Part 2 of `earlyfusion bench engine`: decoding at long contexts, the hybrid against the same model with MLA
everywhere.

The comparison of Kimi Linear's own table (arXiv 2510.26692, figure 1 and section 5.6): time per output token
over context length, at equal batch and with the memory that the hybrid saves spent on a larger batch. The
memory is filled with random states and latents: a step's time does not depend on what they hold.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rich.table import Table

from earlyfusion.model.engine.cache import KdaSlots
from earlyfusion.model.engine.engine import Engine
from earlyfusion.model.engine.sampler import Needs
from earlyfusion.pipeline.bench.engine.peer import our_model

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
            total += sum(tensor[0].numel() * tensor.element_size() for tensor in layer.tensors())
        else:
            total += context * layer.latents_XR.shape[1] * layer.latents_XR.element_size()
    return total


def step_seconds(model: Any, context: int, batch: int, steps: int) -> tuple[float, int]:
    """Median seconds of a decode step of `batch` sequences with `context` tokens each, and bytes per
    sequence.

    Every sequence has pages of its own, in shuffled order.
    """
    pages = context // PAGE + 1
    engine = Engine(model, None, max_slots=batch, max_pages=pages * batch, page_size=PAGE)
    generator = torch.Generator(device=engine.runner.device).manual_seed(0)
    for layer in engine.pools.layers:
        tensors = layer.tensors() if isinstance(layer, KdaSlots) else (layer.latents_XR,)
        for tensor in tensors:
            tensor.normal_(0.0, 0.1, generator=generator)
    runner = engine.runner
    runner.length_S.fill_(context)
    shuffled = torch.randperm(pages * batch, generator=generator, device=runner.device) + 1
    runner.table_SP[1:, :pages] = shuffled.view(batch, pages)
    runner.last_S.fill_(7)
    slots = torch.arange(1, batch + 1, device=runner.device)
    slots = torch.cat([slots, slots.new_zeros(runner.bucket(batch) - batch)])
    runner.length_S[0] = 0
    needs = Needs(drawn=True, top_p=False, min_p=False, logprobs=False)
    seconds = []
    with torch.no_grad():
        for index in range(steps + 1):
            _wait()
            start = time.perf_counter()
            if runner.graphs is not None:
                runner.graphs.run(slots, context + 1, needs)
            else:
                runner.decode_step(slots, context + 1, needs, runner.banned, batch)
            _wait()
            if index:
                seconds.append(time.perf_counter() - start)
            runner.length_S[1:] = context
    return statistics.median(seconds), bytes_per_sequence(engine, context)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_contexts(
    shape: dict[str, Any],
    contexts: list[int],
    steps: int,
    seed: int,
    most_batch: int,
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, Any]]:
    """One record per context: seconds per step and token, memory, and the batch that fits where all-MLA holds
    `base`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hybrid, full = (
        our_model(each, seed, device, dtype, drawn_there=True) for each in (shape, all_mla(shape))
    )
    base, records = 1, []
    for context in contexts:
        hybrid_s, hybrid_bytes = step_seconds(hybrid, context, base, steps)
        full_s, full_bytes = step_seconds(full, context, base, steps)
        batch = max(base, min(most_batch, base * full_bytes // hybrid_bytes))
        larger_s, _ = step_seconds(hybrid, context, batch, steps) if batch > base else (hybrid_s, 0)
        records.append(
            {
                "context": context,
                "batch": base,
                "hybrid_step_s": hybrid_s,
                "all_mla_step_s": full_s,
                "ratio_equal_batch": full_s / hybrid_s,
                "hybrid_bytes": hybrid_bytes,
                "all_mla_bytes": full_bytes,
                "larger_batch": batch,
                "hybrid_token_s": larger_s / batch,
                "all_mla_token_s": full_s / base,
                "ratio_equal_memory": (full_s / base) / (larger_s / batch),
            }
        )
    return records


def context_table(records: list[dict[str, Any]]) -> Table:
    """The records as a table."""
    title = "decoding at long contexts: hybrid against all layers MLA"
    table = Table(title=title, title_justify="left")
    for heading in (
        "context",
        "batch",
        "hybrid ms/step",
        "all MLA ms/step",
        "ratio",
        "MiB/sequence",
        "all MLA",
        "batch, same memory",
        "ratio per token",
    ):
        table.add_column(heading, justify="right")
    for r in records:
        table.add_row(
            f"{r['context']:,}",
            str(r["batch"]),
            f"{1e3 * r['hybrid_step_s']:.1f}",
            f"{1e3 * r['all_mla_step_s']:.1f}",
            f"{r['ratio_equal_batch']:.2f}",
            f"{r['hybrid_bytes'] / 2**20:,.1f}",
            f"{r['all_mla_bytes'] / 2**20:,.1f}",
            str(r["larger_batch"]),
            f"{r['ratio_equal_memory']:.2f}",
        )
    return table
