"""From chunks of raw columns to columnar samples: decoding, the split, statistics, checks. Knows no file format.

N = rows of a chunk, V = ids of a multi-valued feature
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.config import DataConfig, DenseColumn, LabelColumn, Scaling, SparseColumn
from shardkeep.workers.data.columnar import ColumnarWriter, DenseTransform, Lists, Rows
from shardkeep.workers.data.decoding import (
    Chunk,
    Column,
    Labels,
    as_lists,
    decode_ids,
    decode_labels,
    decode_numbers,
    is_list,
    is_text,
    label_texts,
    list_lengths,
    present,
)
from shardkeep.workers.data.gather_kernels import CHUNK_ROWS, hold_out
from shardkeep.workers.data.scaling import ColumnScaler, Scaler
from shardkeep.workers.data.schema import Schema, features_of


@dataclass(frozen=True)
class Layout:
    """Which raw columns become what. `lists` is known only once the first chunk is seen."""

    label: LabelColumn
    dense: tuple[DenseColumn, ...]
    sparse: tuple[SparseColumn, ...]
    scale: Scaling
    missing: tuple[str, ...]

    @property
    def schema(self) -> Schema:
        """The schema of the samples."""
        return Schema(tuple(c.column for c in self.dense), features_of(self.sparse))

    def raw_columns(self) -> list[str]:
        """Names of the columns to read, each once."""
        weights = [c.weights for c in self.sparse if c.weights is not None]
        used = [self.label.column, *(c.column for c in self.dense), *(c.column for c in self.sparse), *weights]
        return list(dict.fromkeys(used))


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
    return Layout(config.label, tuple(config.dense), tuple(config.sparse), config.scale or scale, tuple(config.missing))


def refuse(config: DataConfig, keys: Iterable[str]) -> None:
    """Raises ConfigError for settings that differ from their default and that this source could only ignore."""
    plain = DataConfig()
    for key in keys:
        if getattr(config, key) != getattr(plain, key):
            raise ConfigError(f"data.{key}: has no effect with source: {config.source}")


@dataclass
class PartCheck:
    """Counts rows and labels of one part, so that an empty or one-sided part is refused."""

    name: str
    num_rows: int = 0
    num_positive: int = 0
    seen: dict[str, None] = field(default_factory=dict)

    def add(self, labels_N: NDArray[np.uint8], chunk: Chunk, label: LabelColumn) -> None:
        """Counts a chunk's labels and remembers the first few texts for the error message."""
        self.num_rows += len(labels_N)
        self.num_positive += int(labels_N.sum())
        if len(self.seen) < 10:
            texts = pc.unique(label_texts(chunk.column(label.column), ()).slice(0, 10_000))
            self.seen |= dict.fromkeys(str(t) for t in texts.to_pylist())

    def finish(self, label: LabelColumn, advice: str = "") -> None:
        """Raises DataError where the part has no rows or one class."""
        if not self.num_rows:
            raise DataError(f"the {self.name} data has no rows{advice}")
        if self.num_positive in (0, self.num_rows):
            value = 1 if self.num_positive else 0
            held = ", ".join(repr(t) for t in list(self.seen)[:10])
            hint = "; check data.label.positive" if label.positive is not None else ""
            raise DataError(
                f"label column {label.column}: all {self.num_rows} rows of the {self.name} data are class {value} "
                f"(the column holds {held}); both classes are needed{hint}{advice}"
            )


@dataclass
class Unlabelled:
    """Counts the rows whose label is missing, which are an error or left out."""

    label: LabelColumn
    count: int = 0
    first: DataError | None = None

    def add(self, chunk: Chunk, missing_N: NDArray[np.bool_]) -> bool:
        """Takes in a chunk; whether the missing labels so far are an error."""
        self.count += int(missing_N.sum())
        if self.first is None and missing_N.any():
            self.first = chunk.column(self.label.column).error(int(missing_N.argmax()), "the label is missing")
        return self.first is not None and self.label.missing == "error"

    def finish(self, num_rows: int) -> None:
        """Raises DataError where missing labels are an error, and where no row has a label."""
        if self.first is not None and (self.label.missing == "error" or self.count == num_rows):
            known = "; data.label.missing: skip leaves such rows out" if self.label.missing == "error" else ""
            raise DataError(f"{self.first} ({self.count:,} of {num_rows:,} rows){known}")


@dataclass(frozen=True)
class Fitted:
    """What the training rows decide for all rows: which features are multi-valued, and the scaling.

    `origins`: per dense column, what is subtracted before a number is stored (float64). `transform`: at reading.
    """

    lists: frozenset[str]
    origins: tuple[float, ...]
    transform: DenseTransform


class Converter:
    """Turns chunks into samples: those of `train` first, or with what an earlier conversion of `train` has fitted."""

    def __init__(self, layout: Layout, fitted: Fitted | None = None) -> None:
        self.layout = layout
        self.scaler = Scaler(layout.dense, layout.scale, None if fitted is None else fitted.origins)
        self.lists: frozenset[str] | None = None if fitted is None else fitted.lists
        self.skipped = 0
        self._fitted = fitted

    def fitted(self) -> Fitted:
        """What the training rows have decided."""
        return self._fitted or Fitted(self.lists or frozenset(), self.scaler.origins(), self.scaler.transform())

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
            labels = self._labels(whole)
            if unlabelled.add(whole, labels.missing_N):
                continue  # an error already: only counts
            present_N = ~labels.missing_N
            chunk, held_N, label_N = whole.filter(present_N), held_N[present_N], labels.value_N[present_N]
            for writer, check, keep_N in ((train, checks[0], ~held_N), (held, checks[1], held_N)):
                if writer is not None and keep_N.any():
                    part = chunk.filter(keep_N)
                    rows = self._rows(part, label_N[keep_N], learn=writer is train)
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

    def _rows(self, chunk: Chunk, label_N: NDArray[np.uint8], *, learn: bool) -> Rows:
        layout = self.layout
        if self.lists is None:
            self.lists = frozenset(c.column for c in layout.sparse if _is_multi(chunk, c))
        single = [c for c in layout.sparse if c.column not in self.lists]
        single_NF = np.empty((len(label_N), len(single)), np.int64)
        for f, column in enumerate(single):
            single_NF[:, f] = decode_ids(chunk.column(column.column), layout.missing)
        dense_NI = np.empty((len(label_N), len(layout.dense)), np.float32)
        for i, scaler in enumerate(self.scaler.columns):
            dense_NI[:, i] = self._dense(chunk, scaler, learn=learn)
        lists = {c.column: self._lists(chunk, c) for c in layout.sparse if c.column in self.lists}
        return Rows(label_N, dense_NI, single_NF, lists)

    def _labels(self, chunk: Chunk) -> Labels:
        label = self.layout.label
        return decode_labels(chunk.column(label.column), label.positive, self.layout.missing)

    def _dense(self, chunk: Chunk, scaler: ColumnScaler, *, learn: bool) -> NDArray[np.float32]:
        column = chunk.dense_column(scaler.name)
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
