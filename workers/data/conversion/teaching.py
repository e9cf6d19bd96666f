"""Teaching: which columns of the training rows cannot teach a model anything, in words.

N = rows of a chunk or lists, F = single-valued features, V = entries of all lists
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.conversion.chunk import shown_text
from shardkeep.workers.data.conversion.hashing import MISSING_ID
from shardkeep.workers.data.conversion.rules import is_text

if TYPE_CHECKING:
    from shardkeep.workers.data.batch import Lists  # loads kernels, as the next
    from shardkeep.workers.data.conversion.scaling import ColumnScaler

Note = tuple[str, str]
"""A column, as `dense:NAME` or `sparse:NAME`, and a line about it."""
FEWEST_ROWS = 100
"""So many rows without a value twice mean that the column numbers its rows."""


_MOST_LISTS, _FEWEST_FILLED = 4096, 10


def filled_end(ids_V: Ints, lengths_N: Ints) -> tuple[str, int, float] | None:
    """The end of lists that one id fills up to one length, an entry that has it, and the share of the first 4,096 lists
    that it fills. None = no id does, or it stands elsewhere too."""
    ids_V, lengths_N = ids_V[: lengths_N[:_MOST_LISTS].sum()], lengths_N[:_MOST_LISTS][lengths_N[:_MOST_LISTS] > 0]
    for end, way in (("start", 1), ("end", -1)) if len(lengths_N) else ():
        own_V, own_N = ids_V[::way], lengths_N[::way]
        starts_N = np.cumsum(own_N) - own_N
        place_V = np.arange(len(own_V)) - np.repeat(starts_N, own_N)
        firsts, counts = np.unique(own_V[starts_N], return_counts=True)
        for first in firsts[np.argsort(-counts)][:3]:
            is_V = own_V == first
            run_N = np.minimum(np.minimum.reduceat(np.where(is_V, len(own_V), place_V), starts_N), own_N)
            runs, lengths = run_N[run_N > 0], own_N[run_N > 0]
            filled = len(runs) >= _FEWEST_FILLED and len(set(lengths)) == 1 and len(set(runs)) > 1
            if filled and runs.sum() >= 0.99 * is_V.sum():
                return end, int(np.argmax(ids_V == first)), len(runs) / len(own_N)
    return None


class Teaching:
    """Looks at the ids of training rows: whether all are equal, and in the first chunk whether all differ."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._constant: set[str] = set()
        self._numbering: dict[str, int] = {}
        self._lists: dict[str, str] = {}

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

    def add_lists(self, name: str, lists: Lists, value_of: Callable[[int], pa.Scalar]) -> None:
        """Takes in the lists of a chunk, of which the first ones count. `value_of`: an entry as it is in the file."""
        if name in self._lists or not len(lists.ids_V):
            return
        self._lists[name] = ""
        if (found := filled_end(lists.ids_V, lists.lengths_N)) is not None:
            end, at, share = found
            value = value_of(at)
            text = is_text(value.type) and value.cast(pa.binary()).as_py()
            shown = "''" if not value.is_valid else shown_text(text) if is_text(value.type) else value.as_py()
            what = f"fills the {end} of {share:.0%} of the lists up to one length"
            self._lists[name] = f"column {name}: {shown} {what}; if it is no id, set pad: {shown}"

    def notes(self, dense: Sequence[ColumnScaler]) -> list[Note]:
        """A line for each column that cannot teach."""
        notes = [(f"sparse:{name}", text) for name, text in self._lists.items() if text]
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
