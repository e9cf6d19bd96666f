"""DirectConversion: the usual forms of columns to a batch, without Arrow, whose fixed cost exceeds that of a few rows.

Gives exactly what `conversion.py` gives, or nothing: then conversion.py converts, or finds the error and its row.
"""

# N = rows of all requests, P = rows with padding, I = dense columns, F = features of one value a row, V = values

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Float64s, Floats, Ints
from shardkeep.base.errors import DataError
from shardkeep.inference.server.signature import Column, Jagged, Rows
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.conversion.chunk import Column as RawColumn
from shardkeep.workers.data.conversion.decoding import decode_numbers
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.conversion.rules import Rules, number_of
from shardkeep.workers.data_config import SparseColumn

_MOST_TEXTS = 1 << 16
_SPACES = b" \t\n\v\f\r"
_LONGEST_TEXT = 64
"""What a cache of texts holds: 20 MB at most for each of two caches."""
T = TypeVar("T")


class _Unusual(Exception):
    """A form that is left to conversion.py."""


class DirectConversion:
    """Converts requests of one model. One thread at a time."""

    def __init__(self, names: Sequence[str], inputs: Inputs) -> None:
        layout, fitted = inputs.layout, inputs.fitted
        index = {name: c for c, name in enumerate(names)}
        self._features = tuple(c.column for c in layout.sparse)
        self._rules = layout.rules
        self._marks = layout.rules.marks
        self._whole_marks = [int(mark) for mark in self._marks if mark.is_integer() and abs(mark) < 2.0**63]
        self._dense = [(index[c.column], place, c.width) for c in layout.dense for place in range(c.width or 1)]
        scales = [c.scale or layout.scale for c in layout.numbers]
        self._logs_I = np.array([scale in ("log", "log_standard") for scale in scales], np.bool_)
        self._origin_I1 = np.array(fitted.origins, np.float64).reshape(-1, 1)
        self._transform = fitted.transform
        self._kinds = fitted.kinds
        self._single = [(index[c.column], c.column) for c in layout.sparse if c.column not in fitted.lists]
        self._single_at = [at for at, _ in self._single]
        self._all_texts = all(fitted.kinds.get(name) == "texts" for _, name in self._single)
        self._lists = [(index[c.column], c) for c in layout.sparse if c.column in fitted.lists]
        self._weighted = any(c.weights is not None for c in layout.sparse)
        self._has_times = bool(fitted.times)
        texts = _Texts(layout.rules)
        self._id = _Cache(texts.id)
        separators = {c.separator for _, c in self._lists}
        self._ids = {sep: _Cache(partial(texts.ids, separator=sep)) for sep in separators}
        self._present = _Cache(partial(texts.ids, separator=None))

    def batch(self, requests: Sequence[Rows], size: int) -> Batch | None:
        """The rows of all requests, 1 or more, and copies of the first one up to `size`; None = not these."""
        if self._weighted or self._has_times:
            return None
        count = sum(rows.count for rows in requests)
        try:
            dense_PI = self._dense_of(requests, count, size)
            ids = self._single_of(requests, count, size)
            for at, column in self._lists:
                ids[column.column] = self._list_of(column, [rows.columns[at] for rows in requests], size - count)
        except (_Unusual, DataError, pa.ArrowException):
            return None
        return Batch(dense_PI, {name: ids[name] for name in self._features}, np.zeros((size, 1), np.float32))

    def _dense_of(self, requests: Sequence[Rows], count: int, size: int) -> Floats:
        num_dense = len(self._dense)
        dense_PI = np.zeros((size, num_dense), np.float32)
        if not num_dense:
            return dense_PI
        parts: list[Any] = [_part(rows.columns[at], i, width) for at, i, width in self._dense for rows in requests]
        if set(map(type, parts)) != {np.ndarray}:
            parts = list(map(self._numbers, parts))
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

    def _numbers(self, column: Column) -> Any:
        if isinstance(column, Jagged):
            raise _Unusual
        if not isinstance(column, list):
            return column
        rows_N = np.arange(1, len(column) + 1, dtype=np.int64)
        return decode_numbers(RawColumn("", rows_N, "", pa.array(column, pa.binary())), self._rules)

    def _single_of(self, requests: Sequence[Rows], count: int, size: int) -> dict[str, Ragged]:
        if not self._single:
            return {}
        parts: list[Any] = [rows.columns[at] for at in self._single_at for rows in requests]
        if self._all_texts and set(map(type, parts)) == {list}:
            found = list(map(self._id.__getitem__, chain.from_iterable(parts)))
        else:
            kinds = [self._kinds.get(name) for _, name in self._single for _ in requests]
            found = [id for kind, part in zip(kinds, parts, strict=True) for id in self._ids_of(kind, part)]
        ids_FP = np.empty((len(self._single), size), np.int64)
        ids_FP[:, :count] = np.array(found, np.int64).reshape(-1, count)
        ids_FP[:, count:] = ids_FP[:, :1]
        return {name: Ragged(ids_FP[f]) for f, (_, name) in enumerate(self._single)}

    def _ids_of(self, kind: str | None, column: Column) -> Sequence[int]:
        """An id for each value."""
        if isinstance(column, Jagged):
            raise _Unusual
        if kind == "texts":
            return list(map(self._id.__getitem__, _texts(column)))
        ids: list[int] = self._whole(kind, column).tolist()
        return ids

    def _whole(self, kind: str | None, column: Any) -> Ints:
        """Ids that are numbers."""
        if kind != "numbers" or isinstance(column, list) or column.dtype.kind not in "iu":
            raise _Unusual
        ids_V: Ints = column.view(np.int64) if column.dtype == np.uint64 else column.astype(np.int64)
        if self._whole_marks:
            if column.dtype == np.uint64:
                raise _Unusual  # the largest of its numbers are negative ids
            ids_V = np.where(np.isin(ids_V, self._whole_marks), MISSING_ID, ids_V)
        return ids_V

    def _list_of(self, column: SparseColumn, parts: Sequence[Column], padding: int) -> Ragged:
        kind, found, lengths = self._kinds.get(column.column), list[int](), list[int]()
        for part in parts:
            if kind != "texts":
                raise _Unusual
            if isinstance(part, Jagged):
                entries = list(map(self._present.__getitem__, _texts(part.values_V)))
                ends = np.cumsum(part.lengths_N).tolist()
                for start, end in zip([0, *ends], ends, strict=False):
                    before = len(found)
                    for ids in entries[start:end]:
                        found.extend(ids)
                    lengths.append(len(found) - before)
            elif isinstance(part, list) and column.separator is not None:
                for ids in map(self._ids[column.separator].__getitem__, part):
                    found.extend(ids)
                    lengths.append(len(ids))
            else:
                raise _Unusual
        return Ragged(np.array(found, np.int64), np.array(lengths + [0] * padding, np.int32))


class _Cache(dict[bytes, T]):
    """What a function gives for texts."""

    def __init__(self, of: Callable[[bytes], T]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, text: bytes) -> T:
        found = self._of(text)
        if len(text) <= _LONGEST_TEXT:
            if len(self) >= _MOST_TEXTS:
                self.clear()
            self[text] = found
        return found


def _part(column: Column, place: int, width: int | None) -> Column:
    """The column, or the numbers at one place of vectors."""
    if width is None:
        return column
    if not isinstance(column, Jagged) or (column.lengths_N != width).any():
        raise _Unusual
    return column.values_V[place::width]


def _texts(values: Any) -> Sequence[bytes]:
    """Whole numbers as texts: 7 means the text 7."""
    if isinstance(values, list):
        return values
    if values.dtype.kind not in "iu":
        raise _Unusual
    return [b"%d" % number for number in values.tolist()]


@dataclass(frozen=True)
class _Texts:
    """The ids of texts by the rules of a model, one at a time."""

    rules: Rules

    @cached_property
    def _missing(self) -> frozenset[bytes]:
        return frozenset(text.encode() for text in self.rules.missing)

    def _hash(self, text: bytes) -> int:
        return hash_text(text, spelled=self.rules.form == 1)

    def _is_missing(self, text: bytes) -> bool:
        if text in self._missing:
            return True
        return self.rules.form > 1 and bool(self.rules.marks) and number_of(text) in self.rules.marks

    def id(self, text: bytes) -> int:
        """The id of a field of one text."""
        text = text.strip(_SPACES)
        return MISSING_ID if self._is_missing(text) else self._hash(text)

    def ids(self, text: bytes, separator: str | None) -> tuple[int, ...]:
        """The ids of a field of several texts, without the missing ones."""
        text = text.strip(_SPACES)
        if self._is_missing(text):
            return ()
        if separator is not None and text[:1] in (b"[", b"(", b"{"):
            raise _Unusual  # maybe a list in another writing
        entries = [text] if separator is None else [each.strip(_SPACES) for each in text.split(separator.encode())]
        return tuple(self._hash(entry) for entry in entries if not self._is_missing(entry))
