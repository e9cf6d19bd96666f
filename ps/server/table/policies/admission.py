"""Admission: which new ids of a table become rows, by their number of pushes or by chance."""
# U = ids of a section, K = scalars of the optimizer

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Floats, Ids, Ints, Rows
from shardkeep.ps.server.table.policies.admission_kernels import admit, decide
from shardkeep.ps.server.table.table import Table


class Admission:
    """The rule of one table, in its descriptor. The caller holds the table's locks."""

    def __init__(self, table: Table, counting: Table | None) -> None:
        """`counting`: counts the ids without a row; None = they are drawn by chance."""
        config = table.spec.admit
        assert config is not None  # the caller knows that it is set
        self._table, self._counting = table, counting
        rule = table.descriptor["policies"]["rules"]["admission"]
        rule["admits"], rule["counts"] = True, counting is not None
        rule["bar"] = config.probability if counting is None else config.min_count

    def update(
        self, ids_U: Ids, slots_U: Ints, grad_UD: Rows, scalars_K: Floats, pushes_U: Floats, absent: int
    ) -> None:
        """Updates those of `absent` ids without a row, whose slots are -1, that become rows. Sets their slots."""
        table, counting, places = self._table, self._counting, np.empty(absent, dtype=np.int64)
        if counting is not None:
            counting.make_room(absent)
            counting.make_pre_image_room(3 * absent)  # a removal keeps two
        both = table.descriptors, (counting or table).descriptors
        places = places[: decide(*both, ids_U, slots_U, pushes_U, places)]
        if not places.size:
            return
        if counting is not None:
            counting.changed.note_removed(ids_U[places])
            counting.give_back()
        table.make_room(places.size)
        table.make_pre_image_room(places.size)
        admit(table.descriptors, places, ids_U, slots_U, grad_UD, scalars_K, pushes_U)
