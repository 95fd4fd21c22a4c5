"""Host plans of the Triton KDA kernels: the chunks and runs of a packed row, and the tiles a shape is
launched with.

A *run* is a stretch of chunks scanned one after the other: a whole document, or a segment of it when
documents times heads are too few to fill the device. Tiles come from a fixed table, so that no call is ever
autotuned.

Legend: T tokens, C tokens per chunk, N chunks, J runs, D documents, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from earlyfusion.kernels.launch import hardware
from earlyfusion.kernels.segments import Segments

# Few dims, so that few kernels are compiled; a padded channel costs its share of the products.
DIMS = (32, 64, 128, 256)  # key and value dims the kernels are compiled for; others are padded with zeros
CHUNKS = (16, 32, 64)
MIN_SEGMENT = 8  # chunks; shorter segments would spend more on their transition than they gain


# Named tuples travel into the kernels as they are.
class Chunks(NamedTuple):
    """First token of every chunk and how many it has, 1..C."""

    start: Tensor
    length: Tensor


class Stretches(NamedTuple):
    """First and last + 1 token of every run, and its first chunk."""

    start: Tensor
    end: Tensor
    first_chunk: Tensor


@dataclass(frozen=True)
class Runs:
    """Index tensors (int32) of one packed row, each chunk inside one document."""

    chunks: Chunks
    stretches: Stretches
    document_run_D1: Tensor  # first run of every document, then J
    num_chunks: int
    num: int
    split: bool  # does any document have more than one run?


def plan_runs(segments: Segments, chunk: int, segment_chunks: int, device: torch.device) -> Runs:
    """Runs of at most ``segment_chunks`` chunks (0: one run per document); built once per row and kept."""

    def build() -> Runs:
        chunks: list[tuple[int, int]] = []
        runs: list[tuple[int, int, int]] = []
        document_run = [0]
        for start, length in zip(segments.offsets, segments.lengths):
            end = start + length
            # Without segments a run is the whole document.
            step = chunk * (segment_chunks or -(-length // chunk))
            for first in range(start, end, step):
                runs.append((first, min(first + step, end), len(chunks) + (first - start) // chunk))
            document_run.append(len(runs))
            # The last chunk of a document may be short; none reaches into the next.
            chunks += [(first, min(chunk, end - first)) for first in range(start, end, chunk)]

        # One copy to the device for each table, not one for each column.
        tables = (torch.tensor(rows, dtype=torch.int32) for rows in (chunks, runs, document_run))
        by_chunk, by_run, index = (table.transpose(0, -1).contiguous().to(device) for table in tables)
        split = len(runs) > segments.num
        return Runs(Chunks(*by_chunk), Stretches(*by_run), index, len(chunks), len(runs), split)

    return segments.cached(("kda.triton.runs", chunk, segment_chunks, str(device)), build)


@dataclass(frozen=True)
class Tiles:
    """Constants of one launch each: slab widths, warps and pipeline stages."""

    chunk: int
    prep: dict[str, int]  # BK, num_warps, num_stages
    scan: dict[str, int]  # BV, ...; also of the backward's two scans
    dual: dict[str, int]
    move: dict[str, int]  # transition
    join: dict[str, int]  # combine: BV, BK, ...
    grad: dict[str, int]  # BK, BV, ...


def _launch(warps: int, stages: int = 1, **blocks: int) -> dict[str, int]:
    return dict(blocks, num_warps=warps, num_stages=stages)


def tiles(key_dim: int, value_dim: int, wide: bool, crowded: bool, hopper: bool, chunk: int | None) -> Tiles:
    """The tile table; tests/kernels/test_aot.py holds its default entries to no spills.

    Args:
        wide: products of float32 operands: three tensor core passes, each operand held twice. Meant for
            checking; K of 128 and more spills a few registers.
        crowded: enough documents times heads to fill the device with wide value blocks, which read less.
        hopper: sm_90 or later (a warp group's products read both operands from shared memory).
    """
    # float32 is there for checking: small tiles that fit, not fast ones.
    if wide:
        eight = _launch(8, BV=16)
        prep, join, grad = _launch(4, BK=32), _launch(4, BV=16, BK=16), _launch(8, BK=16, BV=16)
        return Tiles(chunk or 16, prep, eight, eight, eight, join, grad)
    # Value columns of a program: more of them share what is read of the keys, and need registers.
    columns = min(value_dim, 32)
    # Without warp-group products operands live in registers: smaller chunks.
    if key_dim == 256 or not hopper:
        prep = _launch(2 if chunk == 16 else 4, BK=32)  # tiles of 16 x 32: four warps spill with Triton 3.6
        scan, dual = _launch(8, BV=16 if key_dim == 256 else columns), _launch(8, BV=columns)
        join, grad = _launch(8, BV=32, BK=32), _launch(8, BK=32, BV=columns)
        return Tiles(chunk or 32, prep, scan, dual, _launch(8, BV=16), join, grad)
    # Wide blocks read the prepared keys half as often, if enough programs are left.
    scan = _launch(8, 2, BV=64) if crowded and value_dim >= 64 else _launch(4, 2, BV=columns)
    join, grad = _launch(4, BV=32, BK=32), _launch(8, BK=32, BV=min(value_dim, 64))
    return Tiles(chunk or 64, _launch(4, BK=32), scan, scan, _launch(4, BV=16), join, grad)


def auto_segments(segments: Segments, heads: int, value_dim: int, tile: Tiles, device: torch.device) -> int:
    """Chunks per segment that fill the device, 0 where documents times heads already do (and always off
    CUDA)."""
    # What runs at the same time without segments.
    programs = segments.num * heads * max(value_dim // tile.scan["BV"], 1)
    chunks = -(-segments.max_length // tile.chunk)
    wanted = hardware(device).multiprocessors // programs
    # The transitions cost the scan's work (K + V) / V times over at
    # half the rate: splitting pays from about 4 ways on.
    if wanted < 4 or chunks < 4 * MIN_SEGMENT:
        return 0
    return max(-(-chunks // wanted), MIN_SEGMENT)


def padded_dim(name: str, size: int) -> int:
    """The smallest compiled dim that holds ``size``.

    Raises:
        ValueError: it is larger than 256.
    """
    for dim in DIMS:
        if size <= dim:
            return dim
    raise ValueError(
        f"kda: {name} is {size} wide; the Triton kernels hold at most {DIMS[-1]} (EF_KERNELS=torch has no"
        " limit)"
    )
