"""Finder: the items of a retrieval model that suit samples best, by their names in the training files."""

# M = items, E = width of a vector, B = samples, K = best items, N = best items of all samples

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import UserError
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.evaluation.retrieval import Ranking
from shardkeep.workers.retrieval.ranking import TOP_SIZE, Best, ItemIndex

OUTPUTS = ["items", "scores"]
"""What a retrieval model has for a sample: lists of the same length, the best item first."""


@dataclass(frozen=True)
class Items:
    """The items that a retrieval model can answer with.

    Attributes:
        vectors_ME: float32; None = they are computed from the items' columns.
    """

    catalogue: Catalogue
    vectors_ME: Floats | None = None


@dataclass(frozen=True)
class Finder:
    """Finds items by the vectors of samples. Any thread may call."""

    ranking: Ranking
    index: ItemIndex

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The types of `named`."""
        return dict(zip(OUTPUTS, [pa.list_(self.ranking.catalogue.values.type), pa.list_(pa.float32())], strict=True))

    def check(self, k: int, most: int | None = None, key: str = "--top") -> None:
        """Raises UserError for a number of items that there are not. `most`: a smaller bound."""
        bound = min(len(self.index), most or len(self.index))
        if not 1 <= k <= bound:
            raise UserError(f"{key} {k}: the catalogue has {len(self.index):,} items; allowed: 1 to {bound}")

    def top(self, users_BE: Floats, batch: Batch, k: int, *, size: int = TOP_SIZE) -> Best:
        """The best items of samples, as of `ItemIndex.top`; without those that they have seen, if the job's evaluation
        excludes them."""
        return self.index.top(users_BE, k, self.ranking.left(batch), size=size)

    def ranks(self, users_BE: Floats, batch: Batch) -> Ints:
        """The ranks of the samples' targets, as of `Ranking.ranks`."""
        return self.ranking.ranks(self.index, users_BE, batch)

    def named(self, best: Best) -> pa.RecordBatch:
        """Lists of items and of their scores, a row for each sample. A list is shorter where there are no more items.
        A model that is not finite finds none."""
        there_BK = best.places_BK >= 0
        offsets_B1 = pa.array(np.concatenate([[0], np.cumsum(there_BK.sum(1))]), pa.int32())
        items_N = self.ranking.catalogue.values.take(pa.array(best.places_BK[there_BK]))
        parts = [items_N, pa.array(best.scores_BK[there_BK])]
        return pa.record_batch([pa.ListArray.from_arrays(offsets_B1, part) for part in parts], names=OUTPUTS)
