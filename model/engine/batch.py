"""What one forward pass works on: parts of prompts as rows, with the plan that tells where everything stands.

Rows of a step come in multiples of ROWS where results are to be exact. On a CPU a matrix product of one, two
or three rows sums in another order than one of more, and an elementwise operation treats what is left over
after whole vectors (32 numbers) by other code. With ROWS rows at least, and widths that are multiples of 4
(heads, hidden size, vocabulary), a row's bits do not depend on how many rows there are or where it stands:
the engine gives bit-equal results whatever the batch (tests/model/test_engine_invariance.py). Where
kernels/cpu is compiled, it promises that by itself for any rows and widths.

Shapes: N sequences, T tokens, D hidden, W queries per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyfusion.kernels.attention.tiles import tiles
from earlyfusion.kernels.dispatch import has_kernel
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import CachePlan
from earlyfusion.model.engine.cache import Pools
from earlyfusion.model.engine.scheduler import Part
from earlyfusion.model.fusion import NativeFusion

ROWS = 8


def exact_rows(device: torch.device) -> bool:
    """Whether a request's bits are kept independent of its neighbours: on a CPU. On a GPU quicker passes
    over several requests are worth more."""
    return device.type == "cpu"


def whole_rows(rows: int) -> int:
    """`rows` rounded up to a multiple of ROWS."""
    return -(-rows // ROWS) * ROWS


@dataclass(frozen=True)
class TokenRows:
    """Tokens as rows, as `CompiledDecoder.run` wants them: those of a sequence together, in order.

    int64: slots_T; positions_T, tokens before each in its sequence; places_T, the row of the result that is
    to hold what comes of it (-1: nobody asks). starts: first row of every sequence, and the number of rows.
    """

    slots_T: Tensor
    positions_T: Tensor
    places_T: Tensor
    starts: Sequence[int]
    results: int

    @classmethod
    def of(cls, parts: Sequence[Part], rows: Sequence[int]) -> TokenRows:
        """rows: those that are asked for, in the order of the result."""
        lengths = [part.stop - part.start for part in parts]
        starts = [0, *accumulate(lengths)]
        slots = torch.tensor([part.sample.slot for part in parts])
        positions = [torch.arange(part.start, part.stop) for part in parts]
        # Results are computed only where somebody asks: the last layer skips the other rows.
        places_T = torch.full((starts[-1],), -1)
        places_T[list(rows)] = torch.arange(len(rows))
        slots_T = slots.repeat_interleave(torch.tensor(lengths))
        return cls(slots_T, torch.cat(positions), places_T, starts, len(rows))


def embed(parts: Sequence[Part], total: int, model: NativeFusion) -> Tensor:
    """Embeddings of the parts' tokens with image features in their places, filled up to `total` rows."""
    device = model.decoder.embed_tokens.weight.device
    ids: list[int] = []
    places: list[int] = []
    features: list[Tensor] = []
    for part in parts:
        state, offset = part.sample.parent, len(ids) - part.start
        ids += part.sample.tokens(part.start, part.stop)
        inside = [i for i, place in enumerate(state.media_positions) if part.start <= place < part.stop]
        if inside and state.features is not None:
            places += [state.media_positions[i] + offset for i in inside]
            features.append(state.features[inside])
    # Filler tokens stand on slot 0, which nobody reads.
    ids += [0] * (total - len(ids))
    x_TD = model.decoder.embed_tokens(torch.tensor(ids).to(device))
    if features:
        x_TD = x_TD.index_copy(0, torch.tensor(places).to(device), torch.cat(features).to(x_TD.dtype))
    return x_TD


def prefill_plan(parts: Sequence[Part], pools: Pools, device: torch.device) -> tuple[Segments, CachePlan]:
    """Segments and plan of a prefill; a filler document on slot 0 makes the rows a multiple of ROWS."""
    spans = [(part.sample.slot, part.sample.pages, part.start, part.stop) for part in parts]
    total = sum(part.stop - part.start for part in parts)
    missing = whole_rows(total) - total
    if missing:
        first = min(1, parts[0].start)  # all start at 0, or none does
        spans.append((0, [0], first, first + missing))

    # Without a past, attention can run as in training. Where results are exact it takes the cached way, whose
    # bits do not depend on which prompts are read together.
    fresh = not exact_rows(device) and parts[0].start == 0
    lengths = [stop - start for _, _, start, stop in spans]
    # Queries in whole multiples of 32: few different shapes, and whole vectors on a CPU.
    width = -(-max(lengths) // 32) * 32
    pages = tiles(max(stop for *_, stop in spans))[-1][1] // pools.page_size
    rows, places, last, tables, past = [], [], [], [], []
    for row, (_, table, start, stop) in enumerate(spans):
        # Filler may be longer than its one page; it wraps around, since nobody reads it.
        known = pools.rows(table, len(table) * pools.page_size)
        rows.append(known[torch.arange(start, stop) % len(known)])
        past.append(known[torch.arange(stop) % len(known)])
        places.append(row * width + torch.arange(stop - start))
        last.append((torch.arange(width) + start).clamp(max=stop - 1))
        table = table[: pools.pages_for(stop)]
        tables.append(F.pad(torch.tensor(table), (0, pages - len(table))))

    packed = None
    if not fresh and has_kernel("attention_append", device):
        packed = (Segments(tuple(map(len, past))), torch.cat(past).to(device))
    plan = CachePlan(
        fresh=fresh,
        slots_N=torch.tensor([slot for slot, *_ in spans]).to(device),
        rows_T=torch.cat(rows).to(device),
        pages_NP=torch.stack(tables).to(device),
        last_NW=torch.stack(last).to(device),
        places_T=torch.cat(places).to(device),
        past=packed,
    )
    return Segments(tuple(lengths)), plan
