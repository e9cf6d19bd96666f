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


def features_of(columns: Sequence[SparseColumn]) -> tuple[Feature, ...]:
    """The features that the config's sparse columns describe; a table is named after its feature by default."""
    return tuple(Feature(c.column, c.table or c.column, c.pooling) for c in columns)


def sequences_of(groups: Mapping[str, SequenceConfig], features: Sequence[Feature]) -> tuple[SequenceColumns, ...]:
    """The groups that the config's sequences describe. The name of a feature represents the feature's table."""
    tables = {f.name: f.table for f in features} | {f.table: f.table for f in features}
    return tuple(
        SequenceColumns(
            name,
            tuple(Feature(column, tables.get(table, table), "none") for column, table in group.ids.items()),
            tuple(number.column for number in group.numbers),
            group.max_length,
            group.newest,
        )
        for name, group in groups.items()
    )


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


def _sequence_inputs(group: SequenceColumns) -> SequenceConfig:
    return SequenceConfig(
        ids={column.name: column.table for column in group.ids},
        numbers=[SequenceNumber(column=name, scale="none", fill=0.0) for name in group.numbers],
        max_length=group.max_length,
    )


def sample_inputs(schema: Schema, lists: frozenset[str]) -> dict[str, Any] | None:
    """The inputs of a model that was trained on ready samples, whose columns are numbers and ids, taken as they are.

    As the record of `conversion/inputs.py`; None for several labels without settings. `lists`: the features that may
    have several ids.

    The weights of a feature FEATURE come in a column FEATURE_weight."""
    if len(schema.labels) != 1 and not schema.tasks:
        return None
    labels: dict[str, Any] = {"label": LabelColumn(column=schema.labels[0]).model_dump()}
    if schema.tasks:
        labels = {"labels": [task.model_dump() for task in schema.tasks]}
    dense = [DenseColumn(column=name, scale="none", fill=0.0) for name in schema.dense]
    sparse = [
        SparseColumn(
            column=f.name,
            table=f.table,
            pooling=f.pooling,
            weights=f"{f.name}_weight" if f.pooling == "weighted" else None,
        )
        for f in schema.features
    ]
    groups = {group.name: _sequence_inputs(group).model_dump() for group in schema.sequences}
    zeros = [0.0] * (len(dense) + sum(len(group.numbers) for group in schema.sequences))
    return {
        "form": 3 if groups or schema.tasks else 2,
        **labels,
        "dense": [column.model_dump() for column in dense],
        "sparse": [column.model_dump() for column in sparse],
        "scale": "none",
        "missing": [],
        "lists": sorted(lists),
        "kinds": {f.name: "numbers" for f in schema.looked_up},
        "origins": zeros,
        "transform": {"fill_I": zeros, "shift_I": zeros, "factor_I": [1.0] * len(zeros)},
        "reading": {"form": "columns"},
        **({"sequences": groups} if groups else {}),
    }
