"""The tasks by name.

task = make_task("maze")
task = make_task("text_math", path="../shared/data/gsm8k")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from earlyfusion.data.tasks.calculation import Arithmetic, Geometry
from earlyfusion.data.tasks.jigsaw import Jigsaw
from earlyfusion.data.tasks.maze import Maze
from earlyfusion.data.tasks.odd_one_out import OddOneOut
from earlyfusion.data.tasks.places import Grounding, Pointing, Polygon
from earlyfusion.data.tasks.problem import Task, TaskError
from earlyfusion.data.tasks.reading import ChartValue, Ocr
from earlyfusion.data.tasks.scenes import ColourShape, Counting, Relation
from earlyfusion.data.tasks.text_math import TextMath
from earlyfusion.kernels.errors import did_you_mean

PROCEDURAL: dict[str, Callable[[], Task]] = {
    kind.name: kind
    for kind in (
        Counting,
        ColourShape,
        Relation,
        Grounding,
        Pointing,
        Polygon,
        Ocr,
        ChartValue,
        Jigsaw,
        Maze,
        OddOneOut,
        Geometry,
        Arithmetic,
    )
}
"""Tasks that need no data."""
TASKS: dict[str, Callable[..., Task]] = {**PROCEDURAL, TextMath.name: TextMath}


def make_task(name: str, **options: Any) -> Task:
    """A task by name. Raises TaskError for an unknown one and for options it does not take."""
    if name not in TASKS:
        raise TaskError(f"task {name!r}; {did_you_mean(name, TASKS)}")
    try:
        return TASKS[name](**options)
    except TypeError as error:
        raise TaskError(f"task {name!r} with options {sorted(options)}: {error}") from None
