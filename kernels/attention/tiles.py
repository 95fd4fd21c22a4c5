"""Absorbed attention over latents in tiles of keys whose borders depend on positions alone.

The tiles meet in an online softmax with statistics in float32. A row's result does not depend, bit for bit,
on how long its neighbours in the batch are (keys that a row may not see add exactly zero), and the working
space stays bounded however long the context is.

Shapes: B, N sequences, X rows of queries (heads of one or several tokens), L key positions, R latent width,
P pages, S rows of a page.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from earlyfusion.kernels.products import accumulate_dtype, wide_bmm
from earlyfusion.kernels.segments import check_decode

# Tiles grow with the context: few borders, and bounded memory all the same.
FIRST_TILE, LAST_TILE = 128, 8192
"""Keys; a longer tile is at most a quarter of what stands before it."""


@lru_cache(maxsize=64)
def tiles(length: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of the key tiles that cover `length` positions; borders do not depend on `length`."""
    borders: list[tuple[int, int]] = []
    start = 0
    while start < length or not borders:
        # Borders follow from the start alone; the last tile may reach past the end.
        size = FIRST_TILE
        while size * 2 <= min(start // 4, LAST_TILE):
            size *= 2
        borders.append((start, start + size))
        start += size
    return tuple(borders)


def attend_in_tiles(
    query_NXR: Tensor,
    last_NX1: Tensor,
    length: int,
    keys: Callable[[int, int], Tensor],
    rank: int,
    scale: float,
) -> Tensor:
    """Softmax attention over `tiles(length)`.

    last_NX1: last position each query may see, none before 0. keys(start, stop): latents [N, stop - start,
    R], any finite numbers past the end. -> mixed [N, X, rank] in the dtype of the query.
    """
    wide = accumulate_dtype(query_NXR.dtype)
    top = total = mixed = None
    for start, stop in tiles(length):
        keys_NLR = keys(start, stop).to(query_NXR.dtype)
        if query_NXR.dtype == wide:
            scores_NXL = torch.bmm(query_NXR, keys_NLR.transpose(1, 2)).mul_(scale)
        else:  # a logit of 20 rounded to 8 bits is off by up to 0.06, and its probability by 6 %
            scores_NXL = wide_bmm(query_NXR, keys_NLR.transpose(1, 2), scale)
        positions_L = torch.arange(start, stop, device=query_NXR.device)
        # Tokens of a longer neighbour in the batch, or none at all.
        scores_NXL.masked_fill_(positions_L > last_NX1, float("-inf"))

        # Online softmax over tiles.
        highest = scores_NXL.amax(-1, keepdim=True)
        new_top = highest if top is None else torch.maximum(top, highest)
        p_NXL = scores_NXL.sub_(new_top).exp_()
        part = torch.bmm(p_NXL.to(query_NXR.dtype), keys_NLR[..., :rank]).to(wide)
        mass = p_NXL.sum(-1, keepdim=True)
        if top is None or total is None or mixed is None:
            total, mixed = mass, part
        else:
            # 32 equal lanes: one number alone would be treated by other code than a vector, with other bits
            shrink = (top - new_top).expand(-1, -1, 32).contiguous().exp_()[..., :1]
            total, mixed = total.mul_(shrink).add_(mass), mixed.mul_(shrink).add_(part)
        top = new_top
    assert mixed is not None and total is not None
    return mixed.div_(total).to(query_NXR.dtype)


def pages_of(pages_PSR: Tensor, table_BN: Tensor) -> Callable[[int, int], Tensor]:
    """The `keys` of `attend_in_tiles`: latents gathered from the pages of every sequence, page 0 past the
    last. S must divide FIRST_TILE."""
    # Tiles begin at pages, as FIRST_TILE is a multiple of their size.
    size, width = pages_PSR.shape[1:]

    def keys(start: int, stop: int) -> Tensor:
        index_BN = table_BN[:, start // size : stop // size]
        missing = (stop - start) // size - index_BN.shape[1]
        index_BN = torch.nn.functional.pad(index_BN, (0, missing))
        return pages_PSR.index_select(0, index_BN.reshape(-1)).view(-1, stop - start, width)

    return keys


def mla_decode(
    query_BHR: Tensor, pages_PSR: Tensor, table_BN: Tensor, lengths_B: Tensor, rank: int, scale: float
) -> Tensor:
    """See :func:`earlyfusion.kernels.attention.naive.mla_decode`. Raises ValueError also for a page size
    that does not divide FIRST_TILE."""
    check_decode(query_BHR, pages_PSR, table_BN, lengths_B, rank)
    size = pages_PSR.shape[1]
    if FIRST_TILE % size:
        raise ValueError(f"mla_decode: pages of {size} rows; expected a divisor of {FIRST_TILE}")
    # An idle slot is computed with one key, so that no softmax is empty, and then blanked.
    idle_B11 = (lengths_B == 0)[:, None, None]
    last_B11 = (lengths_B - 1).clamp(min=0)[:, None, None]
    keys = pages_of(pages_PSR, table_BN)
    mixed_BHr = attend_in_tiles(query_BHR, last_B11, table_BN.shape[1] * size, keys, rank, scale)
    return mixed_BHr.masked_fill(idle_B11, 0.0)
