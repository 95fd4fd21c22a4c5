"""Entries of a recipe by the label they have in tables and files."""

from __future__ import annotations

import re

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.problem import FORMS
from earlyfusion.data.tasks.registry import TASKS
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.rl.recipe import TaskEntry

# Task, level, form and how it is answered; all but the task may be left out.
_LABEL = re.compile(rf"([^/]+)(?:/(\d+)(?:/({'|'.join(FORMS)}))?)?(?:/(thought|tools))?")


def entry_of(label: str) -> TaskEntry:
    """TaskEntry of "counting", "counting/1", "counting/1/twin", "counting/1/twin/thought" or
    "counting/1/twin/tools". Raises DataError."""
    # A label is what tables and files show, so what is read there can be asked for again.
    match = _LABEL.fullmatch(label)
    if match is None:
        raise DataError(
            f"{label!r}: expected task, task/difficulty or task/difficulty/form, form one of"
            f' {", ".join(FORMS)}, with "/thought" for answers after a thought, "/tools" for answers with'
            " Python"
        )
    name, level, form, how = match.groups()
    if name not in TASKS:
        raise DataError(f"{label!r}: unknown task {name!r}; {did_you_mean(name, TASKS)}")
    about = {"difficulty": level or 0, "form": form or "picture", how or "tools": how is not None}
    return TaskEntry.model_validate({"name": name, **about})
