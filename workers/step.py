"""One training step of one worker: rows to leaves, leaves to gradients, gradients to a push.

Reads top to bottom as the life of a step (ARCHITECTURE.md, Life of a step). Owns no loop.
"""
# B = batch, D = embedding dim, U = unique ids of a table, T = targets

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardkeep.base.arrays import Floats
from shardkeep.ps.client.request import Request
from shardkeep.ps.client.row_client import PullHandle
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.dense.loss_sum import LossSum
from shardkeep.workers.dense.tower import Tower
from shardkeep.workers.embeddings.layer import all_finite_rows, non_finite_rows, scale_rows
from shardkeep.workers.evaluation.progressive import ProgressiveValidation
from shardkeep.workers.pipeline import Pipeline, Prepared
from shardkeep.workers.retrieval.candidates import CANDIDATES
from shardkeep.workers.rewind import LastStep, Rewind


class StepLoss(Protocol):
    """A loss that a device may still compute. `float(...)` waits for it."""

    @property
    def ready(self) -> bool:
        """Whether nothing has to wait for it."""
        ...

    def __float__(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: StepLoss | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Trains one step after another."""

    pipeline: Pipeline
    tower: Tower
    micro_batch: int
    """Samples of a forward and backward pass."""
    rewind: Rewind | LastStep | None = None
    """Keeps the tower's state at the start of each step; None = nothing does."""
    progressive: ProgressiveValidation | None = None
    """Scores each step of the first epoch before it trains; None = nothing does."""

    def run(self, prepared: Prepared, pull: PullHandle, *, last: bool = False, lr_factor: float = 1.0) -> StepResult:
        """Waits for the rows, trains on them, updates the tower, pushes the rows' gradients.

        `last`: of the job; pushes the residuals too. `lr_factor`: multiplies all learning rates."""
        watch, tower = self.tower.watch, self.tower
        watch.enter("pull_wait")
        rows = pull.result()
        if self.progressive is not None and not self.pipeline.slices.epoch(prepared.step):
            watch.enter("forward")
            with tower.whole():
                self.progressive.score(prepared, rows)
        watch.enter("lookup")
        grads = self.pipeline.client.gradients(prepared.step, prepared.request)
        loss = self._micro_steps(prepared, rows, grads)
        grads, request, dropped = self._pushed(prepared, rows, grads)
        update = tower.update(prepared.step, rows_finite=not dropped, lr_factor=lr_factor)
        if self.rewind is not None:  # before anybody can know that this step is done
            watch.enter("keep")
            self.rewind.keep(tower, None if self.progressive is None else self.progressive.scores)
        watch.enter("push")
        scale_rows(grads, update.row_scale)
        overflow = tower.precision.scaling and not update.applied  # then every rank drops this step's rows
        self.pipeline.push(prepared.step, request, {} if overflow else grads, last=last, lr_factor=lr_factor)
        watch.enter("other")
        plan = prepared.plan
        ids, unique_ids = plan.inverse_N.size, plan.unique.layout.num_rows
        return StepResult(loss, update.applied, dropped, pull.staleness, ids, unique_ids)

    def _micro_steps(self, prepared: Prepared, rows: JaggedRows, grads: JaggedRows) -> LossSum:
        """Runs forward and backward on all samples, part by part. Returns the loss, on its way to the host."""
        weight = 1.0 / prepared.step_samples if prepared.rank_samples else 0.0
        loss_sum = LossSum(self.tower.device, prepared.rank_samples, prepared.step_samples)
        size, spare = len(prepared.batch), self._spare_passes(prepared)
        starts = range(0, size, self.micro_batch)
        for start in starts:
            part = slice(start, min(start + self.micro_batch, size))
            last = start == starts[-1] and not spare
            loss_sum.add(self._micro_step(prepared, rows, grads, part, weight, last=last))
        for number in range(spare):
            self._micro_step(prepared, rows, grads, part, 0.0, last=number == spare - 1)
        loss_sum.send()
        return loss_sum

    def _spare_passes(self, prepared: Prepared) -> int:
        """The micro-batches that another rank has and this one has not: each pass of a model in shards takes all."""
        if self.tower.shards is None:
            return 0
        most = -(-prepared.step_samples // self.tower.collective.world_size)
        return -(-most // self.micro_batch) - -(-len(prepared.batch) // self.micro_batch)

    def _micro_step(
        self,
        prepared: Prepared,
        rows: JaggedRows,
        grads: JaggedRows,
        part: slice,
        weight: float,
        *,
        last: bool,
    ) -> torch.Tensor:
        embeddings = self.pipeline.embeddings
        self.tower.watch.enter("lookup")
        batch = prepared.batch.slice(part.start, part.stop)
        leaves = embeddings.lookup(prepared.plan, rows, part=part, device=self.tower.device)
        inputs: Mapping[str, Any] = embeddings.inputs(prepared.plan, leaves, part)
        side, items = self.pipeline.item_side, prepared.items
        if side is not None and items is not None:
            number = part.start // self.micro_batch
            of_items, candidates = side.candidates(items, number, rows, self.tower.device)
            inputs = {**inputs, CANDIDATES: candidates}
        samples = self._on_device(batch.dense_BI), inputs, self._on_device(batch.label_BT)
        factors_B = None if batch.weight_B is None else self._on_device(batch.weight_B)
        loss = self.tower.backward(*samples, weight, factors_B, last=last)
        self.tower.watch.enter("collect")
        embeddings.collect(prepared.plan, leaves, grads, part=part, rows=rows)
        if side is not None and items is not None:
            side.embeddings.collect(items.plan, of_items, grads, part=items.parts[number], rows=rows)
        return loss

    def _pushed(self, prepared: Prepared, rows: JaggedRows, grads: JaggedRows) -> tuple[JaggedRows, Request, int]:
        """Leaves out the rows whose gradient is not finite, and those that are only read: (gradients, request, rows
        that are not finite)."""
        side, items, request = self.pipeline.item_side, prepared.items, prepared.request
        unsent = side.unsent(items, rows) if side is not None and items is not None else {}
        if not unsent and all_finite_rows(grads):
            return grads, request, 0
        bad = {name: non_finite_rows(grad_UD) for name, grad_UD in grads.items()}
        dropped = sum(int(bad_U.sum()) for bad_U in bad.values())
        kept = {name: ~(bad_U | unsent[name] if name in unsent else bad_U) for name, bad_U in bad.items()}
        sent = self.pipeline.client.request({name: request.ids[name][mask] for name, mask in kept.items()})
        return JaggedRows.of_arrays(sent.ids, {name: grads[name][mask] for name, mask in kept.items()}), sent, dropped

    def _on_device(self, array: Floats) -> torch.Tensor:
        return torch.from_numpy(array).to(self.tower.device, non_blocking=True)
