"""Readers: raw columns of one chunk to the values that are stored of them. A reader's rule decides these values.

N = rows of a chunk, V = entries of lists
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.base.arrays import Bools, Float64s, Floats, Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.batch import Values
from shardkeep.workers.data.columns.column import Kind
from shardkeep.workers.data.columns.dataset import LABEL, TIME, WEIGHT
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.categories import decode_ids, pad_ids
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.decoding import (
    as_lists,
    count_kept,
    decode_numbers,
    decode_vectors,
    holds_times,
    in_brackets,
    list_lengths,
)
from shardkeep.workers.data.conversion.hashing import MISSING_ID, Spellings
from shardkeep.workers.data.conversion.labels import absent, add_distinct, decode_labels, listed, missing_error
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted
from shardkeep.workers.data.conversion.rules import ReadingRules, is_text
from shardkeep.workers.data.conversion.sequences import sequence_entries
from shardkeep.workers.data.conversion.teaching import filled_line
from shardkeep.workers.data_config import DenseColumn, SequenceConfig, SparseColumn

LARGEST = float(np.finfo(np.float32).max)
"""Numbers above it are no inputs, unless their logarithms are."""


class Reader:
    """Reads one thing of all rows: a feature, a column of numbers, the columns of a sequence, the labels. The first
    values of a column decide what is not known.

    Args:
        columns: The raw columns that it reads.
        rule: What decides the values that are stored beside what is known of the columns, as JSON types.
        kinds: What it stores, by name.
        widths: The numbers of a row, of what has several.
    """

    def __init__(
        self,
        layout: ColumnLayout,
        known: Fitted,
        columns: Sequence[str],
        rule: Sequence[Any],
        kinds: Mapping[str, Kind],
        widths: Mapping[str, int] = {},
    ) -> None:
        self.columns, self.kinds, self.widths = tuple(columns), kinds, widths
        self._known, self._notes, self._filled = known, list[str](), False
        self._rules = {name: replace(layout.rules(name), zone=known.zones.get(name)) for name in columns}
        self._found: dict[str, dict[str, Any]] = {"brackets": {}, "times": {}, "beyond": {}}
        own = [astuple(rules) for rules in self._rules.values()]
        self.rule = json.dumps([type(self).__name__, *rule, known.of(*columns), own])

    def read(self, chunk: Chunk) -> Mapping[str, Values]:
        """The values of a chunk, by name. Raises DataError for what cannot be read."""
        raise NotImplementedError

    def facts(self, num_rows: int) -> dict[str, Any]:
        """What it found, as JSON types, after all rows. Raises DataError for what all rows together show."""
        zones = {name: rules.zone for name, rules in self._rules.items() if rules.zone is not None}
        removed = {name: rules.removed for name, rules in self._rules.items() if rules.removed}
        return {**self._found, "zones": zones, "removed": removed, "notes": self._notes}

    def rules(self, name: str) -> ReadingRules:
        """How a column is read."""
        return self._rules[name]

    def _in_brackets(self, column: Column, separator: str | None) -> bool:
        """Whether the texts of a column are lists in brackets."""
        find = partial(in_brackets, column, self.rules(column.name), separator)
        return self._decided("brackets", column, find) or False

    def _numbers(self, column: Column) -> Float64s:
        """The values of a column of numbers or times."""
        rules = self.rules(column.name)
        is_time = self._decided("times", column, partial(holds_times, column, rules))
        return (times.seconds if is_time else decode_numbers)(column, rules)

    def _ids(self, column: Column, pads: Sequence[str], spellings: Spellings | None = None) -> tuple[Ints, Bools]:
        """The ids of values, and which of them are no pads, in whose place is a missing value."""
        kind, rules = self._known.kinds.get(column.name), self.rules(column.name)
        ids_V = decode_ids(column, kind, rules, spellings)
        kept_V = ~np.isin(ids_V, pad_ids(column, kind, pads, replace(rules)))
        return np.where(kept_V, ids_V, MISSING_ID), kept_V

    def _see_large(self, column: Column, values_N: Float64s) -> None:
        """Takes in numbers, of which one may be no float32, unless its logarithm is."""
        wrong_N = (np.abs(values_N) > LARGEST).reshape(len(values_N), values_N[:1].size or 1).any(axis=1)
        if wrong_N.any() and column.name not in self._found["beyond"]:
            error = column.error(int(wrong_N.argmax()), "is beyond float32; try scale: log")
            self._found["beyond"][column.name] = str(error)

    def _see_filled(self, name: str, lists: Values, value_of: Callable[[int], pa.Scalar]) -> None:
        """Takes in lists of a column, of which the first ones show whether one id fills them up."""
        if not self._filled and len(lists.values_V):
            self._filled = True
            self._notes += [f"column {name}: {line}" for line in filled_line(lists, value_of)]

    def _decided(self, what: str, column: Column, find: Callable[[], Any]) -> Any:
        known, found = getattr(self._known, what), self._found[what]
        if column.name in known:
            return known[column.name]
        if column.name not in found and (value := find()) is not None:
            found[column.name] = value
        return found.get(column.name)


class IdsReader(Reader):
    """A feature: an id a row, or lists of them, maybe with weights."""

    def __init__(self, layout: ColumnLayout, sparse: SparseColumn, known: Fitted, *, name: str = "") -> None:
        self._sparse, self._pads = sparse, layout.pads.get(sparse.column, [])
        self._name, self._several = name or f"ids:{sparse.column}", sparse.column in known.lists
        self._spellings = Spellings()
        columns = [sparse.column, *([] if sparse.weights is None else [sparse.weights])]
        rule = [sparse.model_dump(exclude={"table", "pooling", "pad"}), self._pads]
        super().__init__(layout, known, columns, rule, {self._name: "ids"})

    def read(self, chunk: Chunk) -> Mapping[str, Values]:
        column = chunk.column(self._sparse.column)
        with column.named():
            if not self._several:
                return {self._name: Values(self._ids(column, self._pads, self._spellings)[0])}
            return {self._name: self._lists(chunk, column)}

    def facts(self, num_rows: int) -> dict[str, Any]:
        facts = super().facts(num_rows)
        if self._spellings.pair is not None:
            one, other = (text.decode("utf-8", "replace")[:40] for text in self._spellings.pair)
            pair = f"{one!r} and {other!r} are two categories; write one value in one way"
            facts["notes"] = [*self._notes, f"column {self._sparse.column}: {pair}"]
        return facts

    def _lists(self, chunk: Chunk, column: Column) -> Values:
        sparse = self._sparse
        several = sparse.weights is not None or self._known.kinds.get(column.name) != "texts"
        brackets = self._in_brackets(column, sparse.separator)
        lists = as_lists(column, self.rules(column.name), sparse.separator, brackets=brackets, single=several)
        lengths_N = list_lengths(lists)
        entries = column.entries(lists, lengths_N)
        ids_V, kept_V = self._ids(entries, self._pads, self._spellings)
        present_V = (ids_V != MISSING_ID) & kept_V
        weights_V = None
        if sparse.weights is not None:
            weights_V = self._weights(chunk.column(sparse.weights), column, lists)[present_V]
        found = Values(ids_V[present_V], count_kept(lengths_N, present_V), weights_V)
        self._see_filled(column.name, found, lambda at: entries.filter(present_V).values[at])
        return found

    def _weights(self, column: Column, owner: Column, ids: pa.Array) -> Floats:
        rules = self.rules(column.name)
        separator = self._sparse.separator if is_text(column.values.type) else None
        lists = as_lists(column, rules, separator, brackets=in_brackets(column, rules, separator) or False)
        if is_text(owner.values.type):  # a mark of a missing value is a list of one, whose weight goes with it
            lists = pc.if_else(pc.and_(ids.is_null(), pc.equal(pc.list_value_length(lists), 1)), None, lists)
        weights_N, lengths_N = list_lengths(lists), list_lengths(ids)
        column.check(
            weights_N != lengths_N, lambda i: f"holds {weights_N[i]} weights for {lengths_N[i]} ids of {owner.name}"
        )
        entries = column.entries(lists, weights_N)
        weights_V = decode_numbers(entries, rules)
        entries.check(np.isnan(weights_V), "a weight is missing")
        return weights_V.astype(np.float32)


class NumbersReader(Reader):
    """A dense column: a number or a time a row, or a vector of numbers."""

    def __init__(self, layout: ColumnLayout, dense: DenseColumn, known: Fitted) -> None:
        self._dense, self._name = dense, f"numbers:{dense.column}"
        widths = {} if dense.width is None else {self._name: dense.width}
        super().__init__(layout, known, [dense.column], [dense.width], {self._name: "numbers"}, widths)

    def read(self, chunk: Chunk) -> Mapping[str, Values]:
        column = chunk.column(self._dense.column)
        with column.named():
            if self._dense.width is None:
                values_N = self._numbers(column)
            else:
                values_N = decode_vectors(column, self.rules(column.name), self._dense.width)
        self._see_large(column, values_N)
        return {self._name: Values(values_N)}


class SequenceReader(Reader):
    """The columns of a sequence: lists of one length in each row."""

    def __init__(self, layout: ColumnLayout, group: SequenceConfig, known: Fitted) -> None:
        self._group = group
        self._pads = {name: layout.pads.get(name, []) for name in group.ids}
        kinds: dict[str, Kind] = {f"ids:{name}": "ids" for name in group.ids}
        kinds |= {f"numbers:{number.column}": "numbers" for number in group.numbers}
        # max_length and newest change nothing that is stored
        super().__init__(layout, known, group.columns, [list(kinds), group.separator, self._pads], kinds)

    def read(self, chunk: Chunk) -> Mapping[str, Values]:
        group, columns = self._group, [chunk.column(name) for name in self.columns]
        brackets = frozenset(column.name for column in columns if self._in_brackets(column, group.separator))
        entries, lengths_N = sequence_entries(columns, self.rules, group.separator, brackets)
        first = entries[0]
        with first.named():
            ids_V, kept_V = self._ids(first, self._pads[first.name])
        if not kept_V.all():
            entries, lengths_N = [column.filter(kept_V) for column in entries], count_kept(lengths_N, kept_V)
        values = {f"ids:{first.name}": Values(ids_V[kept_V], lengths_N)}
        self._see_filled(first.name, values[f"ids:{first.name}"], entries[0].values.__getitem__)
        for column in entries[1 : len(group.ids)]:
            with column.named():
                values[f"ids:{column.name}"] = Values(self._ids(column, self._pads[column.name])[0], lengths_N)
        for column in entries[len(group.ids) :]:
            with column.named():
                numbers_V = self._numbers(column)
            self._see_large(column, numbers_V)
            values[f"numbers:{column.name}"] = Values(numbers_V, lengths_N)
        return values


class LabelReader(Reader):
    """The labels of a row; nan = it has none."""

    def __init__(self, layout: ColumnLayout, known: Fitted) -> None:
        self._labels, self.failed = layout.labels, False
        self._absent = {label.column: list(listed(label)) for label in layout.labels}
        self._held: dict[str, dict[str, None]] = {name: {} for name in layout.label_columns}
        self._missing, self._first = dict.fromkeys(layout.label_columns, 0), dict[str, DataError]()
        rule = [[label.model_dump(exclude={"loss", "weight"}) for label in layout.labels]]
        widths = {LABEL: len(layout.labels)} if layout.tasks else {}
        super().__init__(layout, known, layout.label_columns, rule, {LABEL: "numbers"}, widths)

    def read(self, chunk: Chunk) -> Mapping[str, Values]:
        """Values of a chunk; once a label is missing that must not be, no other column need be read."""
        labels = decode_labels(chunk, self._labels, self.rules)
        for label, missing_N in zip(self._labels, labels.missing_NT.T, strict=True):
            column, name = chunk.column(label.column), label.column
            self._absent[name] = absent(column, self._absent[name])
            if label.kind != "number":
                add_distinct(self._held[name], column)
            if missing_N.any():
                self._missing[name] += int(missing_N.sum())
                self._first.setdefault(name, column.error(int(missing_N.argmax()), "the label is missing"))
                self.failed |= label.missing == "error"
        return {LABEL: Values(labels.value_N)}

    def facts(self, num_rows: int) -> dict[str, Any]:
        for label in self._labels:
            count = self._missing[label.column]
            if count and (label.missing == "error" or count == num_rows):
                raise missing_error(label, self._first[label.column], count, num_rows)
        held = {name: list(texts) for name, texts in self._held.items()}
        return super().facts(num_rows) | {"absent": self._absent, "held": held}


class WeightReader(Reader):
    """The weight of a row."""

    def __init__(self, layout: ColumnLayout, known: Fitted) -> None:
        super().__init__(layout, known, [layout.weight or ""], [], {WEIGHT: "numbers"})

    def read(self, chunk: Chunk) -> Mapping[str, Values]:
        column = chunk.column(self.columns[0])
        with column.named():
            weight_N = decode_numbers(column, self.rules(column.name)).astype(np.float32)

        def problem(index: int) -> str:
            what = "is missing" if np.isnan(weight_N[index]) else f"is {weight_N[index]:g}"
            return f"the weight {what}; allowed: numbers from 0 on"

        column.check(~(weight_N >= 0) | np.isinf(weight_N), problem)
        return {WEIGHT: Values(weight_N)}


class TimeReader(Reader):
    """The time of a row: seconds since 1970, or plain numbers, as the first rows decide."""

    def __init__(self, layout: ColumnLayout, known: Fitted) -> None:
        self._counts: bool | None = None
        super().__init__(layout, known, [layout.time or ""], [], {TIME: "numbers"})

    def read(self, chunk: Chunk) -> Mapping[str, Values]:
        column, problem = chunk.column(self.columns[0]), "the time is missing; allowed: numbers, dates or times"
        rules = self.rules(column.name)
        with column.named():
            if self._counts is None:
                dates = self._known.times.get(column.name) or holds_times(column, rules)
                column.check(np.full(len(chunk), dates is None), problem)
                self._counts = dates or times.are_counts(column, rules)
            time_N = (times.seconds if self._counts else decode_numbers)(column, rules)
        column.check(np.isnan(time_N), problem)
        return {TIME: Values(time_N)}


def feature_readers(layout: ColumnLayout, known: Fitted) -> list[Reader]:
    """Of the columns of a sample but its labels, weight and time."""
    readers: list[Reader] = [NumbersReader(layout, dense, known) for dense in layout.dense]
    readers += [IdsReader(layout, sparse, known) for sparse in layout.sparse]
    return readers + [SequenceReader(layout, group, known) for group in layout.sequences.values()]


def distinct(readers: Iterable[Reader]) -> list[Reader]:
    """Each of the readers once that store the same under the same names."""
    return list({(*reader.kinds, reader.rule): reader for reader in readers}.values())


def readers_of(layout: ColumnLayout, known: Fitted) -> list[Reader]:
    """Of all columns of a sample. The labels come first: without them nothing else need be read."""
    more: list[Reader] = [] if layout.weight is None else [WeightReader(layout, known)]
    more += [] if layout.time is None else [TimeReader(layout, known)]
    return [LabelReader(layout, known), *more, *feature_readers(layout, known)]
