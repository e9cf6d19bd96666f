"""Evaluation: every rank predicts its part of the evaluation data; the metrics are of all of it together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from shardkeep.ps.client.row_client import Pull, RowClient
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.data.batch import Batch, Float32s
from shardkeep.workers.data.samples import Dataset
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.metrics.quality import evaluate_over_workers

# Pulls under way while a batch is predicted: the next one's rows travel meanwhile.
READ_AHEAD = 2


class Evaluation:
    """Predicts a data set with the rows and the tower as they are now. Changes no state."""

    def __init__(
        self,
        *,
        dataset: Dataset,
        client: RowClient,
        embeddings: Embeddings,
        tower: Tower,
        collective: Collective,
        batch_size: int,
        max_samples: int | None,
        best_auc: Callable[[int], float] | None,
        device: torch.device,
    ) -> None:
        """`best_auc(n)`: the best possible AUC on the first n samples, where the data know it."""
        self._dataset = dataset
        self._client = client
        self._embeddings = embeddings
        self._tower = tower
        self._collective = collective
        self._batch_size = batch_size
        self._num_samples = min(len(dataset), max_samples) if max_samples else len(dataset)
        self._best_auc = cache(best_auc) if best_auc is not None else None
        self._device = device

    def run(self, step: int) -> dict[str, Any]:
        """The metrics over all ranks, the same on every rank. Blocks until all ranks have called it.

        `step`: steps done; the rows read have seen all pushes of earlier ones."""
        self._client.fence(step)
        self._collective.barrier(purpose="agreements")  # in bounded and async: the others' last pushes are applied, too
        world, rank = self._collective.world_size, self._collective.rank
        bounds = [self._num_samples * r // world for r in (rank, rank + 1)]
        logits_N, labels_N = self._predict(bounds[0], bounds[1])
        metrics = evaluate_over_workers(logits_N, labels_N, collective=self._collective)
        if self._best_auc is not None:
            metrics["best_auc"] = self._best_auc(self._num_samples)
        return metrics

    def _predict(self, first: int, end: int) -> tuple[Float32s, Float32s]:
        logits: list[Float32s] = [np.empty(0, np.float32)]
        labels: list[Float32s] = [np.empty(0, np.float32)]
        under_way: deque[tuple[Batch, Plan, Pull]] = deque()
        starts = deque(range(first, end, self._batch_size))
        while starts or under_way:
            while starts and len(under_way) < READ_AHEAD:
                start = starts.popleft()
                batch = self._dataset.gather(np.arange(start, min(start + self._batch_size, end)))
                plan = self._embeddings.plan(batch)
                under_way.append((batch, plan, self._client.read(self._client.request(plan.unique))))
            batch, plan, pull = under_way.popleft()
            leaves = self._embeddings.lookup(plan, pull.result(), part=None, device=self._device)
            dense = torch.from_numpy(batch.dense_BI).to(self._device)
            logits.append(self._tower.predict(dense, leaves).float().cpu().numpy().reshape(-1))
            labels.append(batch.label_BT.reshape(-1))
        return np.concatenate(logits), np.concatenate(labels)
