"""Raw values of items: what the training files hold where samples have an id, which of a text is a hash.

M = items, N = ids of a chunk, U = ids that no chunk before has
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.categories import named_ids
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted
from shardkeep.workers.data.conversion.sequences import sequence_entries


def item_values(
    chunks: Iterable[Chunk], columns: list[str], layout: ColumnLayout, fitted: Fitted, ids_M: Ints
) -> pa.Array:
    """The first value that stands for each id: canonical texts, or integers. Reads no more chunks
    than it needs.

    Args:
        columns: The column of items, and maybe one of the lists of items.

    Raises DataError where an id has no value: the files are others than those of the samples."""
    order_M = np.argsort(ids_M, kind="stable")
    sorted_M, left_M = ids_M[order_M], np.ones(len(ids_M), np.bool_)
    places, values = [], []
    for chunk in chunks:
        for column in _columns(chunk, columns, layout, fitted):
            with column.named():
                ids_N, names = named_ids(column, fitted.kinds.get(column.name), layout.rules(column.name))
            at_N = np.minimum(np.searchsorted(sorted_M, ids_N), len(ids_M) - 1)
            fresh_N = np.flatnonzero((sorted_M[at_N] == ids_N) & left_M[at_N])
            at_U, first_U = np.unique(at_N[fresh_N], return_index=True)
            left_M[at_U] = False
            places.append(order_M[at_U])
            values.append(names.take(pa.array(fresh_N[first_U])))
        if not left_M.any():
            break
    if left_M.any():
        raise DataError(f"column {columns[0]}: the files changed while they were read; wait until they are written")
    kinds = {part.type for part in values}
    joined = pa.concat_arrays(values if len(kinds) == 1 else [part.cast(pa.large_string()) for part in values])
    return joined.take(pa.array(np.argsort(np.concatenate(places))))


def _columns(chunk: Chunk, names: list[str], layout: ColumnLayout, fitted: Fitted) -> Iterator[Column]:
    for name in names:
        column = chunk.column(name)
        group = next((group for group in layout.sequences.values() if name in group.ids), None)
        if group is None:
            yield column
        else:
            yield sequence_entries(
                [column], layout.rules, group.separator, frozenset(name for name, are in fitted.brackets.items() if are)
            )[0][0]
