"""Catalogue: all items that a retrieval model can answer with, the most frequent first."""

# M = items, N = ids, C = rows asked for

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.batch import Batch, Ragged


@dataclass(frozen=True)
class Catalogue:
    """The items of the training data, by falling count, equal counts by id.

    Attributes:
        ids_M: The id of each in the table of `Sides.item`.
        counts_M: How often training has it to predict.
        items: Its columns, M samples of `Sides.items`, as they are in the last row that has it.
        values: Its name as in the training files: text or an integer, since ids of texts are hashes.
    """

    ids_M: Ints
    counts_M: Ints
    items: Batch
    values: pa.Array

    def __len__(self) -> int:
        """Number of items."""
        return len(self.ids_M)

    @cached_property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self.counts_M.sum())

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        order_M = np.argsort(self.ids_M, kind="stable")
        return order_M, self.ids_M[order_M]

    def index_of(self, ids_N: Ints) -> Ints:
        """Where each id is among the items, int64 (N,); -1 = nowhere."""
        order_M, sorted_M = self._sorted
        if not len(self):
            return np.full(ids_N.shape, -1, dtype=np.int64)
        at_N = np.minimum(np.searchsorted(sorted_M, ids_N), len(self) - 1)
        found_N: Ints = np.where(sorted_M[at_N] == ids_N, order_M[at_N], -1)
        return found_N

    @cached_property
    def _starts(self) -> dict[str, Ints]:
        """Where the ids of each item begin, of the columns that have lists."""
        lengths = {name: bag.lengths_B for name, bag in self.items.ids.items()}
        return {name: np.cumsum(each) - each for name, each in lengths.items() if each is not None}

    def take(self, rows_C: Ints) -> Batch:
        """The columns of some items, by their places, in that order."""
        ids = {name: self._bag(name, bag, rows_C) for name, bag in self.items.ids.items()}
        return Batch(self.items.dense_BI[rows_C], ids, self.items.label_BT[rows_C])

    def _bag(self, name: str, bag: Ragged, rows_C: Ints) -> Ragged:
        at_N, lengths_C = rows_C, None
        if bag.lengths_B is not None:
            lengths_C = bag.lengths_B[rows_C]
            ends_C = np.cumsum(lengths_C, dtype=np.int64)
            at_N = np.arange(ends_C[-1] if ends_C.size else 0)
            at_N += np.repeat(self._starts[name][rows_C] - ends_C + lengths_C, lengths_C)
        return Ragged(bag.values_N[at_N], lengths_C, None if bag.weights_N is None else bag.weights_N[at_N])
