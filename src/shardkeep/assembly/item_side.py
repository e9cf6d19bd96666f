"""The columns that a JobConfig looks up: all of them, or of a retrieval model users and items apart. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardkeep.base.errors import ConfigError
from shardkeep.compression.per_table import pull_of
from shardkeep.config import JobConfig
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.initializers.initial import Initial
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sides import Sides, sides_of_model
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.label_config import NegativesConfig
from shardkeep.workers.model_config import RetrievalSettings

if TYPE_CHECKING:
    from shardkeep.workers.retrieval.items import ItemSide


def build_sides(config: JobConfig, data: Data, tables: Mapping[str, TableSpec]) -> tuple[Embeddings, ItemSide | None]:
    """The embeddings of all columns; of a retrieval model those of users, and the items. Raises ConfigError."""
    schema = data.train.schema
    if not isinstance(config.model, RetrievalSettings):
        return Embeddings(schema, tables), None
    sides = sides_of_model(config.model, schema)
    return Embeddings(sides.users, tables), _item_side(config, data, sides, tables)


def _item_side(config: JobConfig, data: Data, sides: Sides, tables: Mapping[str, TableSpec]) -> ItemSide:
    # here: other jobs load no pyarrow, whose threads forbid forks
    from shardkeep.workers.retrieval.items import ItemSide
    from shardkeep.workers.retrieval.negatives import Negatives

    if data.catalogue is None:
        raise ConfigError(f"model.name: {config.model.name} needs a catalogue of items, which the data have not")
    loss = config.train.loss
    negatives = Negatives(
        catalogue=data.catalogue,
        config=loss.negatives or NegativesConfig(),
        item=sides.item.name,
        entries=None if sides.predicted is None else sides.predicted.ids[0].name,
        corrects=loss.correction != "none",
        seed=config.seed,
        micro_batch=config.train.batch_size,
    )
    admitting = [tables[name] for name in sides.items.tables() if tables[name].admit is not None]
    pulls = [pull_of(spec.compression, config.compression.pull) for spec in admitting]
    return ItemSide(
        sides=sides,
        catalogue=data.catalogue,
        embeddings=Embeddings(sides.items, tables),
        negatives=negatives,
        absent={spec.name: Initial(spec.init, seed=config.seed, name=spec.name) for spec in admitting},
        exact=all(pull.values == "fp32" for pull in pulls),
    )
