"""`earlyfusion eval` with the page of the samples that a task showed: OUT/<task>/report.html."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from earlyfusion.eval import run
from earlyfusion.pipeline.report.data import read_dict
from earlyfusion.pipeline.report.page import write_page


@wraps(run.evaluate)
def evaluate(**options: Any) -> None:
    run.evaluate(**options)
    if options["out"] is not None:
        write_pages(options["out"])


def write_pages(out: Path) -> list[Path]:
    """Draw the page of every task below `out` that left a shown.json; returns their paths."""
    pages = []
    for path in sorted(out.glob("*/shown.json")):
        # The page stands beside the records of its task.
        data = {"title": path.parent.name, "folder": path.parent, **read_dict(path)}
        pages.append(write_page(path.with_name("report.html"), "evaluation.html", data))
    return pages
