"""Admission: which new ids of a table become rows, by their number of pushes."""
# U = ids of a section, K = scalars of the optimizer

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Floats, Ids, Ints, Rows
from shardkeep.ps.server.table.policies.admission_kernels import admit, decide
from shardkeep.ps.server.table.table import Table


class Admission:
    """The rule of one table, in its descriptor. The caller holds the table's locks."""

    def __init__(self, table: Table, counting: Table) -> None:
        """`counting`: counts the ids without a row."""
        assert table.spec.admit is not None  # the caller knows that it is set
        self._table, self._counting = table, counting
        table.descriptor["policies"]["rules"]["min_count"] = table.spec.admit.min_count

    def update(
        self, ids_U: Ids, slots_U: Ints, grad_UD: Rows, scalars_K: Floats, pushes_U: Floats, absent: int
    ) -> None:
        """Updates those of `absent` ids without a row, whose slots are -1, that become rows. Sets their slots."""
        table, counting, places = self._table, self._counting, np.empty(absent, dtype=np.int64)
        counting.make_room(absent)
        counting.make_pre_image_room(3 * absent)  # a removal keeps two
        places = places[: decide(table.descriptors, counting.descriptors, ids_U, slots_U, pushes_U, places)]
        if not places.size:
            return
        counting.changed.note_removed(ids_U[places])
        counting.give_back()
        table.make_room(places.size)
        table.make_pre_image_room(places.size)
        admit(table.descriptors, places, ids_U, slots_U, grad_UD, scalars_K, pushes_U)
