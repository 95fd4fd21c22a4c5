"""One table of operations and their implementations, and the rule that picks one.

Every operation has up to three backends with the same signature:

* ``naive``: the definition, written to be read; the oracle of every test.
* ``torch``: plain torch with a custom backward; quick on a CPU, correct on any device.
* ``triton``: a GPU kernel. Where one does not exist the table has no entry, never a stub.

``resolve`` picks by device: on CUDA ``triton`` if there is one, else ``torch``, else ``naive``; elsewhere
``torch``, else ``naive``. The environment variable ``EF_KERNELS`` (``auto``, ``naive``, ``torch`` or
``triton``) caps that choice: the named backend is used where it exists and the next simpler one where it does
not. (The engine's C++ for a CPU, kernels/cpu, stands beside this table; ``torch`` and ``naive`` turn it off.)
Implementations are imported when first asked for, so that a CPU machine never imports triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from earlyfusion.kernels.errors import UserError, did_you_mean

BACKENDS = ("naive", "torch", "triton")  # from the simplest to the most special
ENVIRONMENT = "EF_KERNELS"

_ROOM = "earlyfusion.kernels"
REGISTRY: dict[str, dict[str, str]] = {
    "kda": {
        "naive": f"{_ROOM}.kda.naive:kda",
        "torch": f"{_ROOM}.kda.chunk:kda",
        "triton": f"{_ROOM}.kda.triton.kda:kda",
    },
    "kda_step": {
        "naive": f"{_ROOM}.kda.naive:kda_step",
        "torch": f"{_ROOM}.kda.step:kda_step",
        "triton": f"{_ROOM}.kda.decode:kda_step",
    },
    "short_conv": {
        "naive": f"{_ROOM}.kda.naive:short_conv",
        "torch": f"{_ROOM}.kda.conv:short_conv",
        "triton": f"{_ROOM}.kda.triton.conv:short_conv",
    },
    "attention": {
        "naive": f"{_ROOM}.attention.naive:attention",
        "torch": f"{_ROOM}.attention.varlen:attention",
        "triton": f"{_ROOM}.attention.triton.flash:attention",
    },
    "attention_append": {
        "naive": f"{_ROOM}.attention.naive:attention_append",
        "triton": f"{_ROOM}.attention.triton.flash:attention_append",
    },
    "qkv_rope": {
        "naive": f"{_ROOM}.attention.rope:qkv_rope_naive",
        "torch": f"{_ROOM}.attention.rope:qkv_rope",
        "triton": f"{_ROOM}.attention.triton.rope:qkv_rope",
    },
    "mla_decode": {
        "naive": f"{_ROOM}.attention.decode:mla_decode",
        "triton": f"{_ROOM}.attention.triton.decode:mla_decode",
    },
    "max_logit": {
        "naive": f"{_ROOM}.attention.naive:max_logit",
        "torch": f"{_ROOM}.attention.max_logit:max_logit",
        "triton": f"{_ROOM}.attention.triton.max_logit:max_logit",
    },
    "attnres_phase1": {
        "naive": f"{_ROOM}.attnres.naive:phase1",
        "torch": f"{_ROOM}.attnres.two_phase:phase1",
        "triton": f"{_ROOM}.attnres.triton_phase1:phase1",
    },
    "attnres_merge": {
        "naive": f"{_ROOM}.attnres.naive:merge",
        "torch": f"{_ROOM}.attnres.two_phase:merge",
        "triton": f"{_ROOM}.attnres.triton_merge:merge",
    },
    "attnres_open": {
        "naive": f"{_ROOM}.attnres.fused:open_block_naive",
        "torch": f"{_ROOM}.attnres.fused:open_block",
        "triton": f"{_ROOM}.attnres.triton_phase1:open_block",
    },
    "attnres_step": {
        "naive": f"{_ROOM}.attnres.fused:step_naive",
        "torch": f"{_ROOM}.attnres.fused:step",
        "triton": f"{_ROOM}.attnres.triton_merge:step",
    },
    "moe_experts": {
        "naive": f"{_ROOM}.moe.naive:moe_experts",
        "torch": f"{_ROOM}.moe.grouped:moe_experts",
        "triton": f"{_ROOM}.moe.triton_experts:moe_experts",
    },
    "linear_cross_entropy": {
        "naive": f"{_ROOM}.loss.naive:linear_cross_entropy",
        "torch": f"{_ROOM}.loss.chunked_ce:linear_cross_entropy",
        "triton": f"{_ROOM}.loss.triton_rows:linear_cross_entropy",
    },
    "token_log_probs": {
        "naive": f"{_ROOM}.loss.naive:token_log_probs",
        "torch": f"{_ROOM}.loss.chunked_ce:token_log_probs",
        "triton": f"{_ROOM}.loss.triton_rows:token_log_probs",
    },
    "newton_schulz": {
        "naive": f"{_ROOM}.muon.naive:newton_schulz",
        "torch": f"{_ROOM}.muon.newton_schulz:newton_schulz",
        "triton": f"{_ROOM}.muon.triton_symmetric:newton_schulz",
    },
}


class BackendError(UserError, ValueError):
    """An operation or a value of EF_KERNELS that is not known."""


def requested_backend() -> str:
    """The value of ``EF_KERNELS``, ``auto`` if unset.

    Raises:
        BackendError: it names no backend.
    """
    value = os.environ.get(ENVIRONMENT, "auto").strip().lower() or "auto"
    choices = ("auto", *BACKENDS)
    if value not in choices:
        raise BackendError(f"{ENVIRONMENT}={value!r} names no kernel backend; {did_you_mean(value, choices)}")
    return value


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def pick(op: str, device: torch.device | str) -> str:
    """Name of the backend ``resolve`` uses for ``op`` on ``device``.

    Raises:
        BackendError: ``op`` or ``EF_KERNELS`` is unknown; the nearest valid name is given.
    """
    if op not in REGISTRY:
        raise BackendError(f"unknown operation {op!r}; {did_you_mean(op, REGISTRY)} (kernels/dispatch.py)")
    wanted = requested_backend()
    if wanted == "auto":
        wanted = "triton" if torch.device(device).type == "cuda" else "torch"
    for backend in reversed(BACKENDS[: BACKENDS.index(wanted) + 1]):
        if backend in REGISTRY[op] and (backend != "triton" or _has_triton()):
            return backend
    raise BackendError(
        f"operation {op!r} has no backend at or below {wanted!r}; it has {', '.join(REGISTRY[op])}"
    )


@cache
def load(path: str) -> Callable[..., Any]:
    """The function that an entry of REGISTRY names, as "module:function"."""
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)


def resolve(op: str, device: torch.device | str) -> Callable[..., Any]:
    """The implementation of ``op`` for tensors on ``device``; call it with the operation's arguments."""
    backend = pick(op, device)
    return load(REGISTRY[op][backend])


def table(device: torch.device | str) -> list[tuple[str, str, str]]:
    """Rows ``(op, backend, "module:function")`` of what ``resolve`` would use on ``device``."""
    return [(op, backend, REGISTRY[op][backend]) for op in REGISTRY for backend in [pick(op, device)]]
