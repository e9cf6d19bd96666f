"""Weight decay of a whole table: an update with gradient 0 of the rows that a push does not touch.

Only tables with `weight_decay_on: table` use it. Knows no lock.
"""
# N = rows of a table, U = some of them, D = embedding dim

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import JobError
from shardkeep.ps.shard.table import pre_image_kernels
from shardkeep.ps.shard.table import table_kernels as at
from shardkeep.ps.shard.table.table import NO_SQUARES, Table

MOST_ROWS = 1_000_000
"""Rows of such a table on one server: each update reads and writes all of them."""
ROWS_AT_ONCE = 8192


def slots_besides(table: Table, touched_U: Ints) -> Iterator[Ints]:
    """Yields the slots of all rows except `touched_U`, some at a time. Raises JobError if the table has too many."""
    if table.num_rows > MOST_ROWS:
        raise JobError(
            f"table {table.spec.name}: {table.num_rows} rows on one server with optimizer.weight_decay_on: table; "
            f"allowed: {MOST_ROWS}; set weight_decay_on: touched, or use more servers"
        )
    others_N = np.ones(table.num_rows, dtype=np.bool_)
    others_N[touched_U] = False
    slots = np.flatnonzero(others_N)
    for begin in range(0, slots.size, ROWS_AT_ONCE):
        yield slots[begin : begin + ROWS_AT_ONCE]


def decay_rows(table: Table, images: Ints, slots_U: Ints, scalars_K: Floats) -> None:
    """One optimizer update with gradient 0. First keeps pre-images of the rows, for which there is room in `images`."""
    if images[pre_image_kernels.ROWS]:
        records = table.records
        pre_image_kernels.keep(images, records.addresses, records.shift, records.width, slots_U)
    zeros_UD = np.zeros((slots_U.size, table.spec.dim), dtype=np.float32)
    at.update(table.descriptor, slots_U, zeros_UD, NO_SQUARES, scalars_K)
