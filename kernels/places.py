"""Functions that a user names by their place, "package.module:function"."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from earlyfusion.kernels.errors import UserError


def function_at(place: str, key: str) -> Callable[..., Any]:
    """The function at `place`; the working directory counts as well. key: the recipe's, for the error.

    Raises UserError for a place that holds none.
    """
    module, _, name = place.partition(":")
    if os.getcwd() not in sys.path:  # the console script, unlike `python -m`, does not look there
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{key} {place!r} cannot be imported ({error}); expected package.module:function"
        ) from None
    if not callable(function):
        raise UserError(f"{key} {place!r} is no function but {type(function).__name__}")
    return function
