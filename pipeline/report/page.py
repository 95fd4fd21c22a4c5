"""Pages: jinja2 templates over plain dicts. A page is one file that loads nothing and runs nothing.

    write_page(out / "report.html", "run.html", data)

Every text is escaped by the template engine, and control characters in it are made visible; what is HTML
already (drawings, the output of macros) carries its own type.

The page of a training run is `report.html` of its folder:

    write_report(run_dir) -> Path        reads what is there, leaves out what is not, never needs the model

Every part of a folder is optional, other keys and files are ignored; run.html says what is shown:

`metrics.jsonl`   a JSON object a line, `{"step": int, "event": str, ...}`; broken lines are counted.
  event "train"   numbers: `loss` (nats a token), `loss/<modality>`, `loss/source/<source>`, `lr`,
                  `grad_norm`, `tokens` (seen so far), `tokens_per_s`, `patches_per_s`, `seconds` (since the
                  start); `data/share/<source>`, `data/vision_share`, `data/media_share`,
                  `data/epoch/<source>`, `data/skipped/<reason>` (of the stage so far); now and then the
                  tables `expert_load` {"<layer>": [share of routed tokens per expert, sums to 1]} and
                  `max_logit` {"<layer>": [largest attention logit per head]}
  event "guard"   `kind`, `action`, `message`
  other events    listed in the run's diary if they carry `message`
`eval/*.json`     files of `eval/samples.py`: easy_vqa, bpb, heldout, attnres; answer_loss and
                  tool_talks_<source> of a chat stage
`samples/*.json`  files of `eval/samples.py`; an image is a data URI or a path relative to the run folder
`recipe.toml`, `versions.json` (name -> version), `facts.json` (name -> value, for the head)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import write_atomic
from earlyfusion.pipeline.progress import is_finite
from earlyfusion.pipeline.report.charts import lines, spans
from earlyfusion.pipeline.report.data import (
    Record,
    Series,
    by_source,
    curves,
    data_uri,
    family,
    image_source,
    read_run,
    series,
)

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


# ---- The page of a training run.


def write_report(run_dir: str | Path) -> Path:
    """Write `<run_dir>/report.html` and return its path. Raises FileNotFoundError when there is no such
    folder."""
    run = read_run(run_dir, "Joint vision-text pretraining run")
    # Called inside the page: a table of another hand costs its own part, not the whole report.
    functions = {"expert_load": expert_load, "largest": largest}
    return write_page(run["folder"] / "report.html", "run.html", run | functions)


def expert_load(train: Sequence[Record]) -> dict[str, Any]:
    """The latest load of every expert relative to a fair share (matrix: layer by expert); {} without
    experts."""
    tables = [record for record in train if record.get("expert_load")]
    if not tables:
        return {}
    # The latest alone: a map over time would need a page of its own.
    latest = tables[-1]["expert_load"]
    rows = [[share * len(shares) for share in shares] for shares in latest.values()]
    # Layers may have different numbers of experts; the map is as wide as the widest.
    matrix = list(zip(*zip_longest(*rows)))
    return {"step": tables[-1]["step"], "layers": list(latest), "matrix": matrix}


def largest(train: Sequence[Record], key: str, relative: bool = False) -> dict[str, Series]:
    """The largest number of each layer's row in a table over steps (the busiest expert, the sharpest head).
    relative: to a fair share of the row."""
    found: dict[str, Series] = defaultdict(lambda: ([], []))
    for record in train:
        for layer, row in record.get(key, {}).items():
            # A damaged row is a gap in its curve.
            if row and all(map(is_finite, row)):
                steps, values = found[f"layer {layer}"]
                steps.append(record["step"])
                values.append(max(row) * (len(row) if relative else 1))
    return found
