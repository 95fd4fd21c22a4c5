"""Measurements as JSON lines, one problem a line, without its picture: that can be drawn again from the key.

    write_measured(path, measured)
    measured = load_measured(path)
    problem = problem_of(measured[0].key)                # the picture is problem.picture

Files are complete or absent (written beside, then renamed).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.problem import FORMS, Form, Problem, Split
from earlyfusion.data.tasks.registry import TASKS, make_task
from earlyfusion.kernels.errors import did_you_mean
from earlyfusion.rl.recipe import TaskEntry
from earlyfusion.rl.records import Measured


def write_measured(path: str | Path, measured: Iterable[Measured]) -> Path:
    """Write the records; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for one in measured:
        fields = asdict(replace(one, picture=None))
        del fields["picture"]
        lines.append(json.dumps(fields, ensure_ascii=False) + "\n")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, path)
    return path


def load_measured(path: str | Path) -> list[Measured]:
    """Read the records. Raises DataError for a file that is missing or holds something else."""
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; expected measurements as `earlyfusion measure --out DIR` writes them"
        )
    found = []
    for number, line in enumerate(filter(None, path.read_text(encoding="utf-8").split("\n")), 1):
        try:
            fields = json.loads(line)
            if "ended" not in fields:
                raise KeyError(
                    "ended: it was made when answers that a limit cut off were judged by their beginning"
                )
            found.append(Measured(**{**fields, "sampled": tuple(fields["sampled"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} line {number}: not a measurement ({error}); measure again") from None
    return found


def problem_of(key: str, **options: Any) -> Problem:
    """The problem of a key ("counting/test/1/7"). options: of its task. Raises DataError for what is no
    key."""
    head, _, number = key.rpartition("/")
    name, split, level = [*head.split("/", 2), "", ""][:3]
    try:
        seed, difficulty = int(number), json.loads(level)
    except ValueError:
        raise DataError(f"{key!r}: expected task/split/difficulty/seed, such as counting/test/1/7") from None
    return make_task(name, **options).sample(seed, cast(Split, split), difficulty)


def entry_of(label: str) -> TaskEntry:
    """TaskEntry of "counting", "counting/1", "counting/1/twin", "counting/1/twin/thought" or
    "counting/1/twin/tools". Raises DataError."""
    parts = label.split("/")
    how = parts.pop() if parts[-1] in ("thought", "tools") else ""
    if (
        not 1 <= len(parts) <= 3
        or (len(parts) > 1 and not parts[1].isdigit())
        or (parts[2:] and parts[2] not in FORMS)
    ):
        raise DataError(
            f"{label!r}: expected task, task/difficulty or task/difficulty/form, form one of"
            f' {", ".join(FORMS)}, with "/thought" for answers after a thought, "/tools" for answers with'
            " Python"
        )
    if parts[0] not in TASKS:
        raise DataError(f"{label!r}: unknown task {parts[0]!r}; {did_you_mean(parts[0], TASKS)}")
    form = cast(Form, parts[2] if len(parts) > 2 else "picture")
    level = int(parts[1]) if len(parts) > 1 else 0
    return TaskEntry(
        name=parts[0], difficulty=level, form=form, thought=how == "thought", tools=how == "tools"
    )
