"""decode.cpp from Python: its structures, weights in its layout, and a step over threads.

A structure holds addresses: whoever makes a `Program` keeps the tensors behind them alive (`Program.keep`).

sample.cpp from Python. What is chosen and why: model/engine/requests.py.

Shapes: B rows of a batch, V vocabulary, N banned ids.

The C++ of this room as a library: compiled for this machine when it is first asked for, and kept.

The engine uses it on a CPU in float32, for the decoder and for choosing tokens (both in program.py).

It takes a C++17 compiler (`CXX`, else g++, clang++ or c++ on the path) some seconds, once: the library lies
under the user's cache directory (`XDG_CACHE_HOME`, else ~/.cache) by the hash of the sources, the compiler
and the processor's instructions. Without a compiler, or with EF_KERNELS=torch, `library` is None and
everything runs on torch's operations.

Calls into the compiled library: what its functions take, and rows shared out over threads.
"""

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

import numpy as np
import torch
from torch import Tensor

from earlyfusion.kernels.dispatch import ENVIRONMENT
from earlyfusion.kernels.files import replacing, write_atomic
from earlyfusion.kernels.segments import check_shapes, check_tensors

HERE = Path(__file__).resolve().parent
SOURCES = ("decode.cpp", "recurrent.cpp", "residual.cpp", "rowwise.cpp", "sample.cpp")
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
    """The library, which must be there: ask `library` first."""
    found = library()
    if found is None:
        raise RuntimeError("the C++ of kernels/cpu is not compiled on this machine; ask library() first")
    return _declared(found)


@cache
def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    arguments = {
        "decode": (AT, AT, INT, INT, INT),
        "rewind": (AT, AT, AT, AT, INT, INT),
        "logits": (AT, AT, AT, INT, INT),
        "sample": (AT, INT, INT),
        "recurrent": (AT, INT, INT, INT),
        "convolution": (AT, INT, INT, INT),
        "residual_mix": (AT, INT, INT),
        "residual_merge": (AT, INT, INT),
        "norm_rows": (AT, INT, INT),
        "swiglu_rows": (AT, INT, INT),
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


Part = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
IMPORTED_BY = os.getpid()
"""A forked process has none of its parent's threads, which OpenMP does not notice."""


@cache
def _team() -> Any:
    """torch's own OpenMP threads, `GOMP_parallel(part, data, threads, flags)`; None where it has none.

    Between torch's operations they spin, waiting for the next one. Threads beside them would get half a core
    each: with two threads KDA took as long as with one.
    """
    try:
        team = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    team.argtypes, team.restype = (Part, AT, ctypes.c_uint, ctypes.c_uint), None
    return team


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Of this process: a forked one has none of its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")


def run_shared(function: Any, arguments: tuple[Any, ...], starts: Sequence[int], threads: int) -> None:
    """function(*arguments, first, end) over all rows, by so many threads. starts: first row of every
    sequence, and the number of rows; a sequence is not torn apart."""
    shares = share_out(starts, threads)
    left, failed = iter(shares), []

    def work(_: Any = None) -> None:
        # Whoever is free takes the next one: a team may be smaller than was asked for.
        try:
            for share in left:
                function(*arguments, *share)
        except BaseException as error:  # an interrupt; OpenMP would drop it
            failed.append(error)

    team = _team() if len(shares) > 1 and os.getpid() == IMPORTED_BY else None
    if team is not None:
        team(Part(work), None, len(shares), 0)
    else:
        others = [_pool(len(shares) - 1, os.getpid()).submit(work) for _ in shares[1:]]
        work()
        for other in others:
            other.result()
    if failed:
        raise failed[0]


def call(function: str, made: ctypes.Structure, starts: Sequence[int], *more: int, **tensors: Any) -> None:
    """The library's `function` over all rows, by torch's threads, with the tensors' addresses in the fields
    of these names of `made`: None as null, several tensors as a list of addresses."""
    behind = []
    for name, given in tensors.items():
        if isinstance(given, list | tuple):
            # Kept until the call is over, as the tensors are by the caller.
            behind.append((AT * len(given))(*(tensor.data_ptr() for tensor in given)))
            setattr(made, name, ctypes.addressof(behind[-1]))
        elif given is not None:
            setattr(made, name, given.data_ptr())
    run_shared(getattr(compiled(), function), (ctypes.byref(made), *more), starts, torch.get_num_threads())


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


ROWS_AT_ONCE = 128
"""Rows that go through all layers together: their activations stay in the cache."""


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


# Fields in the order of the C++ structures; tests compare the sizes on both sides.
class Matrix(ctypes.Structure):
    _fields_ = [("panels", AT), *fields(INT, "inner columns")]


class Place(ctypes.Structure):
    """Where a sub-layer reads (a source, or -1: the mix) and where it adds; fresh: it is the first to write
    there; last: no later token needs more of the rows than their results."""

    _fields_ = fields(INT, "source into fresh last")


class Step(ctypes.Structure):
    _fields_ = [
        *fields(AT, "slots positions places pages"),
        *fields(INT, "page_step page_size"),
        *fields(AT, "x out chosen"),
        ("chosen_step", INT),
        *fields(AT, "drafts saves kept"),
        *fields(INT, "kept_step drafted"),
    ]


class Measure(ctypes.Structure):
    KIND = 0
    _fields_ = [("source", INT), ("eps", REAL)]


class Mix(ctypes.Structure):
    KIND = 1
    _fields_ = [("sources", INT), ("query", AT)]


class Kda(ctypes.Structure):
    KIND = 2
    _fields_ = [
        ("place", Place),
        *fields(REAL, "eps qk_eps out_eps lower_bound"),
        *fields(INT, "heads dim taps index"),
        *fields(Matrix, "joint f_up gate_up out"),
        *fields(AT, "conv bias rate state past"),
    ]


class Mla(ctypes.Structure):
    KIND = 3
    _fields_ = [
        ("place", Place),
        *fields(REAL, "eps query_eps latent_eps"),
        *fields(INT, "heads rank shared nope value low gated"),
        *fields(Matrix, "joint store query k_up v_up out"),
        *fields(AT, "latent_norm latents"),
    ]


class Mlp(ctypes.Structure):
    KIND = 4
    _fields_ = [("place", Place), ("eps", REAL), *fields(Matrix, "gate_up down")]


class Moe(ctypes.Structure):
    KIND = 5
    _fields_ = [
        ("place", Place),
        *fields(REAL, "eps scaling"),
        *fields(INT, "experts choices renormalize index"),
        *fields(AT, "norm bias"),
        *fields(Matrix, "joint up down shared_down"),
    ]


class Finish(ctypes.Structure):
    KIND = 6
    _fields_ = [("source", INT), ("eps", REAL), ("norm", AT)]


class _Operation(ctypes.Structure):
    _fields_ = [("kind", INT), ("what", AT)]


class _Program(ctypes.Structure):
    _fields_ = [*fields(INT, "hidden sources count"), ("operations", AT)]


def panel_width() -> int:
    """Columns of a packed weight that lie together: two vectors."""
    return int(compiled().panel_width())


def pack(weight: Tensor) -> Tensor:
    """Panels of a weight [inner, columns], or of several [.., inner, columns]: contiguous float32 [..,
    panels, inner, width].

    The last panel is filled up with zeros.
    """
    # Panels of two vectors: a row of a product reads its weights front to back.
    width = panel_width()
    columns = weight.shape[-1]
    panels = -(-columns // width)
    padded = torch.nn.functional.pad(weight.detach().float(), (0, panels * width - columns))
    return padded.unflatten(-1, (panels, width)).transpose(-3, -2).contiguous()


class Program:
    """A list of operations over a residual stream of `hidden` numbers in so many `sources`. Fill it, then
    `build`."""

    def __init__(self, hidden: int, sources: int) -> None:
        self.hidden, self.sources = hidden, sources
        self.operations: list[ctypes.Structure] = []
        self.kept: list[Any] = []
        self._built: _Program | None = None
        self._library = compiled()

    def keep(self, tensor: Tensor) -> int:
        """The address of a contiguous float32 tensor, which lives as long as the program."""
        check_tensors("program", torch.empty(0), (torch.float32,), weight=tensor)
        # ctypes holds the address alone; Python would free the memory.
        self.kept.append(tensor)
        return int(tensor.data_ptr())

    def matrix(self, weight: Tensor | None) -> Matrix:
        """A weight [inner, columns], several of one shape [.., inner, columns], or none."""
        return Matrix() if weight is None else Matrix(self.keep(pack(weight)), *weight.shape[-2:])

    def add(self, operation: ctypes.Structure) -> None:
        self.operations.append(operation)

    def build(self) -> None:
        listed: list[Any] = self.operations
        # Addresses into our own structures: they must not move or die.
        each = [_Operation(op.KIND, ctypes.addressof(op)) for op in listed]
        operations = (_Operation * len(each))(*each)
        self.kept.append(operations)
        self._built = _Program(self.hidden, self.sources, len(each), ctypes.addressof(operations))

    def logits(self, head: Matrix, x_RD: Tensor, threads: int) -> Tensor:
        """x w [R, V] of contiguous rows, one of `matrix`'s weights."""
        out_RV = x_RD.new_empty(x_RD.shape[0], head.columns)
        arguments = (ctypes.byref(head), x_RD.data_ptr(), out_RV.data_ptr())
        run_shared(self._library.logits, arguments, range(x_RD.shape[0] + 1), threads)
        return out_RV

    def run(self, step: Step, starts: Sequence[int], threads: int) -> None:
        """All rows of a step, the sequences shared out over threads. starts: first row of each, and the
        number of rows."""
        assert self._built is not None
        arguments = (ctypes.byref(self._built), ctypes.byref(step), ROWS_AT_ONCE)
        run_shared(self._library.decode, arguments, starts, threads)

    def keep_drafts(self, step: Step, starts: Sequence[int]) -> None:
        """Before `run`: sequences of several rows may be rewound after it. What that takes, the state before
        and every token's part in the recurrence, is kept in memory of the step's own."""
        rows_N = np.diff(starts)
        several_T = np.repeat(rows_N > 1, rows_N)
        count, drafted = int(several_T.sum()), int((rows_N > 1).sum())
        drafts = np.where(several_T, several_T.cumsum() - 1, -1)
        saves = np.full(starts[-1], -1)
        saves[np.array(starts[:-1])[rows_N > 1]] = np.arange(drafted)
        drafts_T, saves_T = torch.from_numpy(drafts), torch.from_numpy(saves)
        # As kda.h lays it out; all KDA layers are of one size, and there may be none.
        layers, size = [op for op in self.operations if isinstance(op, Kda)], 0
        if layers:
            heads, dim, taps = layers[0].heads, layers[0].dim, layers[0].taps
            size = drafted * heads * dim * (dim + 3 * taps) + count * heads * (4 * dim + 1)
        kept = torch.empty(max(1, len(layers) * size))
        step.drafts, step.saves, step.kept = drafts_T.data_ptr(), saves_T.data_ptr(), kept.data_ptr()
        step.kept_step, step.drafted = size, drafted
        step.behind += (drafts_T, saves_T, kept)  # type: ignore[attr-defined]

    def rewind(self, step: Step, first_N: Tensor, counts_N: Tensor, threads: int) -> None:
        """After `run` of a step that keeps its drafts: the sequences that begin at these rows have had so
        many tokens and no more (int64, at least 1)."""
        assert self._built is not None
        places = (first_N.data_ptr(), counts_N.data_ptr())
        arguments = (ctypes.byref(self._built), ctypes.byref(step), *places)
        run_shared(self._library.rewind, arguments, range(len(first_N) + 1), threads)


def step_of(
    slots_T: Tensor,
    positions_T: Tensor,
    places_T: Tensor,
    table_SP: Tensor,
    page_size: int,
    x_TD: Tensor,
    results: int,
    chosen_LTJ: Tensor | None = None,
) -> tuple[Step, Tensor]:
    """A step and the tensor [results, D] that its results will lie in.

    int64: slot and position of every row's token, and the row of the result that is to hold what comes of it
    (-1: nobody asks); pages by slot. chosen: receives the experts of every MoE layer.
    """
    index = {"slots": slots_T, "positions": positions_T, "places": places_T, "table": table_SP}
    check_tensors("step", slots_T, (torch.int64,), "rows", **index)
    x_TD = x_TD.contiguous()
    # Rows that nobody asked for stay zero.
    out_RD = x_TD.new_zeros(results, x_TD.shape[1])
    step = Step(
        slots_T.data_ptr(),
        positions_T.data_ptr(),
        places_T.data_ptr(),
        table_SP.data_ptr(),
        table_SP.stride(0),
        page_size,
        x_TD.data_ptr(),
        out_RD.data_ptr(),
        None if chosen_LTJ is None else chosen_LTJ.data_ptr(),
        0 if chosen_LTJ is None else chosen_LTJ.stride(0),
    )
    # Kept alive as long as the step, which holds their addresses.
    step.behind = (slots_T, positions_T, places_T, table_SP, x_TD, chosen_LTJ)  # type: ignore[attr-defined]
    return step, out_RD


# ---- the sampler ----


class Sampling(ctypes.Structure):
    _fields_ = [
        *fields(INT, "vocabulary drawn known"),
        *fields(AT, "logits keys positions temperature top_p min_p banned"),
        ("count", INT),
        ("masks", AT),
        ("out", AT),
        ("rows", INT),
    ]


def takes(logits_BV: Tensor) -> bool:
    """Whether `sample` is there for these logits: fp32 on a CPU, with a compiler."""
    return logits_BV.is_cpu and logits_BV.dtype == torch.float32 and library() is not None


def sample(
    logits_BV: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    banned: Tensor,
    *,
    drawn: bool,
    logprobs: bool,
) -> Tensor:
    """`requests.choose` of fp32 logits, which are not changed: float64 [3, B].

    keys, positions int64, the other controls fp32; without `drawn` every row is greedy and they are not
    looked at. banned: int64 ids [N] for all rows, or bool [B, V].

    Raises:
        ValueError: a dtype, device or length that does not fit, or a banned id outside the vocabulary.
    """
    rows, vocabulary = logits_BV.shape
    mask = banned.dtype == torch.bool
    controls = {"temperature_B": temperature_B, "top_p_B": top_p_B, "min_p_B": min_p_B}
    places = {"keys_B": keys_B, "positions_B": positions_B}
    check_shapes("sample", logits_BV=logits_BV, **places, **controls)
    cpu = torch.empty(0)
    check_tensors("sample", cpu, (torch.float32,), "any", logits_BV=logits_BV, **controls)
    check_tensors("sample", cpu, (torch.int64,), "any", **places)
    check_tensors("sample", cpu, (torch.bool, torch.int64), "any", banned=banned)
    if not mask and banned.numel():
        # An id outside would be written outside the row.
        smallest, largest = (int(edge) for edge in banned.aminmax())
        if banned.dim() != 1 or smallest < 0 or largest >= vocabulary:
            raise ValueError(
                f"banned: expected ids [N] in 0..{vocabulary - 1}, got {tuple(banned.shape)} from {smallest}"
                f" to {largest}"
            )
    if mask:
        check_shapes("sample", {"B": rows, "V": vocabulary}, banned_BV=banned)
    # Kept under names: the structure holds addresses alone.
    given = (logits_BV, *places.values(), *controls.values(), banned)
    dense = [tensor.contiguous() for tensor in given]
    logits, *control_at, banned_at = (tensor.data_ptr() for tensor in dense)
    out_3B = torch.empty(3, rows, dtype=torch.float64)
    about = Sampling(
        vocabulary,
        drawn,
        logprobs,
        logits,
        *control_at,
        None if mask else banned_at,
        0 if mask else len(banned),
        banned_at if mask else None,
        out_3B.data_ptr(),
        rows,
    )
    run_shared(compiled().sample, (ctypes.byref(about),), range(rows + 1), torch.get_num_threads())
    return out_3B
