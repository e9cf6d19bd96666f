"""From chunks of raw columns to columnar samples: decoding, the split, statistics, checks. Knows no file format.

N = rows of a chunk, V = ids of a multi-valued feature
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.columnar import ColumnarWriter, DenseTransform, Lists, Rows
from shardkeep.workers.data.conversion.decoding import (
    Chunk,
    Column,
    as_lists,
    decode_ids,
    decode_numbers,
    decode_times,
    is_empty,
    is_list,
    is_text,
    kind_of,
    list_lengths,
    present,
)
from shardkeep.workers.data.conversion.labels import Labels, LabelValues, PartCheck, Unlabelled, decode_labels
from shardkeep.workers.data.conversion.scaling import ColumnScaler, Scaler
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

    @property
    def schema(self) -> Schema:
        """The schema of the samples."""
        return Schema(tuple(c.column for c in self.dense), features_of(self.sparse), (self.label.column,))

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
        names = [c.column for c in columns]
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
    """What the training rows decide for all rows: which features are multi-valued, and the scaling.

    `kinds`: feature -> texts or numbers, where known. `origins`: per dense column, what is subtracted before a number
    is stored (float64). `transform`: at reading.
    """

    lists: frozenset[str]
    kinds: Mapping[str, str]
    origins: tuple[float, ...]
    transform: DenseTransform


class Converter:
    """Turns chunks into samples: those of `train` first, or with what an earlier conversion of `train` has fitted."""

    def __init__(self, layout: Layout, fitted: Fitted | None = None) -> None:
        self.layout = layout
        self.scaler = Scaler(layout.dense, layout.scale, None if fitted is None else fitted.origins)
        self.lists: frozenset[str] | None = None if fitted is None else fitted.lists
        self.kinds: dict[str, str] = {} if fitted is None else dict(fitted.kinds)
        self.skipped = 0
        self._fitted = fitted

    def fitted(self) -> Fitted:
        """What the training rows have decided."""
        if self._fitted is not None:
            return self._fitted
        return Fitted(self.lists or frozenset(), self.kinds, self.scaler.origins(), self.scaler.transform())

    def convert(
        self,
        chunks: Iterable[Chunk],
        train: ColumnarWriter | None,
        held: ColumnarWriter | None,
        *,
        share: float = 0.0,
        seed: int = 0,
        origin: str = "",
    ) -> None:
        """Writes every chunk: to `train`, or to `held`, or with both a `share` of the rows to `held`.

        Only rows written to `train` enter the statistics. `origin` names the input where it turns out to be empty.
        Raises DataError for what cannot be a sample.
        """
        key = np.uint64(xxhash.xxh3_64_intdigest(b"eval_fraction", seed=seed))
        checks = (PartCheck("training"), PartCheck("evaluation"))
        row, unlabelled = 0, Unlabelled(self.layout.label)
        for whole in _cut(chunks):
            held_N = np.full(len(whole), train is None)
            if train is not None and held is not None:
                hold_out(key, row, share, held_N)
            row += len(whole)
            labels = self.labels(whole)
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
        if self.lists is None:
            self.lists = frozenset(c.column for c in layout.sparse if _is_multi(chunk, c))
        single = [c for c in layout.sparse if c.column not in self.lists]
        single_NF = np.empty((len(label_N), len(single)), np.int64)
        for f, sparse in enumerate(single):
            column = self._same_kind(chunk.column(sparse.column))
            with column.named():
                single_NF[:, f] = decode_ids(column, layout.missing)
        dense_NI = np.empty((len(label_N), len(layout.dense)), np.float32)
        for i, scaler in enumerate(self.scaler.columns):
            dense_NI[:, i] = self._dense(chunk, scaler, learn=learn)
        lists = {}
        for sparse in layout.sparse:
            if sparse.column in self.lists:
                with self._same_kind(chunk.column(sparse.column)).named():
                    lists[sparse.column] = self._lists(chunk, sparse)
        weight_N = None if layout.weight is None else self._sample_weights(chunk)
        time_N = self._times(chunk) if layout.time is not None and learn else None
        return Rows(label_N, dense_NI, single_NF, lists, weight_N, time_N)

    def _times(self, chunk: Chunk) -> NDArray[np.float64]:
        column = chunk.column(self.layout.time or "")
        with column.named():
            time_N = decode_times(column, self.layout.missing)
        if np.isnan(time_N).any():
            raise column.error(int(np.isnan(time_N).argmax()), "the time is missing; allowed: numbers, dates or times")
        return time_N

    def _sample_weights(self, chunk: Chunk) -> NDArray[np.float32]:
        column = chunk.column(self.layout.weight or "")
        with column.named():
            weight_N = decode_numbers(column, self.layout.missing).astype(np.float32)
        wrong_N = ~(weight_N >= 0) | np.isinf(weight_N)
        if wrong_N.any():
            index = int(wrong_N.argmax())
            what = "is missing" if np.isnan(weight_N[index]) else f"is {weight_N[index]:g}"
            raise column.error(index, f"the weight {what}; allowed: numbers from 0 on")
        return weight_N

    def _same_kind(self, column: Column) -> Column:
        """The column of ids. Raises DataError where it holds texts now and held numbers before: their ids differ."""
        kind, before = kind_of(column.values.type), self.kinds.get(column.name)
        if kind is None or kind == before or is_empty(column.values):
            return column
        self.kinds.setdefault(column.name, kind)
        if before is not None:
            raise column.wrong_type(f"{before}, as in the files before; the same value has another id as one of {kind}")
        return column

    def labels(self, chunk: Chunk) -> Labels:
        """The labels of a chunk. Raises DataError."""
        label = self.layout.label
        column = chunk.column(label.column)
        with column.named():
            return decode_labels(column, label, self.layout.missing)

    def _dense(self, chunk: Chunk, scaler: ColumnScaler, *, learn: bool) -> NDArray[np.float32]:
        column = chunk.dense_column(scaler.name)
        with column.named():
            stored_N = scaler.store(decode_numbers(column, self.layout.missing), learn=learn)
        if np.isinf(stored_N).any():
            raise column.error(int(np.isinf(stored_N).argmax()), "is beyond float32; try scale: log")
        return stored_N

    def _lists(self, chunk: Chunk, sparse: SparseColumn) -> Lists:
        column, missing = chunk.column(sparse.column), self.layout.missing
        lists = as_lists(column, missing, sparse.separator)
        lengths_N = list_lengths(lists)
        entries = column.entries(lists, lengths_N)
        keep_V = present(entries.values, missing)
        weights_V = None
        if sparse.weights is not None:
            weights_V = self._weights(chunk.column(sparse.weights), sparse, lengths_N)[keep_V]
        index_V = np.repeat(np.arange(len(lengths_N)), lengths_N)
        kept_N = np.bincount(index_V[keep_V], minlength=len(lengths_N))
        return Lists(decode_ids(entries, missing)[keep_V], kept_N, weights_V)

    def _weights(self, column: Column, sparse: SparseColumn, lengths_N: NDArray[np.int64]) -> NDArray[np.float32]:
        missing = self.layout.missing
        lists = as_lists(column, missing, sparse.separator if is_text(column.values.type) else None)
        held_N = list_lengths(lists)
        if (held_N != lengths_N).any():
            index = int((held_N != lengths_N).argmax())
            raise column.error(index, f"holds {held_N[index]} weights for {lengths_N[index]} ids of {sparse.column}")
        entries = column.entries(lists, held_N)
        weights_V = decode_numbers(entries, missing)
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
