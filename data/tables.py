"""Tables on a terminal of any width: no word and no number is cut.

A table that fits is printed as it is. One that does not gets narrower columns, as far as words allow. Where
even that is too wide, every row is told by itself, as "name value" for each column.
"""

import sys

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# As wide as no terminal is: the table's own width.
UNBOUNDED = 10_000


def terminal() -> Console:
    """The terminal, or a log file, which has no width and where wrapped figures are hard to read."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table whose cells are text (markup allowed), on `terminal` if no console is given."""
    console = console or terminal()
    wide, narrow, columns = [], [], []
    for column in table.columns:
        cells = [_text(console, cell) for cell in (column.header, *column.cells)]
        lines = [line.cell_len for line in Text("\n").join(cells).split("\n")]
        # A column may break between words, never inside one.
        words = [Text(word).cell_len for word in Text(" ").join(cells).plain.split()]
        columns.append(cells)
        wide.append(max(lines))
        narrow.append(wide[-1] if column.no_wrap else max(words, default=0))

    # The frame is what the table takes beside its cells.
    unbounded = console.options.update(width=UNBOUNDED)
    spare = console.width - Measurement.get(console, unbounded, table).maximum + sum(wide) - sum(narrow)
    if spare < 0:
        _print_rows(console, table, columns)
        return
    if spare < sum(wide) - sum(narrow):
        for column, low, high in zip(table.columns, narrow, wide):
            column.width = low + min(spare, high - low)
            spare -= column.width - low
    console.print(table)


def _print_rows(console: Console, table: Table, columns: list[list[Text]]) -> None:
    """Each row by itself: the first column as its head, then "name value" for every other one."""
    if table.title:
        console.print(table.title, style="italic", highlight=False)
    for number in range(1, len(columns[0])):
        console.print(columns[0][number])
        # Broken between words where it is longer than a line.
        line = Text()
        for name, *cells in columns[1:]:
            for part in (name, cells[number - 1]):
                line += Text(" ").join([Text(" "), *part.split("\n")])
        console.print(line)


def _text(console: Console, cell: object) -> Text:
    return cell.copy() if isinstance(cell, Text) else console.render_str(str(cell), highlight=False)
