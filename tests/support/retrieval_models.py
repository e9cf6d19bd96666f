"""Trained retrieval models over samples of `retrieval`, with rows and layers that nobody has trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from shardkeep.assembly.model import build_scorer, table_specs
from shardkeep.config import JobConfig
from shardkeep.inference.finding import Items
from shardkeep.inference.sorted_rows import SortedRows, SortedTable
from shardkeep.inference.trained import Trained
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.schema import Schema, sample_inputs
from shardkeep.workers.data.sides import sides_of_model
from tests.support.retrieval import ITEM, NEXT, TOWERS, Takes, catalogue_of

DIM = 8
LISTS = frozenset({"tags"})


def job(schema: Schema, **settings: Any) -> JobConfig:
    tower = {"name": "two_tower", "item": list(ITEM), "hidden": [12], "dim": DIM}
    return JobConfig.model_validate(
        {
            "data": {"source": "tests.support.retrieval:none"},
            "model": tower if schema is TOWERS else {"name": "sasrec", "dropout": 0.0},
            "tables": {"default": {"dim": DIM, "init": {"name": "normal", "std": 1.0}}},
            "tower": {"amp": "off", "compile": "off"},
            "train": {"batch_size": 32},
        }
        | settings
    )


def untrained(schema: Schema = TOWERS, *, samples: Takes | None = None, **settings: Any) -> Trained:
    """A model that knows the items of some samples."""
    config, samples = job(schema, **settings), samples or Takes(schema, 300)
    catalogue = catalogue_of(samples)
    specs = table_specs(config, schema)
    nothing = [SortedTable.of(np.empty(0, np.int64), np.empty((0, spec.dim), np.float32)) for spec in specs]
    lists = LISTS & {feature.name for feature in schema.features}
    return Trained(
        config,
        1,
        schema,
        Inputs.of_json(sample_inputs(schema, lists)),
        SortedRows(specs, [nothing], seed=config.seed),
        lambda embeddings: build_scorer(config, schema, embeddings, lambda _model: None),
        items=Items(catalogue),
    )


def frame_of(samples: Takes, schema: Schema, count: int) -> dict[str, Any]:
    """The columns of users of the first samples, as a person has them."""
    batch = samples.gather(np.arange(count))
    model = job(schema).items
    assert model is not None
    sides = sides_of_model(model, schema)
    users = sides.users_of(batch)
    found: dict[str, Any] = {name: users.dense_BI[:, i] for i, name in enumerate(sides.users.dense)}
    for name, bag in users.ids.items():
        if bag.lengths_B is None:
            found[name] = bag.values_N
        else:
            offsets = np.concatenate([[0], np.cumsum(bag.lengths_B)]).astype(np.int32)
            found[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(bag.values_N))
    return found


__all__ = ["NEXT", "TOWERS", "Takes", "frame_of", "job", "untrained"]
