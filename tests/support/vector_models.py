"""Models of users and items, and their inputs, made in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Several
from typing import Any

import torch

from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.data.sides import Sides, sides_of_model
from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.encoder_config import targets_of
from shardkeep.workers.models.registry import build_vector_model
from shardkeep.workers.models.retrieval.vectors import ItemShape, VectorModel
from shardkeep.workers.retrieval.candidates import CANDIDATES, Candidates
from tests.support.towers import model_config

DIMS = {"user": 4, "item": 6, "category": 2}
LONGEST = 17
LENGTHS = (0, 1, 15, 16, 17)


def list_schema(*, numbers: int = 0, columns: Several[str] = ("item",)) -> Schema:
    """An item, and the list before it; the list's column `seen_TABLE` has the table."""
    ids = tuple(Feature(f"seen_{table}", table, "none") for table in columns)
    group = SequenceColumns("seen", ids, tuple(f"number{n}" for n in range(numbers)), LONGEST)
    return Schema((), (Feature("item", "item"),), sequences=(group,))


def two_sided_schema(*, lists: bool = True) -> Schema:
    """A user with an age and a list of items, and an item with a price and a category."""
    features = tuple(Feature(name, name) for name in DIMS)
    return Schema(("age", "price"), features, sequences=list_schema(numbers=1).sequences if lists else ())


def vector_model(
    name: str, schema: Schema, *, seed: int = 0, temperature: float | None = None, **settings: Any
) -> tuple[VectorModel, Sides]:
    """A model as a job builds it, and the sides of its columns."""
    config: Any = model_config(name, **settings)
    sides = sides_of_model(config, schema)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_vector_model(
            config,
            num_dense=sides.users.num_dense,
            features={feature.name: DIMS[feature.table] for feature in sides.users.features},
            sequences={group.name: _shape_of(group) for group in schema.sequences},
            targets=targets_of(config, sides.users),
            items=ItemShape(
                sides.items.num_dense, {feature.name: DIMS[feature.table] for feature in sides.items.features}
            ),
            temperature=temperature,
        )
    return model, sides


def _shape_of(group: SequenceColumns) -> SequenceShape:
    return SequenceShape(
        {column.name: DIMS[column.table] for column in group.ids}, len(group.numbers), group.max_length
    )


def users_of(
    sides: Sides, lengths: Iterable[int] = LENGTHS, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, dict[str, Any]]:
    drawn, lengths_B = torch.Generator().manual_seed(1), torch.tensor(list(lengths), dtype=torch.int64)

    def rows(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, generator=drawn, dtype=dtype).requires_grad_()

    found: dict[str, Any] = {f.name: rows(len(lengths_B), DIMS[f.table]) for f in sides.users.features}
    for group in sides.users.sequences:
        shape, count = _shape_of(group), int(lengths_B.sum())
        ids = {column: rows(count, width) for column, width in shape.ids.items()}
        found[group.name] = Sequence(ids, rows(count, shape.numbers).detach(), lengths_B, shape.max_length)
    return rows(len(lengths_B), sides.users.num_dense).detach(), found


def candidates_of(
    sides: Sides, targets: Several[int], *, count: int = 9, shared: int = 6, dtype: torch.dtype = torch.float32
) -> Candidates:
    drawn = torch.Generator().manual_seed(2)
    inputs = {
        feature.name: torch.randn(count, DIMS[feature.table], generator=drawn, dtype=dtype).requires_grad_()
        for feature in sides.items.features
    }
    return Candidates(
        torch.randn(count, sides.items.num_dense, generator=drawn, dtype=dtype),
        inputs,
        -3.0 * torch.rand(count, generator=drawn, dtype=dtype),
        shared,
        torch.tensor(list(targets), dtype=torch.int64),
    )


def with_candidates(inputs: Mapping[str, Any], candidates: Candidates) -> dict[str, Any]:
    """What a model gets in training."""
    return {**inputs, CANDIDATES: candidates}


def rows_of(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in inputs.values():
        if isinstance(value, Candidates):
            found += rows_of(value.inputs)
        else:
            found += value.ids.values() if isinstance(value, Sequence) else [value]
    return found
