"""A page of problems to look at: every task, level and split with its three forms and its answer.

python -m earlyfusion.data.tasks.gallery --tasks maze,ocr --each 2 --out tasks.html
"""

from __future__ import annotations

import argparse
import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image as PILImage

from earlyfusion.data.errors import DataError
from earlyfusion.data.tasks.problem import SPLITS, Problem
from earlyfusion.data.tasks.registry import PROCEDURAL, make_task
from earlyfusion.data.tasks.rendering import render_text

_PAGE = """<!doctype html><meta charset="utf-8"><title>Tasks</title><style>
body{font:14px system-ui;margin:2em;color:#222}table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:6px;
vertical-align:top;text-align:left}pre{margin:0;white-space:pre-wrap;max-width:32em}img{image-rendering:pixelated}
</style><h1>Verifiable tasks</h1>"""


def picture_tag(picture: PILImage.Image, zoom: int = 2) -> str:
    """The picture as an <img> with its bytes inside."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img width="{picture.width * zoom}" src="data:image/png;base64,{data}">'


def row(problem: Problem, reward: float) -> str:
    """One line of the table."""
    picture = picture_tag(problem.picture) if problem.picture is not None else ""
    cells = [
        html.escape(problem.key),
        picture,
        f"<pre>{html.escape(problem.description)}</pre>",
        picture_tag(render_text(problem.description), 1),
        html.escape(problem.question),
        (
            f"{html.escape(problem.target)}<br><small>reward {reward:.2f};"
            f" {html.escape(problem.meta['combination'][:60])}</small>"
        ),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def page(names: Sequence[str], each: int, seed: int) -> str:
    """The HTML page. Raises TaskError for an unknown task."""
    parts = [_PAGE]
    for name in names:
        task = make_task(name)
        parts.append(
            f"<h2>{name}</h2><table><tr><th>problem<th>picture<th>twin<th>rendered twin<th>question<th>target"
        )
        for level in range(len(getattr(task, "levels", (0,)))):
            for split in SPLITS:
                problems = [task.sample(seed + i, split, level) for i in range(each)]
                parts += [row(problem, task.reward(problem, problem.target)) for problem in problems]
        parts.append("</table>")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; 2 for an unknown task."""
    parser = argparse.ArgumentParser(
        prog="python -m earlyfusion.data.tasks.gallery",
        description=__doc__.splitlines()[0] if __doc__ else "",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tasks", type=str, default=",".join(PROCEDURAL), help="names, comma-separated")
    parser.add_argument("--each", type=int, default=1, help="problems of each level and split")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--out", type=Path, default=Path("tasks.html"), help="file to write")
    options = parser.parse_args(argv)
    try:
        text = page([name for name in options.tasks.split(",") if name], options.each, options.seed)
    except DataError as error:
        print(f"error: {error}")
        return 2
    options.out.write_text(text, encoding="utf-8")
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
