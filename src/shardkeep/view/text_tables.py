"""Tables of text on the screen: two columns, and any table without the spaces that fill its lines up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardkeep.base.printable import printable


class Trimmed:
    """A table whose lines end with their last letter."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in console.render_lines(self._table, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                line.append(Segment(last.text.rstrip(), last.style))
            yield from line
            yield Segment.line()


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Trimmed:
    """Names in the first column, which may be long, and figures at the right in the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(heads[0], overflow="fold", max_width=40)
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in row))
    return Trimmed(table)


def bold(*cells: str) -> list[Text]:
    """A row of `table_of` that stands out."""
    return [Text(printable(cell), style="bold") for cell in cells]


def two_columns(rows: Sequence[tuple[str, str]]) -> Trimmed:
    """Names and values, aligned."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    return Trimmed(table)
