"""Inputs: how raw columns become the inputs of a trained model. Stored in each checkpoint, so that a model can be used
where its training data are not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.base.settings import Settings, first_problem
from shardkeep.workers.data.columnar import ColumnarDataset, ColumnarWriter, DenseTransform
from shardkeep.workers.data.conversion.categories import Kind
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.labels import LabelValues, no_labels
from shardkeep.workers.data.conversion.layout import ColumnLayout, Fitted, PriorFit
from shardkeep.workers.data.conversion.reader import RowReader
from shardkeep.workers.data.conversion.rules import FORM
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.data_config import (
    ColumnName,
    DataConfig,
    Delimiter,
    DenseColumn,
    LabelColumn,
    Mark,
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


LATEST = 3
"""The form of inputs of several labels, of none, or with sequences: a reader of before would take them for others."""
_LARGEST32 = float(np.finfo(np.float32).max)
_Float32 = Annotated[float, AfterValidator(_float32)]
_AnyFloat32 = Annotated[float, Field(allow_inf_nan=True), AfterValidator(_float32)]
"""The mean of very large numbers is infinite, and of no use only where one is missing."""


class _StoredTransform(Settings):
    """The form of `DenseTransform`."""

    fill_I: list[_AnyFloat32]
    shift_I: list[_Float32]
    factor_I: list[_Float32]


class _Csv(Settings):
    """How files were read."""

    form: Literal["csv"]
    delimiter: Delimiter
    columns: list[str] | None
    quote: Mark = '"'
    escape: Mark = None
    decimal: Literal[".", ","] = "."


class _Typed(Settings):
    """Parquet, or columns of the user's own code or of the synthetic stream: nothing was chosen."""

    form: Literal["parquet", "columns"]


class _StoredLayout(Settings):
    """The form of `ColumnLayout` in JSON."""

    model_config = ConfigDict(extra="ignore")  # of a later version

    form: int = Field(ge=FORM, le=LATEST)
    rules: int = Field(FORM, ge=FORM, le=FORM)  # of form 3
    label: LabelColumn | None = None
    labels: list[TaskColumn] = Field(default_factory=list)
    dense: list[DenseColumn]
    sparse: list[SparseColumn]
    scale: Scaling
    missing: list[str]
    time_format: list[str] = Field(default_factory=list)
    weight: ColumnName | None = None
    sequences: dict[ColumnName, SequenceConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _columns_differ(self) -> _StoredLayout:
        later = bool(self.labels or self.sequences or not self.targets)
        if (self.form == LATEST) != later or (self.labels and self.label is not None):
            raise ValueError("label: is missing, or is not of this form")
        check_labels(self.labels)
        dense, sparse = [c.column for c in self.dense], [c.column for c in self.sparse]
        entries = [name for group in self.sequences.values() for name in group.columns]
        for key, columns in (("dense", dense), ("sparse", sparse), ("sequences", [*entries, *{*dense, *sparse}])):
            names = [label.column for label in self.targets]
            names += columns if key != "sequences" or entries else []
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{key}: column {twice[:60]!r} is there twice, or is the label")
        return self

    def layout(self) -> ColumnLayout:
        """What is stored."""
        columns = self.targets, tuple(self.dense), tuple(self.sparse)
        more: dict[str, Any] = {"sequences": self.sequences, "time_format": tuple(self.time_format)}
        return ColumnLayout(*columns, self.scale, tuple(self.missing), self.weight, **more)

    @property
    def targets(self) -> tuple[LabelColumn | TaskColumn, ...]:
        """The label, or the several ones."""
        return tuple(self.labels) if self.label is None else (self.label,)


class _Stored(_StoredLayout):
    """The form of `Inputs` in JSON, whose parts fit each other."""

    lists: list[str]
    kinds: dict[str, Kind]
    times: list[str] = Field(default_factory=list)
    brackets: list[str] = Field(default_factory=list)
    origins: list[float]
    transform: _StoredTransform
    reading: Annotated[_Csv | _Typed, Field(discriminator="form")]
    split: SplitRecord | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> _Stored:
        entries = [name for group in self.sequences.values() for name in group.columns]
        scaled = [number.column for group in self.sequences.values() for number in group.numbers]
        num_dense = sum(column.width or 1 for column in self.dense) + len(scaled)
        numbers = {"origins": self.origins} | {f"transform.{k}": v for k, v in self.transform}
        for key, values in numbers.items():
            if len(values) != num_dense:  # before a number is looked at: there may be too many to list
                raise ValueError(f"{key} has {len(values)} numbers for {num_dense} dense columns")
        dense = {*scaled, *(number.column for column in self.dense for number in column.numbers())}
        sparse = {column.column: column for column in self.sparse}
        for key, named, more in (
            ("lists", self.lists, []),
            ("brackets", self.brackets, entries),
            ("kinds", self.kinds, entries),
        ):
            if unknown := next((name for name in named if name not in sparse and name not in more), None):
                raise ValueError(f"{key}: {unknown[:60]!r} is no sparse column")
        if unknown := next((name for name in self.times if name not in dense), None):
            raise ValueError(f"times: {unknown[:60]!r} is no dense column")
        for name, column in sparse.items():
            if name not in self.lists and (column.separator is not None or column.weights is not None):
                raise ValueError(f"lists: lacks {name[:60]!r}, which has several values a row")
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
        layout = self.layout
        groups = {name: group.model_dump() for name, group in layout.sequences.items()}
        later = bool(groups or layout.tasks or not layout.labels)
        tasks = [label.model_dump() for label in layout.tasks]
        label = None if tasks or not layout.labels else layout.labels[0].model_dump()
        return {
            **({"form": LATEST, "rules": FORM} if later else {"form": FORM}),
            **({"labels": tasks} if tasks else {"label": label}),
            "dense": [column.model_dump() for column in layout.dense],
            "sparse": [column.model_dump() for column in layout.sparse],
            "scale": layout.scale,
            "missing": list(layout.missing),
            **({"time_format": list(layout.time_format)} if layout.time_format else {}),
            "weight": layout.weight,
            **self.fitted.to_json(),
            "reading": dict(self.reading),
            **({"sequences": groups} if groups else {}),
        }

    @classmethod
    def of_json(cls, record: Any) -> Inputs:
        """Undoes `to_json`. Raises ValueError, which names the key, for anything else."""
        try:
            stored = _Stored.model_validate(record)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error
        return cls(stored.layout(), Fitted.of_json(stored.model_dump()), dict(record["reading"]))

    def columns(self) -> list[str]:
        """Names of the raw columns that the model reads, each once; without the label and the weight of a sample."""
        layout = replace(self.layout, weight=None)
        return [name for name in layout.raw_columns() if name not in layout.label_columns]

    def only(self, schema: Schema) -> Inputs:
        """Those of some columns, in the order of `schema`, which has no others than this one's."""
        layout, fitted = self.layout, self.fitted
        ids = {column.name for column in schema.looked_up}
        numbers = (*schema.dense, *(name for group in schema.sequences for name in group.numbers))
        at = {column.column: i for i, column in enumerate(layout.scaled)}
        own_I = [at[name] for name in numbers]
        sequences = {
            group.name: layout.sequences[group.name].model_copy(update={"ids": {c.name: c.table for c in group.ids}})
            for group in schema.sequences  # a table may have been called by a feature that is left out
        }
        first = {column.numbers()[0].column: column for column in layout.dense}
        dense = tuple(first[name] for name in schema.dense if name in first)
        named = {column.column: column for column in layout.sparse}
        sparse = tuple(named[feature.name] for feature in schema.features)
        own = fitted.transform
        return Inputs(
            replace(layout, dense=dense, sparse=sparse, sequences=sequences),
            Fitted(
                fitted.lists & ids,
                {c.name: fitted.kinds[read] for c in schema.looked_up if (read := self._read_as(c.name)) is not None},
                tuple(fitted.origins[i] for i in own_I),
                DenseTransform(own.fill_I[own_I], own.shift_I[own_I], own.factor_I[own_I]),
                fitted.times & set(numbers),
                fitted.brackets & {*ids, *numbers},
                fitted.split,
            ),
            self.reading,
        )

    def _read_as(self, name: str) -> str | None:
        """The column whose kind a column of ids has; None = it is not known."""
        return next((n for n in (name, *self.layout.sharing.get(name, ())) if n in self.fitted.kinds), None)

    def labelled(self, chunk: Chunk) -> tuple[Chunk, LabelValues]:
        """The rows of a chunk that have a label, and their labels. Raises DataError for a missing label, unless
        `data.label.missing` is skip."""
        labels = RowReader(self.layout, self.fitted).labels(chunk)
        for label, missing_N in zip(self.layout.labels, labels.missing_NT.T, strict=True):
            if label.missing == "error":
                chunk.column(label.column).check(missing_N, "the label is missing")
        kept_N = labels.kept(self.layout.labels)
        return chunk.filter(kept_N), labels.value_N[kept_N]

    def samples(self, chunk: Chunk, label_N: LabelValues | None = None) -> ColumnarDataset:
        """The samples of a chunk of 1 row or more, in memory. Without `label_N` the labels are 0, and no column of
        labels or weights is read. Raises DataError for what cannot be a sample."""
        layout, fitted = self.layout, self.fitted
        if label_N is None:
            layout, label_N = replace(layout, weight=None), no_labels(layout.labels, len(chunk))
        sink = pa.BufferOutputStream()
        writer = ColumnarWriter(sink)
        writer.add(RowReader(layout, fitted).rows(chunk, label_N, learn=False))
        writer.close()
        try:
            return ColumnarDataset(
                sink.getvalue(), schema=self.layout.schema, lists=fitted.lists, transform=fitted.transform
            )
        except ValueError as error:
            raise DataError(f"{chunk.path}: {error}") from error


def prior_fit(config: DataConfig) -> PriorFit | None:
    """What the model with which the job continues has decided; None = nothing. Raises ConfigError."""
    if config.fitted is None or config.refit:
        return None
    try:
        inputs = Inputs.of_json(config.fitted)
    except ValueError as error:
        raise ConfigError(f"data.fitted: {error}") from error
    return PriorFit.of(inputs.layout, inputs.fitted)
