"""What a form of row files is: its writer beside its reader. A row file has the ids and rows of one table, no more."""

# N = rows of a chunk, D = embedding dim

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.errors import DataError

CHUNK_ROWS = 65_536
"""The most rows that are read at once."""

Chunk = tuple[Ids, Rows]
"""Ids (N,) and rows (N, D)."""


@dataclass(frozen=True, slots=True)
class RowFile:
    """A row file that is there. Nothing of it is in memory."""

    path: Path
    rows: int
    dim: int
    read: Callable[[], Iterator[Chunk]]
    text_of: Callable[[int], str] | None = None
    """The text of the id in a row, for errors; None = its ids are numbers. Rows count from 1."""

    def shown(self, row: int, id_: int) -> str:
        """The id of a row as the file has it, for errors. `id_`: what it became."""
        return str(id_) if self.text_of is None else self.text_of(row)

    def chunks(self) -> Iterator[Chunk]:
        """Yields all rows, at most CHUNK_ROWS at once. Raises DataError (damaged, or a value that is not finite)."""
        count = 0
        for ids_N, rows_ND in self.read():
            finite_N = np.isfinite(rows_ND).all(axis=1)
            if not finite_N.all():
                at = int(np.flatnonzero(~finite_N)[0])
                row, value = count + at + 1, rows_ND[at][~np.isfinite(rows_ND[at])][0]
                raise DataError(f"{self.path}, row {row}: id {self.shown(row, ids_N[at])} has the value {value}")
            count += ids_N.size
            yield ids_N, rows_ND
        if count != self.rows:
            raise DataError(f"{self.path}: damaged: it has {count} rows, its header says {self.rows}")


class RowWriter(Protocol):
    """Writes the rows of one table."""

    def add(self, ids_N: Ids, rows_ND: Rows) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RowForm:
    """A form of row files."""

    name: str
    suffix: str
    files: Callable[[Path], list[Path]]
    """All files behind a path that a user names."""
    write: Callable[[Sequence[Path], int, int], RowWriter]
    """From files, dim and number of rows to their writer."""
    open: Callable[[Path], RowFile]
    """Raises DataError or OSError."""
