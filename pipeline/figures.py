"""Figures as a table in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from earlyfusion.data.tables import print_table
from earlyfusion.kernels.errors import one_line


def show(title: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Print figures as a table: {column: {row: value}}; a row is named as in the record."""
    table = Table("", title=title, title_justify="left")

    # Columns may have rows of their own: a dict keeps all names in order.
    rows: dict[str, None] = {}
    for name, figures in columns.items():
        table.add_column(name, justify="right")
        rows |= dict.fromkeys(figures)
    for row in rows:
        # Names may be those of others: no markup, nothing that a terminal obeys.
        cells = [row, *(shown(figures.get(row)) for figures in columns.values())]
        table.add_row(*(escape(one_line(cell)) for cell in cells))
    print_table(table)


def shown(value: Any) -> str:
    """A figure as text: four digits, or whole from a thousand on; nothing for None."""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    if isinstance(value, int | float):
        return f"{value:,.0f}"
    return str(value or "")


def scaled(value: float) -> str:
    """A count with a unit prefix: 1.23 G."""
    for limit, unit in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def percent(part: float, whole: float) -> str:
    """12.3 %, or - of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
