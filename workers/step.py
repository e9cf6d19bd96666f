"""One training step of one worker: rows to leaves, leaves to gradients, gradients to a push.

Reads top to bottom as the life of a step (ARCHITECTURE.md, Life of a step). Owns no loop.
"""
# B = batch, D = embedding dim, U = unique ids of a table, T = targets

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import Pull, RowClient, Rows
from shardkeep.ps.jagged import RowSlab
from shardkeep.workers.collectives.collective import Collective
from shardkeep.workers.data.batch import Batch, Float32s, Ragged
from shardkeep.workers.data.samples import Dataset
from shardkeep.workers.data.sampling import StepSlices
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import Embeddings, all_finite_rows, non_finite_rows, scale_rows
from shardkeep.workers.embeddings.plan import Plan
from shardkeep.workers.rewind import Rewind


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step's samples of this rank, read, deduplicated and placed: all that needs no rows."""

    step: int
    batch: Batch
    plan: Plan
    request: Request
    rank_samples: int
    """Samples of this rank; 0 = `batch` holds one dummy sample without ids, which weighs nothing."""
    step_samples: int
    """Samples of all ranks."""


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    """Mean loss of this rank's samples; 0 when it had none."""
    applied: bool
    """Whether the tower was updated; not when its gradient was not finite."""
    dropped_rows: int
    """Row gradients that were not finite and therefore not sent."""
    staleness: int


Ahead = tuple[Prepared, Pull]
"""A step to come, whose rows are on their way."""


class Step:
    """Runs steps: `prepare` ahead of time in another thread, `run` when its pull is on the way."""

    def __init__(
        self,
        *,
        dataset: Dataset,
        slices: StepSlices,
        client: RowClient,
        embeddings: Embeddings,
        tower: Tower,
        collective: Collective,
        micro_batch: int,
        device: torch.device,
        rewind: Rewind | None = None,
    ) -> None:
        """`rewind`: where the tower's state at the start of each step is kept; None = nowhere."""
        self._dataset = dataset
        self._slices = slices
        self._client = client
        self._embeddings = embeddings
        self._tower = tower
        self._collective = collective
        self._micro_batch = micro_batch
        self._device = device
        self._rewind = rewind
        self._watch = tower.watch

    def prepare(self, step: int) -> Prepared:
        """Reads, deduplicates and places a step's samples. Touches neither servers nor tower."""
        rows_B = self._slices.rows(step, self._collective.rank)
        batch = self._dataset.gather(rows_B) if rows_B.size else self._dummy()
        plan = self._embeddings.plan(batch)
        request = self._client.request(plan.unique)
        return Prepared(step, batch, plan, request, int(rows_B.size), self._slices.samples(step))

    @property
    def choices(self) -> dict[str, str]:
        """What the tower chose where the config leaves it open, and why."""
        return self._tower.chosen

    def run(
        self,
        prepared: Prepared,
        pull: Pull,
        following: Callable[[], Prepared | None] = lambda: None,
        *,
        last: bool = False,
    ) -> tuple[StepResult, Ahead | None]:
        """Waits for the rows, trains on them, updates the tower, pushes the rows' gradients; in the job's `last` step
        all that was left for later, too.

        `following` is asked just before the push: the step whose pull goes with it, None = the push goes alone. That
        step and its pull are returned."""
        self._watch.enter("pull_wait")
        rows = pull.result()
        self._watch.enter("lookup")
        grads = self._client.gradients(prepared.step, prepared.request)
        weight = 1.0 / prepared.step_samples if prepared.rank_samples else 0.0
        loss_sum = 0.0
        starts = range(0, len(prepared.batch), self._micro_batch)
        for start in starts:
            part = slice(start, min(start + self._micro_batch, len(prepared.batch)))
            loss_sum += self._micro_step(prepared, rows, grads, part, weight, last=start == starts[-1])
        grads, request, dropped = self._finite(grads, prepared.request)
        update = self._tower.update(prepared.step, rows_finite=not dropped)
        if self._rewind is not None:  # before anybody can know that this step is done
            self._watch.enter("keep")
            self._rewind.keep(self._tower)
        self._watch.enter("push")
        scale_rows(grads, update.row_scale)
        overflow = self._tower.scaling and not update.applied  # of the loss scale: no rank keeps this step's rows
        ahead = self._push(prepared.step, request, {} if overflow else grads, following(), last)
        self._watch.enter("other")
        mean = loss_sum * prepared.step_samples / prepared.rank_samples if prepared.rank_samples else 0.0
        return StepResult(mean, update.applied, dropped, pull.staleness), ahead

    def _push(
        self, step: int, request: Request, grads: Mapping[str, Rows], following: Prepared | None, last: bool
    ) -> Ahead | None:
        if following is None:
            self._client.push(step, request, grads, last=last)
            return None
        return following, self._client.exchange(step, request, grads, following.step, following.request)

    def _micro_step(
        self,
        prepared: Prepared,
        rows: RowSlab,
        grads: RowSlab,
        part: slice,
        weight: float,
        *,
        last: bool,
    ) -> float:
        self._watch.enter("lookup")
        batch = prepared.batch.slice(part.start, part.stop)
        leaves = self._embeddings.lookup(prepared.plan, rows, part=part, device=self._device)
        loss = self._tower.backward(
            self._on_device(batch.dense_BI), leaves, self._on_device(batch.label_BT), weight, last=last
        )
        self._watch.enter("collect")
        self._embeddings.collect(prepared.plan, leaves, grads, part=part, rows=rows)
        return float(loss)

    def _finite(self, grads: RowSlab, request: Request) -> tuple[RowSlab, Request, int]:
        """Leaves out the rows whose gradient is not finite: (gradients, request, rows left out)."""
        if all_finite_rows(grads):
            return grads, request, 0
        kept = {name: ~non_finite_rows(grad_UD) for name, grad_UD in grads.items()}
        dropped = sum(int(mask.size - mask.sum()) for mask in kept.values())
        finite = self._client.request({name: request.ids[name][mask] for name, mask in kept.items()})
        return RowSlab.of_arrays(finite.ids, {name: grads[name][mask] for name, mask in kept.items()}), finite, dropped

    def _on_device(self, array: Float32s) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _dummy(self) -> Batch:
        """One sample without ids for a rank that has none in this step: the reduction needs every rank."""
        schema = self._dataset.schema
        empty = Ragged(np.empty(0, np.int64), np.zeros(1, np.int32))
        weighted = Ragged(np.empty(0, np.int64), np.zeros(1, np.int32), np.empty(0, np.float32))
        ids = {f.name: weighted if f.pooling == "weighted" else empty for f in schema.features}
        return Batch(np.zeros((1, schema.num_dense), np.float32), ids, np.zeros((1, 1), np.float32))
