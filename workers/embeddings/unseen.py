"""Unseen: counts the values of features whose id has no row, by feature.

Training did not see such an id, or a rule of its table gave it no row. It is scored by its initial value.
"""
# V = unique ids of all tables, F = features

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Bools
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import gather_arrays
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.embeddings import kernels
from shardkeep.workers.embeddings.plan import Plan

Counts = dict[str, list[int]]
"""By feature: values without a row, and all values."""


class Unseen:
    """Counts for the features of one schema. Any thread may read; one thread adds."""

    def __init__(self, schema: Schema) -> None:
        self._names = [feature.name for feature in schema.looked_up]
        self._counts_F2 = np.zeros((len(self._names), 2), np.int64)

    def add(self, plan: Plan, has_row_V: Bools, num_samples: int | None = None) -> None:
        """Counts the values of the first samples of a batch; None = of all. `has_row_V`: of the plan's unique ids."""
        starts_T1, stop = plan.unique.layout.starts_T1, plan.num_samples if num_samples is None else num_samples
        features_FK, counts_F2 = plan.features_FK, self._counts_F2
        kernels.count_values(features_FK, plan.inverse_N, plan.offsets, starts_T1, has_row_V, stop, counts_F2)

    def counts(self, collective: Collective | None = None) -> Counts:
        """The counts; with `collective` the sums over all ranks. Every rank must call it then, and it blocks."""
        counts_F2 = self._counts_F2
        if collective is not None:
            counts_F2 = np.sum(gather_arrays(collective, counts_F2.reshape(-1), purpose="metrics"), axis=0)
        return dict(zip(self._names, counts_F2.reshape(-1, 2).tolist(), strict=True))
