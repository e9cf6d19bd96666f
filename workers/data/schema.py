"""Schema: which columns a batch carries and which table each feature looks its ids up in. Holds no data.

Loads no pyarrow, which takes every role 0.25 s.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data_config import (
    DenseColumn,
    LabelColumn,
    SequenceConfig,
    SequenceNumber,
    SparseColumn,
    TaskColumn,
)

Pooling = Literal["sum", "mean", "max", "weighted", "none"]
"""`none`: a row for each id, of a sequence."""


NO_LABEL = "label"
"""The name of the labels of samples without one, which are 1."""


@dataclass(frozen=True)
class Feature:
    """One sparse column: ids per sample, looked up in `table`, pooled to one row."""

    name: str
    table: str
    pooling: Pooling = "sum"


@dataclass(frozen=True)
class SequenceColumns:
    """A group of list columns that have one length in each row, oldest entry first.

    Attributes:
        name: The group's.
        ids: Columns of ids, each looked up without pooling (`pooling` is "none").
        numbers: Columns of numbers beside them; may be empty.
        max_length: Entries that are kept of a row, the newest.
        newest: Where a source has the newest entry of a row. A batch has it last.
    """

    name: str
    ids: tuple[Feature, ...]
    numbers: tuple[str, ...]
    max_length: int
    newest: Literal["last", "first"] = "last"


@dataclass(frozen=True)
class Schema:
    """The columns of a batch: names of the dense ones, the features, the labels and the groups of sequences, each in
    order. `tasks`: the settings of the labels where a config lists several."""

    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    labels: tuple[str, ...] = (NO_LABEL,)
    sequences: tuple[SequenceColumns, ...] = ()
    tasks: tuple[TaskColumn, ...] = ()

    @property
    def looked_up(self) -> tuple[Feature, ...]:
        """All columns of ids: the features, then those of each sequence."""
        return self.features + tuple(column for group in self.sequences for column in group.ids)

    def tables(self) -> tuple[str, ...]:
        """Names of the tables in order of first use."""
        return tuple(dict.fromkeys(feature.table for feature in self.looked_up))

    @property
    def num_dense(self) -> int:
        """Number of dense columns; may be 0."""
        return len(self.dense)


def schema_of(
    dense: Sequence[DenseColumn],
    sparse: Sequence[SparseColumn],
    sequences: Mapping[str, SequenceConfig],
    labels: Sequence[LabelColumn | TaskColumn] = (),
) -> Schema:
    """What a config describes. A table is named after its feature by default; in a sequence the name of a feature
    represents the feature's table."""
    features = tuple(Feature(c.column, c.table or c.column, c.pooling) for c in sparse)
    tables = {f.name: f.table for f in features} | {f.table: f.table for f in features}
    groups = tuple(
        SequenceColumns(
            name,
            tuple(Feature(column, tables.get(table, table), "none") for column, table in group.ids.items()),
            tuple(number.column for number in group.numbers),
            group.max_length,
            group.newest,
        )
        for name, group in sequences.items()
    )
    numbers = tuple(number.column for column in dense for number in column.numbers())
    tasks = tuple(label for label in labels if isinstance(label, TaskColumn))
    return Schema(numbers, features, tuple(label.column for label in labels) or (NO_LABEL,), groups, tasks)


def check_shared_tables(schema: Schema, others: Sequence[str]) -> None:
    """Raises ConfigError for a sequence's table that is neither a feature's nor one of `others`: maybe misspelt."""
    known = list(dict.fromkeys([*(feature.table for feature in schema.features), *others]))
    for group in schema.sequences:
        for column in group.ids:
            if column.table not in known:
                near = difflib.get_close_matches(column.table, known, n=1, cutoff=0.6)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(
                    f"data.sequences.{group.name}.ids.{column.name}: no feature has the table {column.table}; {hint}"
                    f"allowed: {', '.join([*known[:30], 'or a table of its own in tables'])}"
                )


def sample_inputs(schema: Schema, lists: frozenset[str]) -> dict[str, Any] | None:
    """The inputs of a model that was trained on ready samples, whose columns are numbers and ids, taken as they are.

    As the record of `fitting/inputs.py`; None for several labels without settings. `lists`: the features that may
    have several ids.

    The weights of a feature FEATURE come in a column FEATURE_weight."""
    if len(schema.labels) != 1 and not schema.tasks:
        return None
    labels: dict[str, Any] = {"labels": [task.model_dump() for task in schema.tasks]}
    weights = {f.name: f"{f.name}_weight" for f in schema.features if f.pooling == "weighted"}
    sparse = [
        SparseColumn(column=f.name, table=f.table, pooling=f.pooling, weights=weights.get(f.name))
        for f in schema.features
    ]
    groups = {
        group.name: SequenceConfig(
            ids={column.name: column.table for column in group.ids},
            numbers=[SequenceNumber(column=name, scale="none", fill=0.0) for name in group.numbers],
            max_length=group.max_length,
        ).model_dump()
        for group in schema.sequences
    }
    numbers = [*schema.dense, *(name for group in schema.sequences for name in group.numbers)]
    return {
        "form": 4,
        **(labels if schema.tasks else {"label": LabelColumn(column=schema.labels[0]).model_dump()}),
        "dense": [DenseColumn(column=name, scale="none", fill=0.0).model_dump() for name in schema.dense],
        "sparse": [column.model_dump() for column in sparse],
        "scale": "none",
        "missing": [],
        "lists": sorted(lists),
        "kinds": {f.name: "numbers" for f in schema.looked_up},
        "scales": {name: [0.0, 0.0, 0.0, 1.0] for name in numbers},
        "reading": {"form": "columns"},
        **({"sequences": groups} if groups else {}),
    }
