"""The tables of `earlyfusion bench data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

DECODERS = {"webdataset": "webdataset", "energon": "Energon", "ours": "earlyfusion", "ours-exact": "fast off"}
LOADERS = {"webdataset": "webdataset + torch", "energon": "Energon", "ours": "earlyfusion"}


def sides_table(title: str, names: dict[str, str], rows: Sequence[tuple[str, dict[str, str]]]) -> Table:
    """One column for each side, one row for each figure."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    measured = [side for side in names if side in rows[0][1]]
    for side in measured:
        table.add_column(names[side], justify="right")
    for label, values in rows:
        table.add_row(label, *(values[side] for side in measured))
    return table


def _row(part: dict[str, Any], label: str, key: str, form: str, share: int = 1) -> tuple[str, dict[str, str]]:
    return label, {side: format(figures[key] / share, form) for side, figures in part["sides"].items()}


def decoding_table(part: dict[str, Any]) -> Table:
    """Part 1 as a table."""
    rows = [
        _row(part, "images/s per core", "images_per_core_s", ",.0f"),
        _row(part, "patches/s per core", "patches_per_core_s", ",.0f"),
        _row(part, "MB/s per core", "mb_per_core_s", ".1f"),
        _row(part, "images/s by the clock", "images_per_s", ",.0f"),
        _row(part, "ratio per core", "ratio", ".2f"),
    ]
    return sides_table("1024 x 768 JPEG in tar shards -> uint8 patches, one core", DECODERS, rows)


def loading_table(part: dict[str, Any], step_ms: float, peer: dict[str, str | None]) -> Table:
    """Part 2 as a table: totals, and for each worker."""
    workers = max(1, part["workers"])
    rows = []
    for name in ("samples", "tokens", "patches"):
        rows.append(_row(part, f"{name}/s", f"{name}_per_s", ",.0f"))
        rows.append(_row(part, f"{name}/s per worker", f"{name}_per_s", ",.0f", workers))
    rows.append(_row(part, "MB/s", "mb_per_s", ".2f"))
    rows.append(_row(part, "MB/s per worker", "mb_per_s", ".2f", workers))
    rows.append(_row(part, "fill", "fill", ".1%"))
    if step_ms:
        rows.append(_row(part, f"wait share beside a step of {step_ms:g} ms", "wait_share", ".1%"))
    table = sides_table(f"pictures and captions of many sizes -> batches, {workers} workers", LOADERS, rows)
    table.caption = f"Megatron-Energon: {peer['problem'] or peer['version']}"
    return table


def memory_table(part: dict[str, Any]) -> Table:
    """Part 3 as a table."""
    title = f"memory of one worker, {part['videos']:,} of {part['samples']:,} samples are videos"
    table = Table(title=title, title_justify="left", min_width=len(title))
    for heading in ("samples", "resident, MiB"):
        table.add_column(heading, justify="right")
    points = part["resident_mib"]
    for samples, mib in points[:: max(1, len(points) // 6)]:
        table.add_row(f"{samples:,}", f"{mib:.0f}")
    table.caption = (
        f"{part['mib_per_10k_samples']:+.1f} MiB per 10,000 samples after the first fifth;"
        f" {part['open_files']} open files, {part['threads']} threads; {part['samples'] / part['wall_s']:.0f}"
        f" samples/s; {', '.join(part['codecs'])}"
    )
    return table
