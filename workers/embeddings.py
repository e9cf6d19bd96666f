"""The embedding layer of a worker: which rows a batch needs, those rows pooled into the model's inputs, and
the gradients of these inputs summed back to rows. Outside autograd and outside DDP; holds no row itself.

A step goes `plan` (any thread, no torch) -> pull -> `lookup` -> forward, backward -> `collect` -> push.
"""
# B = samples, N = ids of one table or feature, U = unique ids of one table, D = embedding dim

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.base.errors import ConfigError, ProtocolError
from shardkeep.ps.config import TableSpec
from shardkeep.workers import kernels
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.plan import Plan, make_plan
from shardkeep.workers.pooling import add_on_host, add_with_torch, pool_on_host, pool_with_torch, to_device

__all__ = ["Embeddings", "Plan", "non_finite_rows", "scale_rows"]

Rows = npt.NDArray[np.float32]
_CPU = torch.device("cpu")


class Embeddings:
    """Plans, looks up and collects for one schema. Stateless between calls, so any thread may call."""

    def __init__(self, schema: Schema, tables: Mapping[str, TableSpec]) -> None:
        """Raises ConfigError when a feature names a table that is not there."""
        for feature in schema.features:
            if feature.table not in tables:
                raise ConfigError(
                    f"feature {feature.name} names table {feature.table}; known: {', '.join(sorted(tables))}"
                )
        self._table_of = {feature.name: feature.table for feature in schema.features}
        self._of_table = {t: [f for f in schema.features if f.table == t] for t in schema.tables()}
        self.table_dims = {table: tables[table].dim for table in self._of_table}
        """Values per row of each table, in the order of first use."""
        self.feature_dims = {name: self.table_dims[table] for name, table in self._table_of.items()}
        """Values per sample that the model gets for each feature."""

    def plan(self, batch: Batch) -> Plan:
        """Deduplicates the batch's ids per table. CPU only and without the GIL in its loops: meant for a
        prefetching thread. Raises DataError when a feature's arrays do not fit each other or the batch."""
        return make_plan(batch, self._of_table)

    def lookup(
        self,
        plan: Plan,
        rows: Mapping[str, Rows],
        part: slice | None = None,
        device: torch.device = _CPU,
    ) -> dict[str, torch.Tensor]:
        """The model's inputs: per feature a fresh leaf, float32 (B, D), that requires grad.

        Args:
            rows: per table the values of the plan's unique ids, float32 (U, D), C-contiguous; only read.
            part: range of samples of a micro-batch; None = all.
            device: where the leaves live; not the CPU = rows travel there once per table and call.

        Raises ProtocolError when rows are missing or have another shape."""
        for table, dim in self.table_dims.items():
            _check_rows(table, rows.get(table), (plan.unique[table].size, dim))
        features = plan.parts(part)
        if device.type == "cpu":
            pooled = {name: pool_on_host(features[name], rows[t]) for name, t in self._table_of.items()}
        else:
            there = {table: to_device(rows[table], device) for table in self.table_dims}
            pooled = {name: pool_with_torch(features[name], there[t]) for name, t in self._table_of.items()}
        return {name: pooled_BD.requires_grad_() for name, pooled_BD in pooled.items()}

    def zero_gradients(self, plan: Plan) -> dict[str, Rows]:
        """Per table a fresh accumulator for `collect`: zeros, float32 (U, D)."""
        return {t: np.zeros((plan.unique[t].size, dim), np.float32) for t, dim in self.table_dims.items()}

    def collect(
        self,
        plan: Plan,
        leaves: Mapping[str, torch.Tensor],
        grads: Mapping[str, Rows],
        part: slice | None = None,
    ) -> None:
        """Adds the gradients of the leaves of `lookup` (same `part`) to the rows' accumulators `grads`.

        Features in the schema's order, samples in theirs, whatever the device: equal inputs give equal
        bits. A leaf that got no gradient adds nothing. Blocks until a device has sent its sums.

        Raises ProtocolError when a gradient or an accumulator has another shape than it must."""
        for table, dim in self.table_dims.items():
            _check_rows(table, grads.get(table), (plan.unique[table].size, dim))
        features = plan.parts(part)
        on_device: dict[str, torch.Tensor] = {}
        for name, table in self._table_of.items():
            grad_BD = _gradient(name, leaves[name], (features[name].num_samples, self.table_dims[table]))
            if grad_BD is None:
                continue
            if grad_BD.device.type == "cpu":
                add_on_host(features[name], grad_BD, grads[table])
                continue
            if table not in on_device:
                on_device[table] = grad_BD.new_zeros(grads[table].shape)
            add_with_torch(features[name], grad_BD, on_device[table])
        for table, grad_UD in on_device.items():
            grads[table][...] += grad_UD.cpu().numpy()

    def blank(self, num_samples: int = 1, device: torch.device = _CPU) -> dict[str, torch.Tensor]:
        """Leaves of zeros, float32 (B, D): inputs for a rank without samples, which must not stay out of a
        reduction. Their gradients belong to no row."""
        return {
            name: torch.zeros(num_samples, dim, device=device, requires_grad=True)
            for name, dim in self.feature_dims.items()
        }


def non_finite_rows(grad_UD: Rows) -> npt.NDArray[np.bool_]:
    """Whether each row, of C-contiguous float32 (U, D), holds an infinity or a NaN: bool (U,)."""
    bad_U = np.empty(len(grad_UD), dtype=np.bool_)
    kernels.find_non_finite(grad_UD.view(np.uint32), bad_U)
    return bad_U


def scale_rows(grads: Mapping[str, Rows], factor: float) -> None:
    """Multiplies gradients in place, in float32; a factor of 1 costs nothing."""
    if factor != 1.0:
        for grad_UD in grads.values():
            grad_UD *= np.float32(factor)


def _gradient(name: str, leaf: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor | None:
    if leaf.grad is None:
        return None
    if leaf.grad.shape != shape:
        raise ProtocolError(f"feature {name}: gradient {tuple(leaf.grad.shape)}; the part is {shape}")
    return leaf.grad.detach()


def _check_rows(table: str, rows_UD: Rows | None, shape: tuple[int, int]) -> None:
    if rows_UD is None:
        raise ProtocolError(f"table {table}: no rows for {shape[0]} ids")
    if rows_UD.shape != shape or rows_UD.dtype != np.float32 or not rows_UD.flags.c_contiguous:
        raise ProtocolError(f"table {table}: {rows_UD.dtype} rows {rows_UD.shape}; expected contiguous float32 {shape}")
