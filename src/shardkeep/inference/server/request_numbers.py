"""The numbers of requests: dense columns, and those beside the ids of sequences. What is unusual is left to others."""

# N = rows of all requests, P = rows with padding, I = columns of numbers, V = entries

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Floats, Ints
from shardkeep.inference.protocol.datatypes import Numbers
from shardkeep.inference.server.signature import Column, Jagged, Rows
from shardkeep.workers.data.conversion.chunk import Column as RawColumn
from shardkeep.workers.data.conversion.decoding import decode_numbers
from shardkeep.workers.data.conversion.inputs import Inputs


class Unusual(Exception):
    """A form that is left to `general`."""


class Scale:
    """The scaling of columns [start, stop) of all columns of numbers."""

    def __init__(self, inputs: Inputs, start: int, stop: int) -> None:
        layout = inputs.layout
        self._marks = layout.rules.marks
        scales = [column.scale or layout.scale for column in layout.scaled[start:stop]]
        self._logs_I = np.array([scale in ("log", "log_standard") for scale in scales], np.bool_)
        self._origin_I1 = np.array(inputs.fitted.origins[start:stop], np.float64).reshape(-1, 1)
        self._transform = inputs.fitted.transform.of(start, stop)

    def stored(self, values_IN: Float64s) -> Floats:
        """The numbers as a cache holds them, float32 (I, N); changes `values_IN`."""
        if self._marks:
            values_IN[np.isin(values_IN, self._marks)] = np.nan
        if self._logs_I.any():
            log_JN = values_IN[self._logs_I]
            values_IN[self._logs_I] = np.sign(log_JN) * np.log1p(np.abs(log_JN))
        with np.errstate(over="ignore"):
            stored_IN = (values_IN - self._origin_I1).astype(np.float32)
        if np.isinf(stored_IN).any():
            raise Unusual
        return stored_IN

    def inputs(self, stored_IN: Floats) -> Floats:
        """float32 (N, I)."""
        return self._transform.inputs(np.ascontiguousarray(stored_IN.T))


class DenseColumns:
    """The numbers of requests to the dense inputs of a batch."""

    def __init__(self, inputs: Inputs, index: Mapping[str, int]) -> None:
        layout = inputs.layout
        self._places = [(index[c.column], place, c.width) for c in layout.dense for place in range(c.width or 1)]
        self._rules, self._scale = layout.rules, Scale(inputs, 0, len(layout.numbers))

    def batch(self, requests: Sequence[Rows], count: int, size: int) -> Floats:
        """float32 (P, I), 0 beyond the rows."""
        num_dense = len(self._places)
        dense_PI = np.zeros((size, num_dense), np.float32)
        if not num_dense:
            return dense_PI
        parts = [
            self._numbers(rows.columns[at], place, width) for at, place, width in self._places for rows in requests
        ]
        values_IN: Float64s = np.concatenate(parts, dtype=np.float64, casting="unsafe").reshape(num_dense, count)
        dense_PI[:count] = self._scale.inputs(self._scale.stored(values_IN))
        return dense_PI

    def _numbers(self, column: Column, place: int, width: int | None) -> Numbers:
        """The numbers of a column, or those at one place of its vectors."""
        if width is not None:
            if not isinstance(column, Jagged) or (column.lengths_N != width).any():
                raise Unusual
            column = column.values_V[place::width]
        if isinstance(column, np.ndarray):
            return column
        if isinstance(column, Jagged):
            raise Unusual
        return decode_numbers(
            RawColumn("", np.arange(1, len(column) + 1), "", pa.array(column, pa.binary())), self._rules
        )


def numbers_of(part: Column) -> tuple[NDArray[Any], Ints]:
    """The numbers of a column of a sequence, one for each entry, and the entries of each row."""
    if not isinstance(part, Jagged) or isinstance(part.values_V, list):
        raise Unusual
    return part.values_V.astype(np.float64), part.lengths_N
