"""One table of operations and their implementations, and the rule that picks one.

Every operation has up to four backends with the same signature:

* ``naive``: the definition, written to be read; the oracle of every test.
* ``torch``: plain torch with a custom backward; quick on a CPU, correct on any device.
* ``cpu``: for a CPU. Some are for inference in full precision alone: few operations, and a token's bits do
  not depend on the tokens beside it. Those of WITH_GRADIENT are C++ and serve training, too.
* ``triton``: for a GPU. Where none exists the table has no entry, never a stub.

``resolve(op, x)`` picks by the tensor x that the operation works on: on CUDA ``triton``, on a CPU ``cpu``
where nobody asks for a gradient or it has one, else ``torch``, else ``naive``; the first that the operation
has. (Given a device alone, ``cpu`` without gradients is left out; given a float64 tensor, ``triton`` is, and
C++.) The environment variable
``EF_KERNELS`` caps that choice: the named backend is used where it exists and the next simpler one where it
does not. The engine's C++ (kernels/cpu) is a whole decoder, not an operation; ``torch`` and ``naive`` turn it
off, too. Implementations are imported when first asked for, so that a CPU machine never imports triton.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from earlyfusion.kernels.errors import UserError, did_you_mean

BACKENDS = ("naive", "torch", "cpu", "triton")  # from the simplest to the most special
ENVIRONMENT = "EF_KERNELS"


class BackendError(UserError, ValueError):
    """An operation, a backend or a value of EF_KERNELS that is not known."""


REGISTRY: dict[str, dict[str, str]] = {}
"""Operation -> backend -> "module:function"."""


def register(op: str, backend: str, path: str) -> None:
    """Add an implementation, "module:function", to the table; it replaces an older one.

    Raises:
        BackendError: the backend is unknown.
    """
    if backend not in BACKENDS:
        raise BackendError(f"backend {backend!r} is unknown; {did_you_mean(backend, BACKENDS)}")
    # Other rooms may bring their own, also for operations of this one.
    REGISTRY.setdefault(op, {})[backend] = path


_OURS = """
kda kda.naive kda.chunk kda.recurrent kda.triton.kda
kda_step kda.naive kda.decode - -
short_conv kda.naive kda.conv kda.recurrent kda.triton.conv
attention attention.naive attention.varlen - attention.triton.flash
attention_append attention.naive - - attention.triton.flash
qkv_rope attention.naive attention.varlen - attention.triton.rope
mla_decode attention.naive attention.tiles - attention.triton.decode
max_logit attention.naive attention.varlen - attention.triton.flash
attnres_phase1 attnres.naive:phase1 attnres.two_phase:phase1 \
    attnres.two_phase:phase1_alone attnres.triton_two_phase:phase1
attnres_step attnres.naive:step attnres.two_phase:step - attnres.triton_two_phase:step
attnres_block attnres.naive:block attnres.two_phase:block \
    attnres.two_phase:block_alone attnres.triton_two_phase:block
moe_experts moe.naive moe.grouped moe.grouped:moe_experts_alone moe.triton_experts
linear_cross_entropy loss.naive loss.chunked_ce - loss.triton_rows
token_log_probs loss.naive loss.chunked_ce - loss.triton_rows
newton_schulz muon.naive muon.newton_schulz - muon.triton_symmetric
rms_norm products products:rms_norm_closed products products:rms_norm_on_gpu
"""
"""A line per operation: module:function of each of BACKENDS in turn, or -. A module alone: its function
of that name."""

WITH_GRADIENT = {"kda", "short_conv"}
"""Operations whose ``cpu`` form has a gradient."""

for _line in _OURS.strip().splitlines():
    _op, *_paths = _line.split()
    for _backend, _path in zip(BACKENDS, _paths, strict=True):
        if _path != "-":
            _place = _path if ":" in _path else f"{_path}:{_op}"
            register(_op, _backend, f"earlyfusion.kernels.{_place}")


def requested_backend() -> str:
    """The value of ``EF_KERNELS``, ``auto`` if unset.

    Raises:
        BackendError: it names no backend.
    """
    # Read at every call: tests and users set it at any time.
    value = os.environ.get(ENVIRONMENT, "auto").strip().lower() or "auto"
    choices = ("auto", *BACKENDS)
    if value not in choices:
        raise BackendError(f"{ENVIRONMENT}={value!r} names no kernel backend; {did_you_mean(value, choices)}")
    return value


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _serves_cpu(op: str, like: Tensor | torch.device | str) -> bool:
    """Whether the ``cpu`` form of ``op`` may take this tensor, or tensors of this device."""
    if op not in WITH_GRADIENT:
        return _answers_alone(like)
    if isinstance(like, Tensor):
        return like.device.type == "cpu" and like.dtype != torch.float64
    return torch.device(like).type == "cpu"


def _answers_alone(like: Tensor | torch.device | str) -> bool:
    """Whether this is inference on a CPU in full precision."""
    # A device alone does not say whether anyone wants a gradient.
    if not isinstance(like, Tensor) or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64)


def pick(op: str, like: Tensor | torch.device | str) -> str:
    """Name of the backend ``resolve`` uses for ``op``.

    Raises:
        BackendError: ``op`` or ``EF_KERNELS`` is unknown; the nearest valid name is given.
    """
    if op not in REGISTRY:
        raise BackendError(f"unknown operation {op!r}; {did_you_mean(op, REGISTRY)} (kernels/dispatch.py)")
    most = requested_backend()
    if most == "auto":
        device = like.device if isinstance(like, Tensor) else torch.device(like)
        most = "triton" if device.type == "cuda" else "cpu"

    # float64 is there for checking, in plain torch: no kernel is written for it.
    wide = isinstance(like, Tensor) and like.dtype == torch.float64
    usable = {
        "naive": True,
        "torch": True,
        "cpu": _serves_cpu(op, like),
        "triton": _has_triton() and not wide,
    }
    # From the most special that is allowed down to the law.
    for backend in reversed(BACKENDS[: BACKENDS.index(most) + 1]):
        if backend in REGISTRY[op] and usable[backend]:
            return backend
    raise BackendError(
        f"operation {op!r} has no backend at or below {most!r}; it has {', '.join(REGISTRY[op])}"
    )


def has_kernel(op: str, like: Tensor | torch.device | str) -> bool:
    """Whether ``resolve`` gives a GPU kernel, for callers that lay out their memory for it."""
    return pick(op, like) == "triton"


@cache
def load(path: str) -> Callable[..., Any]:
    """The function that an entry of REGISTRY names, as "module:function"."""
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)


def resolve(op: str, like: Tensor | torch.device | str) -> Callable[..., Any]:
    """The implementation of ``op`` for a tensor like this one, or a device; call it with its arguments."""
    backend = pick(op, like)
    return load(REGISTRY[op][backend])


def table(device: torch.device | str) -> list[tuple[str, str, str]]:
    """Rows ``(op, backend, "module:function")`` of what ``resolve`` would use on ``device``."""
    return [(op, backend, REGISTRY[op][backend]) for op in REGISTRY for backend in [pick(op, device)]]
