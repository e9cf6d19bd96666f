"""Frames: samples in memory (a DataFrame, a dict of columns, an Arrow table) as chunks of raw columns."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.decoding import Chunk, is_empty, is_list, is_text, kind_of, missing_column
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.gather_kernels import CHUNK_ROWS

_NAME = "the data"


def chunks_of(data: object, inputs: Inputs) -> Iterator[Chunk]:
    """The rows of `data` in chunks of at most 65,536, with the columns that the model reads. Raises DataError.

    Args:
        data: A pandas DataFrame, a dict of columns (lists or arrays of equal length), or a pyarrow Table."""
    table = _as_table(data)
    for name in inputs.columns():
        if name not in table.column_names:
            raise missing_column(_NAME, name, table.column_names)
    table = table.select(inputs.columns()).combine_chunks()
    columns = {name: _as_trained(name, _plain(table.column(name)), inputs) for name in table.column_names}
    for start in range(0, table.num_rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, table.num_rows)
        rows_N = np.arange(start + 1, stop + 1, dtype=np.int64)
        yield Chunk(_NAME, rows_N, {name: values.slice(start, stop - start) for name, values in columns.items()})


def _as_table(data: object) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    try:
        if isinstance(data, Mapping):
            return pa.table({str(name): _array(values) for name, values in data.items()})
        if importlib.util.find_spec("pandas") is not None:
            import pandas as pd  # type: ignore[import-untyped]

            if isinstance(data, pd.DataFrame):
                return pa.Table.from_pandas(data, preserve_index=False)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{_NAME}: cannot be read as columns ({str(error).splitlines()[0]})") from error
    raise DataError(f"{_NAME}: is a {type(data).__name__}; allowed: a DataFrame, a dict of columns, a pyarrow Table")


def _array(values: Any) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TypeError(f"a column is a {type(values).__name__}; allowed: a list or an array")
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu().numpy()
    return pa.array(values if isinstance(values, np.ndarray) else list(values))


def _plain(column: pa.ChunkedArray) -> pa.Array:
    values = column.combine_chunks()
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _as_trained(name: str, values: pa.Array, inputs: Inputs) -> pa.Array:
    """Ids in the kind that the training data had. In a CSV all ids are texts, and 7 in a DataFrame means the text 7."""
    trained = inputs.fitted.kinds.get(name)
    if trained is None or kind_of(values.type) in (None, trained) or is_empty(values):
        return values
    if is_list(values.type):
        lists = values.cast(pa.list_(values.type.value_type))
        entries = _converted(name, lists.flatten(), trained)
        lengths_N = np.array(pc.fill_null(pc.list_value_length(lists), 0), np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), entries)
    return _converted(name, values, trained)


def _converted(name: str, values: pa.Array, trained: str) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    try:
        if trained == "numbers":
            return pc.utf8_trim_whitespace(values.cast(pa.string())).cast(pa.int64())
        if pa.types.is_floating(values.type):  # pandas makes a column of whole numbers with a gap one of floats
            values = pc.if_else(pc.is_nan(values), None, values).cast(pa.int64())
        return values if is_text(values.type) else values.cast(pa.string())
    except pa.ArrowInvalid as error:
        why = str(error).splitlines()[0]
        raise DataError(f"{_NAME}, column {name}: was trained on {trained}, holds {values.type}: {why}") from error
