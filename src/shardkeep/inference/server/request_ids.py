"""Conversion: the rows of requests to a batch of ids and numbers, exactly as `Predictor.predict` converts them.

The usual forms of columns need no Arrow, whose fixed cost for a row is 40 times that of numpy. `direct` gives exactly
what `general` gives, or nothing: then `general` converts, or finds the error and its row.
"""

# N = rows of all requests, P = rows with padding, I = dense columns, F = features of one value a row, V = values

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Float64s, Floats
from shardkeep.base.errors import DataError
from shardkeep.inference.columns import InputColumn, input_columns
from shardkeep.inference.protocol.datatypes import Numbers, Values
from shardkeep.inference.recent import Recent
from shardkeep.inference.server.signature import Column, Jagged, Rows
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.conversion.chunk import Chunk, Column as RawColumn
from shardkeep.workers.data.conversion.decoding import decode_numbers
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.conversion.rules import ReadingRules, number_of

_MOST_TEXTS = 1 << 16
_LONGEST_TEXT = 64
"""What a memory of texts holds: 20 MB at most for each of two."""


class _Unusual(Exception):
    """A form that is left to `general`."""


class Conversion:
    """Converts requests of one model. One thread at a time."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self._columns = inputs, input_columns(inputs)
        index = {column.name: c for c, column in enumerate(self._columns)}
        self._dense = _DenseColumns(inputs, index)
        self._ids = _IdColumns(self._columns, inputs.layout.rules)
        self._features = tuple(c.column for c in inputs.layout.sparse)
        self._usual = not inputs.fitted.times and all(column.role != "weights" for column in self._columns)

    def batches(self, rows: Rows, padded: Callable[[int], int]) -> Iterator[tuple[Batch, int]]:
        """The rows of a request in batches, and the number of each. Raises DataError for what cannot be a sample.

        Args:
            padded: Gives the samples that a batch of so many rows has."""
        batch = self.direct([rows], padded(rows.count))
        return self.general(rows, padded) if batch is None else iter([(batch, rows.count)])

    def direct(self, requests: Sequence[Rows], size: int) -> Batch | None:
        """The rows of all requests, and copies of the first one up to `size`; None = not these, or there are none."""
        count = sum(rows.count for rows in requests)
        if not self._usual or not count:
            return None
        try:
            dense_PI = self._dense.batch(requests, count, size)
            ids = self._ids.batch(requests, count, size)
        except (_Unusual, DataError, pa.ArrowException):
            return None
        return Batch(dense_PI, {name: ids[name] for name in self._features}, np.zeros((size, 1), np.float32))

    def general(self, rows: Rows, padded: Callable[[int], int]) -> Iterator[tuple[Batch, int]]:
        """As `batches`, in batches of at most 65,536 rows, whose last row fills them up."""
        pairs = zip(self._columns, rows.columns, strict=True)
        data = {column.name: _array(column.kind, values) for column, values in pairs}
        for chunk in Chunk("the data", np.arange(1, rows.count + 1), data).parts():
            samples = self._inputs.samples(chunk)
            count = len(samples)
            yield samples.gather(np.minimum(np.arange(padded(count)), count - 1)), count


class _DenseColumns:
    """The numbers of requests to the dense inputs of a batch."""

    def __init__(self, inputs: Inputs, index: Mapping[str, int]) -> None:
        layout = inputs.layout
        self._places = [(index[c.column], place, c.width) for c in layout.dense for place in range(c.width or 1)]
        self._rules, self._marks = layout.rules, layout.rules.marks
        scales = [c.scale or layout.scale for c in layout.numbers]
        self._logs_I = np.array([scale in ("log", "log_standard") for scale in scales], np.bool_)
        self._origin_I1 = np.array(inputs.fitted.origins, np.float64).reshape(-1, 1)
        self._transform = inputs.fitted.transform

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
        if self._marks:
            values_IN[np.isin(values_IN, self._marks)] = np.nan
        if self._logs_I.any():
            log_JN = values_IN[self._logs_I]
            values_IN[self._logs_I] = np.sign(log_JN) * np.log1p(np.abs(log_JN))
        with np.errstate(over="ignore"):
            stored_NI = (values_IN - self._origin_I1).astype(np.float32).T
        if np.isinf(stored_NI).any():
            raise _Unusual
        dense_PI[:count] = self._transform.inputs(np.ascontiguousarray(stored_NI))
        return dense_PI

    def _numbers(self, column: Column, place: int, width: int | None) -> Numbers:
        """The numbers of a column, or those at one place of its vectors."""
        if width is not None:
            if not isinstance(column, Jagged) or (column.lengths_N != width).any():
                raise _Unusual
            column = column.values_V[place::width]
        if isinstance(column, np.ndarray):
            return column
        if isinstance(column, Jagged):
            raise _Unusual
        return decode_numbers(
            RawColumn("", np.arange(1, len(column) + 1), "", pa.array(column, pa.binary())), self._rules
        )


class _IdColumns:
    """The ids of requests, by feature."""

    def __init__(self, columns: Sequence[InputColumn], rules: ReadingRules) -> None:
        ids = [(at, column) for at, column in enumerate(columns) if column.role == "ids"]
        self._single = [(at, column) for at, column in ids if not column.several]
        self._several = [(at, column) for at, column in ids if column.several]
        self._all_texts = all(column.kind == "texts" for _, column in self._single)
        self._marks = [int(mark) for mark in rules.marks if mark.is_integer() and abs(mark) < 2.0**63]
        texts, separators = _Texts(rules), {None, *(column.separator for _, column in self._several)}
        self._id = Recent(texts.id, _MOST_TEXTS, _is_short)
        self._ids = {s: Recent(partial(texts.ids, separator=s), _MOST_TEXTS, _is_short) for s in separators}

    def batch(self, requests: Sequence[Rows], count: int, size: int) -> dict[str, Ragged]:
        ids = self._of_one(requests, count, size)
        for at, column in self._several:
            ids[column.name] = self._of_several(column, [rows.columns[at] for rows in requests], size - count)
        return ids

    def _of_one(self, requests: Sequence[Rows], count: int, size: int) -> dict[str, Ragged]:
        if not self._single:
            return {}
        parts: list[Any] = [rows.columns[at] for at, _ in self._single for rows in requests]
        if self._all_texts and set(map(type, parts)) == {list}:
            found = list(map(self._id.__getitem__, chain.from_iterable(parts)))
        else:
            kinds = [column.kind for _, column in self._single for _ in requests]
            found = [id for kind, part in zip(kinds, parts, strict=True) for id in self._of_values(kind, part)]
        ids_FP = np.empty((len(self._single), size), np.int64)
        ids_FP[:, :count] = np.array(found, np.int64).reshape(-1, count)
        ids_FP[:, count:] = ids_FP[:, :1]
        return {column.name: Ragged(ids_FP[f]) for f, (_, column) in enumerate(self._single)}

    def _of_values(self, kind: str | None, column: Column) -> Sequence[int]:
        """An id for each value."""
        if isinstance(column, Jagged):
            raise _Unusual
        if kind == "texts":
            return list(map(self._id.__getitem__, _texts(column)))
        if kind != "numbers" or isinstance(column, list) or column.dtype.kind not in "iu":
            raise _Unusual
        if column.dtype == np.uint64 and self._marks:
            raise _Unusual  # the largest of its numbers are negative ids
        ids_V = column.astype(np.int64)  # uint64 keeps its bits
        if self._marks:
            ids_V = np.where(np.isin(ids_V, self._marks), MISSING_ID, ids_V)
        ids: list[int] = ids_V.tolist()
        return ids

    def _of_several(self, column: InputColumn, parts: Sequence[Column], padding: int) -> Ragged:
        found, lengths = list[int](), list[int]()
        for part in parts:
            if column.kind != "texts":
                raise _Unusual
            if isinstance(part, Jagged):
                entries = list(map(self._ids[None].__getitem__, _texts(part.values_V)))
                ends = np.cumsum(part.lengths_N).tolist()
                fields = [tuple(chain.from_iterable(entries[a:b])) for a, b in zip([0, *ends], ends, strict=False)]
            elif isinstance(part, list) and column.separator is not None and not column.brackets:
                fields = list(map(self._ids[column.separator].__getitem__, part))
            else:
                raise _Unusual
            found.extend(chain.from_iterable(fields))
            lengths.extend(map(len, fields))
        return Ragged(np.array(found, np.int64), np.array(lengths + [0] * padding, np.int32))


def _is_short(text: bytes, _: object) -> bool:
    return len(text) <= _LONGEST_TEXT


def _texts(values: Values) -> Sequence[bytes]:
    """Whole numbers as texts: 7 means the text 7."""
    if isinstance(values, list):
        return values
    if values.dtype.kind not in "iu":
        raise _Unusual
    return [b"%d" % number for number in values.tolist()]


class _Texts:
    """The ids of texts by the rules of a model, one at a time."""

    def __init__(self, rules: ReadingRules) -> None:
        self._missing = frozenset(text.encode() for text in rules.missing)
        self._marks = rules.marks if rules.form > 1 else []
        self._hash = partial(hash_text, spelled=rules.form == 1)

    def id(self, text: bytes) -> int:
        """The id of a field of one text."""
        found = self._present(text)
        return MISSING_ID if found is None else self._hash(found)

    def ids(self, text: bytes, separator: str | None) -> tuple[int, ...]:
        """The ids of a field of several texts, without the missing ones."""
        field = self._present(text)
        if field is None:
            return ()
        if separator is not None and field[:1] in (b"[", b"(", b"{"):
            raise _Unusual  # maybe a list in another writing
        entries = [field] if separator is None else field.split(separator.encode())
        return tuple(self._hash(entry) for each in entries if (entry := self._present(each)) is not None)

    def _present(self, text: bytes) -> bytes | None:
        """The text without the spaces around it; None = a missing one."""
        text = text.strip(b" \t\n\v\f\r")
        marked = bool(self._marks) and number_of(text) in self._marks
        return None if marked or text in self._missing else text


def _array(kind: str | None, column: Column) -> pa.Array:
    """`kind`: of the training data's ids. An empty text is no number and no time, but a missing one."""
    if isinstance(column, Jagged):
        offsets = np.zeros(len(column.lengths_N) + 1, np.int32)
        np.cumsum(column.lengths_N, out=offsets[1:])
        return pa.ListArray.from_arrays(pa.array(offsets), _array(kind, column.values_V))
    if isinstance(column, list):
        return pa.array([text or None for text in column] if kind != "texts" else column, pa.binary())
    return pa.array(column)
