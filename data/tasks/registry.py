"""The tasks by name; importing this file registers those of the project.

    task = make_task("maze")
    task = make_task("text_math", path="shared/data/gsm8k")

Options are keywords; an unknown name is told with the nearest.
"""

from typing import Any

# Imported for what they register.
from earlyfusion.data.tasks import (  # noqa: F401
    collection,
    episode,
    file,
    gather,
    needle,
    pages,
    pictures,
    puzzles,
    rule,
    shelf,
)
from earlyfusion.data.tasks.problem import TASKS, Task, TaskError
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.kernels.files import function_at

NEEDY = ("text_math", "file", "episode", "needle", "shelf", "gather", "collection", "pages")
"""Tasks that need data, a tool or a way of answering of their own."""
PROCEDURAL = tuple(name for name, made in TASKS.items() if made.levels and name not in NEEDY)
"""Tasks with problems of one picture that need no data and no tool."""
EXAMS = tuple(name for name, made in TASKS.items() if made.kinds)
"""Tasks that `earlyfusion eval` asks."""


def known(name: str) -> str:
    """The name of a task. Raises TaskError for one that is neither registered nor a place."""
    if name not in TASKS and ":" not in name:
        raise TaskError(f"unknown task {name!r}; {did_you_mean(name, TASKS)}, or package.module:Class")
    return name


def make_task(name: str, **options: Any) -> Task:
    """A task by name, or of your own by its place, "package.module:Class". Raises TaskError for an unknown
    one and for options it does not take."""
    known(name)
    try:
        made = function_at(name, "task") if ":" in name else TASKS[name]
        task: Task = made(**options)
        task.name = name
        return task
    except TypeError as error:
        raise TaskError(f"task {name!r} with options {sorted(options)}: {error}") from None
