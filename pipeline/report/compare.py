"""`earlyfusion compare`: did the treatment change anything, and could this test have seen it?

    earlyfusion compare runs/start runs/vision-rl --control runs/text-rl
    earlyfusion compare runs/start 'runs/vision-rl-seed*' --out runs/delta

Paired deltas between evaluated models. A table on the terminal, compare.json, and compare.html, a page that
loads nothing and shows what the table has no room for. The computation is eval/compare/analysis.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.eval.compare import analysis
from earlyfusion.eval.compare.load import CompareError, load_arm
from earlyfusion.eval.stats import smallest_delta
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import write_json
from earlyfusion.pipeline.options import Options, verb
from earlyfusion.pipeline.report.page import number, p_value, write_page

Row = Mapping[str, Any]
STYLES = {"gain": "green", "loss": "red"}


class CompareOptions(Options):
    positional: ClassVar[tuple[str, ...]] = ("base", "treated")

    base: str
    """evaluation folder of the starting model; seeds: DIR,DIR or a pattern"""
    treated: str
    """evaluation folder of the treated model; several seeds likewise"""
    control: str = ""
    """arm that got everything but the treatment (same compute)"""
    control_base: str = ""
    """where the control began, if not at BASE"""
    paired_seeds: bool = False
    """run i of BASE and TREATED share a training seed"""
    metric: str = "score"
    """number of the records: score, mae, cer, iou, ..."""
    out: Path = Path("compare")
    """folder for compare.json and compare.html"""
    draws: int = Field(2000, ge=100)
    """bootstrap draws"""
    flips: int = Field(10_000, ge=100)
    """sign-flip draws"""
    seed: int = 0
    """seed of both"""


@verb
def compare(options: CompareOptions) -> None:
    """Print the table, write numbers and page."""
    # Mistakes of words before anything is read.
    if options.control_base and not options.control:
        raise CompareError("--control-base without --control: name the control arm as well")
    base, treated = (
        load_arm("base", options.base, options.metric),
        load_arm("treated", options.treated, options.metric),
    )
    control = load_arm("control", options.control, options.metric) if options.control else None
    start = load_arm("control base", options.control_base, options.metric) if options.control_base else None
    if options.paired_seeds and len(base.runs) != len(treated.runs):
        runs = f"{len(base.runs)} base runs and {len(treated.runs)} treated runs"
        raise CompareError(f"--paired-seeds: {runs}; give equally many, in order")

    # One dict for the terminal, the JSON file and the page.
    settings = analysis.Options(options.draws, options.flips, options.seed, options.paired_seeds)
    result = {"metric": options.metric, **analysis.compare_arms(base, treated, control, start, settings)}
    console = Console()
    show(result, console if console.is_terminal else Console(width=max(console.width, 100)))
    print(f"numbers: {write_json(options.out / 'compare.json', result)}")
    print(f"report:  {write_page(options.out / 'compare.html', 'compare.html', compare_page(result))}")


class Unit:
    """How the numbers of a result are written: scores from 0 to 1 in points (hundredths), all else as it
    is."""

    def __init__(self, result: Row) -> None:
        scores = [entry[arm]["score"] for entry in result["tasks"] for arm in ("base", "treated")]
        self.points = result["metric"] == "score" and all(-1 <= score <= 1 for score in scores)
        self.name = "points" if self.points else result["metric"]
        self.scale = 100 if self.points else 1

    def __call__(self, value: float | None, sign: str = "") -> str:
        return number(value, f"{sign}.{2 if self.points else 4}f", self.scale)

    def range(self, interval: Row) -> str:
        """ "[-0.31, +1.20]"; words where nothing changed: an interval of no width would claim too much."""
        if interval.get("se") == 0:
            return "[none changed]"
        return f"[{self(interval['low'], '+')}, {self(interval['high'], '+')}]"

    def delta(self, interval: Row) -> str:
        """ "+0.45 ± 0.38"."""
        return f"{self(interval['value'], '+')} ± {self(interval['se'])}"

    def scaled(self, interval: Row) -> dict[str, float]:
        """value, low and high as they are shown."""
        return {key: self.scale * interval[key] for key in ("value", "low", "high")}


def show(result: Row, console: Console) -> None:
    """The table; it fits 80 columns (the first column, the words, folds; the rest is numbers and may not)."""
    unit = Unit(result)
    table = Table(
        title=f"treated - base, {unit.name}", title_justify="left", box=None, padding=(0, 1), show_edge=False
    )
    table.add_column("task, verdict", overflow="fold")
    for name in ("n", "base\ntreated", "delta ± SE\n95 %", "less\ncontrol's", "p\nHolm", "visible\nfrom"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in result["tasks"]:
        delta, against = entry["delta"], entry.get("difference_in_differences")
        # The first word of a verdict decides its colour.
        style = STYLES.get(entry["verdict"].split(",")[0], "dim")
        table.add_row(
            f"{safe(entry['task'])}\n[{style}]{entry['verdict']}[/]",
            f"{entry['n']:,}",
            f"{unit(entry['base']['score'])}\n{unit(entry['treated']['score'])}",
            f"{unit.delta(delta)}\n{escape(unit.range(delta))}",
            f"{unit.delta(against)}\n{escape(unit.range(against))}" if against else "–",
            f"{p_value(delta['p'])}\n{p_value(delta['p_holm'])}",
            unit(delta["smallest_delta"]),
        )
    print_table(console, table)

    # Several seeds: whether the gain holds for others is said apart.
    for entry in result["tasks"]:
        if seeds := entry["seeds"]:
            alone, both = seeds["seeds"], seeds["both"]
            told = f"{len(seeds['base'])} base and {len(seeds['treated'])} treated seeds"
            told += f"; over seeds {unit.range(alone)}, over new questions and seeds {unit.range(both)}"
            console.print(f"{safe(entry['task'])}: {escape(told)}")
    if result["left_out"]:
        console.print(f"not in every run, left out: {safe(', '.join(result['left_out']))}")


def safe(name: str) -> str:
    """A name of others as the console may print it: no markup, nothing that a terminal obeys."""
    return escape(one_line(name))


def compare_page(result: Row) -> dict[str, Any]:
    """What the template compare.html shows of a `compare_arms` result."""
    # A page of points, or of the metric's own numbers.
    unit = Unit(result)
    named = {
        arm: ", ".join(Path(folder).name or folder for folder in result["arms"][arm])
        for arm in result["arms"]
    }
    tasks = []
    for entry in result["tasks"]:
        categories = [{"label": row["category"], **unit.scaled(row)} for row in entry["categories"]]
        tasks.append({**entry, "category_rows": categories, "seed_rows": _seed_rows(entry, unit)})

    # The template reads the result itself, and beside it what is drawn.
    return {
        **result,
        "title": f"{named['treated']} against {named['base']}",
        "note": f"{len(tasks)} lines of results; {result['metric']}",
        "tasks": tasks,
        "unit": unit,
        "forest": [_forest_row(entry, unit) for entry in tasks],
        "power": power,
    }


def _seed_rows(entry: Row, unit: Unit) -> list[dict[str, Any]]:
    """The scores of every seed of both arms, and their means; none where each arm has one."""
    rows = []
    for arm in ("base", "treated") if entry["seeds"] else ():
        scores = [unit.scale * score for score in entry["seeds"][arm]]
        rows.append(
            {"label": arm, "value": float(np.mean(scores)), "low": None, "high": None, "dots": [scores]}
        )
    return rows


def _forest_row(entry: Row, unit: Unit) -> dict[str, Any]:
    delta, control = entry["delta"], entry.get("control_delta")
    row = {"label": entry["task"], **unit.scaled(delta), "band": unit.scale * delta["smallest_delta"]}
    # What the same compute did without the treatment.
    if control:
        row["beside"] = {"control - base": unit.scaled(control)}
    if entry["published"] and not entry["view"]:
        row["mark"] = {"K2.5 report": unit.scale * entry["published"]}
    return row


def power(entry: Row, unit: Unit) -> dict[str, Any]:
    """Smallest true delta that n questions show with 80 % power at this discordance: a curve, and this test
    on it."""
    discordance, n = entry["delta"]["discordance"], entry["n"]
    # Equally many points on either side of this test, on a logarithmic axis.
    ns = np.unique(np.geomspace(max(10, n / 20), n * 20, 60).astype(int)).tolist()
    curve = [unit.scale * smallest_delta(count, discordance) for count in ns]
    return {
        "n questions": (ns, curve),
        "this test": ([n], [unit.scale * smallest_delta(n, discordance)]),
    }
