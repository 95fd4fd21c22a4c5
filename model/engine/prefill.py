"""What a prefill reads: parts of prompts, packed into one row with the plan that tells where everything
stands.

Shapes: N sequences, T tokens, D hidden, W queries per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import Reads, tiles
from earlyfusion.model.engine.memory import Pools
from earlyfusion.model.engine.sequence import Sample
from earlyfusion.model.engine.stores import PooledPlan
from earlyfusion.model.fusion import NativeFusion

ROWS = 8
"""Rows of a step on a CPU come in multiples of this; the reason stands in runner.py."""


def whole_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of ROWS."""
    return -(-rows // ROWS) * ROWS


@dataclass(frozen=True)
class Part:
    """Tokens start .. stop - 1 of a sample, to be read in this step."""

    sample: Sample
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == self.sample.target


@dataclass(frozen=True)
class Reading:
    """The tokens of some parts as rows, as `CompiledDecoder.run` wants them; the last token of every part
    that completes its sample is asked for, `ends` of them."""

    slots_T: Tensor
    positions_T: Tensor
    places_T: Tensor
    starts: list[int]
    ends: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Reading:
        starts = [0, *accumulate(part.stop - part.start for part in parts)]
        slots_T = np.repeat([part.sample.slot for part in parts], np.diff(starts))
        positions_T = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        places_T, ends = np.full(starts[-1], -1), 0
        for part, start in zip(parts, starts[1:]):
            if part.completes:
                places_T[start - 1] = ends
                ends += 1
        slots, positions, places = (
            torch.from_numpy(array.astype(np.int64)) for array in (slots_T, positions_T, places_T)
        )
        return cls(slots, positions, places, starts, ends)


def ends_plan(parts: Sequence[Part], pools: Pools) -> PooledPlan:
    """The last tokens of the parts that complete their sample, as a step's plan; filled up with slot 0."""
    done = [part for part in parts if part.completes]
    size, filled = pools.page_size, whole_rows(len(done)) - len(done)
    length = tiles(max((part.stop for part in done), default=1))[-1][1]
    tables = [part.sample.pages[: pools.pages_for(part.stop)] for part in done] + [[0]] * filled
    padded = [table + [0] * (length // size - len(table)) for table in tables]
    last_N1 = torch.tensor([[part.stop - 1] for part in done] + [[0]] * filled, dtype=torch.long)
    none = torch.zeros(0, dtype=torch.long)
    pages_NP = torch.tensor(padded, dtype=torch.long).view(len(tables), length // size)
    return PooledPlan(True, False, none, none, pages_NP, last_N1.view(len(tables), 1), None)


def embed(parts: Sequence[Part], total: int, model: NativeFusion) -> Tensor:
    """Embeddings of the parts' tokens with image features in their places, filled up to `total` rows."""
    device = model.decoder.embed_tokens.weight.device
    ids: list[int] = []
    places: list[int] = []
    features: list[Tensor] = []
    for part in parts:
        ticket, offset = part.sample.ticket, len(ids) - part.start
        ids += part.sample.tokens(part.start, part.stop)
        inside = [i for i, place in enumerate(ticket.media_positions) if part.start <= place < part.stop]
        if inside and ticket.features is not None:
            places += [ticket.media_positions[i] + offset for i in inside]
            together = len(inside) == inside[-1] - inside[0] + 1
            features.append(ticket.features[slice(inside[0], inside[-1] + 1) if together else inside])
    ids += [0] * (total - len(ids))
    x_TD = model.decoder.embed_tokens(torch.tensor(ids, dtype=torch.long).to(device))
    if features:
        x_TD = x_TD.index_copy(0, torch.tensor(places).to(device), torch.cat(features).to(x_TD.dtype))
    return x_TD


def prefill_plan(parts: Sequence[Part], pools: Pools, device: torch.device) -> tuple[Segments, PooledPlan]:
    """Segments and plan of a prefill; a filler document on slot 0 makes the rows a multiple of ROWS."""
    size = pools.page_size
    spans = [(part.start, part.stop) for part in parts]
    slots, tables = [part.sample.slot for part in parts], [part.sample.pages for part in parts]
    total = sum(stop - start for start, stop in spans)
    missing = whole_rows(total) - total
    if missing:
        first = 0 if spans[0][0] == 0 else 1
        spans, slots, tables = spans + [(first, first + missing)], slots + [0], tables + [[0]]
    width = -(-max(stop - start for start, stop in spans) // 32) * 32
    longest = tiles(max(stop for _, stop in spans))[-1][1]
    # without a past, attention can run as in training; on a CPU it takes the cached way, whose bits do not
    # depend
    # on which prompts are read together
    fresh = device.type != "cpu" and all(start == 0 for start, _ in spans)
    rows, places, tables_read, last, whole = [], [], [], [], []
    for row, ((start, stop), pages) in enumerate(zip(spans, tables)):
        known = pools.rows(pages, len(pages) * size)
        rows.append(known[torch.arange(start, stop) % known.shape[0]])
        places.append(row * width + torch.arange(stop - start))
        last.append((torch.arange(width) + start).clamp(max=stop - 1))
        if not fresh:
            filled = torch.tensor(pages[: pools.pages_for(stop)], dtype=torch.long)
            tables_read.append(torch.nn.functional.pad(filled, (0, longest // size - filled.shape[0])))
            whole.append(known[torch.arange(stop) % known.shape[0]])
    on_device = lambda tensors: torch.stack(tensors).to(device)
    plan = PooledPlan(
        single=False,
        fresh=fresh,
        slots_N=torch.tensor(slots, dtype=torch.long).to(device),
        rows_T=torch.cat(rows).to(device),
        pages_NP=on_device(tables_read)
        if whole
        else torch.zeros(len(spans), 0, dtype=torch.long, device=device),
        last_NW=on_device(last),
        places_T=torch.cat(places).to(device),
        reads=Reads.of(whole, device) if whole else None,
    )
    return Segments(tuple(stop - start for start, stop in spans)), plan
