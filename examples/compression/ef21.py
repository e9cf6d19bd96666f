"""EF21: rows of the difference between a gradient and what the servers have of it (Richtarik et al., NeurIPS 2021).

    compression:
      push:
        select: {name: "shardkeep.examples.compression.ef21:Ef21"}
        keep: 0.25
        pool_rows: 200000

For each worker i and row: c <- C(gradient - g_i), g_i <- g_i + c. C sends the rows with the largest norm. A row's state
is -g_i, so that state + gradient is the difference, and a row that loses its place takes its g_i back from the servers.

What is exact: what servers receive of a row adds up to the sum of all g_i, with fp32 and a pool that holds every row.
What is not: EF21 updates w <- w - lr * sum(g_i) in each step. Servers would have to add up the differences, as SGD with
a momentum of 1 does, and to update rows that no worker sends. No optimizer of shardkeep does that. Plain SGD subtracts
each difference once, so that w becomes w_0 - lr * sum(g_i): use it to study the selection, not to train.
"""
# V = rows of a step, D = embedding dim

from __future__ import annotations

from shardkeep.base.arrays import Bools, Floats
from shardkeep.compression.selection.rows import Rows


class Ef21(Rows):
    """Sends the rows that differ most from what was sent of them, and keeps nothing of the others."""

    def settle(self, state_VW: Floats, values_VD: Floats, sent_VD: Bools, decoded_VD: Floats) -> None:
        state_VW -= decoded_VD
