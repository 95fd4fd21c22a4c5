"""`earlyfusion compare`: did the treatment change anything, and could this test have seen it?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.eval.compare.analysis import Options, compare_arms
from earlyfusion.eval.compare.load import CompareError, load_arm
from earlyfusion.eval.compare.report import write_html
from earlyfusion.eval.compare.text import Unit, p_text
from earlyfusion.eval.results import write_json
from earlyfusion.kernels.errors import one_line

STYLES = {"gain": "green", "loss": "red"}


def compare(
    base: Annotated[
        str,
        typer.Argument(
            help="evaluation folder of the starting model; several seeds: DIR,DIR or a quoted pattern"
        ),
    ],
    treated: Annotated[
        str, typer.Argument(help="evaluation folder of the treated model; several seeds likewise")
    ],
    control: Annotated[
        str | None, typer.Option(help="arm that got everything but the treatment (same compute)")
    ] = None,
    control_base: Annotated[str | None, typer.Option(help="where the control began, if not at BASE")] = None,
    paired_seeds: Annotated[
        bool, typer.Option("--paired-seeds", help="run i of BASE and TREATED share a training seed")
    ] = False,
    metric: Annotated[
        str, typer.Option(help="number of the records to compare (score, mae, cer, iou, ...)")
    ] = "score",
    out: Annotated[Path, typer.Option(help="folder for compare.json and compare.html")] = Path("compare"),
    draws: Annotated[int, typer.Option(min=100, help="bootstrap draws")] = 2000,
    flips: Annotated[int, typer.Option(min=100, help="sign-flip draws")] = 10_000,
    seed: Annotated[int, typer.Option(help="seed of both")] = 0,
) -> None:
    """Paired deltas between evaluated models, with honest statistics.

    earlyfusion compare runs/start runs/vision-rl --control runs/text-rl
    earlyfusion compare runs/start 'runs/vision-rl-seed*' --out runs/delta

    Each argument is the --out folder of `earlyfusion eval`; several seeds of one arm are given with commas or as
    a quoted pattern. Prints a table; writes compare.json and a self-contained compare.html with plots.
    """
    if control_base and not control:
        raise CompareError("--control-base without --control: name the control arm as well")
    first, second = load_arm("base", base, metric), load_arm("treated", treated, metric)
    third = load_arm("control", control, metric) if control else None
    start = load_arm("control base", control_base, metric) if control_base else None
    if paired_seeds and len(first.runs) != len(second.runs):
        raise CompareError(
            f"--paired-seeds: {len(first.runs)} base runs and {len(second.runs)} treated runs; give equally"
            " many, in order"
        )
    options = Options(draws, flips, seed, paired_seeds)
    result = {"metric": metric, **compare_arms(first, second, third, start, options)}

    console = Console()
    show(result, console if console.is_terminal else Console(width=max(console.width, 100)))
    written = write_json(out / "compare.json", result)
    report = write_html(out / "compare.html", result)
    print(f"numbers: {written}\nreport:  {report}")


def shown(name: str) -> str:
    """A name of others as the console may print it: no markup, nothing that a terminal obeys."""
    return escape(one_line(name))


def show(result: dict[str, Any], console: Console) -> None:
    """The tables; they fit 80 columns (the first column folds)."""
    with_control = any("difference_in_differences" in entry for entry in result["tasks"])
    unit = Unit(result)
    names = ["task, verdict", "n", "base\ntreated", "delta ± SE\n95 %"]
    names += ["less\ncontrol's"] if with_control else []
    table = _table(f"treated - base, {unit.name}", [*names, "p\nHolm", "visible\nfrom"])
    for entry in result["tasks"]:
        delta = entry["delta"]
        style = STYLES.get(entry["verdict"].split(",")[0], "dim")
        row = [f"{shown(entry['task'])}\n[{style}]{entry['verdict']}[/]", f"{entry['n']:,}"]
        row += [f"{unit(entry['base']['score'])}\n{unit(entry['treated']['score'])}", _delta(unit, delta)]
        if with_control:
            row.append(_delta(unit, entry["difference_in_differences"]))
        table.add_row(*row, f"{p_text(delta['p'])}\n{p_text(delta['p_holm'])}", unit(delta["smallest_delta"]))
    print_table(console, table)
    for entry in result["tasks"]:
        _show_details(entry, unit, console)
    if result["left_out"]:
        console.print(f"not in every run, left out: {shown(', '.join(result['left_out']))}")


def _table(title: str, columns: Sequence[str]) -> Table:
    """A narrow table: the first column is words and may fold, the rest is numbers and may not."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index), overflow="fold")
    return table


def _delta(unit: Unit, interval: dict[str, Any]) -> str:
    return f"{unit(interval['value'], True)} ± {unit(interval['se'])}\n{_range(unit, interval)}"


def _show_details(entry: dict[str, Any], unit: Unit, console: Console) -> None:
    seeds = entry["seeds"]
    if seeds:
        both, alone = seeds["both"], seeds["seeds"]
        console.print(
            f"{shown(entry['task'])}: {len(seeds['base'])} base and {len(seeds['treated'])} treated seeds;"
            f" over seeds {unit(alone['value'], True)} {_range(unit, alone)}, over new questions and seeds"
            f" {_range(unit, both)}"
        )
    table = entry["delta"]["mcnemar"]
    if table and entry["view"] == "":
        console.print(
            f"{shown(entry['task'])}: {table['won']} won, {table['lost']} lost (discordance "
            f"{100 * table['discordance']:.1f} %), McNemar exact p {p_text(table['p_exact'])}, bootstrap "
            f"{_range(unit, entry['delta']['bootstrap'])}"
        )
    if not entry["categories"] or entry["view"]:
        return
    table = _table(
        f"{shown(entry['task'])} by category (p after Holm over {len(entry['categories'])})",
        ["category", "n", "base", "treated", "delta ± SE", "95 %", "p Holm", "visible\nfrom"],
    )
    for c in entry["categories"]:
        row = [shown(c["category"]), f"{c['n']:,}", unit(c["base"]), unit(c["treated"])]
        row += [f"{unit(c['value'], True)} ± {unit(c['se'])}", _range(unit, c), p_text(c["p_holm"])]
        table.add_row(*row, unit(c["smallest_delta"]))
    print_table(console, table)


def _range(unit: Unit, interval: dict[str, Any]) -> str:
    """The interval, its bracket kept from being read as markup."""
    return "\\" + unit.range(interval)
