"""Conversion: the rows of requests to a batch of ids and numbers, exactly as `Predictor.predict` converts them.

The usual forms of columns need no Arrow, whose fixed cost for a row is 40 times that of numpy. `direct` gives exactly
what `general` gives, or nothing: then `general` converts, or finds the error and its row.
"""

# N = rows of all requests, P = rows with padding, I = dense columns, F = features of one value a row, V = values

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import DataError
from shardkeep.inference.columns import InputColumn, input_columns
from shardkeep.inference.protocol.datatypes import Values
from shardkeep.inference.recent import Recent
from shardkeep.inference.server.request_numbers import Columns, DenseColumns, Scale, Unusual, entries_of
from shardkeep.inference.server.signature import Column, Jagged, Rows
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.columns.column_kernels import entry_places, list_sizes
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.conversion.rules import canonical, listing, numbers_of
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.schema import SequenceColumns

_MOST_TEXTS = 1 << 16
_LONGEST_TEXT = 64
"""What a memory of texts holds: 20 MB at most for each of two."""


class Conversion:
    """Converts requests of one model. One thread at a time."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self._columns = inputs, input_columns(inputs)
        columns = {column.name: (at, column) for at, column in enumerate(self._columns)}
        self._dense, self._ids = DenseColumns(inputs, columns), _IdColumns(inputs, columns)
        groups = inputs.layout.schema.sequences
        self._sequences = [_Sequence(group, inputs, columns, self._ids) for group in groups]
        self._names = tuple(column.name for column in inputs.layout.schema.looked_up)
        self._usual = not (
            any(inputs.fitted.times.values()) or inputs.layout.pads or any(c.role == "weights" for c in self._columns)
        )

    def batches(self, rows: Rows, padded: Callable[[int], int]) -> Iterator[tuple[Batch, int]]:
        """The rows of a request in batches, and the number of each. Raises DataError for what cannot be a sample.

        Args:
            padded: Gives the samples that a batch of so many rows has."""
        batch = self.direct([rows], padded(rows.count))
        return self.general(rows, padded) if batch is None else iter([(batch, rows.count)])

    def direct(self, requests: Sequence[Rows], size: int) -> Batch | None:
        """The rows of all requests, and copies of the first one up to `size`; None = not these, or there are none."""
        count = sum(rows.count for rows in requests)
        if not self._usual or not count or any(rows.absent for rows in requests):
            return None
        try:
            dense_PI = self._dense.batch(requests, count, size)
            ids, numbers = self._ids.batch(requests, count, size), dict[str, Floats]()
            whole = dict[str, Ragged]()
            for sequence in self._sequences:
                whole |= sequence.add(requests, size, ids, numbers)
        except (Unusual, DataError, pa.ArrowException):
            return None
        ids = {name: ids[name] for name in self._names}
        return Batch(dense_PI, ids, np.zeros((size, 1), np.float32), numbers=numbers, whole=lambda: whole)

    def warm(self) -> None:
        """Converts a row of missing values in the general way: what pyarrow imports for it, such as pandas, takes
        seconds, and no request is to wait for it."""
        lists = [column.several and column.separator is None for column in self._columns]
        missing = [Jagged([], np.zeros(1, np.int64)) if each else [b""] for each in lists]
        with contextlib.suppress(DataError):  # of a model that has no mark of a missing value
            next(self.general(Rows(1, missing), lambda count: count))

    def general(self, rows: Rows, padded: Callable[[int], int]) -> Iterator[tuple[Batch, int]]:
        """As `batches`, in batches of at most 65,536 rows, whose last row fills them up."""
        pairs = zip(self._columns, rows.columns, strict=True)
        data = {c.name: _array(c.kind, values) for c, values in pairs if c.name not in rows.absent}
        data |= {name: pa.nulls(rows.count) for name in rows.absent}
        for chunk in Chunk("the data", np.arange(1, rows.count + 1), data).parts():
            samples = self._inputs.samples(chunk)
            count = len(samples)
            yield samples.gather(np.minimum(np.arange(padded(count)), count - 1)), count


class _IdColumns:
    """The ids of requests, by feature. `columns`: with their places in a request."""

    def __init__(self, inputs: Inputs, columns: Columns) -> None:
        features = [columns[feature.column] for feature in inputs.layout.sparse]
        self._single = [(at, column) for at, column in features if not column.several]
        self._several = [(at, column) for at, column in features if column.several]
        marks = {name: inputs.layout.rules(name).missing for name in columns}
        of_marks = {each: _Texts(each) for each in marks.values()}
        self._texts = {name: of_marks[each] for name, each in marks.items()}
        self._all_texts = len(of_marks) == 1 and all(column.kind == "texts" for _, column in self._single)

    def batch(self, requests: Sequence[Rows], count: int, size: int) -> dict[str, Ragged]:
        ids = self._of_one(requests, count, size)
        for at, column in self._several:
            ids[column.name] = self._of_several(column, [rows.columns[at] for rows in requests], size - count)
        return ids

    def entries(self, column: InputColumn, part: Column) -> tuple[NDArray[Any], Ints]:
        """The ids of a column of several values, one for each entry, and the entries of each row."""
        if isinstance(part, Jagged):
            return np.array(self._of_values(column, part.values_V), np.int64), part.lengths_N
        if column.kind != "texts" or column.separator is None or column.brackets or not isinstance(part, list):
            raise Unusual
        fields = list(map(self._texts[column.name].ids_of(column.separator).__getitem__, part))
        return np.array(list(chain.from_iterable(fields)), np.int64), np.array(list(map(len, fields)), np.int64)

    def _of_one(self, requests: Sequence[Rows], count: int, size: int) -> dict[str, Ragged]:
        if not self._single:
            return {}
        parts: list[Any] = [rows.columns[at] for at, _ in self._single for rows in requests]
        if self._all_texts and set(map(type, parts)) == {list}:
            id_of = self._texts[self._single[0][1].name].id_of
            found = list(map(id_of.__getitem__, chain.from_iterable(parts)))
        else:
            columns = [column for _, column in self._single for _ in requests]
            found = [id for column, part in zip(columns, parts, strict=True) for id in self._of_values(column, part)]
        ids_FP = np.empty((len(self._single), size), np.int64)
        ids_FP[:, :count] = np.array(found, np.int64).reshape(-1, count)
        ids_FP[:, count:] = ids_FP[:, :1]
        return {column.name: Ragged(ids_FP[f]) for f, (_, column) in enumerate(self._single)}

    def _of_values(self, column: InputColumn, values: Column) -> Sequence[int]:
        """An id for each value."""
        texts = self._texts[column.name]
        if isinstance(values, Jagged):
            raise Unusual
        if column.kind == "texts":
            return list(map(texts.id_of.__getitem__, _texts(values)))
        if column.kind != "numbers" or isinstance(values, list) or values.dtype.kind not in "iub":
            raise Unusual
        if values.dtype == np.uint64 and texts.marks:
            raise Unusual  # the largest of its numbers are negative ids
        ids_V = values.astype(np.int64)  # uint64 keeps its bits
        if texts.marks:
            ids_V = np.where(np.isin(ids_V, texts.marks), MISSING_ID, ids_V)
        ids: list[int] = ids_V.tolist()
        return ids

    def _of_several(self, column: InputColumn, parts: Sequence[Column], padding: int) -> Ragged:
        if column.kind != "texts":
            raise Unusual
        found = [self.entries(column, part) for part in parts]
        ids_V, lengths_N = (np.concatenate(each) for each in zip(*found, strict=True))
        kept_V, count = ids_V != MISSING_ID, len(lengths_N)
        row_V = np.repeat(np.arange(count), lengths_N)[kept_V]
        return Ragged(ids_V[kept_V], np.bincount(row_V, minlength=count + padding).astype(np.int32))


class _Sequence:
    """A sequence of requests, cut by the kernels that cut it in training."""

    def __init__(self, group: SequenceColumns, inputs: Inputs, columns: Columns, ids: _IdColumns) -> None:
        scaled = [number.column for number in inputs.layout.scaled]
        self._scale = Scale(inputs, [scaled.index(name) for name in group.numbers])
        self._group, self._converted = group, ids
        self._ids = [columns[column.name] for column in group.ids]
        self._numbers = [columns[name][0] for name in group.numbers]
        self._kept = group.max_length if group.newest == "last" else -group.max_length

    def add(
        self, requests: Sequence[Rows], size: int, ids: dict[str, Ragged], numbers: dict[str, Floats]
    ) -> dict[str, Ragged]:
        """Adds the ids and the numbers of a batch; samples beyond the rows have no entries. Returns whole lists."""
        found = [[self._converted.entries(column, rows.columns[at]) for rows in requests] for at, column in self._ids]
        found += [[entries_of(rows.columns[at]) for rows in requests] for at in self._numbers]
        values = [np.concatenate([values_V for values_V, _ in parts]) for parts in found]
        lengths_N, *others = [np.concatenate([lengths_N for _, lengths_N in parts]) for parts in found]
        if any((other_N != lengths_N).any() for other_N in others):
            raise Unusual
        offsets_N1, rows_N = np.append(0, np.cumsum(lengths_N)), np.arange(len(lengths_N))
        lengths_P, whole_P = np.zeros(size, np.int32), np.append(lengths_N, np.zeros(size - len(lengths_N), np.int32))
        newest = list_sizes(offsets_N1, rows_N, self._group.max_length, lengths_P[: len(rows_N)])
        entry_places(offsets_N1, rows_N, self._kept, places := np.empty(newest, np.int64))
        own = {column.name: ids_V for column, ids_V in zip(self._group.ids, values, strict=False)}
        ids.update({name: Ragged(ids_V[places], lengths_P) for name, ids_V in own.items()})
        if self._numbers:
            kept_SN = np.stack([values_V[places] for values_V in values[len(self._ids) :]])
            numbers[self._group.name] = self._scale.inputs(kept_SN)
        return {name: Ragged(ids_V, whole_P) for name, ids_V in own.items()}


def _is_short(text: bytes, _: object) -> bool:
    return len(text) <= _LONGEST_TEXT


def _texts(values: Values) -> Sequence[bytes]:
    """Whole numbers and truth values as texts: 7 means the text 7."""
    if isinstance(values, list):
        return values
    if values.dtype.kind not in "iub":
        raise Unusual
    return [b"%d" % number for number in values.tolist()]


class _Texts:
    """The ids of texts by the marks of missing values of their column, with memories of the latest ones.

    `marks`: the whole numbers among them."""

    def __init__(self, missing: Sequence[str]) -> None:
        self._is_missing = listing(missing)
        self.marks = [int(mark) for mark in numbers_of(missing) if mark.is_integer() and abs(mark) < 2.0**63]
        self.id_of = Recent(self._id, _MOST_TEXTS, _is_short)
        self._ids_of: dict[str, Recent[bytes, tuple[int, ...]]] = {}

    def ids_of(self, separator: str) -> Recent[bytes, tuple[int, ...]]:
        """The ids of fields of several texts."""
        if separator not in self._ids_of:
            self._ids_of[separator] = Recent(partial(self._ids, separator=separator), _MOST_TEXTS, _is_short)
        return self._ids_of[separator]

    def _id(self, text: bytes) -> int:
        form = canonical(text)
        return MISSING_ID if self._is_missing(form) else hash_text(form)

    def _ids(self, text: bytes, separator: str) -> tuple[int, ...]:
        field = text.strip(b" \t\n\v\f\r")
        if self._is_missing(canonical(field)):
            return ()
        if field[:1] in (b"[", b"(", b"{"):
            raise Unusual  # maybe a list in another writing
        return tuple(map(self.id_of.__getitem__, field.split(separator.encode())))


def _array(kind: str | None, column: Column) -> pa.Array:
    """`kind`: of the training data's ids. An empty text is no number and no time, but a missing one."""
    if isinstance(column, Jagged):
        offsets = np.zeros(len(column.lengths_N) + 1, np.int32)
        np.cumsum(column.lengths_N, out=offsets[1:])
        return pa.ListArray.from_arrays(pa.array(offsets), _array(kind, column.values_V))
    if isinstance(column, list):
        return pa.array([text or None for text in column] if kind != "texts" else column, pa.binary())
    return pa.array(column)
