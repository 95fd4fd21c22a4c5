"""Layouts whose words stand elsewhere than beside a picture: COCO's captions, and folders that are
classes."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from earlyfusion.data.errors import DataError
from earlyfusion.data.row_files import MOST_BYTES, Row, RowFile
from earlyfusion.kernels.files import Record

NO_CLASSES = ("", "train", "training", "val", "valid", "validation", "dev", "test", "images", "photos")
"""Folders that say nothing of the pictures in them."""


def looks_like_coco(path: Path) -> bool:
    """Whether a .json begins as the annotations of COCO do."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"{") and bool(re.search(rb'"(images|annotations|licenses|categories)"\s*:', head))


@lru_cache(maxsize=4)
def _annotations(path: Path) -> Record:
    """The file as a dict with lists of `images` and `annotations`. Raises DataError."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise DataError(f"{path}: {size >> 20} MiB; the limit of annotations is {MOST_BYTES >> 20} MiB")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not valid JSON (a file cut short?)") from None
    lists = [found.get(name) for name in ("images", "annotations")]
    if not all(isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in lists):
        raise DataError(f"{path}: looks like COCO's annotations; expected lists of images and annotations")
    return dict(found)


def coco_captions(path: Path, root: Path, pictures: Mapping[str, Sequence[Path]]) -> tuple[RowFile, str]:
    """(a row for each picture with all its captions, what is not read) of COCO's captions_*.json; no row for
    annotations of other kinds. pictures: the files below `root` by their names. Raises DataError."""
    found = _annotations(path)
    captions: dict[object, list[str]] = defaultdict(list)
    others = 0
    for one in found["annotations"]:
        if isinstance(one.get("caption"), str) and one["caption"].strip():
            captions[one.get("image_id")].append(one["caption"].strip())
        else:
            others += 1
    note = f"{path.name}: {others:,} annotations without a caption are not read" if others else ""
    images = [one for one in found["images"] if captions.get(one.get("id"))]
    if captions and len(images) < len(found["images"]):
        note += (
            f"{'; ' if note else f'{path.name}: '}{len(found['images']) - len(images):,} pictures have none"
        )

    def read(number: int) -> Row:
        image = images[number]
        name = str(image.get("file_name", ""))
        place = _place(name, path, pictures.get(Path(name).name, ()))
        shown = name if place is None else place.relative_to(root).as_posix()
        return {"image": shown, "caption": captions[image.get("id")]}

    return RowFile(path, len(images), read, root), note


def _place(name: str, annotations: Path, known: Sequence[Path]) -> Path | None:
    """The file of a picture: where its name says, else in the folder that the annotations' name ends in
    (captions_train2017.json, train2017/), else the only one of this name."""
    split = annotations.stem.rpartition("_")[2]
    rules: list[Callable[[Path], bool]] = [
        lambda path: path.as_posix().endswith(f"/{name}") and "/" in name,
        lambda path: path.parent.name == split,
        lambda path: True,
    ]
    return next((path for rule in rules for path in known if rule(path)), None)


def class_names(keys: Sequence[str]) -> list[str] | None:
    """The words of pictures that lie in folders of their class, by the names of their folders; None where
    they lie in fewer than two folders, or in those of splits. keys: their paths below the root, without
    endings."""
    parents = [key.rpartition("/")[0].rpartition("/")[2] for key in keys]
    if len(set(parents)) < 2 or any(parent.lower() in NO_CLASSES for parent in parents):
        return None
    return [re.sub(r"[_\-\s]+", " ", parent).strip() for parent in parents]
