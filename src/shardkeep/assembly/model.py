"""The tables and the dense model that a JobConfig names. Starts nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkeep.config import JobConfig
from shardkeep.ps.config import TableSpec
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.data.sides import Sides, sides_of_model
from shardkeep.workers.dense.loss import Objective
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.encoder_config import targets_of
from shardkeep.workers.model_config import MODELS, OwnModelConfig, RetrievalSettings
from shardkeep.workers.models.registry import (
    build_model,
    build_own_model,
    build_vector_model,
    row_dim,
    start_at,
    start_values,
)
from shardkeep.workers.models.retrieval.vectors import ItemShape
from shardkeep.workers.timing.clock import Stopwatch

_SEEDING = threading.Lock()  # torch's generator is the process's; workers may be threads of one


def table_specs(config: JobConfig, schema: Schema) -> list[TableSpec]:
    """The tables that the schema's features use, fully defined. Raises ConfigError for a table no feature uses."""
    config.check_tables(schema)
    return [row_spec(config, name) for name in schema.tables()]


def row_spec(config: JobConfig, name: str) -> TableSpec:
    """The table `name` with all values that the job's model reads from a row (`row_dim`)."""
    spec = config.table(name)
    return spec.model_copy(update={"dim": row_dim(config.model.name, spec.dim)})


def build_dense_model(config: JobConfig, schema: Schema, embeddings: Embeddings) -> nn.Module:
    """The model that the config names, with values of torch's generator. `schema`: of all columns; `embeddings`: of
    all, or of the users' side alone where the model is one of vectors."""
    if isinstance(config.model, OwnModelConfig):
        return build_own_model(config.model, _own_inputs(schema, embeddings), import_from=Path(config.data.root))
    if isinstance(config.model, RetrievalSettings):
        return _vector_model(config, config.model, sides_of_model(config.model, schema), embeddings)
    return build_model(
        config.model,
        num_dense=schema.num_dense,
        features=embeddings.feature_dims,
        default_dim=config.table("default").dim,
        labels=schema.labels,
        sequences=embeddings.sequences,
        targets=targets_of(config.model, schema),
    )


def _vector_model(config: JobConfig, model: Any, sides: Sides, users: Embeddings) -> nn.Module:
    items = {feature.name: row_spec(config, feature.table).dim for feature in sides.items.features}
    return build_vector_model(
        model,
        num_dense=sides.users.num_dense,
        features=users.feature_dims,
        sequences=users.sequences,
        targets=targets_of(model, sides.users),
        items=ItemShape(sides.items.num_dense, items),
        temperature=config.train.loss.temperature,
    )


def _own_inputs(schema: Schema, embeddings: Embeddings) -> dict[str, Any]:
    """The arguments of a class of the user's own; sequences and labels only where the job names some."""
    inputs: dict[str, Any] = {"num_dense": schema.num_dense, "features": dict(embeddings.feature_dims)}
    inputs |= {"sequences": dict(embeddings.sequences)} if embeddings.sequences else {}
    return inputs | ({"labels": schema.labels} if schema.tasks else {})


def build_scorer(
    config: JobConfig, schema: Schema, embeddings: Embeddings, load: Callable[[nn.Module], None]
) -> Scorer:
    """The dense model on the CPU, to score with. `load`: gives it its parameters and buffers."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        model = build_dense_model(config, schema, embeddings)
    load(model)
    return Scorer(model, config.tower, torch.device("cpu"))


def build_tower(
    config: JobConfig, data: Data, embeddings: Embeddings, device: torch.device, watch: Stopwatch | None = None
) -> Tower:
    """The dense model, alone until it joins a generation. Ours begins at the mean of a label that is a number, and at
    those of several labels."""
    schema = data.train.schema
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_dense_model(config, schema, embeddings)
    if config.model.name in MODELS and schema.tasks:
        start_at(model, start_values(schema.tasks, data.conditional_means))
    elif config.train.loss.of_numbers and config.model.name in MODELS and len(schema.labels) == 1:
        start_at(model, data.label_means)
    return Tower(
        model,
        config=config.tower,
        objective=Objective.of(config.train, schema.tasks),
        compression=config.compression.tower,
        device=device,
        sync=config.consistency.mode == "sync",
        seed=config.seed,
        watch=watch,
    )
