"""What a loader delivered, as it came out, and what was left out, with the reason.

`skipped.jsonl` in the run folder holds one line for each sample left out: stage, lane, step (of the lane, for
which it was being prepared), source, shard, key, epoch, index, reason, message. Every process writes a file
of its own. A resume goes through the same samples again, so a line may stand there twice; `read_skipped`
gives each once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from earlyfusion.kernels.files import read_jsonl

FILE = "skipped.jsonl"


def skip_file(folder: str | Path, rank: int = 0) -> Path:
    """Where process `rank` logs what it leaves out."""
    return Path(folder) / (FILE if rank == 0 else f"skipped-rank{rank}.jsonl")


def append_skipped(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Add lines in one write, so that a kill tears at most the last."""
    # The first loss may come before the run has written anything.
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        # In ASCII: names of files need not be UTF-8.
        file.write("".join(json.dumps(entry) + "\n" for entry in entries))


def read_skipped(folder: str | Path) -> list[dict[str, Any]]:
    """Every sample left out by any process of the run, once, in the order of stage, step and lane."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(Path(folder).glob("skipped*.jsonl")):
        for entry in read_jsonl(path):
            place = tuple(entry.get(name) for name in ("stage", "step", "lane", "source", "epoch", "index"))
            # A line torn by a kill, or a stranger's, lacks its place.
            if None not in place:
                found[place] = entry
    return [found[place] for place in sorted(found)]


def total(states: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Sums over lanes of their counts (`Lane.counts`), from their states."""
    # From the states and not from the lanes, which may live in another process.
    sums: dict[str, Counter[str]] = {}
    for state in states:
        for name, counts in state["counts"].items():
            sums.setdefault(name, Counter()).update(counts)
    return sums
