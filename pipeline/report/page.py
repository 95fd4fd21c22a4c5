"""Pages: jinja2 templates over plain dicts. A page is one file that loads nothing and runs nothing.

    write_page(out / "report.html", "run.html", data)

Every text is escaped by the template engine, and control characters in it are made visible; what is HTML
already (drawings, the output of macros) carries its own type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import write_atomic
from earlyfusion.pipeline.progress import is_finite
from earlyfusion.pipeline.report.charts import lines, spans
from earlyfusion.pipeline.report.data import by_source, curves, data_uri, family, image_source, series

_VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


def write_page(path: Path, template: str, data: Mapping[str, Any]) -> Path:
    """Write the page of a template, whole or not at all; returns `path`."""
    return write_atomic(path, ENVIRONMENT.get_template(template).render(data))


def guarded(*, caller: Callable[[], str]) -> str:
    """{% call guarded() %}: what stands inside, or a note: a file of another hand must not take the page from
    a run."""
    try:
        return caller().strip()  # rendered here and now, so that whatever goes wrong is caught here
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}")
        return Markup('<p class="note">A part of the page could not be drawn ({}).</p>').format(why)


def section(title: str, note: str = "", *, caller: Callable[[], str]) -> str:
    """{% call section(title, note) %}: a titled part of a page; nothing where it is empty."""
    body = guarded(caller=caller)
    if not body:
        return ""
    return Markup('<section><h2>{}</h2><p class="note">{}</p>{}</section>').format(title, note, body)


def number(value: Any, form: str = ".3f", scale: float = 1) -> str:
    """A number in a format of Python's, times `scale`; a dash for what is none."""
    return format(value * scale, form) if is_finite(value) else "–"


def p_value(p: Any) -> str:
    """A p value with what it can resolve."""
    return "<.001" if is_finite(p) and p < 0.001 else number(p)


def visible(value: Any) -> Any:
    """Text with its control characters as symbols."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return value.translate(_VISIBLE)
    return "" if value is None else value


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    finalize=visible,
    trim_blocks=True,
    lstrip_blocks=True,
)
# What templates call: parts of a page, and drawings below their titles.
for part in (guarded, section, image_source, lines, spans):
    ENVIRONMENT.globals[part.__name__] = part
# What templates put behind a value: curves of records, numbers as text.
for read in (series, curves, family, by_source, data_uri, number, p_value):
    ENVIRONMENT.filters[read.__name__] = read
ENVIRONMENT.filters["percent"] = partial(number, form=".1f", scale=100)
ENVIRONMENT.filters["points"] = partial(number, form="+.1f", scale=100)
