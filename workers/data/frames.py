"""Frames: tables in memory (a DataFrame, a dict of columns, a list of dicts, an Arrow table)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError, first_line
from shardkeep.workers.data.conversion.chunk import plain


def table_of(data: object, name: str) -> pa.Table:
    """The columns of `data`, which messages call `name`. Raises DataError.

    Args:
        data: A DataFrame of pandas or polars or what else can be read as an Arrow stream, a pyarrow Table or
            RecordBatch, a dict of columns (lists or arrays of equal length), or a list of dicts, one for each row."""
    try:
        if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
            keys = dict.fromkeys(key for row in data for key in row)
            data = {key: [row.get(key) for row in data] for key in keys}
        if isinstance(data, Mapping):
            return pa.table({str(key): array_of(values) for key, values in data.items()})
        if type(data).__module__.startswith("pandas."):
            return pa.Table.from_pandas(data, preserve_index=False)
        if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
            return pa.table(data)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{name}: cannot be read as columns ({first_line(error)})") from error
    allowed = "a DataFrame, a dict of columns, a list of dicts, a pyarrow Table"
    raise DataError(f"{name}: is a {type(data).__name__}; allowed: {allowed}")


def stored_table(data: object, name: str) -> pa.Table:
    """As `table_of`, in types that Parquet files have. Raises DataError."""
    table = table_of(data, name)
    columns = [plain(values) for values in table.columns]
    for column, values in zip(table.column_names, columns, strict=True):
        try:
            pq.write_table(pa.table({column: values.slice(0, 0)}), pa.MockOutputStream())
        except pa.ArrowException as error:
            what = f"holds {values.type}, which Parquet files do not have; leave the column out"
            raise DataError(f"{name}, column {column}: {what}") from error
    return pa.Table.from_arrays(columns, table.column_names)


def array_of(values: Any) -> pa.Array:
    """One column: a list, a series, an array of one or two dimensions, a tensor. Raises what Arrow does; TypeError."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if hasattr(values, "__arrow_c_stream__"):
        return pa.chunked_array(values)
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TypeError(f"a column is a {type(values).__name__}; allowed: a list or an array")
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim == 2:
        values = list(values)
    return pa.array(values if isinstance(values, np.ndarray) else list(values), from_pandas=True)
