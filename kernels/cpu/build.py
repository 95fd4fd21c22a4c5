"""The C++ of this room as a library: compiled for this machine when it is first asked for, and kept.

It takes a C++17 compiler (`CXX`, else g++, clang++ or c++ on the path) some seconds, once: the library lies under the
user's cache directory (`XDG_CACHE_HOME`, else ~/.cache) by the hash of the sources, the compiler and the processor's
instructions. Without a compiler, or with EF_COMPILED=0, `library` is None and everything runs on torch's operations.
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

ENVIRONMENT = "EF_COMPILED"
HERE = Path(__file__).resolve().parent
SOURCES = ("decode.cpp", "vector.h")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
NATIVE = (("-march=native",), ("-mcpu=native",), ())
"""Tried in this order: not every compiler knows the first, on every processor."""
SECONDS = 300


def wanted() -> bool:
    return os.environ.get(ENVIRONMENT) != "0"


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
    parts = [*((HERE / name).read_text() for name in SOURCES), path, version, *FLAGS, str(NATIVE), _instructions()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(path: str, target: Path) -> None:
    """Raises OSError or subprocess.SubprocessError; nothing half-written is left under the target's name."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, said = Path(folder) / target.name, ""
        for native in NATIVE:
            command = [path, *FLAGS, *native, str(HERE / SOURCES[0]), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode == 0:
                os.replace(made, target)
                return
            said = said or done.stderr.strip()
        raise OSError(said[:500] or f"{path} failed without a word")


def library() -> ctypes.CDLL | None:
    """The loaded library. What keeps it from being built is told once, as a RuntimeWarning; no compiler is no reason."""
    path = compiler() if wanted() else None
    return None if path is None else _built(path, cache_directory())


@cache
def _built(path: str, folder: Path) -> ctypes.CDLL | None:
    try:
        target = folder / f"decode-{_key(path)}.so"
        if not target.exists():
            _compile(path, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"the engine's C++ could not be compiled with {path}, so decoding takes torch's operations, which is slower: "
            f"{error}. Set CXX to another compiler, or {ENVIRONMENT}=0 to stop trying",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def status() -> str:
    """For people: how decoding on a CPU runs."""
    if not wanted():
        return f"torch's operations ({ENVIRONMENT}=0)"
    if compiler() is None:
        return "torch's operations (no C++ compiler found; with g++ or CXX it is quicker)"
    return f"compiled ({compiler()})" if library() is not None else "torch's operations (the C++ does not compile)"
