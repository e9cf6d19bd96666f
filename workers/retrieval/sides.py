"""Sides: the columns of a retrieval model, parted into those of a user and those of an item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.model_config import RETRIEVAL, ModelConfig, predicts_entries


@dataclass(frozen=True)
class Sides:
    """The columns of users and of items.

    Attributes:
        users: All columns but those of items; has the label.
        items: Columns of an item, without sequences.
        item: The feature whose id names an item; the first one of `items`.
    """

    users: Schema
    items: Schema
    dense_I: Ints
    """Where the dense columns of items are among all."""

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


def sides_of_model(model: ModelConfig, schema: Schema) -> Sides | None:
    """The sides of a model in `RETRIEVAL`; None of any other. Raises ConfigError, too, where the item that follows a
    list is not one feature of its table."""
    if model.name not in RETRIEVAL:
        return None
    item: list[str] = getattr(model, "item", [])
    if not predicts_entries(model):
        return sides_of(schema, item)
    table = entries_of(model, schema).table
    found = [feature.name for feature in schema.features if feature.table == table]
    if item and item[0] in {feature.name for feature in schema.features} - {*found}:
        raise ConfigError(f"model.item: {item[0]} has not the table {table} of the list; allowed: {', '.join(found)}")
    if not item and len(found) != 1:
        what = f"{' and '.join(found)} have" if found else "no sparse column has"
        raise ConfigError(f"model.item: is missing, and {what} the table {table} of the list; name the item's column")
    return sides_of(schema, item or found)


def entries_of(model: ModelConfig, schema: Schema) -> Feature:
    """The column of the list whose entries a model predicts. Raises ConfigError unless there is one list."""
    if len(schema.sequences) != 1:
        raise ConfigError(
            f"model.name: {model.name} predicts the entries of one list; data.sequences has {len(schema.sequences)}"
        )
    return schema.sequences[0].ids[0]


def sides_of(schema: Schema, item: Sequence[str]) -> Sides:
    """Parts the columns. `item`: those of an item, of which the first is a feature with one id in each sample.

    Raises ConfigError for a column that is no dense column and no feature."""
    if not item:
        raise ConfigError("model.item: is missing; it lists the columns of an item, of which the first names it")
    known = (*(feature.name for feature in schema.features), *schema.dense)
    if unknown := [name for name in item if name not in known]:
        raise ConfigError(f"model.item: {unknown[0]} is no dense or sparse column; allowed: {', '.join(known)}")
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
