"""StoredDataset: the samples of a side, picked at random out of stored columns. Knows arrays; not where they lie.

B = rows asked for, N = samples, I = dense columns
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Floats, Ints
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.columns.column import StoredColumn, advise
from shardkeep.workers.data.columns.column_kernels import ALL, take_dense, take_features
from shardkeep.workers.data.columns.scaling import Scale, inputs_into
from shardkeep.workers.data.schema import Schema, SequenceColumns
from shardkeep.workers.data_config import DenseColumn

LABEL, WEIGHT, TIME = "label", "weight", "time"
"""The names of columns of no feature; the others are `ids:NAME` and `numbers:NAME`."""
_SPARSE = 8
"""Rows that are read ahead for one sample, at most."""


class StoredDataset:
    """Samples of stored columns.

    Args:
        dense: The columns of numbers in their order, a vector as one.
        columns: By the names above, all of equally many rows: label, weight, ids, numbers.
        transform: Of the dense columns, then of the numbers of each sequence: whether it is a logarithm, and the scale.
        rows_N: Which rows are samples, int64 or int32, in their order; None = all.

    Raises:
        ValueError: The columns do not fit the schema or each other.
    """

    def __init__(
        self,
        schema: Schema,
        dense: tuple[DenseColumn, ...],
        columns: Mapping[str, StoredColumn],
        transform: Sequence[tuple[bool, Scale]],
        rows_N: NDArray[np.int64] | NDArray[np.int32] | None = None,
    ) -> None:
        self._schema, self._dense, self._columns, self._transform = schema, dense, columns, transform
        self._rows_N, self._label, self._reads_ahead = rows_N, columns[LABEL], False
        self._flat = {name: column.values.reshape(-1) for name, column in columns.items()}
        counts = {len(column) for column in columns.values()}
        groups = [[*(f"ids:{c.name}" for c in g.ids), *(f"numbers:{n}" for n in g.numbers)] for g in schema.sequences]
        lists: list[list[Any]] = [[columns[name].offsets for name in group] for group in groups]
        for name, column in columns.items():
            if column.dictionary is None and name.startswith("ids:") and column.values.dtype != np.int64:
                raise ValueError(f"column {name}: holds no ids")
        if len(counts) > 1 or any(not np.array_equal(g[0], at) for g in lists for at in g[1:]):
            raise ValueError("the columns are not of the same rows and lists")
        if rows_N is not None and len(rows_N) and not 0 <= rows_N.min() <= rows_N.max() < len(self._label):
            raise ValueError("a row is outside of the columns")
        self._single = [f.name for f in schema.features if columns[f"ids:{f.name}"].offsets is None]
        single, numbers = (
            [columns[f"ids:{n}"] for n in self._single],
            [(c, columns[f"numbers:{c.column}"]) for c in dense],
        )
        self._single_F3 = _table(
            3,
            [
                [*_place(c.values), c.values.ctypes.data if c.dictionary is None else c.dictionary.ctypes.data]
                for c in single
            ],
        )
        self._dense_I4 = _table(
            4, [[*_place(c.values), d.width or 1, at] for d, c in numbers for at in range(d.width or 1)]
        )
        own = transform[: schema.num_dense]
        origin_I, *scales = np.array([scale for _, scale in own], np.float64).reshape(-1, 4).T
        rest = [np.ascontiguousarray(each, np.float32) for each in scales]
        self._dense_scales: Any = np.array([log for log, _ in own], np.bool_), np.ascontiguousarray(origin_I), *rest

    @property
    def schema(self) -> Schema:
        return self._schema

    def __len__(self) -> int:
        return len(self._label) if self._rows_N is None else len(self._rows_N)

    def gather(self, rows_B: Ints) -> Batch:
        rows_B = np.ascontiguousarray(rows_B, np.int64)
        if len(rows_B) and not 0 <= rows_B.min() <= rows_B.max() < len(self):
            raise IndexError(f"a row is outside [0, {len(self)})")
        if self._rows_N is not None:
            rows_B = self._rows_N[rows_B].astype(np.int64, copy=False)
        single_FB = np.empty((len(self._single), len(rows_B)), np.int64)
        take_features(self._single_F3, len(self._label), rows_B, single_FB)
        single = {name: Ragged(ids_B) for name, ids_B in zip(self._single, single_FB, strict=True)}
        ids, numbers = dict[str, Ragged](), dict[str, Floats]()
        for feature in self._schema.features:
            own = single.get(feature.name)
            ids[feature.name] = self._list(self._columns[f"ids:{feature.name}"], rows_B) if own is None else own
        at = self._schema.num_dense
        for group in self._schema.sequences:
            self._sequence(group, at, rows_B, ids, numbers)
            at += len(group.numbers)
        label_BT = self._label.values.reshape(-1, len(self._schema.labels))[rows_B].astype(np.float32, copy=False)
        weight_B = self._columns[WEIGHT].values[rows_B].astype(np.float32) if WEIGHT in self._columns else None

        def whole() -> dict[str, Ragged]:
            found = dict[str, Ragged]()
            for group in self._schema.sequences:
                self._sequence(replace(group, numbers=(), max_length=ALL), 0, rows_B, found, {})
            return found

        return Batch(self._inputs(rows_B), ids, label_BT, weight_B, numbers, whole)

    def prefetch(self, start: int, stop: int) -> None:
        """As `ReadsAhead`; entries of lists are read when they are touched."""
        if not self._reads_ahead:
            self._reads_ahead = True
            for column in self._columns.values():
                advise(column.values, mmap.MADV_RANDOM)
        if self._rows_N is not None:
            rows_N = self._rows_N[start:stop]
            start, stop = int(rows_N.min()), int(rows_N.max()) + 1
            if stop - start > _SPARSE * len(rows_N):  # in an order of their own, as by time
                return
        for column in self._columns.values():
            advise(column.values[start:stop] if column.offsets is None else column.offsets[start:stop])

    def checksums(self) -> list[str]:
        """Those of its columns and of its rows: equal for equal samples."""
        found = [column.content for column in self._columns.values()]
        if self._rows_N is not None:
            found.append(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self._rows_N, np.int64).data))
        return found

    @cached_property
    def histories(self) -> str:
        """How many of its sequences are cut and empty, in words behind those that say where the samples come from."""
        text = ""
        for group in self._schema.sequences:
            offsets_N1 = self._columns[f"ids:{group.ids[0].name}"].offsets
            assert offsets_N1 is not None
            lengths_N = np.diff(offsets_N1)[slice(None) if self._rows_N is None else self._rows_N]
            cut, empty = (lengths_N > group.max_length).mean(), (lengths_N == 0).mean()
            text += f"; {group.name}: {cut:.1%} of the histories are cut to {group.max_length}, {empty:.1%} are empty"
        return text

    def _inputs(self, rows_B: Ints) -> Floats:
        out_BI = np.empty((len(rows_B), self._schema.num_dense), np.float32)
        log_I, origin_I, fill_I, shift_I, factor_I = self._dense_scales
        take_dense(self._dense_I4, len(self._label), rows_B, log_I, origin_I, fill_I, shift_I, factor_I, out_BI)
        return out_BI

    def _list(self, column: StoredColumn, rows_B: Ints) -> Ragged:
        places_V, lengths_B = column.entries(rows_B, ALL)
        return Ragged(column.ids(places_V), lengths_B, None if column.weights is None else column.weights[places_V])

    def _sequence(
        self, group: SequenceColumns, at: int, rows_B: Ints, ids: dict[str, Ragged], numbers: dict[str, Floats]
    ) -> None:
        """Adds the newest entries of the rows, oldest first, to the ids and numbers of a batch. `at`: the number of the
        group's first column of numbers."""
        kept = group.max_length if group.newest == "last" else -group.max_length
        places_V, lengths_B = self._columns[f"ids:{group.ids[0].name}"].entries(rows_B, kept)
        for column in group.ids:
            ids[column.name] = Ragged(self._columns[f"ids:{column.name}"].ids(places_V), lengths_B)
        if group.numbers:
            numbers[group.name] = np.empty((len(places_V), len(group.numbers)), np.float32)
            for s, name in enumerate(group.numbers):
                out_V = numbers[group.name][:, s]
                inputs_into(self._transform[at + s], self._flat[f"numbers:{name}"], places_V, out_V)


def _table(width: int, rows: list[list[int]]) -> Ints:
    return np.array(rows, np.int64).reshape(-1, width)


def _place(values: NDArray[Any]) -> tuple[int, int]:
    """The address of an array, and the bytes of a value."""
    return values.ctypes.data, values.itemsize
