"""Calls into the compiled library: what its functions take, and rows shared out over threads."""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from earlyfusion.kernels.cpu.build import library

INT, REAL, AT = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
"""int64_t, double, an address."""


def compiled() -> ctypes.CDLL:
    """The library, which must be there: ask `build.library` first."""
    found = library()
    if found is None:
        raise RuntimeError(
            "the C++ of kernels/cpu is not compiled on this machine; ask build.library() first"
        )
    return _declared(found)


@cache
def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    arguments = {
        "decode": (AT, AT, INT, INT, INT),
        "logits": (AT, AT, AT, INT, INT),
        "sample": (AT, INT, INT),
        "product": (INT, AT, INT, AT, AT, INT, INT),
        "apply": (INT, INT, AT, AT),
    }
    # ctypes would pass 32-bit integers where nothing is declared.
    for name, types in arguments.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, None
    found.structure_size.argtypes = (INT,)
    for name in ("panel_width", "structure_size", "sampling_size"):
        getattr(found, name).restype = INT
    return found


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Of this process: a forked one has none of its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")


def run_shared(function: Any, arguments: tuple[Any, ...], starts: Sequence[int], threads: int) -> None:
    """function(*arguments, first, end) over all rows, by so many threads. starts: first row of every
    sequence, and the number of rows; a sequence is not torn apart."""
    shares = share_out(starts, threads)
    # The first share is this thread's own.
    pool = _pool(len(shares) - 1, os.getpid()) if len(shares) > 1 else None
    others = [pool.submit(function, *arguments, *share) for share in shares[1:]] if pool is not None else []
    function(*arguments, *shares[0])
    for other in others:
        other.result()


def share_out(starts: Sequence[int], threads: int) -> list[tuple[int, int]]:
    """(first, end) rows of each thread: whole sequences, about as many rows each; fewer shares where there
    are fewer."""
    rows, borders = starts[-1], [0]
    for thread in range(1, threads):
        # Shares end where sequences end: a sequence's tokens follow each other.
        nearest = starts[bisect_left(starts, rows * thread / threads)]
        if borders[-1] < nearest < rows:
            borders.append(nearest)
    return list(zip(borders, [*borders[1:], rows]))
