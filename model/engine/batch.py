"""What one forward pass works on: parts of prompts, packed into one row with the plan that tells where
everything stands, or the running samples.

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

import numpy as np
import torch
from torch import Tensor

from earlyfusion.kernels.attention.tiles import tiles
from earlyfusion.kernels.segments import Segments
from earlyfusion.model.cache import Reads
from earlyfusion.model.engine.cache import PooledPlan, Pools
from earlyfusion.model.engine.sampler import Needs
from earlyfusion.model.engine.state import Sample
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
class Part:
    """Tokens start .. stop - 1 of a sample, to be read in this step."""

    sample: Sample
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == self.sample.target


@dataclass(frozen=True)
class Batch:
    """The running samples, their slots filled up with slot 0, and what their sampling needs."""

    samples: tuple[Sample, ...]
    slots_B: Tensor
    needs: Needs


def needs_of(samples: Sequence[Sample]) -> Needs:
    every = [sample.parent.request.params for sample in samples]
    return Needs(
        drawn=any(params.temperature > 0 for params in every),
        top_p=any(params.top_p < 1 for params in every),
        min_p=any(params.min_p > 0 for params in every),
        logprobs=any(params.logprobs for params in every),
    )


@dataclass(frozen=True)
class TokenRows:
    """The tokens of some parts as rows, as `CompiledDecoder.run` wants them. places_T: row of the result (-1:
    not asked for). starts: first row of every part, and the number of rows."""

    slots_T: Tensor
    positions_T: Tensor
    places_T: Tensor
    starts: list[int]

    @classmethod
    def of(cls, parts: Sequence[Part], rows: Sequence[int]) -> TokenRows:
        """rows: those that are asked for, in the order of the result."""
        starts = [0, *accumulate(part.stop - part.start for part in parts)]
        slots_T = np.repeat([part.sample.slot for part in parts], np.diff(starts))
        positions_T = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        places_T = np.full(starts[-1], -1, dtype=np.int64)
        places_T[list(rows)] = np.arange(len(rows))
        slots, positions, places = map(torch.from_numpy, (slots_T, positions_T, places_T))
        return cls(slots, positions, places, starts)


def embed(parts: Sequence[Part], total: int, model: NativeFusion) -> Tensor:
    """Embeddings of the parts' tokens with image features in their places, filled up to `total` rows."""
    device = model.decoder.embed_tokens.weight.device
    ids: list[int] = []
    places: list[int] = []
    features: list[Tensor] = []
    for part in parts:
        parent, offset = part.sample.parent, len(ids) - part.start
        ids += part.sample.tokens(part.start, part.stop)
        inside = [i for i, place in enumerate(parent.media_positions) if part.start <= place < part.stop]
        if inside and parent.features is not None:
            places += [parent.media_positions[i] + offset for i in inside]
            together = len(inside) == inside[-1] - inside[0] + 1
            features.append(parent.features[slice(inside[0], inside[-1] + 1) if together else inside])
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

    # Without a past, attention can run as in training. Where results are exact it takes the cached way, whose
    # bits do not depend on which prompts are read together.
    fresh = not exact_rows(device) and all(start == 0 for start, _ in spans)
    width = -(-max(stop - start for start, stop in spans) // 32) * 32
    pages = tiles(max(stop for _, stop in spans))[-1][1] // size
    rows, places, last = [], [], []
    tables_read: list[Tensor] = []
    latent_rows: list[Tensor] = []
    for row, ((start, stop), table) in enumerate(zip(spans, tables)):
        known = pools.rows(table, len(table) * size)
        rows.append(known[torch.arange(start, stop) % known.shape[0]])
        places.append(row * width + torch.arange(stop - start))
        last.append((torch.arange(width) + start).clamp(max=stop - 1))
        if not fresh:
            filled = torch.tensor(table[: pools.pages_for(stop)], dtype=torch.long)
            tables_read.append(torch.nn.functional.pad(filled, (0, pages - filled.shape[0])))
            latent_rows.append(known[torch.arange(stop) % known.shape[0]])

    none = torch.zeros(len(spans), 0, dtype=torch.long)
    plan = PooledPlan(
        single=False,
        fresh=fresh,
        slots_N=torch.tensor(slots, dtype=torch.long).to(device),
        rows_T=torch.cat(rows).to(device),
        pages_NP=(none if fresh else torch.stack(tables_read)).to(device),
        last_NW=torch.stack(last).to(device),
        places_T=torch.cat(places).to(device),
        reads=None if fresh else Reads.of(latent_rows, device),
    )
    return Segments(tuple(stop - start for start, stop in spans)), plan
