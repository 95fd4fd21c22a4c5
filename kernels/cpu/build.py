"""The C++ of this room as a library: compiled for this machine when it is first asked for, and kept.

The engine uses it on a CPU in float32, for the decoder (program.py) and for choosing tokens (sampling.py).

It takes a C++17 compiler (`CXX`, else g++, clang++ or c++ on the path) some seconds, once: the library lies under the
user's cache directory (`XDG_CACHE_HOME`, else ~/.cache) by the hash of the sources, the compiler and the processor's
instructions. Without a compiler, or with EF_KERNELS=torch, `library` is None and everything runs on torch's operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

from earlyfusion.kernels.dispatch import ENVIRONMENT

HERE = Path(__file__).resolve().parent
SOURCES = ("decode.cpp", "sample.cpp")
HEADERS = ("vector.h", "rows.h", "kda.h", "mla.h", "feed.h")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
NATIVE = (("-march=native",), ("-mcpu=native",), ())
"""Tried in this order: not every compiler knows the first, on every processor."""
SECONDS = 300


def wanted() -> bool:
    return os.environ.get(ENVIRONMENT) not in ("torch", "naive")


def compiler() -> str | None:
    """Path of the compiler, or None."""
    given = os.environ.get("CXX")
    for name in [given] if given else ["g++", "clang++", "c++"]:
        found = shutil.which(name)
        if found:
            return found
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
    names = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(line for line in lines if line.startswith(names))


def _key(path: str) -> str:
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    parts = [
        *((HERE / name).read_text() for name in SOURCES + HEADERS),
        path,
        version,
        *FLAGS,
        str(NATIVE),
        _instructions(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(path: str, target: Path) -> None:
    """Raises OSError or subprocess.SubprocessError; nothing half-written is left under the target's name."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, said = Path(folder) / target.name, ""
        for native in NATIVE:
            command = [path, *FLAGS, *native, *(str(HERE / name) for name in SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode == 0:
                os.replace(made, target)
                return
            said = said or done.stderr.strip()
        raise OSError(said[:500] or f"{path} failed without a word")


def library() -> ctypes.CDLL | None:
    """The loaded library. What keeps it from being built is told once, as a RuntimeWarning; no compiler is no reason."""
    return _library() if wanted() else None


@cache
def _library() -> ctypes.CDLL | None:
    path = compiler()
    if path is None:
        return None
    try:
        target = cache_directory() / f"cpu-{_key(path)}.so"
        if not target.exists():
            _compile(path, target)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        warnings.warn(
            f"the engine's C++ could not be compiled with {path}, so it takes torch's operations, which are slower: {error}. "
            f"Set CXX to another compiler, or {ENVIRONMENT}=torch to stop trying",
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
    return f"compiled ({compiler()})" if library() is not None else "torch's operations (the C++ does not compile)"
