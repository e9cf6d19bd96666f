"""Conversion: the rows of requests to batches of ids and numbers, exactly as `Predictor.predict` converts them."""

# N = rows, V = values of a column that has several in a row

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.inference.frames import chunks_of
from shardkeep.inference.protocol.datatypes import Values
from shardkeep.inference.server.signature import Column, Jagged, Rows
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.conversion.inputs import Inputs


def batches_of(
    rows: Rows, names: Sequence[str], inputs: Inputs, padded: Callable[[int], int]
) -> Iterator[tuple[Batch, int]]:
    """The rows in batches of at most 65,536, and their number. Raises DataError for what cannot be a sample.

    Args:
        padded: Gives the samples that a batch of so many rows has; its last row fills it up."""
    data = {
        name: _array(column, inputs.fitted.kinds.get(name)) for name, column in zip(names, rows.columns, strict=True)
    }
    for chunk in chunks_of(data, inputs):
        samples = inputs.samples(chunk)
        count = len(samples)
        yield samples.gather(np.minimum(np.arange(padded(count)), count - 1)), count


def _array(column: Column, kind: str | None) -> pa.Array:
    if not isinstance(column, Jagged):
        return _flat(column, kind)
    offsets = np.zeros(len(column.lengths_N) + 1, np.int32)
    np.cumsum(column.lengths_N, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), _flat(column.values_V, kind))


def _flat(values: Values, kind: str | None) -> pa.Array:
    """`kind`: of the training data's ids. An empty text is no number and no time, but a missing one."""
    if isinstance(values, list):
        return pa.array([text or None for text in values] if kind != "texts" else values, pa.binary())
    return pa.array(values)
