"""Schema: which columns a batch carries and which table each feature looks its ids up in. Holds no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardkeep.workers.data_config import SparseColumn

Pooling = Literal["sum", "mean", "max", "weighted"]


@dataclass(frozen=True)
class Feature:
    """One sparse column: ids per sample, looked up in `table`, pooled to one row."""

    name: str
    table: str
    pooling: Pooling = "sum"


@dataclass(frozen=True)
class Schema:
    """The columns of a batch: names of the dense ones in order, the features in order, and the labels in order."""

    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    labels: tuple[str, ...] = ("label",)

    def tables(self) -> tuple[str, ...]:
        """Names of the tables in order of first use."""
        return tuple(dict.fromkeys(feature.table for feature in self.features))

    @property
    def num_dense(self) -> int:
        """Number of dense columns; may be 0."""
        return len(self.dense)


def features_of(columns: Sequence[SparseColumn]) -> tuple[Feature, ...]:
    """The features that the config's sparse columns describe; a table is named after its feature by default."""
    return tuple(Feature(c.column, c.table or c.column, c.pooling) for c in columns)
