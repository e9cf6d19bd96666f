"""Sides: the columns of a retrieval model, parted into those of a user and those of an item.

The sides of a split, training, evaluation and test, are in fitting/split.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import ConfigError, did_you_mean
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

    @property
    def named_by(self) -> list[str]:
        """The columns whose raw values name items."""
        return [self.item.name, *([] if self.predicted is None else [self.predicted.ids[0].name])]

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


def sides_of_model(model: RetrievalSettings, schema: Schema) -> Sides:
    """The sides of a model's columns. Raises ConfigError for columns that it does not take."""
    if model.predicts == "next":
        return _sides_of_list(model, schema)
    if not model.item:
        names = ", ".join((*(feature.name for feature in schema.features), *schema.dense)[:30])
        raise ConfigError(f"model.item: is missing; it lists the columns of an item, its id first; allowed: {names}")
    numbers = {name: [each for each in schema.dense if each.startswith(f"{name}[")] for name in model.item}
    return sides_of(schema, [each for name in model.item for each in (numbers[name] or [name])])  # of a vector all


def _sides_of_list(model: RetrievalSettings, schema: Schema) -> Sides:
    """Of a model that takes a list and the item that follows it."""
    if len(schema.sequences) != 1:
        names = ", ".join(group.name for group in schema.sequences) or "none"
        raise ConfigError(f"model.name: {model.name} takes one group of data.sequences; the data has {names}")
    group = schema.sequences[0]
    column = group.ids[0]
    near = [each.name for each in schema.features if each.table == column.table and each.pooling != "weighted"]
    item = model.item or near
    if len(item) != 1 or item[0] not in near:
        named, allowed = ", ".join(item) or "no column", ", ".join(near) or "none"
        raise ConfigError(
            f"model.item: {named}; the item that follows {column.name} is one column of table {column.table}; "
            f"allowed: {allowed}"
        )
    sides = replace(sides_of(schema, item), predicted=group)
    if others := (*sides.users.dense, *(feature.name for feature in sides.users.features)):
        raise ConfigError(
            f"model.name: {model.name} takes {group.name} and {item[0]} alone, not {', '.join(others)}; "
            "allowed: two_tower, whose users have further columns"
        )
    return sides


def sides_of(schema: Schema, item: Sequence[str]) -> Sides:
    """Parts the columns. `item`: those of an item, of which the first is a feature with one id in each sample.

    Raises ConfigError for a column that is no dense column and no feature."""
    known = (*(feature.name for feature in schema.features), *schema.dense)
    groups = {name: group.name for group in schema.sequences for name in (*(f.name for f in group.ids), *group.numbers)}
    for name in item:
        if name not in known:
            place = f"is in data.sequences.{groups[name]}" if name in groups else "is no dense or sparse column"
            hint = "" if name in groups else did_you_mean(name, known)
            raise ConfigError(f"model.item: {name} {place}{hint or ';'} allowed: {', '.join(known[:30])}")
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
