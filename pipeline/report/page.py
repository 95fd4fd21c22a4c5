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

import base64
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from PIL import Image as PILImage

from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import Record, read_jsonl, write_atomic
from earlyfusion.pipeline.progress import is_finite
from earlyfusion.pipeline.report.charts import lines, spans

# ---- What a run folder holds, read once. Nothing of another hand in it may break a page: torn lines are
# counted and left out, numbers are checked, pictures come from inside the folder only.

Series = tuple[list[float], list[float]]
"""Steps, values."""


def read_run(run_dir: str | Path, about: str = "Training run") -> Record:
    """A run folder as a dict: title, note, train (records), marks (steps at which the guard acted), events,
    results...

    about: what stands below the title where facts.json says nothing. Raises FileNotFoundError when it is no
    folder; a missing part is empty.
    """
    directory = Path(run_dir)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory}: not a folder; expected the output folder of a run (with metrics.jsonl)"
        )
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_bytes().split(b"\n") if metrics.is_file() else []
    # What has no step cannot stand on an axis.
    records = [record for record in read_jsonl(metrics) if is_finite(record.get("step"))]
    of: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        of[str(record.get("event"))].append(record)

    recipe = directory / "recipe.toml"
    facts = read_dict(directory / "facts.json")
    # Measurements of one name are one curve.
    results: dict[str, list[Record]] = defaultdict(list)
    for record in read_steps(directory / "eval"):
        results[str(record.get("name"))].append(record)
    told = [f"{key.replace('_', ' ')}: {value}" for key, value in facts.items() if key != "name"]
    return {
        "title": str(facts.get("name", directory.resolve().name)),
        "note": " · ".join(told) or about,
        "train": of["train"],
        "evals": of["eval"],
        "marks": [record["step"] for record in of["guard"]],
        # The latest ones: a long run may tell thousands.
        "events": [record for record in records if isinstance(record.get("message"), str)][-200:],
        "broken_lines": sum(bool(line.strip()) for line in lines) - len(records),
        "results": results,
        "samples": read_steps(directory / "samples"),
        "folder": directory,
        "recipe": recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else "",
        "versions": read_dict(directory / "versions.json"),
    }


def read_steps(folder: Path) -> list[Record]:
    """The JSON objects of a folder that name their step, by step."""
    records = [read_dict(path) for path in sorted(folder.glob("*.json"))]
    return sorted((r for r in records if is_finite(r.get("step"))), key=lambda record: record["step"])


def read_dict(path: Path) -> Record:
    """The JSON object of a file; {} when there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def series(records: Iterable[Record], key: str) -> Series:
    """(steps, values) of the records whose `key` is a number."""
    kept = [record for record in records if is_finite(record.get(key))]
    return [record["step"] for record in kept], [record[key] for record in kept]


def curves(records: Iterable[Record], labels: Mapping[str, str]) -> dict[str, Series]:
    """Label -> series of its key; labels: key -> label."""
    return {label: series(records, key) for key, label in labels.items()}


def family(records: Iterable[Record], prefix: str, without: str = " ") -> dict[str, Series]:
    """Name -> series of every numeric key prefix + name, in order of first appearance; no name that begins
    `without`."""
    found = {}
    for key in dict.fromkeys(key for record in records for key in record if key.startswith(prefix)):
        curve = series(records, key)
        if curve[0] and not key.startswith(prefix + without):
            found[key.removeprefix(prefix)] = curve
    return found


def by_source(records: Iterable[Record], key: str, suffix: str = "") -> dict[str, Series]:
    """Name + suffix -> series of what the records hold of each source in their table "sources"."""
    found: dict[str, Series] = {}
    for name in dict.fromkeys(name for record in records for name in record["sources"]):
        # A source may be missing from a measurement.
        rows = [{"step": record["step"], **record["sources"].get(name, {})} for record in records]
        found[name + suffix] = series(rows, key)
    return found


def data_uri(picture: PILImage.Image | bytes, form: str = "png") -> str:
    """A picture with its bytes inside, to stand in a page. bytes: of a file of that form."""
    if isinstance(picture, PILImage.Image):
        buffer = io.BytesIO()
        picture.save(buffer, form, quality=85)
        picture = buffer.getvalue()
    return f"data:image/{form};base64,{base64.b64encode(picture).decode()}"


def image_source(folder: Path, image: Any) -> str | None:
    """A data URI for a picture named in a record; None when it is missing or outside `folder`."""
    if not isinstance(image, str) or not image:
        return None
    if image.startswith("data:image/"):
        return image
    path = file_inside(folder, image)
    if path is None:
        return None
    return data_uri(path.read_bytes(), "jpeg" if path.suffix.lower() in (".jpg", ".jpeg") else "png")


def file_inside(folder: Path, name: str) -> Path | None:
    """The file of that relative path; None when it is missing or outside `folder`."""
    try:
        # Links are followed before it is asked where the file lies.
        path = (folder / name).resolve()
        return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
    except (OSError, ValueError):  # a null character, half a character, a name of 5,000
        return None


# ---- Pages.

_VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


def write_page(path: Path, template: str, data: Record) -> Path:
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


def expert_load(train: Sequence[Record]) -> Record:
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
