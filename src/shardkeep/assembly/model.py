"""The tables and the dense model that a JobConfig names. Starts nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.checkpoints.index import specs_of
from shardkeep.ps.config import TableSpec
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.data.sides import Sides, sides_of_model
from shardkeep.workers.dense.loss import Objective
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.sequence import SequenceShape
from shardkeep.workers.encoder_config import targets_of
from shardkeep.workers.model_config import MODELS, OwnModelConfig, RetrievalSettings
from shardkeep.workers.models.layers.axes import Match, columns, matches
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
    """The model that the config names, with values of torch's generator; on the device `meta` without values, of
    widths that name their columns (`matches`). `schema`: of all columns; `embeddings`: of all, or of the users' side
    alone where the model is one of vectors."""
    if isinstance(config.model, OwnModelConfig):
        return build_own_model(config.model, _own_inputs(schema, embeddings), import_from=Path(config.data.root))
    if isinstance(config.model, RetrievalSettings):
        return _vector_model(config, config.model, sides_of_model(config.model, schema), embeddings)
    return build_model(
        config.model,
        num_dense=_axis(schema.dense, schema.num_dense),
        features=_axes(embeddings.feature_dims),
        default_dim=config.table("default").dim,
        labels=schema.labels,
        sequences=_sequences(schema, embeddings),
        targets=targets_of(config.model, schema),
    )


def _axis(names: Sequence[str], width: int) -> int:
    return columns(names, width) if torch.get_default_device().type == "meta" else width


def _axes(dims: Mapping[str, int]) -> dict[str, int]:
    return {name: _axis([name], dim) for name, dim in dims.items()}


def _sequences(schema: Schema, embeddings: Embeddings) -> dict[str, SequenceShape]:
    shapes = zip(schema.sequences, embeddings.sequences.values(), strict=True)
    return {g.name: replace(s, ids=_axes(s.ids), numbers=_axis(g.numbers, s.numbers)) for g, s in shapes}


def _vector_model(config: JobConfig, model: Any, sides: Sides, users: Embeddings) -> nn.Module:
    items = {feature.name: row_spec(config, feature.table).dim for feature in sides.items.features}
    return build_vector_model(
        model,
        num_dense=_axis(sides.users.dense, sides.users.num_dense),
        features=_axes(users.feature_dims),
        sequences=_sequences(sides.users, users),
        targets=targets_of(model, sides.users),
        items=ItemShape(_axis(sides.items.dense, sides.items.num_dense), _axes(items)),
        temperature=config.train.loss.temperature,
    )


def inherited(config: JobConfig, schema: Schema, checkpoint: Checkpoint) -> dict[str, Match | None] | None:
    """Where another run's dense model has the values of this one (`matches`); None = in tensors of the same name."""
    inputs, model = checkpoint.facts.get("inputs"), checkpoint.facts["from"].get("model")
    if inputs is None or model is None or config.model.name not in MODELS:
        return None
    from shardkeep.workers.data.fitting.inputs import Inputs  # loads pyarrow

    before = config.model_copy(update={"model": type(config.model).model_validate(model)})
    old, tables = Inputs.of_json(inputs).layout.schema, {name: row_spec(config, name) for name in schema.tables()}
    if (old, before) == (schema, config):
        return None
    silent = {column.name for column in schema.looked_up if tables[column.table].init.name == "zeros"}
    there, models = {spec.name: spec for spec in specs_of(checkpoint)}, []
    for job, all_columns, specs in ((before, old, there), (config, schema, tables)):
        users = all_columns if job.items is None else sides_of_model(job.items, all_columns).users
        with torch.device("meta"):
            models.append(build_dense_model(job, all_columns, Embeddings(users, specs)))
    return matches(models[0], models[1], silent)


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
        compression=partial(DenseCompression, config.compression.tower, import_from=Path(config.data.root)),
        device=device,
        sync=config.consistency.mode == "sync",
        seed=config.seed,
        watch=watch,
    )
