"""Frames as raw columns, and values in memory as ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.conversion.categories import Kind, decode_ids
from shardkeep.workers.data.conversion.chunk import Chunk, Column, check_columns, plain
from shardkeep.workers.data.conversion.rules import ReadingRules
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.frames import array_of, table_of

_NAME = "the data"


def chunks_of(data: object, inputs: Inputs) -> Iterator[Chunk]:
    """The rows of `data` in chunks of at most 65,536, with the columns that the model reads. `data`: see
    `table_of`. Raises DataError."""
    table = table_of(data, _NAME)
    there = [name for name in inputs.columns() if not inputs.fills or name in table.column_names]
    check_columns(_NAME, there or inputs.columns(), table.schema)
    columns = {name: pa.nulls(len(table)) for name in inputs.columns()}
    columns |= {name: plain(table.column(name)) for name in there}
    yield from Chunk(_NAME, np.arange(1, table.num_rows + 1, dtype=np.int64), columns).parts()


def ids_of(values: object, kind: Kind | None, rules: ReadingRules) -> Ints:
    """The ids of values in memory, as those of a feature that held `kind` in training. Raises DataError."""
    array = array_of(values, "ids")
    column = Column("ids", np.arange(1, len(array) + 1), "ids", array)
    with column.named():
        return decode_ids(column, kind, rules)
