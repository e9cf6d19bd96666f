"""RowReader: raw columns of one chunk to the samples of its rows, read as the training rows have decided.

N = rows of a chunk, V = ids of a multi-valued feature
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.base.arrays import Bools, Float64s, Floats, Ints
from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.batch import DecodedRows, Lists
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.categories import decode_ids, kind_of, pad_ids
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.decoding import (
    as_lists,
    count_kept,
    decode_numbers,
    decode_vectors,
    holds_times,
    in_brackets,
    list_lengths,
    present,
)
from shardkeep.workers.data.conversion.hashing import MISSING_ID, Spellings
from shardkeep.workers.data.conversion.labels import Labels, LabelValues, decode_labels
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted, PriorFit
from shardkeep.workers.data.conversion.rules import ReadingRules, is_list, is_text
from shardkeep.workers.data.conversion.scaling import ColumnScaler, transform_of
from shardkeep.workers.data.conversion.sequences import sequence_entries
from shardkeep.workers.data.conversion.teaching import Note, Teaching
from shardkeep.workers.data_config import DenseColumn, SequenceConfig, SparseColumn


class RowReader:
    """Reads samples: those of the training rows first, or with what these have `fitted` before.

    `prior`: the part that another model's training rows have fitted."""

    def __init__(self, layout: ColumnLayout, fitted: Fitted | None = None, prior: PriorFit | None = None) -> None:
        if fitted is not None:
            prior = PriorFit.of(layout, fitted)
        self.layout = layout
        self.rules = layout.rules
        scales = {} if prior is None else prior.dense
        self._scalers = [ColumnScaler(c, layout.scale, scales.get(c.column)) for c in layout.scaled]
        self._lists: frozenset[str] | None = None if fitted is None else fitted.lists
        self._prior = prior
        names = layout.categories | {name for group in layout.sequences.values() for name in group.columns}
        self._kinds = {} if prior is None else {n: k for n, k in prior.kinds.items() if n in names}
        self._brackets = {} if prior is None else {n: n in prior.brackets for n in prior.lists if n in names}
        self._time_counts: bool | None = None
        self._fitted = fitted
        self._spellings = {c.column: Spellings() for c in layout.sparse} if fitted is None else {}
        self._teaching = Teaching() if fitted is None else None

    def fitted(self) -> Fitted:
        """What the training rows have decided. Raises ConfigError where `data.time_format` has no effect."""
        if self._fitted is not None:
            return self._fitted
        scalers, brackets = self._scalers, frozenset(name for name, are in self._brackets.items() if are)
        origins, times_ = tuple(c.origin for c in scalers), frozenset(c.name for c in scalers if c.is_time)
        if self.layout.time_format and not times_ and self.layout.time is None:
            raise ConfigError("data.time_format: has no effect: no dense column holds times, and data.time is not set")
        return Fitted(self.lists, self._kinds, origins, transform_of(scalers), times_, brackets)

    @property
    def lists(self) -> frozenset[str]:
        """The multi-valued features; none before the first chunk."""
        return self._lists or frozenset()

    def notes(self) -> list[Note]:
        """What a person should know of the training columns: a line each."""
        notes = [] if self._teaching is None else self._teaching.notes(self._scalers)
        for name, spellings in self._spellings.items():
            if spellings.pair is not None:
                one, other = (text.decode("utf-8", "replace")[:40] for text in spellings.pair)
                text = f"column {name}: {one!r} and {other!r} are two categories; write one value in one way"
                notes.append((f"sparse:{name}", text))
        return notes

    def rows(self, chunk: Chunk, label_N: LabelValues, *, learn: bool) -> DecodedRows:
        """The samples of a chunk; `learn`: they enter the statistics. Raises DataError for what cannot be a sample."""
        layout = self.layout
        if self._lists is None:
            self._lists = self._find_lists(chunk)
        single = [c for c in layout.sparse if c.column not in self.lists]
        single_NF = np.empty((len(label_N), len(single)), np.int64)
        for f, sparse in enumerate(single):
            column = chunk.column(sparse.column)
            with column.named():
                single_NF[:, f], _ = self._ids(column)
        dense_NI, end = np.empty((len(label_N), len(layout.numbers)), np.float32), 0
        for dense in layout.dense:
            start, end = end, end + (dense.width or 1)
            self._dense(chunk, dense, self._scalers[start:end], dense_NI[:, start:end], learn=learn)
        lists, numbers = dict[str, Lists](), dict[str, tuple[Floats, Ints]]()
        for sparse in layout.sparse:
            if sparse.column in self.lists:
                with chunk.column(sparse.column).named():
                    lists[sparse.column] = self._multi(chunk, sparse)
        for group in layout.sequences.values():
            start, end = end, end + len(group.numbers)
            ids, floats = self._sequence(chunk, group, self._scalers[start:end], learn=learn)
            lists, numbers = lists | ids, numbers | floats
        if learn and self._teaching is not None:
            self._teaching.add([c.column for c in single], single_NF)
        weight_N = None if layout.weight is None else self._sample_weights(chunk)
        time_N = self.times(chunk) if layout.time is not None and learn else None
        return DecodedRows(label_N, dense_NI, single_NF, lists, weight_N, time_N, numbers)

    def _find_lists(self, chunk: Chunk) -> frozenset[str]:
        """Which features have several values a row. Raises ConfigError for a separator of lists."""
        lists = frozenset(
            c.column
            for c in self.layout.sparse
            if c.separator is not None or c.weights is not None or is_list(chunk.column(c.column).values.type)
        )
        if self._prior is not None:
            names = frozenset(c.column for c in self.layout.sparse)
            lists = lists - self._prior.features | self._prior.lists & names
        cut = [("sparse", c.separator, [c.column]) for c in self.layout.sparse]
        cut += [(f"sequences.{name}", g.separator, [*g.columns]) for name, g in self.layout.sequences.items()]
        for key, separator, columns in cut if self._prior is None else ():
            if separator is not None and all(is_list(chunk.column(name).values.type) for name in columns):
                text = f"{', '.join(columns)}: separator: {separator!r} has no effect, the column holds lists"
                raise ConfigError(f"data.{key}: {text}; allowed: no separator")
        return lists

    def _ids(self, column: Column) -> tuple[Ints, Bools]:
        """The ids of a column of one value a row, or of the entries of lists, as its kind in the first rows says; and
        which of them are no pads, in whose place is a missing value."""
        kind = self._kinds.get(column.name)
        if kind is None and (own := kind_of(column.values)) is not None:
            sharing = self.layout.sharing.get(column.name, ())
            kind = self._kinds[column.name] = next((self._kinds[name] for name in sharing if name in self._kinds), own)
        ids_V = decode_ids(column, kind, self.rules, self._spellings.get(column.name))
        kept_V = ~np.isin(ids_V, pad_ids(column, kind, self.layout.pads.get(column.name, ()), self.rules))
        return np.where(kept_V, ids_V, MISSING_ID), kept_V

    def _sample_weights(self, chunk: Chunk) -> Floats:
        column = chunk.column(self.layout.weight or "")
        with column.named():
            weight_N = decode_numbers(column, self.rules).astype(np.float32)

        def problem(index: int) -> str:
            what = "is missing" if np.isnan(weight_N[index]) else f"is {weight_N[index]:g}"
            return f"the weight {what}; allowed: numbers from 0 on"

        column.check(~(weight_N >= 0) | np.isinf(weight_N), problem)
        return weight_N

    def times(self, chunk: Chunk) -> Float64s:
        """Seconds since 1970, or plain numbers, as the first rows decide. Raises DataError for a missing time."""
        column, problem = chunk.column(self.layout.time or ""), "the time is missing; allowed: numbers, dates or times"
        with column.named():
            if self._time_counts is None:
                dates = holds_times(column, self.rules)
                column.check(np.full(len(chunk), dates is None), problem)
                self._time_counts = dates or times.are_counts(column, self.rules)
            time_N = (times.seconds if self._time_counts else decode_numbers)(column, self.rules)
        column.check(np.isnan(time_N), problem)
        return time_N

    def labels(self, chunk: Chunk) -> Labels:
        """The labels of a chunk. Raises DataError."""
        return decode_labels(chunk, self.layout.labels, self.rules)

    def _dense(
        self, chunk: Chunk, dense: DenseColumn, scalers: Sequence[ColumnScaler], out_NW: Floats, *, learn: bool
    ) -> None:
        """Fills `out_NW` with the numbers to store of a column: W = 1, or the width of its vectors."""
        column = chunk.column(dense.column)
        with column.named():
            if dense.width is not None:
                values_NW = decode_vectors(column, self.rules, dense.width)
            else:
                values_NW = _numbers(column, self.rules, scalers[0])[:, None]
            for w, scaler in enumerate(scalers):
                out_NW[:, w] = scaler.store(values_NW[:, w], learn=learn)
        column.check(np.isinf(out_NW).max(axis=1), "is beyond float32; try scale: log")

    def _sequence(
        self, chunk: Chunk, group: SequenceConfig, scalers: Sequence[ColumnScaler], *, learn: bool
    ) -> tuple[dict[str, Lists], dict[str, tuple[Floats, Ints]]]:
        """The ids and the numbers to store of a sequence, by column."""
        columns = [chunk.column(name) for name in group.columns]
        brackets = frozenset(column.name for column in columns if self._in_brackets(column, group.separator))
        entries, lengths_N = sequence_entries(columns, self.rules, group.separator, brackets)
        lists, numbers = dict[str, Lists](), dict[str, tuple[Floats, Ints]]()
        with entries[0].named():
            ids_V, kept_V = self._ids(entries[0])
        if not kept_V.all():
            entries, lengths_N = [column.filter(kept_V) for column in entries], count_kept(lengths_N, kept_V)
        lists[entries[0].name] = Lists(ids_V[kept_V], lengths_N)
        if self._teaching is not None:
            self._teaching.add_lists(entries[0].name, lists[entries[0].name], entries[0].values.__getitem__)
        for column in entries[1 : len(group.ids)]:
            with column.named():
                lists[column.name] = Lists(self._ids(column)[0], lengths_N)
        for column, scaler in zip(entries[len(group.ids) :], scalers, strict=True):
            with column.named():
                stored_V = scaler.store(_numbers(column, self.rules, scaler), learn=learn)
            column.check(np.isinf(stored_V), "is beyond float32; try scale: log")
            numbers[column.name] = stored_V, lengths_N
        return lists, numbers

    def _in_brackets(self, column: Column, separator: str | None) -> bool:
        """Whether the texts of a column are lists in brackets; the first rows decide."""
        if column.name not in self._brackets:
            brackets = in_brackets(column, self.rules, separator)
            self._brackets |= {} if brackets is None else {column.name: brackets}
        return self._brackets.get(column.name, False)

    def _multi(self, chunk: Chunk, sparse: SparseColumn) -> Lists:
        column = chunk.column(sparse.column)
        lists = as_lists(
            column,
            self.rules,
            sparse.separator,
            brackets=self._in_brackets(column, sparse.separator),
            single=sparse.weights is not None or self._kinds.get(column.name) != "texts",
        )
        lengths_N = list_lengths(lists)
        entries = column.entries(lists, lengths_N)
        ids_V, kept_V = self._ids(entries)
        present_V = present(entries.values, self.rules) & kept_V
        weights_V = None
        if sparse.weights is not None:
            weights_V = self._weights(chunk.column(sparse.weights), sparse, column, lists)[present_V]
        found = Lists(ids_V[present_V], count_kept(lengths_N, present_V), weights_V)
        if self._teaching is not None:
            self._teaching.add_lists(sparse.column, found, lambda at: entries.filter(present_V).values[at])
        return found

    def _weights(self, column: Column, sparse: SparseColumn, owner: Column, ids: pa.Array) -> Floats:
        separator = sparse.separator if is_text(column.values.type) else None
        brackets = in_brackets(column, self.rules, separator) or False
        lists = as_lists(column, self.rules, separator, brackets=brackets)
        if is_text(owner.values.type):  # a mark of a missing value is a list of one, whose weight goes with it
            lists = pc.if_else(pc.and_(ids.is_null(), pc.equal(pc.list_value_length(lists), 1)), None, lists)
        weights_N, lengths_N = list_lengths(lists), list_lengths(ids)
        column.check(
            weights_N != lengths_N, lambda i: f"holds {weights_N[i]} weights for {lengths_N[i]} ids of {sparse.column}"
        )
        entries = column.entries(lists, weights_N)
        weights_V = decode_numbers(entries, self.rules)
        entries.check(np.isnan(weights_V), "a weight is missing")
        return weights_V.astype(np.float32)


def _numbers(column: Column, rules: ReadingRules, scaler: ColumnScaler) -> Float64s:
    """The values of a column of numbers or times; the first rows decide."""
    if scaler.is_time is None:
        scaler.is_time = holds_times(column, rules)
    return (times.seconds if scaler.is_time else decode_numbers)(column, rules)
