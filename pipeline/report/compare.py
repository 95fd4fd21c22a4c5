"""`earlyfusion compare`: did the treatment change anything, and could this test have seen it?

The computation is eval/compare/analysis.py; here its dict becomes tables on the terminal, compare.json and
compare.html (the template compare.html), a page that loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.eval.compare.analysis import Options, compare_arms
from earlyfusion.eval.compare.load import CompareError, load_arm
from earlyfusion.eval.stats import smallest_delta
from earlyfusion.kernels.errors import one_line
from earlyfusion.kernels.files import write_json
from earlyfusion.pipeline.report.page import number, p_value, write_page

Row = Mapping[str, Any]
STYLES = {"gain": "green", "loss": "red"}


def compare(
    base: Annotated[
        str, typer.Argument(help="evaluation folder of the starting model; seeds: DIR,DIR or a pattern")
    ],
    treated: Annotated[
        str, typer.Argument(help="evaluation folder of the treated model; several seeds likewise")
    ],
    control: Annotated[
        str, typer.Option(help="arm that got everything but the treatment (same compute)")
    ] = "",
    control_base: Annotated[str, typer.Option(help="where the control began, if not at BASE")] = "",
    paired_seeds: Annotated[
        bool, typer.Option("--paired-seeds", help="run i of BASE and TREATED share a training seed")
    ] = False,
    metric: Annotated[str, typer.Option(help="number of the records: score, mae, cer, iou, ...")] = "score",
    out: Annotated[Path, typer.Option(help="folder for compare.json and compare.html")] = Path("compare"),
    draws: Annotated[int, typer.Option(min=100, help="bootstrap draws")] = 2000,
    flips: Annotated[int, typer.Option(min=100, help="sign-flip draws")] = 10_000,
    seed: Annotated[int, typer.Option(help="seed of both")] = 0,
) -> None:
    """Paired deltas between evaluated models, with honest statistics: a table, compare.json and compare.html.

    earlyfusion compare runs/start runs/vision-rl --control runs/text-rl
    earlyfusion compare runs/start 'runs/vision-rl-seed*' --out runs/delta
    """
    # Mistakes of words before anything is read.
    if control_base and not control:
        raise CompareError("--control-base without --control: name the control arm as well")
    given = {"base": base, "treated": treated, "control": control, "control base": control_base}
    # An empty name of the first two is an error of its own; the other two are optional.
    arms = {
        label: load_arm(label, folders, metric)
        for label, folders in given.items()
        if folders or "c" != label[0]
    }
    runs = [len(arms[label].runs) for label in ("base", "treated")]
    if paired_seeds and runs[0] != runs[1]:
        raise CompareError(
            f"--paired-seeds: {runs[0]} base runs and {runs[1]} treated runs; give equally many, in order"
        )

    options = Options(draws, flips, seed, paired_seeds)

    # One dict for the terminal, the JSON file and the page.
    sides = (arms["base"], arms["treated"], arms.get("control"), arms.get("control base"))
    result = {"metric": metric, **compare_arms(*sides, options)}
    console = Console()
    show(result, console if console.is_terminal else Console(width=max(console.width, 100)))
    print(f"numbers: {write_json(out / 'compare.json', result)}")
    print(f"report:  {write_page(out / 'compare.html', 'compare.html', compare_page(result))}")


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
    """The tables; they fit 80 columns (the first column folds)."""
    unit = Unit(result)
    names = [
        "task, verdict",
        "n",
        "base\ntreated",
        "delta ± SE\n95 %",
        "less\ncontrol's",
        "p\nHolm",
        "visible\nfrom",
    ]
    table = _table(f"treated - base, {unit.name}", names)
    for entry in result["tasks"]:
        delta, against = entry["delta"], entry.get("difference_in_differences")
        # The first word of a verdict decides its colour.
        style = STYLES.get(entry["verdict"].split(",")[0], "dim")
        table.add_row(
            f"{_safe(entry['task'])}\n[{style}]{entry['verdict']}[/]",
            f"{entry['n']:,}",
            f"{unit(entry['base']['score'])}\n{unit(entry['treated']['score'])}",
            f"{unit.delta(delta)}\n{escape(unit.range(delta))}",
            f"{unit.delta(against)}\n{escape(unit.range(against))}" if against else "–",
            f"{p_value(delta['p'])}\n{p_value(delta['p_holm'])}",
            unit(delta["smallest_delta"]),
        )
    print_table(console, table)

    for entry in result["tasks"]:
        # Several seeds: whether the gain holds for others is said apart.
        if seeds := entry["seeds"]:
            alone, both = seeds["seeds"], seeds["both"]
            told = f"{len(seeds['base'])} base and {len(seeds['treated'])} treated seeds; over seeds"
            told += (
                f" {unit.delta(alone)} {unit.range(alone)}, over new questions and seeds {unit.range(both)}"
            )
            console.print(f"{_safe(entry['task'])}: {escape(told)}")
        if (counts := entry["delta"]["mcnemar"]) and not entry["view"]:
            told = f"{counts['won']} won, {counts['lost']} lost, McNemar exact p {p_value(counts['p_exact'])}"
            console.print(
                f"{_safe(entry['task'])}: {told}, bootstrap {escape(unit.range(entry['delta']['bootstrap']))}"
            )
        if entry["categories"] and not entry["view"]:
            _show_categories(entry, unit, console)
    if result["left_out"]:
        console.print(f"not in every run, left out: {_safe(', '.join(result['left_out']))}")


def _show_categories(entry: Row, unit: Unit, console: Console) -> None:
    title = f"{_safe(entry['task'])} by category (p after Holm over {len(entry['categories'])})"
    table = _table(
        title, ["category", "n", "base", "treated", "delta ± SE", "95 %", "p Holm", "visible\nfrom"]
    )
    # Names of others are made safe, numbers are ours.
    for row in entry["categories"]:
        cells = [
            f"{row['n']:,}",
            unit(row["base"]),
            unit(row["treated"]),
            unit.delta(row),
            escape(unit.range(row)),
        ]
        table.add_row(_safe(row["category"]), *cells, p_value(row["p_holm"]), unit(row["smallest_delta"]))

    print_table(console, table)


def _table(title: str, columns: list[str]) -> Table:
    """A narrow table: the first column is words and may fold, the rest is numbers and may not."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index), overflow="fold")
    return table


def _safe(name: str) -> str:
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
