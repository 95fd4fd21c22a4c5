"""Which parts of a weight are one matrix to Muon.

A block specification is a plain list of integers `[repeat, group, size, size, ...]` (it lives in
`param_groups` and in checkpoints): the rows of a weight are read as [repeat, group, size + size + ...], and
every (repeat, size) is one block of group * size rows. All columns belong to every block.

    [1, 1, rows]              the whole matrix                              1 block
    [H, 1, d]                 one block a head (q, k, v projections)        H blocks
    [H / g, 1, g * d]         g heads together                              H / g blocks
    [H, 1, nope, v]           kv_b_proj: keys and values of each head       2 H blocks
    [H / g, g, nope, v]       the same, g heads together                    2 H / g blocks
    [1, 1, F, F]              gate and up projections stored in one         2 blocks

A stack of expert matrices [E, rows, cols] applies its specification to each of the E matrices.

Shapes: N blocks of one size, G group, R rows of one section, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from earlyfusion.kernels.errors import UserError

BlockSpec = list[int]


class RoutingError(UserError, ValueError):
    """A parameter cannot be trained the way its group says."""


def whole(rows: int) -> BlockSpec:
    """The weight as one block."""
    return [1, 1, rows]


def per_head(heads: int, head_rows: int, group_size: int) -> BlockSpec:
    """Blocks of `group_size` heads (0: the whole weight). group_size must divide heads."""
    if group_size == 0:
        return whole(heads * head_rows)
    return [heads // group_size, 1, group_size * head_rows]


def per_head_pair(heads: int, first_rows: int, second_rows: int, group_size: int) -> BlockSpec:
    """Heads that hold two matrices each, kept apart (0: the whole weight, both together)."""
    if group_size == 0:
        return whole(heads * (first_rows + second_rows))
    if group_size == 1 and first_rows == second_rows:
        return [2 * heads, 1, first_rows]
    return [heads // group_size, group_size, first_rows, second_rows]


def unit_rows(spec: Sequence[int]) -> int:
    """Rows of the smallest stretch that holds only complete blocks."""
    return spec[1] * sum(spec[2:])


def block_shapes(spec: Sequence[int], columns: int) -> list[tuple[int, int]]:
    """(rows, columns) of a block, once per section."""
    return [(spec[1] * size, columns) for size in spec[2:]]


def block_scale(rows: int, columns: int, rms: float) -> float:
    """Factor that gives an orthogonal block the root mean square `rms`: rms * sqrt(max(rows, columns)).

    A (semi-)orthogonal matrix has mean square 1 / max(rows, columns). Source: Moonlight (arXiv 2502.16982)
    section 2.2.
    """
    return rms * math.sqrt(max(rows, columns))


def check_blocks(fqn: str, shape: Sequence[int], spec: Sequence[int]) -> None:
    """Raises RoutingError unless `spec` tiles the rows of a weight of `shape`."""
    if len(spec) < 3 or any(not isinstance(x, int) or x < 1 for x in spec):
        raise RoutingError(
            f"{fqn}: blocks {list(spec)} are not [repeat, group, size, ...] of positive integers"
        )
    if spec[0] * unit_rows(spec) != shape[-2]:
        raise RoutingError(
            f"{fqn}: blocks {list(spec)} cover {spec[0] * unit_rows(spec)} rows, the weight {tuple(shape)}"
            f" has {shape[-2]}"
        )


def sections(weight: Tensor, spec: Sequence[int]) -> tuple[Tensor, ...]:
    """Views [N, G, R, C] of the blocks, one per section of `spec`; N counts experts and repeats together.

    weight: contiguous [rows, C] or [E, rows, C]; a shard may hold fewer rows or experts, in whole units.
    """
    units = weight.view(-1, spec[1], sum(spec[2:]), weight.shape[-1])
    return (units,) if len(spec) == 3 else units.split(list(spec[2:]), dim=2)


def describe(shape: Sequence[int], spec: Sequence[int]) -> str:
    """The blocks in words, e.g. `4 x 48x128` or `8 x (96x128 + 96x128)`."""
    count = spec[0] * (shape[0] if len(shape) == 3 else 1)
    sizes = [f"{rows}x{columns}" for rows, columns in block_shapes(spec, shape[-1])]
    return f"{count} x {sizes[0]}" if len(sizes) == 1 else f"{count} x ({' + '.join(sizes)})"
