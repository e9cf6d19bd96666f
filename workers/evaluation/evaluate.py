"""Evaluation: every rank predicts its part of the evaluation data; the metrics are of all of it together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import ConfigError
from shardkeep.compression.ledger import Ledger
from shardkeep.ps.client.row_client import PullHandle, RowClient
from shardkeep.workers.blocks import BlockScorer
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.collectives.operations import gather_arrays
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import Dataset, gathered
from shardkeep.workers.data.sampling import StepSlices
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.embeddings.unseen import Unseen
from shardkeep.workers.evaluation.history import EvaluationHistory
from shardkeep.workers.metrics.quality import MetricSettings, evaluate_over_workers, loses_to_the_mean
from shardkeep.workers.reporting.counters import StepCounters
from shardkeep.workers.reporting.report import Report

# Pulls under way while a batch is predicted: the next one's rows travel meanwhile.
READ_AHEAD = 2
TRAIN_DIRECTIONS = ("push", "pull", "tower")
"""The ledger's directions of training."""


def groups_of(batch: Batch, asked: MetricSettings) -> Ints:
    """The groups of a batch's samples, int64 (B,); empty if no metric needs them. Raises ConfigError."""
    if asked.group_by is None:
        return np.empty(0, np.int64)
    ids = batch.ids.get(asked.group_by)
    if ids is None or ids.lengths_B is not None:
        why = "is no feature of the data" if ids is None else "has several values in a row"
        raise ConfigError(f"eval.group_by: {asked.group_by} {why}; allowed: a column of data.sparse with one")
    return ids.values_N


def weights_of(batch: Batch) -> Floats:
    """The weights of a batch's samples, float32 (B,); empty = all 1."""
    return np.empty(0, np.float32) if batch.weight_B is None else batch.weight_B


class Evaluates(Protocol):
    """What has the metrics of a job's evaluation data."""

    collective: Collective

    def run(self, step: int) -> dict[str, Any]:
        """The metrics over all ranks, the same on every rank. Blocks until all ranks have called it.

        `step`: steps done; the rows read have seen all pushes of earlier ones."""
        ...


class Evaluator:
    """Predicts a data set with the rows and the tower as they are now. Changes no state."""

    def __init__(
        self,
        *,
        dataset: Dataset,
        client: RowClient,
        scorer: BlockScorer,
        collective: Collective,
        max_samples: int | None,
        asked: MetricSettings | None = None,
    ) -> None:
        """`asked`: the metrics; None = those of classes."""
        self.collective = collective
        self._dataset = dataset
        self._client = client
        self._scorer = scorer
        self._num_samples = min(len(dataset), max_samples) if max_samples else len(dataset)
        self._asked = asked or MetricSettings()
        if self._asked.group_by is not None:
            groups_of(gathered(dataset, np.arange(1)), self._asked)  # now, not after an epoch
        best_auc = getattr(dataset, "best_auc", None)
        self._best_auc = cache(best_auc) if best_auc is not None and "auc" in self._asked.of(0).metrics else None

    def run(self, step: int) -> dict[str, Any]:
        """As of `Evaluates`."""
        self._client.fence(step)
        self.collective.barrier(purpose="agreements")  # in bounded and async: the others' last pushes are applied, too
        world, rank = self.collective.world_size, self.collective.rank
        bounds = [self._num_samples * r // world for r in (rank, rank + 1)]
        names, unseen = self._dataset.schema.labels, Unseen(self._dataset.schema)
        metrics = evaluate_over_workers(
            *self._predict(bounds[0], bounds[1], unseen), names=names, collective=self.collective, asked=self._asked
        )
        metrics["unseen"] = unseen.counts(self.collective)
        if self._best_auc is not None:
            best = self._best_auc(self._num_samples)
            metrics |= zip(
                [f"best_auc/{name}" for name in names] if len(names) > 1 else ["best_auc"], best, strict=True
            )
        return metrics

    def _predict(self, first: int, end: int, unseen: Unseen) -> tuple[Floats, Floats, Ints, Floats]:
        """Logits and labels, float32 (N, T), groups and weights of samples [first, end). Counts values in `unseen`."""
        none_0T = np.empty((0, len(self._dataset.schema.labels)), np.float32)
        found: list[tuple[Floats, Floats, Ints, Floats]] = []
        found.append((none_0T, none_0T, np.empty(0, np.int64), np.empty(0, np.float32)))
        samples = samples_of(self._dataset, first, end, self._scorer.size)
        for batch, logits_BT in scored(samples, self._scorer, self._client, unseen):
            found.append((logits_BT, batch.label_BT, groups_of(batch, self._asked), weights_of(batch)))
        logits, labels, groups, weights = map(np.concatenate, zip(*found, strict=True))
        return logits, labels, groups, weights


def samples_of(dataset: Dataset, first: int, end: int, size: int) -> Iterator[Batch]:
    """The samples [first, end) in batches of `size`."""
    for start in range(first, end, size):
        yield gathered(dataset, np.arange(start, min(start + size, end)))


def scored(
    samples: Iterator[Batch], scorer: BlockScorer, client: RowClient, unseen: Unseen | None = None
) -> Iterator[tuple[Batch, Floats]]:
    """Each batch of samples with the outputs (B, T) of the dense model. Counts values in `unseen`."""
    under_way: deque[tuple[Batch, Plan, PullHandle]] = deque()
    while True:
        while len(under_way) < READ_AHEAD and (batch := next(samples, None)) is not None:
            plan = scorer.embeddings.plan(batch)
            under_way.append((batch, plan, client.read(client.request(plan.unique))))
        if not under_way:
            return
        batch, plan, pull = under_way.popleft()
        outputs_BT = scorer.logits(batch, plan, pull.result())
        assert pull.has_row_V is not None
        if unseen is not None:
            unseen.add(plan, pull.has_row_V)
        yield batch, outputs_BT


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluates after the steps that the config names, or after each epoch, and after the last step. Reports it."""

    evaluator: Evaluates
    every_steps: int
    slices: StepSlices
    counters: StepCounters
    report: Report
    ledger: Ledger
    """Counts this rank's bytes."""
    best: EvaluationHistory
    """Learns of every evaluation."""
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around an evaluation: makes the dense model ready to predict."""

    def after(self, step: int, *, last: bool) -> None:
        """Evaluates if it is due after `step`. `last`: the job has no further step."""
        done, every = step + 1, self.every_steps
        due = not done % every if every else self.slices.ends_epoch(step)
        if not (due or last):
            return
        self.report.phase(done, "evaluating")
        with self.counters.watch.excluded(), self.counters.cpu.excluded(done):
            with self.whole():
                metrics = self.evaluator.run(done)
            trained = {"train_samples": self.counters.samples, "train_bytes": self._train_bytes()}
        self.report.evaluation(done, metrics, trained)
        self.best.forget_after(step)  # repeated after a recovery, it reports all that follows from it again
        before = self.best.lr_factor
        self.best.add(done, metrics)
        if (last or self.best.ends) and not self.evaluator.collective.rank and loses_to_the_mean(metrics):
            self.report.warning("quality", "the model is worse than a constant, the mean of the training labels")
        if self.best.lr_factor != before and not self.evaluator.collective.rank:
            self.report.lowered_rates(done, self.best.lr_factor)

    def _train_bytes(self) -> dict[str, int]:
        """Sums the bytes of training so far over all ranks, by direction: without evaluation's reads, and without the
        control plane's, which belong to no step. The sum itself counts as agreements."""
        totals = self.ledger.totals()
        own = np.array([sum(totals[direction].values()) for direction in TRAIN_DIRECTIONS], dtype=np.int64)
        sums = np.sum(gather_arrays(self.evaluator.collective, own, purpose="agreements"), axis=0).tolist()
        return dict(zip(TRAIN_DIRECTIONS, sums, strict=True)) | {"total": sum(sums)}
