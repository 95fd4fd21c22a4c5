"""The C++ of this room as a library: compiled for this machine when it is first asked for, and kept.

The engine uses it on a CPU in float32, for the decoder and for choosing tokens (both in program.py).

It takes a C++17 compiler (`CXX`, else g++, clang++ or c++ on the path) some seconds, once: the library lies
under the user's cache directory (`XDG_CACHE_HOME`, else ~/.cache) by the hash of the sources, the compiler
and the processor's instructions. Without a compiler, or with EF_KERNELS=torch, `library` is None and
everything runs on torch's operations.

Calls into the compiled library: what its functions take, and rows shared out over threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from earlyfusion.kernels.dispatch import ENVIRONMENT
from earlyfusion.kernels.files import replacing, write_atomic

HERE = Path(__file__).resolve().parent
SOURCES = ("decode.cpp", "sample.cpp")
HEADERS = ("vector.h", "rows.h", "kda.h", "mla.h", "feed.h")
# No fast-math: a NaN must stay a NaN.
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
NATIVE = (("-march=native",), ("-mcpu=native",), ())
"""Tried in this order: not every compiler knows the first, on every processor."""
SECONDS = 300


def wanted() -> bool:
    return os.environ.get(ENVIRONMENT) not in ("torch", "naive")


def compiler() -> tuple[str, ...] | None:
    """The compiler's path and the flags that CXX may name after it, or None."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quote that is not closed
        return None
    # CXX may name its own flags, as make allows.
    for name, *flags in [given] if given else [["g++"], ["clang++"], ["c++"]]:
        found = shutil.which(name)
        if found:
            return found, *flags
    return None


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "earlyfusion"


def _instructions() -> str:
    """What the processor says of itself: a library compiled for another one may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    # Only what decides which instructions there are: the clock frequency changes from boot to boot.
    names = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(line for line in lines if line.startswith(names))


def _key(command: tuple[str, ...]) -> str:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    parts = [
        *((HERE / name).read_text() for name in SOURCES + HEADERS),
        *command,
        version,
        *FLAGS,
        str(NATIVE),
        _instructions(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _ours(path: Path) -> None:
    """Raise PermissionError unless the path is this user's and nobody else may write it."""
    # Of the link, not of what it points to.
    about = path.lstat()
    mine = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    if not mine or stat.S_ISLNK(about.st_mode) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} is a link, or belongs to or may be written by another user (owner {about.st_uid}, mode"
            f" {stat.filemode(about.st_mode)}); chmod go-w it, remove it, or set XDG_CACHE_HOME to a folder"
            " of your own"
        )


def _digest(path: Path) -> str:
    data = path.read_bytes()
    return f"{len(data)} {hashlib.sha256(data).hexdigest()}"


def _is_whole(target: Path, seal: Path) -> bool:
    """Whether the library is there as it was built. Raises PermissionError."""
    if not target.exists():
        return False
    _ours(target)
    try:
        return seal.read_text() == _digest(target)
    except (OSError, ValueError):
        return False


def _compile(path: tuple[str, ...], target: Path) -> None:
    """Raises OSError or subprocess.SubprocessError; nothing half-written is left under the target's name."""
    said = ""
    with replacing(target) as made:
        for native in NATIVE:
            command = [*path, *FLAGS, *native, *(str(HERE / name) for name in SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode == 0:
                ctypes.CDLL(str(made)).decode  # noqa: B018  (what cannot be loaded is not kept)
                # Whatever the umask lets others do with new files.
                made.chmod(0o600)
                return
            said = said or done.stderr.strip()
        raise OSError(f"{' '.join(path)} failed: {said[:500]}")


def library() -> ctypes.CDLL | None:
    """The loaded library. What keeps it from being built is told once, as a RuntimeWarning; no compiler is no
    reason."""
    return _library() if wanted() else None


@cache
def _library() -> ctypes.CDLL | None:
    path = compiler()
    if path is None:
        return None
    try:
        folder = cache_directory()
        # What lies there is loaded into the process: nobody else may write it.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _ours(folder)
        target = folder / f"cpu-{_key(path)}.so"
        # Beside it: what its bytes should be. A half-written library would kill the process that loads it.
        seal = target.with_suffix(".sha256")
        if not _is_whole(target, seal):
            _compile(path, target)
            # Last: without it the library is not loaded.
            write_atomic(seal, _digest(target))
        return ctypes.CDLL(str(target))
    except (
        OSError,
        AttributeError,
        RuntimeError,
        subprocess.SubprocessError,
    ) as error:  # RuntimeError: no home
        warnings.warn(
            f"the engine takes torch's operations, which are slower: {error}. Set CXX to another compiler, or"
            f" {ENVIRONMENT}=torch to stop trying",
            RuntimeWarning,
            stacklevel=3,
        )
    return None


def status() -> str:
    """For people: how the engine runs on a CPU."""
    if not wanted():
        return f"torch's operations ({ENVIRONMENT}={os.environ[ENVIRONMENT]})"
    if compiler() is None:
        return "torch's operations (no C++ compiler found; with g++ or CXX it is quicker)"
    if library() is None:
        return "torch's operations (the C++ does not compile, or its cache is not this user's alone)"
    return f"compiled ({' '.join(compiler() or ())})"


# ---- calls ----

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
