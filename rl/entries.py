"""Entries of a recipe by the label they have in tables and files."""

from __future__ import annotations

from typing import cast

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.problem import FORMS, Form
from earlyfusion.data.tasks.registry import TASKS
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.rl.recipe import TaskEntry


def entry_of(label: str) -> TaskEntry:
    """TaskEntry of "counting", "counting/1", "counting/1/twin", "counting/1/twin/thought" or
    "counting/1/twin/tools". Raises DataError."""
    parts = label.split("/")
    how = parts.pop() if parts[-1] in ("thought", "tools") else ""
    defaults = ("", "0", "picture")
    name, level, form = (*parts, *defaults[len(parts) :])[:3]
    if not 1 <= len(parts) <= 3 or not level.isdigit() or form not in FORMS:
        raise DataError(
            f"{label!r}: expected task, task/difficulty or task/difficulty/form, form one of"
            f' {", ".join(FORMS)}, with "/thought" for answers after a thought, "/tools" for answers with'
            " Python"
        )
    if name not in TASKS:
        raise DataError(f"{label!r}: unknown task {name!r}; {did_you_mean(name, TASKS)}")

    thought, tools = how == "thought", how == "tools"
    return TaskEntry(name=name, difficulty=int(level), form=cast(Form, form), thought=thought, tools=tools)
