"""The inputs of a model that was trained on ready samples: its columns are numbers and ids, taken as they are.

Loads no pyarrow, which takes every role 0.25 s.
"""

from __future__ import annotations

from typing import Any

from shardkeep.workers.data.schema import Schema
from shardkeep.workers.data_config import DenseColumn, LabelColumn, SparseColumn


def sample_inputs(schema: Schema, lists: frozenset[str]) -> dict[str, Any] | None:
    """The record of `conversion/inputs.py`; None for a model of several labels. `lists`: the features that
    may have several ids.

    The weights of a feature FEATURE come in a column FEATURE_weight."""
    if len(schema.labels) != 1:
        return None
    dense = [DenseColumn(column=name, scale="none", fill=0.0) for name in schema.dense]
    sparse = [
        SparseColumn(
            column=f.name,
            table=f.table,
            pooling=f.pooling,
            weights=f"{f.name}_weight" if f.pooling == "weighted" else None,
        )
        for f in schema.features
    ]
    zeros = [0.0] * len(dense)
    return {
        "form": 2,
        "label": LabelColumn(column=schema.labels[0]).model_dump(),
        "dense": [column.model_dump() for column in dense],
        "sparse": [column.model_dump() for column in sparse],
        "scale": "none",
        "missing": [],
        "lists": sorted(lists),
        "kinds": {f.name: "numbers" for f in schema.features},
        "origins": zeros,
        "transform": {"fill_I": zeros, "shift_I": zeros, "factor_I": [1.0] * len(dense)},
        "reading": {"form": "columns"},
    }
