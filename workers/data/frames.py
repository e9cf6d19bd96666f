"""Frames: tables and columns in memory (a DataFrame, a dict of columns, a list of dicts, an Arrow table)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError, first_line
from shardkeep.workers.data.conversion.chunk import plain


def table_of(data: object, name: str) -> pa.Table:
    """The columns of `data`, which messages call `name`. Raises DataError.

    Args:
        data: A DataFrame of pandas or polars or what else can be read as an Arrow stream, a pyarrow Table or
            RecordBatch, a dict of columns (lists or arrays of equal length), or a list of dicts, one for each row."""
    with _readable(f"{name}: cannot be read as columns"):
        if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
            keys = dict.fromkeys(key for row in data for key in row)
            data = {key: [row.get(key) for row in data] for key in keys}
        if isinstance(data, Mapping):
            return pa.table({str(key): _array(values) for key, values in data.items()})
        if type(data).__module__.startswith("pandas."):
            return pa.Table.from_pandas(data, preserve_index=False)
        if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
            return pa.table(data)
    allowed = "a DataFrame, a dict of columns, a list of dicts, a pyarrow Table"
    raise DataError(f"{name}: is a {type(data).__name__}; allowed: {allowed}")


def array_of(values: Any, name: str) -> pa.Array:
    """One column: a list, a series, an array of one or two dimensions, a tensor. Raises DataError, which begins with
    `name`."""
    with _readable(f"{name} cannot be read as an array"):
        return plain(_array(values))


@contextlib.contextmanager
def _readable(problem: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{problem} ({first_line(error)})") from error


def _array(values: Any) -> pa.Array:
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
