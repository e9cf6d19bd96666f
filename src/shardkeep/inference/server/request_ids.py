"""Conversion: the rows of requests to a batch of ids and numbers, exactly as `Predictor.predict` converts them.

The usual forms of columns need no Arrow, whose fixed cost for a row is 40 times that of numpy. `direct` gives exactly
what `general` gives, or nothing: then `general` converts, or finds the error and its row.
"""

# N = rows of all requests, P = rows with padding, I = dense columns, F = features of one value a row, V = values

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shardkeep.inference.server.request_numbers import DenseColumns, Scale, Unusual, numbers_of
from shardkeep.inference.server.signature import Column, Jagged, Rows
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.conversion.rules import ReadingRules, number_of
from shardkeep.workers.data.gather_kernels import CHUNK_ROWS, gather_lengths, gather_lists
from shardkeep.workers.data.schema import SequenceColumns

_MOST_TEXTS = 1 << 16
_LONGEST_TEXT = 64
"""What a memory of texts holds: 20 MB at most for each of two."""


class Conversion:
    """Converts requests of one model. One thread at a time."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self._columns = inputs, input_columns(inputs)
        index = {column.name: c for c, column in enumerate(self._columns)}
        self._dense = DenseColumns(inputs, index)
        sequences = {name for group in inputs.layout.sequences.values() for name in group.columns}
        features = [column for column in self._columns if column.name not in sequences]
        self._ids = _IdColumns(features, index, inputs.layout.rules)
        self._sequences = self._of_sequences(index)
        self._names = tuple(column.name for column in inputs.layout.schema.looked_up)
        self._usual = not (inputs.fitted.times or inputs.layout.pads or any(c.role == "weights" for c in self._columns))

    def _of_sequences(self, index: Mapping[str, int]) -> list[_Sequence]:
        columns, sequences = {column.name: (index[column.name], column) for column in self._columns}, []
        stop = len(self._inputs.layout.numbers)
        for group in self._inputs.layout.schema.sequences:
            start, stop = stop, stop + len(group.numbers)
            sequences.append(_Sequence(group, columns, self._ids, Scale(self._inputs, start, stop)))
        return sequences

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
        data = {column.name: _array(column.kind, values) for column, values in pairs}
        for chunk in Chunk("the data", np.arange(1, rows.count + 1), data).parts():
            samples = self._inputs.samples(chunk)
            count = len(samples)
            yield samples.gather(np.minimum(np.arange(padded(count)), count - 1)), count


class _IdColumns:
    """The ids of requests, by feature."""

    def __init__(self, columns: Sequence[InputColumn], index: Mapping[str, int], rules: ReadingRules) -> None:
        ids = [(index[column.name], column) for column in columns if column.role == "ids"]
        self._single = [(at, column) for at, column in ids if not column.several]
        self._several = [(at, column) for at, column in ids if column.several]
        self._all_texts = all(column.kind == "texts" for _, column in self._single)
        self._marks = [int(mark) for mark in rules.marks if mark.is_integer() and abs(mark) < 2.0**63]
        texts, separators = _Texts(rules), {None, *(column.separator for _, column in self._several)}
        self._texts, self._id = texts, Recent(texts.id, _MOST_TEXTS, _is_short)
        self._ids = {s: Recent(partial(texts.ids, separator=s), _MOST_TEXTS, _is_short) for s in separators}

    def batch(self, requests: Sequence[Rows], count: int, size: int) -> dict[str, Ragged]:
        ids = self._of_one(requests, count, size)
        for at, column in self._several:
            ids[column.name] = self._of_several(column, [rows.columns[at] for rows in requests], size - count)
        return ids

    def entries(self, column: InputColumn, part: Column) -> tuple[NDArray[Any], Ints]:
        """The ids of a column of a sequence, one for each entry, and the entries of each row."""
        if isinstance(part, Jagged):
            return np.array(self._of_values(column.kind, part.values_V), np.int64), part.lengths_N
        if column.kind != "texts" or column.separator is None or column.brackets or not isinstance(part, list):
            raise Unusual
        fields = [self._texts.entries(text, column.separator) for text in part]
        ids = list(map(self._id.__getitem__, chain.from_iterable(fields)))
        return np.array(ids, np.int64), np.array(list(map(len, fields)), np.int64)

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
            raise Unusual
        if kind == "texts":
            return list(map(self._id.__getitem__, _texts(column)))
        if kind != "numbers" or isinstance(column, list) or column.dtype.kind not in "iu":
            raise Unusual
        if column.dtype == np.uint64 and self._marks:
            raise Unusual  # the largest of its numbers are negative ids
        ids_V = column.astype(np.int64)  # uint64 keeps its bits
        if self._marks:
            ids_V = np.where(np.isin(ids_V, self._marks), MISSING_ID, ids_V)
        ids: list[int] = ids_V.tolist()
        return ids

    def _of_several(self, column: InputColumn, parts: Sequence[Column], padding: int) -> Ragged:
        found, lengths = list[int](), list[int]()
        for part in parts:
            if column.kind != "texts":
                raise Unusual
            if isinstance(part, Jagged):
                entries = list(map(self._ids[None].__getitem__, _texts(part.values_V)))
                ends = np.cumsum(part.lengths_N).tolist()
                fields = [tuple(chain.from_iterable(entries[a:b])) for a, b in zip([0, *ends], ends, strict=False)]
            elif isinstance(part, list) and column.separator is not None and not column.brackets:
                fields = list(map(self._ids[column.separator].__getitem__, part))
            else:
                raise Unusual
            found.extend(chain.from_iterable(fields))
            lengths.extend(map(len, fields))
        return Ragged(np.array(found, np.int64), np.array(lengths + [0] * padding, np.int32))


class _Sequence:
    """A sequence of requests, cut by the kernels that cut it in training."""

    def __init__(
        self, group: SequenceColumns, columns: Mapping[str, tuple[int, InputColumn]], ids: _IdColumns, scale: Scale
    ) -> None:
        self._group, self._converted, self._scale = group, ids, scale
        self._ids = [columns[column.name] for column in group.ids]
        self._numbers = [columns[name][0] for name in group.numbers]
        self._kept = group.max_length if group.newest == "last" else -group.max_length

    def add(
        self, requests: Sequence[Rows], size: int, ids: dict[str, Ragged], numbers: dict[str, Floats]
    ) -> dict[str, Ragged]:
        """Adds the ids and the numbers of a batch; samples beyond the rows have no entries. Returns whole lists."""
        found = [[self._converted.entries(column, rows.columns[at]) for rows in requests] for at, column in self._ids]
        found += [[numbers_of(rows.columns[at]) for rows in requests] for at in self._numbers]
        values = [np.concatenate([values_V for values_V, _ in parts]) for parts in found]
        lengths_N, *others = [np.concatenate([lengths_N for _, lengths_N in parts]) for parts in found]
        if any((other_N != lengths_N).any() for other_N in others):
            raise Unusual
        newest = _Newest(lengths_N, self._group.max_length, self._kept)
        lengths_P, whole_P = (
            np.append(each, np.zeros(size - len(each), np.int32)) for each in (newest.lengths_N, lengths_N)
        )
        own = {column.name: ids_V for column, ids_V in zip(self._group.ids, values, strict=False)}
        ids.update({name: Ragged(newest.of(ids_V), lengths_P) for name, ids_V in own.items()})
        if self._numbers:
            values_SV = np.stack(values[len(self._ids) :])
            stored_SN = np.stack([newest.of(values_V) for values_V in self._scale.stored(values_SV)])
            numbers[self._group.name] = self._scale.inputs(stored_SN)
        return {name: Ragged(ids_V, whole_P) for name, ids_V in own.items()}


class _Newest:
    """The newest entries of lists of these lengths, oldest first."""

    def __init__(self, lengths_N: Ints, most: int, kept: int) -> None:
        self._offsets_N1 = np.zeros(len(lengths_N) + 1, np.int32)
        np.cumsum(lengths_N, out=self._offsets_N1[1:])
        self._starts_C = np.arange(0, len(lengths_N), CHUNK_ROWS)
        self._rows_N, self._kept = np.arange(len(lengths_N)), kept
        self.lengths_N = np.empty(len(lengths_N), np.int32)
        self._total = gather_lengths(self._offsets_N1, self._starts_C, self._rows_N, most, self.lengths_N)

    def of(self, values_V: NDArray[Any]) -> NDArray[Any]:
        out = np.empty(self._total, values_V.dtype)
        starts = self._offsets_N1, self._starts_C, values_V, np.zeros_like(self._starts_C)
        gather_lists(*starts, self._rows_N, self._kept, out)
        return out


def _is_short(text: bytes, _: object) -> bool:
    return len(text) <= _LONGEST_TEXT


def _texts(values: Values) -> Sequence[bytes]:
    """Whole numbers as texts: 7 means the text 7."""
    if isinstance(values, list):
        return values
    if values.dtype.kind not in "iu":
        raise Unusual
    return [b"%d" % number for number in values.tolist()]


class _Texts:
    """The ids of texts by the rules of a model, one at a time."""

    def __init__(self, rules: ReadingRules) -> None:
        self._missing = frozenset(text.encode() for text in rules.missing)
        self._marks = rules.marks

    def id(self, text: bytes) -> int:
        """The id of a field of one text."""
        found = self._present(text)
        return MISSING_ID if found is None else hash_text(found)

    def ids(self, text: bytes, separator: str | None) -> tuple[int, ...]:
        """The ids of a field of several texts, without the missing ones."""
        entries = self.entries(text, separator)
        return tuple(hash_text(entry) for each in entries if (entry := self._present(each)) is not None)

    def entries(self, text: bytes, separator: str | None) -> list[bytes]:
        """The texts in a field of several."""
        field = self._present(text)
        if field is None:
            return []
        if separator is not None and field[:1] in (b"[", b"(", b"{"):
            raise Unusual  # maybe a list in another writing
        return [field] if separator is None else field.split(separator.encode())

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
