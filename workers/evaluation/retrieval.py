"""Evaluation of retrieval models: the rank of each sample's item among all items, over all ranks."""

# M = items, E = width of a vector, N = samples, B = samples of a batch

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardkeep.base.arrays import Floats, Ints
from shardkeep.ps.client.row_client import RowClient
from shardkeep.workers.blocks import BlockScorer, DenseModel
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import gather_arrays
from shardkeep.workers.config import EvalConfig, LossConfig
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.samples import Dataset, gathered
from shardkeep.workers.data.sides import Sides
from shardkeep.workers.embeddings.inputs import Inputs
from shardkeep.workers.embeddings.unseen import Unseen
from shardkeep.workers.evaluation.evaluate import samples_of, scored, weights_of
from shardkeep.workers.metrics.ranks import evaluate_ranks
from shardkeep.workers.retrieval.candidates import ItemInputs
from shardkeep.workers.retrieval.ranking import ItemIndex, Left


@dataclass(frozen=True)
class ItemModel:
    """The items' side of a dense model of vectors."""

    dense: DenseModel

    @property
    def device(self) -> torch.device:
        return self.dense.device

    def predict(self, dense_BI: torch.Tensor, embeddings: Inputs) -> torch.Tensor:
        """The vectors of items, float32 (B, E), without gradients."""
        return self.dense.predict(dense_BI, ItemInputs(embeddings))


@dataclass(frozen=True)
class RankSettings:
    """What to compute.

    Attributes:
        metrics: Of `evaluate_ranks`.
        exclude_seen: Leave out the items of a sample's own lists, except its target.
    """

    metrics: tuple[str, ...]
    exclude_seen: bool = False

    @classmethod
    def by(cls, config: EvalConfig, loss: LossConfig) -> RankSettings:
        """What a job's config asks for."""
        return cls(config.asked(loss), config.exclude_seen)


@dataclass(frozen=True)
class Ranking:
    """Ranks the items of a catalogue for samples."""

    sides: Sides
    catalogue: Catalogue
    asked: RankSettings

    def item_samples(self, first: int, end: int, size: int) -> Iterator[Batch]:
        """The items [first, end) in batches of `size`."""
        for start in range(first, end, size):
            yield self.catalogue.items.slice(start, min(start + size, end))

    def left(self, batch: Batch) -> Left:
        """The items that are left out for each sample."""
        return Left.history(batch, self.sides, self.catalogue) if self.asked.exclude_seen else Left.none(len(batch))

    def ranks(self, index: ItemIndex, users_BE: Floats, batch: Batch) -> Ints:
        """The ranks of the samples' targets among all items, as `evaluate_ranks` takes them."""
        positive_B = batch.label_BT[:, 0] > 0
        targets_B = np.where(positive_B, self.catalogue.index_of(batch.ids[self.sides.item.name].values_N), -1)
        return np.where(positive_B, index.ranks(users_BE, targets_B, self.left(batch)), -1)


class RetrievalEvaluator:
    """Ranks all items for a data set with the rows and the tower as they are now. Changes no state. As `Evaluates`.

    Args:
        users: Has the vectors of samples of `ranking.sides.users`; `items`: of samples of `ranking.sides.items`.
        dataset: Where it has `best_ranks`, the best possible recall stands beside each recall.
    """

    def __init__(
        self,
        *,
        dataset: Dataset,
        client: RowClient,
        users: BlockScorer,
        items: BlockScorer,
        collective: Collective,
        max_samples: int | None,
        ranking: Ranking,
    ) -> None:
        self.collective, self._best_ranks = collective, getattr(dataset, "best_ranks", None)
        self._dataset, self._client, self._users, self._items = dataset, client, users, items
        self._num_samples = min(len(dataset), max_samples) if max_samples else len(dataset)
        self._ranking = ranking
        ranking.left(gathered(dataset, np.arange(1)))  # refuses what excludes nothing now, not after an epoch

    def run(self, step: int) -> dict[str, Any]:
        """As of `Evaluates`."""
        self._client.fence(step)
        self.collective.barrier(purpose="agreements")  # in bounded and async: the others' last pushes are applied, too
        index, unseen = ItemIndex(self._vectors()), Unseen(self._ranking.sides.users)
        parts = self._ranks(index, unseen)
        ranks_N, weights_N = (np.concatenate(gather_arrays(self.collective, each, purpose="metrics")) for each in parts)
        metrics = evaluate_ranks(ranks_N, weights_N, self._ranking.asked.metrics)
        if self._best_ranks is not None:
            recalls = [name for name in self._ranking.asked.metrics if name.startswith("recall@")]
            best = evaluate_ranks(self._best_ranks(self._num_samples), np.empty(0, np.float32), recalls)
            metrics |= {f"best_{name}": best[name] for name in recalls}
        return metrics | {"unseen": unseen.counts(self.collective)}

    def _share(self, count: int) -> tuple[int, int]:
        """First and end of this rank's part."""
        world, rank = self.collective.world_size, self.collective.rank
        return count * rank // world, count * (rank + 1) // world

    def _vectors(self) -> Floats:
        """The vectors of all items (M, E), of which each rank computes a part."""
        samples = self._ranking.item_samples(*self._share(len(self._ranking.catalogue)), self._items.size)
        own = [vectors_BE for _, vectors_BE in scored(samples, self._items, self._client)]
        flat = np.concatenate([np.empty(0, np.float32), *(vectors_BE.reshape(-1) for vectors_BE in own)])
        parts = gather_arrays(self.collective, flat, purpose="metrics")
        return np.concatenate(parts).reshape(len(self._ranking.catalogue), -1)

    def _ranks(self, index: ItemIndex, unseen: Unseen) -> tuple[Ints, Floats]:
        """Ranks and weights of this rank's samples. Counts values in `unseen`."""
        whole: deque[Batch] = deque()

        def users() -> Iterator[Batch]:
            for batch in samples_of(self._dataset, *self._share(self._num_samples), self._users.size):
                whole.append(batch)
                yield self._ranking.sides.users_of(batch)

        ranks, weights = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for batch, users_BE in scored(users(), self._users, self._client, unseen):
            ranks.append(self._ranking.ranks(index, users_BE, whole.popleft()))
            weights.append(weights_of(batch))
        return np.concatenate(ranks), np.concatenate(weights)
