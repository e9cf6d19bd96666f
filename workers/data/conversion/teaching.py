"""Teaching: which columns of the training rows cannot teach a model anything, in words.

N = rows or lists, V = entries of all lists
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.batch import Values
from shardkeep.workers.data.conversion.chunk import shown_text
from shardkeep.workers.data.conversion.hashing import MISSING_ID
from shardkeep.workers.data.conversion.rules import is_text

if TYPE_CHECKING:
    from shardkeep.workers.data.columns.column import StoredColumn  # loads kernels

MIN_ROWS = 100
"""So many rows without a value twice mean that the column numbers its rows."""
_MAX_LISTS, _MIN_FILLED = 4096, 10


def filled_end(ids_V: Ints, lengths_N: Ints) -> tuple[str, int, float] | None:
    """The end of lists that one id fills up to one length, an entry that has it, and the share of the first 4,096 lists
    that it fills. None = no id does, or it stands elsewhere too."""
    ids_V, lengths_N = ids_V[: lengths_N[:_MAX_LISTS].sum()], lengths_N[:_MAX_LISTS][lengths_N[:_MAX_LISTS] > 0]
    for end, way in (("start", 1), ("end", -1)) if len(lengths_N) else ():
        own_V, own_N = ids_V[::way], lengths_N[::way]
        starts_N = np.cumsum(own_N) - own_N
        place_V = np.arange(len(own_V)) - np.repeat(starts_N, own_N)
        firsts, counts = np.unique(own_V[starts_N], return_counts=True)
        for first in firsts[np.argsort(-counts)][:3]:
            is_V = own_V == first
            run_N = np.minimum(np.minimum.reduceat(np.where(is_V, len(own_V), place_V), starts_N), own_N)
            runs, lengths = run_N[run_N > 0], own_N[run_N > 0]
            filled = len(runs) >= _MIN_FILLED and len(set(lengths)) == 1 and len(set(runs)) > 1
            if filled and runs.sum() >= 0.99 * is_V.sum():
                return end, int(np.argmax(ids_V == first)), len(runs) / len(own_N)
    return None


def filled_line(lists: Values, value_of: Callable[[int], pa.Scalar]) -> list[str]:
    """A line about the id that fills lists up, if one does. `value_of`: an entry as it is in the file."""
    assert lists.lengths_N is not None
    if (found := filled_end(lists.values_V, lists.lengths_N)) is None:
        return []
    end, at, share = found
    value = value_of(at)
    text = is_text(value.type) and value.cast(pa.binary()).as_py()
    shown = "''" if not value.is_valid else shown_text(text) if is_text(value.type) else value.as_py()
    return [f"{shown} fills the {end} of {share:.0%} of the lists up to one length; if it is no id, set pad: {shown}"]


def idle_line(name: str, column: StoredColumn, rows_N: Ints | None) -> list[str]:
    """A line about a column of ids, one a row, that is constant in the rows of training, or numbers them."""
    values_N = column.values if rows_N is None else column.values[rows_N]
    if not len(values_N):
        return []
    first: int = column.facts["first"] if rows_N is None else int(np.searchsorted(rows_N, column.facts["first"]))
    if (values_N == values_N[0]).all():
        missing = column.ids(np.array([0 if rows_N is None else rows_N[0]]))[0] == MISSING_ID
        why = "is empty" if missing else "has the same value in all rows"
        return [f"column {name}: {why}; it teaches nothing, leave it out"]
    if first >= MIN_ROWS and len(np.unique(values_N[:first])) == first:
        return [f"column {name}: the first {first:,} rows have {first:,} values; it names rows, leave it out"]
    return []
