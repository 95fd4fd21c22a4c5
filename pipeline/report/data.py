"""What a run folder holds, read once into the plain dict that a template shows.

Every part of a folder is optional, and nothing of another hand in it may break a page: torn lines are counted
and left out, numbers are checked, pictures come from inside the folder only.
"""

from __future__ import annotations

import base64
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image as PILImage

from earlyfusion.kernels.files import read_jsonl
from earlyfusion.pipeline.progress import is_finite

Series = tuple[list[float], list[float]]
"""Steps, values."""
Record = Mapping[str, Any]


def read_run(run_dir: str | Path, about: str = "Training run") -> dict[str, Any]:
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
    of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        of[str(record.get("event"))].append(record)

    recipe = directory / "recipe.toml"
    facts = read_dict(directory / "facts.json")
    # Measurements of one name are one curve.
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
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


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The JSON objects of a folder that name their step, by step."""
    records = [read_dict(path) for path in sorted(folder.glob("*.json"))]
    return sorted((r for r in records if is_finite(r.get("step"))), key=lambda record: record["step"])


def read_dict(path: Path) -> dict[str, Any]:
    """The JSON object of a file; {} when there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
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
    try:
        # Links are followed before it is asked where the file lies.
        path = (folder / image).resolve()
        inside = path.is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError):  # a null character, half a character, a name of 5,000
        return None
    form = "jpeg" if path.suffix.lower() in (".jpg", ".jpeg") else "png"
    return data_uri(path.read_bytes(), form) if inside else None
