"""Tables of text on the screen: two columns, and any table without the spaces that fill its lines up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text


class Trimmed:
    """A table whose lines end with their last letter."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in console.render_lines(self._table, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                line.append(Segment(last.text.rstrip(), last.style))
            yield from line
            yield Segment.line()


def two_columns(rows: Sequence[tuple[str, str]]) -> Trimmed:
    """Names and values, aligned."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return Trimmed(table)
