"""The numbers of requests: dense columns, and those beside the ids of sequences. What is unusual is left to others."""

# N = rows of all requests, P = rows with padding, I = columns of numbers, V = entries

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Floats, Ints
from shardkeep.inference.columns import InputColumn
from shardkeep.inference.protocol.datatypes import Numbers
from shardkeep.inference.server.signature import Column, Jagged, Rows
from shardkeep.workers.data.columns.scaling import inputs_into
from shardkeep.workers.data.conversion.chunk import Column as RawColumn
from shardkeep.workers.data.conversion.decoding import decode_numbers
from shardkeep.workers.data.conversion.reader import LARGEST
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data_config import DenseColumn

Columns = Mapping[str, tuple[int, InputColumn]]
"""The columns of a request by name, with the place of each."""


class Unusual(Exception):
    """A form that is left to `general`."""


class Scale:
    """The scaling of columns of numbers, by their places among all."""

    def __init__(self, inputs: Inputs, places: Sequence[int]) -> None:
        layout = inputs.layout
        self._marks = [layout.rules(layout.scaled[place].column).marks for place in places]
        transforms = inputs.fitted.transform(layout)
        self._transforms = [transforms[place] for place in places]

    def inputs(self, values_IN: Float64s) -> Floats:
        """float32 (N, I); changes `values_IN`."""
        for values_N, marks in zip(values_IN, self._marks, strict=True):
            if marks:
                values_N[np.isin(values_N, marks)] = np.nan
        if (np.abs(values_IN) > LARGEST).any():
            raise Unusual
        out_NI, rows_N = np.empty(values_IN.shape[::-1], np.float32), np.arange(values_IN.shape[1])
        for transform, values_N, out_N in zip(self._transforms, np.ascontiguousarray(values_IN), out_NI.T, strict=True):
            inputs_into(transform, values_N, rows_N, out_N)
        return out_NI


class DenseColumns:
    """The numbers of requests to the dense inputs of a batch."""

    def __init__(self, inputs: Inputs, columns: Columns) -> None:
        layout = inputs.layout
        self._places = [(c, columns[c.column][0], place) for c in layout.dense for place in range(c.width or 1)]
        self._rules, self._scale = layout.rules, Scale(inputs, range(len(layout.numbers)))

    def batch(self, requests: Sequence[Rows], count: int, size: int) -> Floats:
        """float32 (P, I), 0 beyond the rows."""
        num_dense = len(self._places)
        dense_PI = np.zeros((size, num_dense), np.float32)
        if not num_dense:
            return dense_PI
        parts = [
            self._numbers(rows.columns[at], place, dense) for dense, at, place in self._places for rows in requests
        ]
        values_IN: Float64s = np.concatenate(parts, dtype=np.float64, casting="unsafe").reshape(num_dense, count)
        dense_PI[:count] = self._scale.inputs(values_IN)
        return dense_PI

    def _numbers(self, column: Column, place: int, dense: DenseColumn) -> Numbers:
        """The numbers of a column, or those at one place of its vectors."""
        if dense.width is not None:
            if not isinstance(column, Jagged) or (column.lengths_N != dense.width).any():
                raise Unusual
            column = column.values_V[place :: dense.width]
        if isinstance(column, np.ndarray):
            return column
        if isinstance(column, Jagged):
            raise Unusual
        return decode_numbers(
            RawColumn("", np.arange(1, len(column) + 1), "", pa.array(column, pa.binary())), self._rules(dense.column)
        )


def entries_of(part: Column) -> tuple[NDArray[Any], Ints]:
    """The numbers of a column of a sequence, one for each entry, and the entries of each row."""
    if not isinstance(part, Jagged) or isinstance(part.values_V, list):
        raise Unusual
    return part.values_V.astype(np.float64), part.lengths_N
