"""ColumnLayout: which raw columns become what; and what the training rows decide about them. Data only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.columnar import DenseTransform
from shardkeep.workers.data.conversion.categories import Kind
from shardkeep.workers.data.conversion.rules import FORM, ReadingRules
from shardkeep.workers.data.conversion.scaling import PriorScale, from_json, to_json
from shardkeep.workers.data.schema import NO_LABEL, Schema, features_of, sequences_of
from shardkeep.workers.data_config import (
    DataConfig,
    DenseColumn,
    LabelColumn,
    Scaling,
    SequenceConfig,
    SequenceNumber,
    SparseColumn,
    TaskColumn,
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
    missing: tuple[str, ...]
    weight: str | None = None
    time: str | None = None
    sequences: Mapping[str, SequenceConfig] = field(default_factory=dict)
    time_format: tuple[str, ...] = ()

    @property
    def rules(self) -> ReadingRules:
        """How values are read, the same for all columns."""
        return ReadingRules(self.missing, self.time_format)

    @property
    def schema(self) -> Schema:
        """The schema of the samples."""
        names, features = tuple(c.column for c in self.numbers), features_of(self.sparse)
        sequences = sequences_of(self.sequences, features)
        return Schema(names, features, self.label_columns or (NO_LABEL,), sequences, tasks=self.tasks)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Names of the labels."""
        return tuple(label.column for label in self.labels)

    @property
    def tasks(self) -> tuple[TaskColumn, ...]:
        """The labels of `data.labels`; () = there is one label."""
        return tuple(label for label in self.labels if isinstance(label, TaskColumn))

    @cached_property
    def numbers(self) -> tuple[DenseColumn, ...]:
        """The dense columns, those of a vector one by one."""
        return tuple(number for column in self.dense for number in column.numbers())

    @cached_property
    def scaled(self) -> tuple[DenseColumn | SequenceNumber, ...]:
        """All columns of numbers: the dense ones, then those of each sequence."""
        return (*self.numbers, *(number for group in self.sequences.values() for number in group.numbers))

    @cached_property
    def categories(self) -> frozenset[str]:
        """Names of all columns of ids."""
        return frozenset(column.name for column in self.schema.looked_up)

    @cached_property
    def sharing(self) -> dict[str, tuple[str, ...]]:
        """Of each column of ids in a sequence the columns before it that have its table: their ids are read alike."""
        looked_up = self.schema.looked_up
        return {
            column.name: tuple(other.name for other in looked_up[:at] if other.table == column.table)
            for at, column in enumerate(looked_up)
            if column.pooling == "none"
        }

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
    for key, columns in (("dense", config.dense), ("sparse", config.sparse)):
        names = [number.column for c in columns for number in (c.numbers() if isinstance(c, DenseColumn) else [c])]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ConfigError(f"data.{key}: names column {twice[0]} twice; allowed: each column once")
        _refuse_labels(config, key, names)
    _refuse_labels(config, "weight", [config.weight])
    _refuse_labels(config, "split.by", [None if config.split is None else config.split.by])
    if config.labels:
        _refuse_labels(config, "time", [config.time])
        _refuse_labels(config, "sparse.weights", [column.weights for column in config.sparse])
    _check_sequences(config)
    dense, sparse = tuple(config.dense), tuple(config.sparse)
    return ColumnLayout(
        config.targets,
        dense,
        sparse,
        config.scale or scale,
        tuple(config.missing),
        config.weight,
        config.time,
        sequences=config.sequences,
        time_format=tuple(config.time_format),
    )


def _refuse_labels(config: DataConfig, key: str, names: Sequence[str | None]) -> None:
    """Raises ConfigError where a label is among the columns of another use."""
    for label in config.targets:
        if label.column in names:
            raise ConfigError(f"data.{key}: names {label.column}, which is {'a' if config.labels else 'the'} label")


def _check_sequences(config: DataConfig) -> None:
    """Raises ConfigError for a column of a sequence that is anything else too, and for the name of a feature."""
    used: dict[str | None, str] = {c.weights: "a column of weights" for c in config.sparse}
    used |= {c.column: "in data.dense" for column in config.dense for c in (column, *column.numbers())}
    used |= {c.column: "in data.sparse" for c in config.sparse}
    used |= {config.weight: "data.weight", config.time: "data.time"}
    used |= {label.column: "a label" if config.labels else "the label" for label in config.targets}
    features = {c.column for c in config.sparse}
    for name, group in config.sequences.items():
        if name in features:
            raise ConfigError(f"data.sequences: {name} is the name of a feature; allowed: a name of its own")
        for column in group.columns:
            if column in used:
                raise ConfigError(
                    f"data.sequences.{name}: names {column}, which is {used[column]}; allowed: columns of its own"
                )
            used[column] = f"in data.sequences.{name}"


@dataclass(frozen=True)
class Fitted:
    """What the training rows decide for all rows.

    `lists`: the multi-valued features; `brackets`: those whose texts are lists in brackets. `kinds`: feature -> what it
    holds, where known. `times`: the columns of numbers that hold times. `origins`: per column of numbers, what is
    subtracted before a number is stored (float64). `transform`: at reading. `split`: by what they were chosen among all
    rows, where that needs no file.
    """

    lists: frozenset[str]
    kinds: Mapping[str, Kind]
    origins: tuple[float, ...]
    transform: DenseTransform
    times: frozenset[str] = frozenset()
    brackets: frozenset[str] = frozenset()
    split: SplitRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON types, which `of_json` reads."""
        return {
            "lists": sorted(self.lists),
            "kinds": dict(self.kinds),
            "times": sorted(self.times),
            "brackets": sorted(self.brackets),
            "origins": list(self.origins),
            "transform": to_json(self.transform),
            **({} if self.split is None else {"split": self.split.model_dump(mode="json")}),
        }

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> Fitted:
        """Undoes `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        lists, times, brackets = (frozenset(record[name]) for name in ("lists", "times", "brackets"))
        kinds, origins = dict(record["kinds"]), tuple(record["origins"])
        split = None if record.get("split") is None else SplitRecord.model_validate(record["split"])
        return cls(lists, kinds, origins, from_json(record["transform"]), times, brackets, split)


@dataclass(frozen=True)
class PriorFit:
    """What an earlier model's training rows have decided, by column: the same columns of a job that continues it are
    read so. `features`: all columns of ids."""

    features: frozenset[str]
    lists: frozenset[str]
    brackets: frozenset[str]
    kinds: Mapping[str, Kind]
    dense: Mapping[str, PriorScale]

    @classmethod
    def of(cls, layout: ColumnLayout, fitted: Fitted) -> PriorFit:
        """All that a model has decided."""
        t, names = fitted.transform, [column.column for column in layout.scaled]
        numbers = zip(names, fitted.origins, t.fill_I, t.shift_I, t.factor_I, strict=True)
        scales = {name: PriorScale(name in fitted.times, *map(float, each)) for name, *each in numbers}
        lists = fitted.lists.union(*(group.columns for group in layout.sequences.values()))
        return cls(layout.categories, lists, fitted.brackets, fitted.kinds, scales)

    def of_columns(self, *names: str) -> list[Any]:
        """What is decided of columns, but their scaling."""
        read = [[name in self.lists, name in self.brackets, self.kinds.get(name)] for name in names]
        return [*read, *(astuple(self.dense[name])[:2] for name in names if name in self.dense)]

    def agrees(self, fitted: Fitted, layout: ColumnLayout) -> bool:
        """Whether other training rows have decided the same of these columns."""
        other = PriorFit.of(layout, fitted)
        return self._shared_with(other) == other._shared_with(self)

    def _shared_with(self, other: PriorFit) -> tuple[Any, ...]:
        """What is decided of the columns that both have."""
        features = self.features & other.features
        kinds = {name: self.kinds.get(name) for name in features}
        dense = {name: self.dense[name] for name in self.dense.keys() & other.dense.keys()}
        return self.lists & features, self.brackets & features, kinds, dense

    def to_json(self) -> list[Any]:
        """JSON types, equal for equal decisions."""
        dense = {name: astuple(scale) for name, scale in sorted(self.dense.items())}
        names = [sorted(each) for each in (self.features, self.lists, self.brackets)]
        return [FORM, *names, dict(sorted(self.kinds.items())), dense]
