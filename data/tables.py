"""Tables on a terminal of any width: no word and no number is cut.

A table that fits is printed as it is. One that does not gets narrower columns, as far as words allow. Where
even that is too wide, every row is told by itself, as "name value" for each column.
"""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNBOUNDED = 10_000


def print_table(console: Console, table: Table) -> None:
    """Print a table whose cells are text (markup allowed)."""
    columns = [[_text(console, cell) for cell in (column.header, *column.cells)] for column in table.columns]
    most = [max(text.cell_len for cell in cells for text in cell.split("\n")) for cells in columns]
    least = [
        widest
        if column.no_wrap
        else max((Text(word).cell_len for cell in cells for word in cell.plain.split()), default=0)
        for column, cells, widest in zip(table.columns, columns, most)
    ]
    frame = Measurement.get(console, console.options.update(width=UNBOUNDED), table).maximum - sum(most)
    if frame + sum(least) > console.width:
        _print_rows(console, table, columns)
        return
    spare = console.width - frame - sum(least)
    if frame + sum(most) > console.width:
        for column, low, high in zip(table.columns, least, most):
            given = min(spare, high - low)
            column.width, spare = low + given, spare - given
    console.print(table)


def _print_rows(console: Console, table: Table, columns: list[list[Text]]) -> None:
    """Each row by itself: the first column as its head, then "name value" for every other one."""
    if table.title:
        console.print(table.title, style="italic", highlight=False)
    named = table.show_header
    for number in range(1, len(columns[0])):
        head, *rest = [cells[number] for cells in columns]
        console.print(head)
        line = Text()
        for name, cell in zip([cells[0] for cells in columns[1:]], rest):
            names, values = name.plain.split("\n"), cell.split("\n")
            same = named and len(names) == len(values)
            for label, value in zip(names, values) if same else [(" ".join(names), cell)]:
                piece = Text(f"  {label} " if label else "  ") + value
                if line and line.cell_len + piece.cell_len > console.width:
                    console.print(line)
                    line = Text()
                line += piece if value.plain.strip() else Text()
        console.print(line)


def _text(console: Console, cell: object) -> Text:
    return cell.copy() if isinstance(cell, Text) else console.render_str(str(cell), highlight=False)
