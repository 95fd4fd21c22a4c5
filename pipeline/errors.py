"""Errors that are the user's to mend, and the exit codes every verb returns."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence

MIN_PYTHON = (3, 11)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_REQUEUE = 75  # stopped by a signal with a checkpoint saved: start the same command again with --resume


class UserError(Exception):
    """What was given cannot work. The message is one line: what was given, what was expected, what to do.

    The command line prints the message alone and exits with code 2; no traceback unless EF_DEBUG=1.
    """

    exit_code = EXIT_USER


class TrainingStopped(Exception):
    """The guard's policy says that training must not go on (exit code 1)."""

    exit_code = EXIT_FAILURE


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or None when nothing is near (difflib ratio below 0.5)."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return found[0] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A clause for the end of an error: the nearest choice if there is one, else all choices."""
    listed = sorted(set(choices))
    match = nearest(word, listed)
    if match is not None:
        return f"did you mean {match!r}?"
    return f"known: {', '.join(listed)}" if listed else "nothing is known here"


def require_python(version: Sequence[int] = tuple(sys.version_info[:3])) -> None:
    """UserError for a Python that is too old."""
    if tuple(version[:2]) < MIN_PYTHON:
        given, need = ".".join(map(str, version[:3])), ".".join(map(str, MIN_PYTHON))
        raise UserError(f"Python {given} is too old: earlyfusion needs Python {need} or newer")
