"""Inputs: how raw columns become the inputs of a trained model. Stored in each checkpoint, so that a model can be used
where its training data are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.errors import DataError
from shardkeep.workers.data.columnar import ColumnarDataset, ColumnarWriter
from shardkeep.workers.data.conversion.conversion import Converter, Fitted, Layout
from shardkeep.workers.data.conversion.decoding import Chunk
from shardkeep.workers.data.conversion.labels import LabelValues
from shardkeep.workers.data.conversion.scaling import from_json, to_json
from shardkeep.workers.data_config import DenseColumn, LabelColumn, SparseColumn


@dataclass(frozen=True)
class Inputs:
    """The columns that a model reads, and what its training rows decided about them."""

    layout: Layout
    fitted: Fitted
    reading: Mapping[str, Any]
    """The form of the training files, such as the delimiter."""

    def to_json(self) -> dict[str, Any]:
        """JSON types, which `of_json` reads."""
        layout, fitted = self.layout, self.fitted
        return {
            "label": layout.label.model_dump(),
            "dense": [column.model_dump() for column in layout.dense],
            "sparse": [column.model_dump() for column in layout.sparse],
            "scale": layout.scale,
            "missing": list(layout.missing),
            "lists": sorted(fitted.lists),
            "kinds": dict(fitted.kinds),
            "origins": list(fitted.origins),
            "transform": to_json(fitted.transform),
            "reading": dict(self.reading),
        }

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> Inputs:
        """Undoes `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        layout = Layout(
            LabelColumn(**record["label"]),
            tuple(DenseColumn(**column) for column in record["dense"]),
            tuple(SparseColumn(**column) for column in record["sparse"]),
            record["scale"],
            tuple(record["missing"]),
        )
        kinds, origins = dict(record["kinds"]), tuple(record["origins"])
        fitted = Fitted(frozenset(record["lists"]), kinds, origins, from_json(record["transform"]))
        return cls(layout, fitted, dict(record["reading"]))

    def columns(self) -> list[str]:
        """Names of the raw columns that the model reads, each once; without the label."""
        return [name for name in self.layout.raw_columns() if name != self.layout.label.column]

    def labelled(self, chunk: Chunk) -> tuple[Chunk, LabelValues]:
        """The rows of a chunk that have a label, and their labels. Raises DataError for a missing label, unless
        `data.label.missing` is skip."""
        labels = Converter(self.layout, self.fitted).labels(chunk)
        if labels.missing_N.any() and self.layout.label.missing == "error":
            column = chunk.column(self.layout.label.column)
            raise column.error(int(labels.missing_N.argmax()), "the label is missing")
        return chunk.filter(~labels.missing_N), labels.value_N[~labels.missing_N]

    def samples(self, chunk: Chunk, label_N: LabelValues | None = None) -> ColumnarDataset:
        """The samples of a chunk of 1 row or more, in memory. Without `label_N` the labels are 0, and no column of
        labels is read. Raises DataError for what cannot be a sample."""
        converter = Converter(self.layout, self.fitted)
        if label_N is None:
            label_N = np.zeros(len(chunk), np.uint8)
        sink = pa.BufferOutputStream()
        writer = ColumnarWriter(sink)
        writer.add(converter.rows(chunk, label_N, learn=False))
        writer.close()
        fitted = self.fitted
        try:
            return ColumnarDataset(
                sink.getvalue(), schema=self.layout.schema, lists=fitted.lists, transform=fitted.transform
            )
        except ValueError as error:
            raise DataError(f"{chunk.path}: {error}") from error
