"""The lists of a sequence: columns that have one length in each row. A missing entry keeps its place.

N = rows of a chunk
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.conversion.chunk import Column
from shardkeep.workers.data.conversion.decoding import as_lists, list_lengths
from shardkeep.workers.data.conversion.rules import ReadingRules, Rules, is_list, is_text


def sequence_entries(
    columns: Sequence[Column], rules: Rules, separator: str | None, brackets: frozenset[str]
) -> tuple[list[Column], Ints]:
    """The entries of each column of one sequence, flattened, and how many each row has, int64 (N,).

    A missing list is an empty one. `brackets`: the columns whose texts are lists in brackets. Raises DataError where
    the lists of a row differ in length.
    """
    lists = [_lists(column, rules(column.name), separator, brackets=column.name in brackets) for column in columns]
    most_N = np.maximum.reduce([list_lengths(each) for each in lists])
    lists = [_of_one(each, most_N) if is_text(c.values.type) else each for c, each in zip(columns, lists, strict=True)]
    lengths = [list_lengths(each) for each in lists]
    for column, lengths_N in zip(columns, lengths, strict=True):

        def problem(index: int, lengths_N: Ints = lengths_N) -> str:
            held = f"has {lengths_N[index]} entries, and {columns[0].name} has {lengths[0][index]}"
            return f"{held}; the lists of a sequence have one length in each row"

        column.check(lengths_N != lengths[0], problem)
    return [c.entries(each, lengths[0]) for c, each in zip(columns, lists, strict=True)], lengths[0]


def _lists(column: Column, rules: ReadingRules, separator: str | None, *, brackets: bool) -> pa.Array:
    kind = column.values.type
    if is_text(kind) and separator is None:
        raise column.wrong_type("lists; of texts such as a|b give the sequence's separator")
    if not (is_list(kind) or is_text(kind) or pa.types.is_null(kind)):
        raise column.wrong_type("lists, or texts with the sequence's separator between the entries")
    with column.named():
        return as_lists(column, rules, separator, brackets=brackets)


def _of_one(lists: pa.Array, most_N: Ints) -> pa.Array:
    """The lists of texts, where a missing field beside lists of one entry is a list of one missing entry."""
    alone = pc.and_(lists.is_null(), pa.array(most_N == 1))
    return pc.if_else(alone, pa.scalar([None], lists.type), lists) if pc.any(alone).as_py() else lists
