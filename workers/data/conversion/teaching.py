"""Teaching: which columns of the training rows cannot teach a model anything, in words.

N = rows of a chunk, F = single-valued features
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.conversion.hashing import MISSING_ID
from shardkeep.workers.data.conversion.scaling import ColumnScaler

Note = tuple[str, str]
"""A column, as `dense:NAME` or `sparse:NAME`, and a line about it."""
FEWEST_ROWS = 100
"""So many rows without a value twice mean that the column numbers its rows."""


class Teaching:
    """Looks at the ids of training rows: whether all are equal, and in the first chunk whether all differ."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._constant: set[str] = set()
        self._numbering: dict[str, int] = {}

    def add(self, names: Sequence[str], single_NF: Ints) -> None:
        """Takes in a chunk's ids."""
        for f, name in enumerate(names):
            ids_N = single_NF[:, f]
            if name not in self._first:
                self._first[name] = int(ids_N[0])
                self._constant.add(name)
                if len(ids_N) >= FEWEST_ROWS and len(np.unique(ids_N)) == len(ids_N):
                    self._numbering[name] = len(ids_N)
            if name in self._constant and (ids_N != self._first[name]).any():
                self._constant.discard(name)

    def notes(self, dense: Sequence[ColumnScaler]) -> list[Note]:
        """A line for each column that cannot teach."""
        notes = list[Note]()
        for name in self._first:
            if name in self._constant:
                value = "is empty" if self._first[name] == MISSING_ID else "has the same value in all rows"
                notes.append((f"sparse:{name}", f"column {name}: {value}; it teaches nothing, leave it out"))
            elif name in self._numbering:
                count = self._numbering[name]
                text = f"column {name}: the first {count:,} rows have {count:,} values; it names rows, leave it out"
                notes.append((f"sparse:{name}", text))
        for column in dense:
            if column.is_constant:
                value = "has the same number in all rows" if column.is_known else "is empty"
                notes.append((f"dense:{column.name}", f"column {column.name}: {value}; it counts as 0"))
        return notes
