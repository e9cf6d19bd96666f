"""Inputs: how raw columns become the inputs of a trained model. Stored in each checkpoint, so that a model can be used
where its training data are not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from shardkeep.base.arrays import Floats
from shardkeep.base.errors import ConfigError
from shardkeep.base.settings import Settings, first_problem
from shardkeep.workers.data.columns.column import StoredColumn
from shardkeep.workers.data.columns.dataset import LABEL, StoredDataset
from shardkeep.workers.data.conversion.categories import Kind
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.conversion import convert
from shardkeep.workers.data.conversion.labels import decode_labels
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted, check_names
from shardkeep.workers.data.conversion.reader import WeightReader, feature_readers
from shardkeep.workers.data.conversion.rules import FORM
from shardkeep.workers.data.fitting.rows import samples_of
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.data_config import (
    ColumnName,
    DataConfig,
    Delimiter,
    DenseColumn,
    LabelColumn,
    Mark,
    Missing,
    Scaling,
    SequenceConfig,
    SparseColumn,
    TaskColumn,
)
from shardkeep.workers.label_config import check_labels
from shardkeep.workers.split_config import SplitRecord


def _float32(value: float) -> float:
    if math.isnan(value) or _LARGEST32 < abs(value) < math.inf:
        raise ValueError("is no number of float32")
    return value


_LARGEST32 = float(np.finfo(np.float32).max)
_Float32 = Annotated[float, AfterValidator(_float32)]
_AnyFloat32 = Annotated[float, Field(allow_inf_nan=True), AfterValidator(_float32)]
"""The mean of very large numbers is infinite, and of no use only where one is missing."""


class _Csv(Settings):
    """How files were read."""

    form: Literal["csv"]
    delimiter: Delimiter
    columns: list[str] | None
    quote: Mark = '"'
    escape: Mark = None
    decimal: Literal[".", ","] = "."
    absent: Literal["missing"] | None = None


class _Typed(Settings):
    """Files with types, or columns of the user's own code or of the synthetic stream: nothing was chosen."""

    form: Literal["parquet", "jsonl", "arrow", "orc", "columns"]
    absent: Literal["missing"] | None = None


class _StoredFitted(Settings):
    """The form of `Fitted` in JSON."""

    lists: list[str]
    kinds: dict[str, Kind]
    times: dict[str, bool] = Field(default_factory=dict)
    brackets: dict[str, bool] = Field(default_factory=dict)
    zones: dict[str, bool] = Field(default_factory=dict)
    scales: dict[str, tuple[float, _AnyFloat32, _Float32, _Float32]]
    split: SplitRecord | None = None


class _Stored(_StoredFitted):
    """The form of `Inputs` in JSON, whose parts fit each other."""

    model_config = ConfigDict(extra="ignore")  # of a later version

    form: int = Field(ge=FORM, le=FORM)
    label: LabelColumn | None = None
    labels: tuple[TaskColumn, ...] = ()
    dense: tuple[DenseColumn, ...]
    sparse: tuple[SparseColumn, ...]
    scale: Scaling
    missing: Missing
    time_format: tuple[str, ...] = ()
    weight: ColumnName | None = None
    sequences: dict[ColumnName, SequenceConfig] = Field(default_factory=dict)
    reading: Annotated[_Csv | _Typed, Field(discriminator="form")]

    def layout(self) -> ColumnLayout:
        """What is stored."""
        labels, formats = self.labels if self.label is None else (self.label,), self.time_format
        columns = labels, self.dense, self.sparse, self.scale, self.missing, self.weight
        return ColumnLayout(*columns, sequences=self.sequences, time_format=formats)

    @model_validator(mode="after")
    def _parts_fit(self) -> _Stored:
        if self.labels and self.label is not None:
            raise ValueError("label: is there beside labels")
        check_labels(self.labels)
        layout, ids = self.layout(), {column.column for column in self.sparse}
        try:
            check_names(layout)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        numbers = {number.column for number in layout.scaled}
        if wrong := next(iter(numbers ^ self.scales.keys()), None):
            raise ValueError(f"scales: {wrong[:60]!r} is no dense column, or has no scale")
        some = ids.union(*(group.columns for group in self.sequences.values()))
        for key, kind, allowed in (
            ("lists", "sparse", ids),
            ("brackets", "sparse", some),
            ("kinds", "sparse", some),
            ("times", "dense", numbers),
        ):
            if unknown := next((name for name in getattr(self, key) if name not in allowed), None):
                raise ValueError(f"{key}: {unknown[:60]!r} is no {kind} column")
        for column in self.sparse:
            if column.column not in self.lists and (column.separator is not None or column.weights is not None):
                raise ValueError(f"lists: lacks {column.column[:60]!r}, which has several values a row")
        return self


@dataclass(frozen=True)
class Inputs:
    """The columns that a model reads, and what its training rows decided about them."""

    layout: ColumnLayout
    fitted: Fitted
    reading: Mapping[str, Any]
    """The form of the training files, such as the delimiter."""

    def to_json(self) -> dict[str, Any]:
        """JSON types, which `of_json` reads."""
        layout = TypeAdapter(ColumnLayout).dump_python(self.layout, mode="json", exclude={"time"})
        labels = layout.pop("labels")
        label = {"labels": labels} if self.layout.tasks else {"label": labels[0] if labels else None}
        empty = [key for key in ("time_format", "sequences") if not layout[key]]
        record = {"form": FORM, **label, **layout, **self.fitted.to_json(), "reading": dict(self.reading)}
        return {key: value for key, value in record.items() if key not in empty}

    @classmethod
    def of_json(cls, record: Any) -> Inputs:
        """Undoes `to_json`. Raises ValueError, which names the key, for anything else."""
        try:
            stored = _Stored.model_validate(record)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error
        return cls(stored.layout(), Fitted.of_json(record), dict(record["reading"]))

    @property
    def fills(self) -> bool:
        """Whether a column that is not there is missing values (`data.absent`)."""
        return self.reading.get("absent") == "missing"

    def columns(self) -> list[str]:
        """Names of the raw columns that the model reads, each once; without the label and the weight of a sample."""
        layout = replace(self.layout, weight=None)
        return [name for name in layout.raw_columns() if name not in layout.label_columns]

    def only(self, schema: Schema) -> Inputs:
        """Those of some columns, in the order of `schema`, which has no others than this one's."""
        layout = self.layout
        sequences = {
            group.name: layout.sequences[group.name].model_copy(update={"ids": {c.name: c.table for c in group.ids}})
            for group in schema.sequences  # a table may have been called by a feature that is left out
        }
        first = {column.numbers()[0].column: column for column in layout.dense}
        dense = tuple(first[name] for name in schema.dense if name in first)
        named = {column.column: column for column in layout.sparse}
        sparse = tuple(named[feature.name] for feature in schema.features)
        own = replace(layout, dense=dense, sparse=sparse, sequences=sequences)
        return Inputs(own, self.fitted.only(own), self.reading)

    def labelled(self, chunk: Chunk) -> tuple[Chunk, Floats]:
        """The rows of a chunk that have a label, and their labels. Raises DataError for a missing label, unless
        `data.label.missing` is skip."""
        labels = decode_labels(chunk, self.layout.labels, self.layout.rules)
        for label, missing_N in zip(self.layout.labels, labels.missing_NT.T, strict=True):
            if label.missing == "error":
                chunk.column(label.column).check(missing_N, "the label is missing")
        kept_N = labels.kept(self.layout.labels)
        return chunk.filter(kept_N), labels.value_N[kept_N]

    def samples(self, chunk: Chunk, label_N: Floats | None = None) -> StoredDataset:
        """The samples of a chunk of 1 row or more, in memory. Without `label_N` the labels are 0, and no column of
        labels or weights is read. Raises DataError for what cannot be a sample."""
        layout, readers = self.layout, feature_readers(self.layout, self.fitted)
        if label_N is None:
            layout = replace(layout, weight=None)
            label_N = np.zeros((len(chunk), len(layout.labels)) if layout.tasks else len(chunk), np.float32)
        elif layout.weight is not None:
            readers.append(WeightReader(layout, self.fitted))
        columns = convert([chunk], readers) | {LABEL: StoredColumn(label_N)}
        return samples_of(layout, columns, self.fitted)


def prior_fit(config: DataConfig) -> Fitted | None:
    """What the model with which the job continues has decided; None = nothing. Raises ConfigError."""
    if config.fitted is None or config.refit:
        return None
    try:
        return Inputs.of_json(config.fitted).fitted
    except ValueError as error:
        raise ConfigError(f"data.fitted: {error}") from error
