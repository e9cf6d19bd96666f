"""One training step of one worker: rows to leaves, leaves to gradients, gradients to a push.

Reads top to bottom as the life of a step (ARCHITECTURE.md, Life of a step). Owns no loop.
"""
# B = batch, D = embedding dim, U = unique ids of a table, T = targets

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardkeep.base.arrays import Floats
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import Pull, RowClient
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import Embeddings, all_finite_rows, non_finite_rows, scale_rows
from shardkeep.workers.pipeline import Pipeline, Prepared
from shardkeep.workers.progressive import ProgressiveValidation
from shardkeep.workers.rewind import Rewind


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float | None
    """Mean loss of this rank's samples; 0 when it had none. None = not known: a loop of the user's own may not report
    it."""
    applied: bool
    """Whether the tower was updated; not when its gradient was not finite."""
    dropped_rows: int
    """Row gradients that were not finite and therefore not sent."""
    staleness: int
    ids: int = 0
    """Ids of this rank's samples."""
    unique_ids: int = 0
    """The distinct ones among them, table by table: its rows."""


class Step:
    """Trains one step after another.

    Args:
        client: Makes the accumulators of gradients.
        pipeline: Pushes.
        embeddings: Rows to leaves, leaves to gradients.
        tower: The dense model.
        micro_batch: Samples of a forward and backward pass.
        device: Where the tower is.
        rewind: Keeps the tower's state at the start of each step; None = nothing does.
        progressive: Scores each step before it trains; None = nothing does.
    """

    def __init__(
        self,
        *,
        client: RowClient,
        pipeline: Pipeline,
        embeddings: Embeddings,
        tower: Tower,
        micro_batch: int,
        device: torch.device,
        rewind: Rewind | None = None,
        progressive: ProgressiveValidation | None = None,
    ) -> None:
        self._client = client
        self._pipeline = pipeline
        self._embeddings = embeddings
        self._tower = tower
        self._micro_batch = micro_batch
        self._device = device
        self._rewind = rewind
        self._progressive = progressive
        self._watch = tower.watch

    @property
    def choices(self) -> dict[str, str]:
        """What the tower chose where the config leaves it open, and why."""
        return self._tower.chosen

    def run(self, prepared: Prepared, pull: Pull, *, last: bool = False, lr_factor: float = 1.0) -> StepResult:
        """Waits for the rows, trains on them, updates the tower, pushes the rows' gradients.

        `last`: of the job; pushes the residuals too. `lr_factor`: multiplies all learning rates."""
        self._watch.enter("pull_wait")
        rows = pull.result()
        if self._progressive is not None:
            self._watch.enter("forward")
            self._progressive.score(prepared, rows)
        self._watch.enter("lookup")
        grads = self._client.gradients(prepared.step, prepared.request)
        loss = self._micro_steps(prepared, rows, grads)
        grads, request, dropped = self._finite(grads, prepared.request)
        update = self._tower.update(prepared.step, rows_finite=not dropped, lr_factor=lr_factor)
        if self._rewind is not None:  # before anybody can know that this step is done
            self._watch.enter("keep")
            self._rewind.keep(self._tower, None if self._progressive is None else self._progressive.scores)
        self._watch.enter("push")
        scale_rows(grads, update.row_scale)
        overflow = self._tower.precision.scaling and not update.applied  # then every rank drops this step's rows
        self._pipeline.push(prepared.step, request, {} if overflow else grads, last=last, lr_factor=lr_factor)
        self._watch.enter("other")
        plan = prepared.plan
        ids, unique_ids = plan.inverse_N.size, plan.unique.layout.num_rows
        return StepResult(loss, update.applied, dropped, pull.staleness, ids, unique_ids)

    def _micro_steps(self, prepared: Prepared, rows: JaggedRows, grads: JaggedRows) -> float:
        """Runs forward and backward on all samples, part by part. Returns the mean loss of this rank's samples."""
        weight = 1.0 / prepared.step_samples if prepared.rank_samples else 0.0
        loss_sum = 0.0
        starts = range(0, len(prepared.batch), self._micro_batch)
        for start in starts:
            part = slice(start, min(start + self._micro_batch, len(prepared.batch)))
            loss_sum += self._micro_step(prepared, rows, grads, part, weight, last=start == starts[-1])
        return loss_sum * prepared.step_samples / prepared.rank_samples if prepared.rank_samples else 0.0

    def _micro_step(
        self,
        prepared: Prepared,
        rows: JaggedRows,
        grads: JaggedRows,
        part: slice,
        weight: float,
        *,
        last: bool,
    ) -> float:
        self._watch.enter("lookup")
        batch = prepared.batch.slice(part.start, part.stop)
        leaves = self._embeddings.lookup(prepared.plan, rows, part=part, device=self._device)
        samples = self._on_device(batch.dense_BI), leaves, self._on_device(batch.label_BT)
        factors_B = None if batch.weight_B is None else self._on_device(batch.weight_B)
        loss = self._tower.backward(*samples, weight, factors_B, last=last)
        self._watch.enter("collect")
        self._embeddings.collect(prepared.plan, leaves, grads, part=part, rows=rows)
        return float(loss)

    def _finite(self, grads: JaggedRows, request: Request) -> tuple[JaggedRows, Request, int]:
        """Leaves out the rows whose gradient is not finite: (gradients, request, rows left out)."""
        if all_finite_rows(grads):
            return grads, request, 0
        kept = {name: ~non_finite_rows(grad_UD) for name, grad_UD in grads.items()}
        dropped = sum(int(mask.size - mask.sum()) for mask in kept.values())
        finite = self._client.request({name: request.ids[name][mask] for name, mask in kept.items()})
        return (
            JaggedRows.of_arrays(finite.ids, {name: grads[name][mask] for name, mask in kept.items()}),
            finite,
            dropped,
        )

    def _on_device(self, array: Floats) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
