"""Admission: which new ids of a table become rows, by the applied pushes that had them, or by chance."""
# A = ids of a push without a row

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardkeep.base.arrays import Bools, Floats, Ids, Ints
from shardkeep.ps.policy_config import AdmitConfig
from shardkeep.ps.shard.table import policy_kernels as at
from shardkeep.ps.shard.table.eviction import Eviction
from shardkeep.ps.shard.table.optimizers.optimizer import Update
from shardkeep.ps.shard.table.table import Table


class Admission:
    """The rule of one table. The caller holds the locks of the table and of its candidates.

    Args:
        candidates: Has a row for each id that is counted; its score is the count. None = nothing is counted.
        remove: Removes rows of candidates by their slots.
    """

    def __init__(
        self, table: Table, config: AdmitConfig, candidates: Eviction | None, remove: Callable[[Ints], None]
    ) -> None:
        self._table, self._config, self._candidates, self._remove = table, config, candidates, remove

    def admit(self, ids_A: Ids, pushes_A: Floats, update: Update, images: Ints) -> Bools:
        """Which ids become rows. `pushes_A`: how many pushes each is the sum of; empty = one. `images`: what pushes
        keep of the candidates for a snapshot, which has room for three pre-images of each id."""
        if self._candidates is None:
            chosen_A = np.empty(ids_A.size, dtype=np.bool_)
            at.draw(ids_A, self._table.key, update.step + update.earlier_steps, self._config.probability, chosen_A)
        else:
            chosen_A = self._counted(self._candidates, ids_A, pushes_A, update, images)
        taken = int(chosen_A.sum())
        self._table.admitted_rows += taken
        self._table.refused_rows += ids_A.size - taken
        return chosen_A

    def _counted(self, candidates: Eviction, ids_A: Ids, pushes_A: Floats, update: Update, images: Ints) -> Bools:
        table = candidates.table
        table.make_room_if_tight(ids_A.size)
        slots_A, counts_A = np.empty(ids_A.size, dtype=np.int64), np.empty(ids_A.size, dtype=np.float32)
        rows = table.descriptor, table.starts, images, ids_A
        at.count_candidates(*rows, candidates.clock(update), pushes_A, slots_A, counts_A)
        chosen_A: Bools = counts_A >= self._config.min_count
        if chosen_A.any():
            self._remove(slots_A[chosen_A])
        return chosen_A
