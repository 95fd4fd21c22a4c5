"""The error of a user's mistake, for every room: it stands on the lowest floor and imports nothing heavy."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was given cannot work. The message is one line: what was given, what was expected, what to do.

    Every room's errors of that kind derive from it. The command line prints the message alone and exits with
    `exit_code`; EF_DEBUG=1 shows the traceback as well.
    """

    exit_code = 2


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`; None when none is like it (difflib's ratio below 0.4)."""
    found = difflib.get_close_matches(word, sorted(set(choices)), n=1, cutoff=0.4)
    return found[0] if found else None


SHORT_LIST = 12
"""Choices that are all named beside the nearest one."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of an error line: the nearest choice, and all of them where they are few or none is near."""
    listed = sorted(set(choices))
    if not listed:
        return "nothing is known here"

    # Without a near one the list is the better help.
    near = nearest(word, listed)
    known = f"known: {', '.join(listed)}"
    if near is None:
        return known
    return f"did you mean {near!r}?" + (f" ({known})" if len(listed) <= SHORT_LIST else "")


def one_line(error: object, limit: int = 300) -> str:
    """The text of `error` on one line, at most `limit` characters, without what a terminal would obey."""
    text = " ".join(str(error).split())
    text = text if len(text) <= limit else f"{text[:limit]} ..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
