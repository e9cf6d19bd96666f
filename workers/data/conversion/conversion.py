"""From chunks of raw columns to columnar samples: decoding, the split, statistics, checks. Knows no file format.

N = rows of a chunk, V = ids of a multi-valued feature
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from shardkeep.base.arrays import Float64s, Floats, Ints
from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.columnar import ColumnarWriter, DenseTransform, Lists, Rows
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.categories import Kind, decode_ids, kind_of
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.decoding import (
    as_lists,
    decode_numbers,
    decode_vectors,
    holds_times,
    list_lengths,
    present,
)
from shardkeep.workers.data.conversion.hashing import Spellings
from shardkeep.workers.data.conversion.labels import (
    Labels,
    LabelValues,
    PartCheck,
    Unlabelled,
    decode_labels,
    listed,
    unmatched,
)
from shardkeep.workers.data.conversion.rules import FORM, Rules, is_list, is_text
from shardkeep.workers.data.conversion.scaling import ColumnScaler, KeptScale, Scaler
from shardkeep.workers.data.conversion.teaching import Teaching
from shardkeep.workers.data.gather_kernels import CHUNK_ROWS, hold_out
from shardkeep.workers.data.schema import Schema, features_of
from shardkeep.workers.data_config import DataConfig, DenseColumn, LabelColumn, Scaling, SparseColumn


@dataclass(frozen=True)
class Layout:
    """Which raw columns become what. `lists` is known only once the first chunk is seen."""

    label: LabelColumn
    dense: tuple[DenseColumn, ...]
    sparse: tuple[SparseColumn, ...]
    scale: Scaling
    missing: tuple[str, ...]
    weight: str | None = None
    time: str | None = None
    form: int = FORM

    @property
    def rules(self) -> Rules:
        """How values are read, the same for all columns."""
        return Rules(self.missing, self.form)

    @property
    def schema(self) -> Schema:
        """The schema of the samples."""
        return Schema(tuple(c.column for c in self.numbers), features_of(self.sparse), (self.label.column,))

    @cached_property
    def numbers(self) -> tuple[DenseColumn, ...]:
        """The dense columns, those of a vector one by one."""
        return tuple(number for column in self.dense for number in column.numbers())

    def raw_columns(self) -> list[str]:
        """Names of the columns to read, each once."""
        weights = [c.weights for c in self.sparse if c.weights is not None]
        scalars = [name for name in (self.weight, self.time) if name is not None]
        used = [self.label.column, *(c.column for c in self.dense), *(c.column for c in self.sparse), *weights]
        return list(dict.fromkeys([*used, *scalars]))


def layout_of(config: DataConfig, *, scale: Scaling = "standard") -> Layout:
    """The layout that the config describes. Raises ConfigError where it cannot be one."""
    if config.label is None:
        raise ConfigError(f"data.label: is missing; source: {config.source} needs the column to predict")
    if not config.dense and not config.sparse:
        raise ConfigError("data.dense and data.sparse: are both empty; allowed: at least one column")
    for key, columns in (("dense", config.dense), ("sparse", config.sparse)):
        names = [number.column for c in columns for number in (c.numbers() if isinstance(c, DenseColumn) else [c])]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ConfigError(f"data.{key}: names column {twice[0]} twice; allowed: each column once")
        if config.label.column in names:
            raise ConfigError(f"data.{key}: names {config.label.column}, which is the label")
    if config.weight == config.label.column:
        raise ConfigError(f"data.weight: names {config.weight}, which is the label")
    dense, sparse = tuple(config.dense), tuple(config.sparse)
    return Layout(config.label, dense, sparse, config.scale or scale, tuple(config.missing), config.weight, config.time)


def left_out(count: int) -> str:
    """What a person learns of rows without a label, behind where the samples come from."""
    return f"; {count:,} rows left out, their label is missing" if count else ""


def refuse(config: DataConfig, keys: Iterable[str]) -> None:
    """Raises ConfigError for settings that differ from their default and that this source could only ignore."""
    plain = DataConfig()
    for key in keys:
        if getattr(config, key) != getattr(plain, key):
            raise ConfigError(f"data.{key}: has no effect with source: {config.source}")


@dataclass(frozen=True)
class Fitted:
    """What the training rows decide for all rows.

    `lists`: the multi-valued features. `kinds`: feature -> what it holds, where known. `times`: the dense columns that
    hold times. `origins`: per dense column, what is subtracted before a number is stored (float64). `transform`: at
    reading.
    """

    lists: frozenset[str]
    kinds: Mapping[str, Kind]
    origins: tuple[float, ...]
    transform: DenseTransform
    times: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Kept:
    """What an earlier model's training rows have decided, by column: the same columns of a job that continues it are
    read so."""

    form: int
    features: frozenset[str]
    lists: frozenset[str]
    kinds: Mapping[str, Kind]
    dense: Mapping[str, KeptScale]

    @classmethod
    def of(cls, layout: Layout, fitted: Fitted) -> Kept:
        """All that a model has decided."""
        t = fitted.transform
        scales = {
            column.column: KeptScale(column.column in fitted.times, origin, *map(float, numbers))
            for column, origin, *numbers in zip(
                layout.numbers, fitted.origins, t.fill_I, t.shift_I, t.factor_I, strict=True
            )
        }
        return cls(layout.form, frozenset(c.column for c in layout.sparse), fitted.lists, fitted.kinds, scales)

    def agrees(self, fitted: Fitted, layout: Layout) -> bool:
        """Whether other training rows have decided the same of these columns."""
        other = Kept.of(layout, fitted)
        return self.form == other.form and all(
            {name: mine.get(name) for name in names} == {name: theirs.get(name) for name in names}
            for names, mine, theirs in (
                (self.features & other.features, dict.fromkeys(self.lists, 1), dict.fromkeys(other.lists, 1)),
                (self.features & other.features, self.kinds, other.kinds),
                (self.dense.keys() & other.dense.keys(), self.dense, other.dense),
            )
        )

    def to_json(self) -> list[Any]:
        """JSON types, equal for equal decisions."""
        dense = {name: astuple(scale) for name, scale in sorted(self.dense.items())}
        return [self.form, sorted(self.features), sorted(self.lists), dict(sorted(self.kinds.items())), dense]


class Converter:
    """Turns chunks into samples: those of `train` first, or with what an earlier conversion of `train` has fitted.

    `kept`: the part that another model's training rows have fitted."""

    def __init__(self, layout: Layout, fitted: Fitted | None = None, kept: Kept | None = None) -> None:
        if fitted is not None:
            kept = Kept.of(layout, fitted)
        self.layout = layout
        self.rules = layout.rules
        self.scaler = Scaler(layout.numbers, layout.scale, {} if kept is None else kept.dense)
        self.skipped = 0
        self.absent = list(listed(layout.label)) if layout.form > 1 else []  # values that mean 1, not seen yet
        self._lists: frozenset[str] | None = None if fitted is None else fitted.lists
        self._kept = kept
        names = [c.column for c in layout.sparse]
        self._kinds = {} if kept is None else {n: k for n, k in kept.kinds.items() if n in names}
        self._time_counts: bool | None = None
        self._fitted = fitted
        self._spellings = {c.column: Spellings() for c in layout.sparse} if fitted is None and layout.form > 1 else {}
        self._teaching = Teaching() if fitted is None else None

    def fitted(self) -> Fitted:
        """What the training rows have decided."""
        if self._fitted is not None:
            return self._fitted
        scaler = self.scaler
        return Fitted(self.lists, self._kinds, scaler.origins(), scaler.transform(), scaler.times())

    @property
    def lists(self) -> frozenset[str]:
        """The multi-valued features; none before the first chunk."""
        return self._lists or frozenset()

    def notes(self) -> list[str]:
        """What a person should know of the training columns: a line each."""
        notes = [] if self._teaching is None else self._teaching.notes(self.scaler)
        for name, spellings in self._spellings.items():
            if spellings.pair is not None:
                one, other = (text.decode("utf-8", "replace")[:40] for text in spellings.pair)
                notes.append(f"column {name}: {one!r} and {other!r} are two categories; write one value in one way")
        return notes

    def convert(
        self,
        chunks: Iterable[Chunk],
        train: ColumnarWriter | None,
        held: ColumnarWriter | None,
        *,
        share: float = 0.0,
        seed: int = 0,
        origin: str = "",
        places: Mapping[str, str] | None = None,
    ) -> None:
        """Writes every chunk: to `train`, or to `held`, or with both a `share` of the rows to `held`.

        Only rows written to `train` enter the statistics. `origin` names the input where it turns out to be empty.
        `places`: of each path the name that, with the seed and the row's number in the file, decides about a row.
        Raises DataError for what cannot be a sample.
        """
        checks = (PartCheck("training"), PartCheck("evaluation"))
        row, unlabelled = 0, Unlabelled(self.layout.label)
        for whole in _cut(chunks):
            held_N = np.full(len(whole), train is None)
            if train is not None and held is not None:
                name = b"eval_fraction" + os.fsencode((places or {}).get(whole.path, ""))
                hold_out(np.uint64(xxhash.xxh3_64_intdigest(name, seed=seed)), whole.rows_N, share, held_N)
            row += len(whole)
            labels = self.labels(whole)
            self.absent = unmatched(whole.column(self.layout.label.column), self.absent, self.rules)
            if unlabelled.add(whole, labels.missing_N):
                continue  # an error already: only counts
            present_N = ~labels.missing_N
            chunk, held_N, label_N = whole.filter(present_N), held_N[present_N], labels.value_N[present_N]
            for writer, check, keep_N in ((train, checks[0], ~held_N), (held, checks[1], held_N)):
                if writer is not None and keep_N.any():
                    part = chunk.filter(keep_N)
                    rows = self.rows(part, label_N[keep_N], learn=writer is train)
                    check.add(rows.label_N, part, self.layout.label)
                    writer.add(rows)
        if not row:
            raise DataError(f"{origin or 'the data'}: has no rows")
        unlabelled.finish(row)
        self.skipped += unlabelled.count
        advice = f" (data.eval_fraction: {share})" if train is not None and held is not None else ""
        for writer, check in ((train, checks[0]), (held, checks[1])):
            if writer is not None:
                check.finish(self.layout.label, advice)

    def rows(self, chunk: Chunk, label_N: LabelValues, *, learn: bool) -> Rows:
        """The samples of a chunk; `learn`: they enter the statistics. Raises DataError for what cannot be a sample."""
        layout = self.layout
        if self._lists is None:
            self._lists = self._find_lists(chunk)
        single = [c for c in layout.sparse if c.column not in self.lists]
        single_NF = np.empty((len(label_N), len(single)), np.int64)
        for f, sparse in enumerate(single):
            column = chunk.column(sparse.column)
            with column.named():
                single_NF[:, f] = self._ids(column)
        dense_NI, end = np.empty((len(label_N), len(layout.numbers)), np.float32), 0
        for dense in layout.dense:
            start, end = end, end + (dense.width or 1)
            self._dense(chunk, dense, self.scaler.columns[start:end], dense_NI[:, start:end], learn=learn)
        lists = {}
        for sparse in layout.sparse:
            if sparse.column in self.lists:
                with chunk.column(sparse.column).named():
                    lists[sparse.column] = self._multi(chunk, sparse)
        if learn and self._teaching is not None:
            self._teaching.add([c.column for c in single], single_NF)
        weight_N = None if layout.weight is None else self._sample_weights(chunk)
        time_N = self._times(chunk) if layout.time is not None and learn else None
        return Rows(label_N, dense_NI, single_NF, lists, weight_N, time_N)

    def _find_lists(self, chunk: Chunk) -> frozenset[str]:
        """Which features have several values a row. Raises ConfigError for pooling where none can."""
        lists = frozenset(c.column for c in self.layout.sparse if _is_multi(chunk, c))
        if self._kept is not None:
            names = frozenset(c.column for c in self.layout.sparse)
            lists = lists - self._kept.features | self._kept.lists & names
        for column in self.layout.sparse:
            if column.pooling in ("mean", "max") and column.column not in lists:
                raise ConfigError(
                    f"data.sparse: {column.column}: pooling: {column.pooling} has no effect, each row has one value; "
                    "leave it out, or give the separator of the values"
                )
        return lists

    def _ids(self, column: Column) -> Ints:
        """The ids of a column of one value a row, or of the entries of lists, as its kind in the first rows says."""
        kind = self._kinds.get(column.name)
        if kind is None and (kind := kind_of(column.values, self.rules)) is not None:
            self._kinds[column.name] = kind
        return decode_ids(column, kind, self.rules, self._spellings.get(column.name))

    def _times(self, chunk: Chunk) -> Float64s:
        """Seconds since 1970, or plain numbers: the first rows decide."""
        column = chunk.column(self.layout.time or "")
        with column.named():
            if self._time_counts is None:
                dates = holds_times(column, self.rules)
                self._time_counts = None if dates is None else dates or times.are_counts(column, self.rules)
            time_N = (times.seconds if self._time_counts else decode_numbers)(column, self.rules)
        if np.isnan(time_N).any():
            raise column.error(int(np.isnan(time_N).argmax()), "the time is missing; allowed: numbers, dates or times")
        return time_N

    def _sample_weights(self, chunk: Chunk) -> Floats:
        column = chunk.column(self.layout.weight or "")
        with column.named():
            weight_N = decode_numbers(column, self.rules).astype(np.float32)
        wrong_N = ~(weight_N >= 0) | np.isinf(weight_N)
        if wrong_N.any():
            index = int(wrong_N.argmax())
            what = "is missing" if np.isnan(weight_N[index]) else f"is {weight_N[index]:g}"
            raise column.error(index, f"the weight {what}; allowed: numbers from 0 on")
        return weight_N

    def labels(self, chunk: Chunk) -> Labels:
        """The labels of a chunk. Raises DataError."""
        column = chunk.column(self.layout.label.column)
        with column.named():
            return decode_labels(column, self.layout.label, self.rules)

    def _dense(
        self, chunk: Chunk, dense: DenseColumn, scalers: Sequence[ColumnScaler], out_NW: Floats, *, learn: bool
    ) -> None:
        """Fills `out_NW` with the numbers to store of a column: W = 1, or the width of its vectors."""
        column = chunk.column(dense.column)
        with column.named():
            if dense.width is not None:
                values_NW = decode_vectors(column, self.rules, dense.width)
            else:
                if scalers[0].is_time is None:
                    scalers[0].is_time = holds_times(column, self.rules)
                values_NW = (times.seconds if scalers[0].is_time else decode_numbers)(column, self.rules)[:, None]
            for w, scaler in enumerate(scalers):
                out_NW[:, w] = scaler.store(values_NW[:, w], learn=learn)
        infinite_N = np.isinf(out_NW).any(axis=1)
        if infinite_N.any():
            raise column.error(int(infinite_N.argmax()), "is beyond float32; try scale: log")

    def _multi(self, chunk: Chunk, sparse: SparseColumn) -> Lists:
        column = chunk.column(sparse.column)
        lists = as_lists(
            column,
            self.rules,
            sparse.separator,
            single=sparse.weights is not None or self._kinds.get(column.name) != "texts",
        )
        lengths_N = list_lengths(lists)
        entries = column.entries(lists, lengths_N)
        keep_V = present(entries.values, self.rules)
        weights_V = None
        if sparse.weights is not None:
            weights_V = self._weights(chunk.column(sparse.weights), sparse, lengths_N)[keep_V]
        index_V = np.repeat(np.arange(len(lengths_N)), lengths_N)
        kept_N = np.bincount(index_V[keep_V], minlength=len(lengths_N))
        return Lists(self._ids(entries)[keep_V], kept_N, weights_V)

    def _weights(self, column: Column, sparse: SparseColumn, lengths_N: Ints) -> Floats:
        lists = as_lists(column, self.rules, sparse.separator if is_text(column.values.type) else None)
        held_N = list_lengths(lists)
        if (held_N != lengths_N).any():
            index = int((held_N != lengths_N).argmax())
            raise column.error(index, f"holds {held_N[index]} weights for {lengths_N[index]} ids of {sparse.column}")
        entries = column.entries(lists, held_N)
        weights_V = decode_numbers(entries, self.rules)
        if np.isnan(weights_V).any():
            raise entries.error(int(np.isnan(weights_V).argmax()), "a weight is missing")
        return weights_V.astype(np.float32)


def _is_multi(chunk: Chunk, sparse: SparseColumn) -> bool:
    column = chunk.column(sparse.column)
    return sparse.separator is not None or sparse.weights is not None or is_list(column.values.type)


def _cut(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The same rows in chunks of at most 65,536: what bounds the memory of a conversion."""
    for chunk in chunks:
        for start in range(0, len(chunk), CHUNK_ROWS):
            yield chunk.slice(start, min(start + CHUNK_ROWS, len(chunk)))
