"""ColumnLayout: which raw columns become what; and what the training rows decide about them. Data only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.columns.column import StoredColumn
from shardkeep.workers.data.columns.scaling import Scale, has_log
from shardkeep.workers.data.conversion.categories import Kind
from shardkeep.workers.data.conversion.rules import ReadingRules
from shardkeep.workers.data.schema import Schema, schema_of
from shardkeep.workers.data_config import (
    ALL,
    DataConfig,
    DenseColumn,
    LabelColumn,
    Missing,
    Scaling,
    SequenceConfig,
    SequenceNumber,
    SparseColumn,
    TaskColumn,
    marks_of,
)
from shardkeep.workers.split_config import SplitRecord


@dataclass(frozen=True)
class ColumnLayout:
    """Which raw columns become what. `lists` is known only once the first chunk is seen. `labels`: one of `data.label`,
    or several of `data.labels`; () = each sample is a positive one."""

    labels: tuple[LabelColumn | TaskColumn, ...]
    dense: tuple[DenseColumn, ...]
    sparse: tuple[SparseColumn, ...]
    scale: Scaling
    missing: Missing
    weight: str | None = None
    time: str | None = None
    sequences: Mapping[str, SequenceConfig] = field(default_factory=dict)
    time_format: tuple[str, ...] = ()

    def rules(self, name: str) -> ReadingRules:
        """How the values of a column are read."""
        return ReadingRules(marks_of(self.missing, name), self.time_format)

    @property
    def schema(self) -> Schema:
        """The schema of the samples."""
        return schema_of(self.dense, self.sparse, self.sequences, self.labels)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Names of the labels."""
        return tuple(label.column for label in self.labels)

    @property
    def tasks(self) -> tuple[TaskColumn, ...]:
        """The labels of `data.labels`; () = there is one label."""
        return tuple(label for label in self.labels if isinstance(label, TaskColumn))

    @property
    def of_numbers(self) -> list[DenseColumn | SequenceNumber]:
        """All columns of numbers: the dense ones, a vector as one, then those of each sequence."""
        return [*self.dense, *(number for group in self.sequences.values() for number in group.numbers)]

    @cached_property
    def numbers(self) -> tuple[DenseColumn, ...]:
        """The dense columns, those of a vector one by one."""
        return tuple(number for column in self.dense for number in column.numbers())

    @cached_property
    def scaled(self) -> tuple[DenseColumn | SequenceNumber, ...]:
        """All columns of numbers: the dense ones, then those of each sequence."""
        return (*self.numbers, *(number for group in self.sequences.values() for number in group.numbers))

    @cached_property
    def sharing(self) -> dict[str, list[str]]:
        """Of each column of ids all columns that have its table: their ids are of one kind."""
        looked_up = self.schema.looked_up
        return {c.name: sorted({other.name for other in looked_up if other.table == c.table}) for c in looked_up}

    @cached_property
    def pads(self) -> dict[str, list[str]]:
        """Of each column of ids whose table has padded lists the ids that only fill them up."""
        own = {c.column: c.pad for c in self.sparse} | {next(iter(g.ids)): g.pad for g in self.sequences.values()}
        looked_up = self.schema.looked_up
        padded = [(c.table, pad) for c in looked_up if (pad := own.get(c.name)) is not None]
        pads = {c.name: sorted({pad for table, pad in padded if table == c.table}) for c in looked_up}
        return {name: each for name, each in pads.items() if each}

    def raw_columns(self) -> list[str]:
        """Names of the columns to read, each once."""
        weights = [c.weights for c in self.sparse if c.weights is not None]
        scalars = [name for name in (self.weight, self.time) if name is not None]
        used = [*self.label_columns, *(c.column for c in self.dense), *(c.column for c in self.sparse), *weights]
        entries = [name for group in self.sequences.values() for name in group.columns]
        return list(dict.fromkeys([*used, *entries, *scalars]))


def check_pooling(columns: Sequence[SparseColumn], lists: Collection[str]) -> None:
    """Raises ConfigError for pooling or a pad of a column that is not one of `lists`."""
    for column in columns:
        key = f"pooling: {column.pooling}" if column.pad is None else f"pad: {column.pad}"
        if key not in ("pooling: sum", "pooling: weighted") and column.column not in lists:
            raise ConfigError(
                f"data.sparse: {column.column}: {key} has no effect, each row has one value; "
                "leave it out, or give the separator of the values"
            )


def layout_of(config: DataConfig, *, scale: Scaling = "standard", labelled: bool = True) -> ColumnLayout:
    """The layout that the config describes. `labelled`: there must be a label. Raises ConfigError where it cannot be
    one."""
    if labelled and not config.targets:
        raise ConfigError(f"data.label: is missing; source: {config.source} needs the column to predict")
    if not config.dense and not config.sparse and not config.sequences:
        raise ConfigError("data.dense and data.sparse: are both empty; allowed: at least one column")
    dense, sparse = tuple(config.dense), tuple(config.sparse)
    layout = ColumnLayout(
        config.targets,
        dense,
        sparse,
        config.scale or scale,
        config.missing,
        config.weight,
        config.time,
        sequences=config.sequences,
        time_format=tuple(config.time_format),
    )
    check_names(layout, None if config.split is None else config.split.by)
    read = {ALL, *layout.raw_columns(), *([] if config.split is None else [config.split.by])}
    if unread := [name for name in config.missing if name not in read and not isinstance(config.missing, list)]:
        raise ConfigError(f"data.missing: {unread[0]} is no column that the job reads; allowed: '*', or one of them")
    return layout


def check_names(layout: ColumnLayout, by: str | None = None) -> None:
    """Raises ConfigError for a column of two uses that exclude each other. `by`: what rows are split by."""
    is_label, used = "a label" if layout.tasks else "the label", dict[str | None, str]()
    dense = [name for c in layout.dense for name in {c.column, *(number.column for number in c.numbers())}]
    uses: list[tuple[str, str, list[Any]]] = [
        ("sparse.weights", "a column of weights", [c.weights for c in layout.sparse]),
        ("dense", "in data.dense", dense),
        ("sparse", "in data.sparse", [c.column for c in layout.sparse]),
        ("weight", "data.weight", [layout.weight]),
        ("time", "data.time", [layout.time]),
        ("split.by", "", [by]),
    ]
    for key, use, names in uses:
        if key in ("dense", "sparse") and (twice := sorted({name for name in names if names.count(name) > 1})):
            raise ConfigError(f"data.{key}: names column {twice[0]} twice; allowed: each column once")
        label = next((name for name in layout.label_columns if name in names), None)
        if label is not None and (layout.tasks or key not in ("sparse.weights", "time")):
            raise ConfigError(f"data.{key}: names {label}, which is {is_label}")
        used |= dict.fromkeys(names, use) if use else {}
    used |= dict.fromkeys(layout.label_columns, is_label)
    for name, group in layout.sequences.items():
        if name in (c.column for c in layout.sparse):
            raise ConfigError(f"data.sequences: {name} is the name of a feature; allowed: a name of its own")
        for column in group.columns:
            if column in used:
                why = f"names {column}, which is {used[column]}; allowed: columns of its own"
                raise ConfigError(f"data.sequences.{name}: {why}")
            used[column] = f"in data.sequences.{name}"


@dataclass(frozen=True)
class Fitted:
    """What is decided of columns by the training rows, or by the schemas of their files, for all rows.

    Attributes:
        lists: The multi-valued features.
        kinds: What a column of ids holds, where known.
        brackets: Of columns of texts that are cut, whether each text is a list in brackets.
        times: Of columns of numbers, whether they hold times.
        zones: Of columns of times, whether they have a zone.
        scales: What turns the numbers of a column into inputs; those of a vector by `column[0]` and so on.
        split: By what the training rows were chosen among all rows.
    """

    lists: frozenset[str] = frozenset()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    brackets: Mapping[str, bool] = field(default_factory=dict)
    times: Mapping[str, bool] = field(default_factory=dict)
    zones: Mapping[str, bool] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    split: SplitRecord | None = None

    def transform(self, layout: ColumnLayout) -> list[tuple[bool, Scale]]:
        """Of all columns of numbers of a layout, in its order: whether the inputs are logarithms, and the scale."""
        return [(has_log(column, layout.scale), self.scales[column.column]) for column in layout.scaled]

    def of(self, *names: str) -> list[Any]:
        """What is decided of some columns but their scales, as JSON types."""
        return [[name, name in self.lists, *(getattr(self, part).get(name) for part in _FOUND)] for name in names]

    def only(self, layout: ColumnLayout) -> Fitted:
        """That of the columns of a layout."""
        names = {*layout.raw_columns(), *(number.column for number in layout.scaled)}
        own = {part: {n: v for n, v in getattr(self, part).items() if n in names} for part in (*_FOUND, "scales")}
        return Fitted(self.lists & names, split=self.split, **own)

    def found(self, columns: Mapping[str, StoredColumn]) -> Fitted:
        """With what the values of columns have shown, where nothing was decided."""
        found: dict[str, Any] = {}
        for part in _FOUND:
            shown = {name: value for c in columns.values() for name, value in c.facts.get(part, {}).items()}
            found[part] = {**shown, **getattr(self, part)}
        return replace(self, **found)

    def continued(self, prior: Fitted, layout: ColumnLayout) -> Fitted:
        """With what an earlier model has decided in place of its own, for the columns that the model has. One column of
        a table decides the kind of all."""
        prior = prior.only(layout)
        kept = {part: {**getattr(self, part), **getattr(prior, part)} for part in (*_FOUND, "scales")}
        for name, shared in layout.sharing.items():
            kept["kinds"] |= {n: kind for n, kind in ((name, prior.kinds.get(o)) for o in shared) if kind is not None}
        return Fitted(self.lists - prior.kinds.keys() | prior.lists, split=self.split, **kept)

    def to_json(self) -> dict[str, Any]:
        """JSON types, which `of_json` reads."""
        found = _FITTED.dump_python(self, mode="json", exclude={"lists"}, exclude_none=True)
        return {"lists": sorted(self.lists), **found}

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> Fitted:
        """Undoes `to_json`. Raises ValueError for anything else."""
        return _FITTED.validate_python(record)


_FITTED = TypeAdapter(Fitted)
_FOUND = ("kinds", "brackets", "times", "zones")
"""The parts of `Fitted` that values may decide, by column."""
