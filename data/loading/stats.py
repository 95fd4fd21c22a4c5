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

from earlyfusion.data.config import DataConfig
from earlyfusion.data.errors import DataError, told
from earlyfusion.kernels.files import read_jsonl

FILE = "skipped.jsonl"
MIN_READ = 200
"""Samples of a process before the share of bad ones says anything."""


def skip_file(folder: str | Path, rank: int = 0) -> Path:
    """Where process `rank` logs what it leaves out."""
    return Path(folder) / (FILE if rank == 0 else f"skipped-rank{rank}.jsonl")


def append_skipped(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Add lines in one write, so that a kill tears at most the last."""
    if entries:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(
                "".join(json.dumps(entry) + "\n" for entry in entries)
            )  # ASCII: names need not be UTF-8


def read_skipped(folder: str | Path) -> list[dict[str, Any]]:
    """Every sample left out by any process of the run, once, in the order of stage, step and lane."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(Path(folder).glob("skipped*.jsonl")):
        for entry in read_jsonl(path):
            place = tuple(entry.get(name) for name in ("stage", "step", "lane", "source", "epoch", "index"))
            if None not in place:
                found[place] = entry
    return [found[place] for place in sorted(found)]


class LoaderStats:
    """Sums over the lanes of one process, from their states (`Lane.state_dict`)."""

    def __init__(self, states: Iterable[Mapping[str, Any]], sources: Mapping[str, int], lanes: int) -> None:
        """sources: name -> samples of one epoch. lanes: micro-batches of a step over all processes."""
        self.states, self.sources, self.lanes = list(states), sources, lanes

    def delivered(self) -> dict[str, list[int]]:
        """Source -> [tokens, of which image features, of which in documents with a picture]."""
        return {
            name: [sum(state["delivered"][name][column] for state in self.states) for column in range(3)]
            for name in self.sources
        }

    def skipped(self) -> dict[str, Counter[str]]:
        """Source -> reason -> samples left out."""
        return {
            name: sum((Counter(state["streams"][name]["skipped"]) for state in self.states), Counter())
            for name in self.sources
        }

    def read(self) -> int:
        """Samples that could be used."""
        return sum(stream["given"][0] for state in self.states for stream in state["streams"].values())

    def check(self, data: DataConfig) -> None:
        """Raise DataError when more samples are bad than `max_bad` or `max_bad_share` allow."""
        reasons: Counter[str] = sum(self.skipped().values(), Counter())
        bad, good = reasons.total(), self.read()
        last = [message for state in self.states for s in state["streams"].values() for message in s["last"]]
        where = f"({told(reasons)}; last: {last[-1] if last else 'unknown'}); see {FILE}"
        if data.max_bad is not None and bad > data.max_bad:
            raise DataError(f"{bad} samples cannot be used, data.max_bad allows {data.max_bad} {where}")
        if bad + good >= MIN_READ and bad > data.max_bad_share * (bad + good):
            share = bad / (bad + good)
            raise DataError(
                f"{bad} of {bad + good} samples cannot be used ({share:.1%}), data.max_bad_share allows "
                f"{data.max_bad_share:.1%} {where}"
            )

    def stats(self) -> dict[str, Any]:
        """Everything about these lanes, as it came out and not as it was configured.

        tokens, shares, media_tokens, vision_tokens (in documents with a picture) and epochs by source;
        vision_share, media_share and fill of all; skipped by source, skip_reasons (messages),
        skipped_by_reason.
        """
        delivered, skipped = self.delivered(), self.skipped()
        total, media, vision = (sum(row[column] for row in delivered.values()) for column in range(3))
        positions = sum(state["positions"] for state in self.states)
        cursors = {
            name: sum(state["streams"][name]["cursor"] for state in self.states) for name in self.sources
        }
        part = self.lanes / max(1, len(self.states))
        return {
            "tokens": {name: row[0] for name, row in delivered.items()},
            "media_tokens": {name: row[1] for name, row in delivered.items()},
            "vision_tokens": {name: row[2] for name, row in delivered.items()},
            "shares": {name: row[0] / max(1, total) for name, row in delivered.items()},
            "vision_share": vision / max(1, total),
            "media_share": media / max(1, total),
            "epochs": {name: cursors[name] * part / max(1, size) for name, size in self.sources.items()},
            "positions": positions,
            "fill": total / max(1, positions),
            "skipped": {name: reasons.total() for name, reasons in skipped.items()},
            "skipped_by_reason": dict(sum(skipped.values(), Counter())),
            "skip_reasons": [
                m for state in self.states for s in state["streams"].values() for m in s["last"]
            ],
        }
