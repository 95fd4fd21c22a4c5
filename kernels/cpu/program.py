"""decode.cpp from Python: its structures, weights in its layout, and a step over threads.

A structure holds addresses: whoever makes a `Program` keeps the tensors behind them alive (`Program.keep`).

sample.cpp from Python. What is chosen and why: model/engine/sampler.py.

Shapes: B rows of a batch, V vocabulary, N banned ids.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.cpu.build import AT, INT, REAL, compiled, library, run_shared
from earlyfusion.kernels.segments import check_shapes, check_tensors

ROWS_AT_ONCE = 128
"""Rows that go through all layers together: their activations stay in the cache."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


# Fields in the order of the C++ structures; tests compare the sizes on both sides.
class Matrix(ctypes.Structure):
    _fields_ = [("panels", AT), *_fields(INT, "inner columns")]


class Place(ctypes.Structure):
    """Where a sub-layer reads (a source, or -1: the mix) and where it adds; fresh: it is the first to write
    there; last: no later token needs more of the rows than their results."""

    _fields_ = _fields(INT, "source into fresh last")


class Step(ctypes.Structure):
    _fields_ = [
        *_fields(AT, "slots positions places pages"),
        *_fields(INT, "page_step page_size"),
        *_fields(AT, "x out chosen"),
        ("chosen_step", INT),
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
        *_fields(REAL, "eps qk_eps out_eps lower_bound"),
        *_fields(INT, "heads dim taps"),
        *_fields(Matrix, "joint f_up gate_up out"),
        *_fields(AT, "conv bias rate state past"),
    ]


class Mla(ctypes.Structure):
    KIND = 3
    _fields_ = [
        ("place", Place),
        *_fields(REAL, "eps query_eps latent_eps"),
        *_fields(INT, "heads rank shared nope value low gated"),
        *_fields(Matrix, "joint store query k_up v_up out"),
        *_fields(AT, "latent_norm latents"),
    ]


class Mlp(ctypes.Structure):
    KIND = 4
    _fields_ = [("place", Place), ("eps", REAL), *_fields(Matrix, "gate_up down")]


class Moe(ctypes.Structure):
    KIND = 5
    _fields_ = [
        ("place", Place),
        *_fields(REAL, "eps scaling"),
        *_fields(INT, "experts choices renormalize index"),
        *_fields(AT, "norm bias"),
        *_fields(Matrix, "joint up down shared_down"),
    ]


class Finish(ctypes.Structure):
    KIND = 6
    _fields_ = [("source", INT), ("eps", REAL), ("norm", AT)]


class _Operation(ctypes.Structure):
    _fields_ = [("kind", INT), ("what", AT)]


class _Program(ctypes.Structure):
    _fields_ = [*_fields(INT, "hidden sources count"), ("operations", AT)]


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
        *((name, INT) for name in ("vocabulary", "drawn", "known")),
        *((name, AT) for name in ("logits", "keys", "positions", "temperature", "top_p", "min_p", "banned")),
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
    """`sampler.choose` of fp32 logits, which are not changed: float64 [3, B].

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
