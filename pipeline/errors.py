"""The exit codes that every verb returns, and a training that its guard stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from earlyfusion.kernels.errors import UserError

MIN_PYTHON = (3, 11)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_REQUEUE = 75  # stopped by a signal with a checkpoint saved: start the same command again with --resume


class TrainingStopped(UserError):
    """The guard's policy says that training must not go on (exit code 1)."""

    exit_code = EXIT_FAILURE


def require_python(version: Sequence[int] = tuple(sys.version_info[:3])) -> None:
    """UserError for a Python that is too old."""
    if tuple(version[:2]) < MIN_PYTHON:
        given, need = ".".join(map(str, version[:3])), ".".join(map(str, MIN_PYTHON))
        raise UserError(f"Python {given} is too old: earlyfusion needs Python {need} or newer")
