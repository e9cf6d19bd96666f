"""Sequences of list columns as a model gets them, made in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import targets_of
from shardkeep.workers.models.registry import build_model, row_dim
from tests.support.towers import model_config

LONGEST, NUMBERS = 17, 2
LENGTHS = (0, 1, 15, 16, 17, 3)
FEATURES = {"user": 4, "item": 8, "category": 4}
COLUMNS = {"seen_item": "item", "seen_category": "category"}


def schema_of(*, numbers: int = NUMBERS, features: Iterable[str] = FEATURES) -> Schema:
    """A group `seen` whose columns share the tables of two features."""
    ids = tuple(Feature(column, table, "none") for column, table in COLUMNS.items())
    group = SequenceColumns("seen", ids, tuple(f"number{n}" for n in range(numbers)), LONGEST)
    return Schema(("price", "age"), tuple(Feature(name, name) for name in features), sequences=(group,))


def sequence_model(name: str = "dnn", *, schema: Schema | None = None, seed: int = 0, **settings: Any) -> nn.Module:
    """A stock model over the sequences of `schema_of`."""
    schema = schema or schema_of()
    settings = ({"hidden": [8]} if name not in ("lr", "fm") else {}) | settings
    config = model_config(name=name, **settings)
    dims = {table: row_dim(name, dim) for table, dim in FEATURES.items()}
    shapes = {
        group.name: SequenceShape(
            {column.name: dims[column.table] for column in group.ids}, len(group.numbers), group.max_length
        )
        for group in schema.sequences
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(
            config,
            num_dense=len(schema.dense),
            features={feature.name: dims[feature.table] for feature in schema.features},
            default_dim=4,
            sequences=shapes,
            targets=targets_of(config, schema),
        )


def inputs_of(
    lengths: Iterable[int] = LENGTHS,
    *,
    name: str = "dnn",
    schema: Schema | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Dense columns, and leaves for the features and the sequences."""
    schema, drawn = schema or schema_of(), torch.Generator().manual_seed(seed)
    lengths_B = torch.tensor(list(lengths), dtype=torch.int64)
    dims = {table: row_dim(name, dim) for table, dim in FEATURES.items()}

    def rows(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, generator=drawn, dtype=dtype)

    found: dict[str, Any] = {f.name: rows(len(lengths_B), dims[f.table]).requires_grad_() for f in schema.features}
    for group in schema.sequences:
        count = int(lengths_B.sum())
        ids = {column.name: rows(count, dims[column.table]).requires_grad_() for column in group.ids}
        found[group.name] = Sequence(ids, rows(count, len(group.numbers)), lengths_B, group.max_length)
    return rows(len(lengths_B), len(schema.dense)), found


def leaves_of(embeddings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The rows of all features and columns by name."""
    found: dict[str, torch.Tensor] = {}
    for name, value in embeddings.items():
        found |= value.ids if isinstance(value, Sequence) else {name: value}
    return found
