"""Rollouts on disk: OUT/rollouts.jsonl, one JSON object for each group of answers, and their pictures beside
it.

    {"update": 10, "task": "counting", "form": "picture", "key": "counting/train/0/123", "difficulty": 0,
     "prompt": "...", "target": "3", "image": "rollouts/0f3a...png", "mean_score": 0.5,
     "answers": [{"text": "3", "tokens": 2, "score": 1.0, "reward": 1.0, "advantage": 0.5, "logprob": -0.7,
                  "finish": "stop", "status": "ok"}, ...]}

`image` is relative to OUT, named by what it shows and written once; null for a prompt in words alone. Nothing
of a record depends on the clock, and a resume from update u drops what came after u, so that the folder of a
resumed run equals that of one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image as PILImage

from earlyfusion.kernels.files import plain, read_jsonl, replacing, write_atomic
from earlyfusion.rl.records import GroupRecord

FILE, FOLDER = "rollouts.jsonl", "rollouts"
_OURS = re.compile(r"\.?[0-9a-f]{24}\.png(\.\d+\.tmp)?")


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """The records of a rollout file (or of OUT), in order; [] when there is none. Torn lines are left out."""
    path = Path(path)
    if path.is_dir():
        path = path / FILE
    return [record for record in read_jsonl(path) if isinstance(record.get("update"), int)]


class RolloutLog:
    """Appends to OUT/rollouts.jsonl. Made by one process of a run, the first.

    start_update: updates already done. 0 begins the file anew; u > 0 keeps the records up to u. Torn lines
    go, and so do pictures that no record shows any more.
    """

    def __init__(self, out: Path, *, start_update: int) -> None:
        self.out = Path(out)
        self.path, self.folder = self.out / FILE, self.out / FOLDER
        self.out.mkdir(parents=True, exist_ok=True)
        kept = (
            [record for record in read_rollouts(self.path) if record["update"] <= start_update]
            if start_update
            else []
        )
        self._rewrite(kept)
        self._pictures = {str(record["image"]) for record in kept if record.get("image")}
        self._sweep()

    def _rewrite(self, kept: Sequence[dict[str, Any]]) -> None:
        if not kept:
            self.path.unlink(missing_ok=True)
            return
        write_atomic(self.path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept))

    def _sweep(self) -> None:
        for path in self.folder.glob("*.png*"):
            if _OURS.fullmatch(path.name) and f"{FOLDER}/{path.name}" not in self._pictures:
                path.unlink()

    def write(self, groups: Sequence[GroupRecord], sandbox: str = "") -> None:
        """Append one record for each group; pictures are on disk before the line that names them. sandbox:
        what is said of one with walls missing.

        Numbers that are not finite are written as null.
        """
        lines = []
        for group in groups:
            record = {
                "update": int(group.update),
                "task": group.task,
                "form": group.form,
                "key": group.key,
                "difficulty": group.difficulty,
                "prompt": group.prompt,
                "target": group.target,
                "image": None if group.picture is None else self._keep(group.picture),
                "mean_score": group.mean_score,
                "answers": [asdict(answer) for answer in group.answers],
            }
            record |= {"sandbox": sandbox} if sandbox else {}
            lines.append(json.dumps(plain(record), allow_nan=False) + "\n")
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _keep(self, picture: PILImage.Image) -> str:
        """The picture's path relative to OUT; written if this content is new."""
        about = f"{picture.mode} {picture.width} {picture.height} ".encode()
        name = f"{FOLDER}/{hashlib.sha256(about + picture.tobytes()).hexdigest()[:24]}.png"
        if name not in self._pictures:
            self.folder.mkdir(exist_ok=True)
            with replacing(self.out / name, sync=False) as partial:
                picture.save(partial, "PNG")
            self._pictures.add(name)
        return name
