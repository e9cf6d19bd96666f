"""Frames: samples in memory (a DataFrame, a dict of columns, a list of dicts, an Arrow table) as raw columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.categories import Kind, decode_ids
from shardkeep.workers.data.conversion.chunk import Chunk, Column, check_columns, plain
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.conversion.rules import ReadingRules

_NAME = "the data"


def chunks_of(data: object, inputs: Inputs) -> Iterator[Chunk]:
    """The rows of `data` in chunks of at most 65,536, with the columns that the model reads. Raises DataError.

    Args:
        data: A DataFrame of pandas or polars or what else can be read as an Arrow stream, a pyarrow Table or
            RecordBatch, a dict of columns (lists or arrays of equal length), or a list of dicts, one for each row."""
    table = _as_table(data)
    check_columns(_NAME, inputs.columns(), table.schema)
    columns = {name: plain(table.column(name).combine_chunks()) for name in inputs.columns()}
    yield from Chunk(_NAME, np.arange(1, table.num_rows + 1, dtype=np.int64), columns).parts()


def ids_of(values: object, kind: Kind | None, rules: ReadingRules) -> Ints:
    """The ids of values in memory, as those of a feature that held `kind` in training. Raises DataError."""
    try:
        array = plain(_array(values))
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"ids cannot be read ({str(error).splitlines()[0]})") from error
    column = Column("ids", np.arange(1, len(array) + 1), "ids", array)
    with column.named():
        return decode_ids(column, kind, rules)


def _as_table(data: object) -> pa.Table:
    try:
        if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
            names = dict.fromkeys(name for row in data for name in row)
            data = {name: [row.get(name) for row in data] for name in names}
        if isinstance(data, Mapping):
            return pa.table({str(name): _array(values) for name, values in data.items()})
        if type(data).__module__.startswith("pandas."):
            return pa.Table.from_pandas(data, preserve_index=False)
        if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
            return pa.table(data)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{_NAME}: cannot be read as columns ({str(error).splitlines()[0]})") from error
    allowed = "a DataFrame, a dict of columns, a list of dicts, a pyarrow Table"
    raise DataError(f"{_NAME}: is a {type(data).__name__}; allowed: {allowed}")


def _array(values: Any) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TypeError(f"a column is a {type(values).__name__}; allowed: a list or an array")
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim == 2:
        values = list(values)
    return pa.array(values if isinstance(values, np.ndarray) else list(values), from_pandas=True)
