"""Sides: the columns of a retrieval model, parted into those of a user and those of an item."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns

if TYPE_CHECKING:
    from shardkeep.workers.model_config import RetrievalSettings


@dataclass(frozen=True)
class Sides:
    """The columns of users and of items.

    Attributes:
        users: All columns but those of items; has the label.
        items: Columns of an item, without sequences.
        item: The feature whose id names an item; the first one of `items`.
        predicted: The sequence whose entries are predicted too, by its first column of ids; None = there is none.
    """

    users: Schema
    items: Schema
    dense_I: Ints
    """Where the dense columns of items are among all."""
    predicted: SequenceColumns | None = None

    @property
    def item(self) -> Feature:
        """The feature that names an item."""
        return self.items.features[0]

    def users_of(self, batch: Batch) -> Batch:
        """The batch without the columns of items."""
        dense_BI = batch.dense_BI if not self.dense_I.size else np.delete(batch.dense_BI, self.dense_I, axis=1)
        ids = {feature.name: batch.ids[feature.name] for feature in self.users.looked_up}
        return replace(batch, dense_BI=np.ascontiguousarray(dense_BI), ids=ids)

    def items_of(self, batch: Batch) -> Batch:
        """The columns of items alone, without labels."""
        dense_BI = np.ascontiguousarray(batch.dense_BI[:, self.dense_I])
        ids = {feature.name: batch.ids[feature.name] for feature in self.items.features}
        return Batch(dense_BI, ids, np.empty((len(batch), 0), np.float32))


def item_columns(model: RetrievalSettings, schema: Schema) -> tuple[str, ...]:
    """The columns of an item: those of `model.item`, where the name of a column of vectors represents its numbers, or
    left out the feature of the table of the list that the model predicts. Raises ConfigError where there is none."""
    group = predicted_sequence(model, schema)
    listed = None if group is None else group.ids[0]
    if model.item:
        tables = {feature.name: feature.table for feature in schema.features}
        if listed is not None and (table := tables.get(model.item[0], listed.table)) != listed.table:
            what = f"{model.item[0]} has table {table}, and the entries of {listed.name} have {listed.table}"
            raise ConfigError(f"model.item: {what}; allowed: a feature of that table")
        numbers = {name: [each for each in schema.dense if each.startswith(f"{name}[")] for name in model.item}
        return tuple(each for name in model.item for each in (numbers[name] or [name]))
    if listed is None:
        raise ConfigError(f"model.item: is missing; {model.name} needs the columns of an item, the first names it")
    near = [feature.name for feature in schema.features if feature.table == listed.table]
    if len(near) != 1:
        what = f"features {', '.join(near)} have" if near else "no feature has"
        raise ConfigError(f"model.item: is missing, and {what} table {listed.table}; allowed: the item that comes next")
    return (near[0],)


def predicted_sequence(model: RetrievalSettings, schema: Schema) -> SequenceColumns | None:
    """The sequence whose entries a model of what comes next predicts; None of other models. Raises ConfigError where
    there is none, or several."""
    if model.predicts == "item":
        return None
    if len(schema.sequences) != 1:
        count = f"{len(schema.sequences)} groups" if schema.sequences else "none"
        raise ConfigError(f"model.name: {model.name} predicts the entries of one sequence; data.sequences has {count}")
    return schema.sequences[0]


def sides_for(model: RetrievalSettings, schema: Schema) -> Sides:
    """The sides of a model. Raises ConfigError as `item_columns` and `sides_of`."""
    return replace(sides_of(schema, item_columns(model, schema)), predicted=predicted_sequence(model, schema))


def sides_of(schema: Schema, item: Sequence[str]) -> Sides:
    """Parts the columns. `item`: those of an item, of which the first is a feature with one id in each sample.

    Raises ConfigError for a column that is no dense column and no feature."""
    known = (*(feature.name for feature in schema.features), *schema.dense)
    groups = {name: group.name for group in schema.sequences for name in (*(f.name for f in group.ids), *group.numbers)}
    for name in item:
        if name not in known:
            place = f"is in data.sequences.{groups[name]}" if name in groups else "is no dense or sparse column"
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}? " if near and name not in groups else ""
            raise ConfigError(f"model.item: {name} {place}; {hint}allowed: {', '.join(known[:30])}")
    features = {feature.name: feature for feature in schema.features}
    if item[0] not in features:
        raise ConfigError(f"model.item: {item[0]} is a dense column; the first must name the item by its id")
    own = [features[name] for name in item if name in features]
    dense = [name for name in item if name not in features]
    users = replace(
        schema,
        dense=tuple(name for name in schema.dense if name not in item),
        features=tuple(feature for feature in schema.features if feature.name not in item),
    )
    items = Schema(tuple(dense), tuple(own), labels=())
    return Sides(users, items, np.array([schema.dense.index(name) for name in dense], dtype=np.int64))
