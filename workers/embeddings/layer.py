"""The embedding layer of a worker: which rows a batch needs, those rows pooled into the model's inputs, and
the gradients of these inputs summed back to rows. Outside autograd and outside DDP; holds no row itself.

A step goes `plan` (any thread, no torch) -> pull -> `lookup` -> forward, backward -> `collect` -> push.
"""
# B = samples, N = ids of one table or feature, U = unique ids of one table, D = embedding dim

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.base.array_kernels import all_finite
from shardkeep.base.arrays import Floats, Int32s, Ints, Rows
from shardkeep.base.errors import ConfigError, ProtocolError
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Catalog, JaggedRows
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.schema import Schema
from shardkeep.workers.embeddings import kernels
from shardkeep.workers.embeddings.inputs import Inputs
from shardkeep.workers.embeddings.plan import Plan, Planner
from shardkeep.workers.embeddings.sequence import Sequence, SequenceShape
from shardkeep.workers.embeddings.transfers import to_host

_CPU = torch.device("cpu")


class Embeddings:
    """Plans, looks up and collects for one schema. Stateless between calls, so any thread may call."""

    def __init__(self, schema: Schema, tables: Mapping[str, TableSpec]) -> None:
        """Raises ConfigError when a feature names a table that is not there."""
        for feature in schema.looked_up:
            if feature.table not in tables:
                raise ConfigError(
                    f"feature {feature.name} names table {feature.table}; known: {', '.join(sorted(tables))}"
                )
        self.table_of = {feature.name: feature.table for feature in schema.looked_up}
        self._catalog = Catalog(list(tables.values()))
        self._planner = Planner(schema, self._catalog)
        self.table_dims = {table: tables[table].dim for table in schema.tables()}
        """Values per row of each table, in the order of first use."""
        self._dims = {name: self.table_dims[table] for name, table in self.table_of.items()}
        self._dims_F = list(self._dims.values())
        self._widths_F = np.array(self._dims_F, dtype=np.int64)
        self.feature_dims = {feature.name: self._dims[feature.name] for feature in schema.features}
        """Values per sample that the model gets for each feature."""
        self.sequences = {
            group.name: SequenceShape(
                {column.name: self._dims[column.name] for column in group.ids}, len(group.numbers), group.max_length
            )
            for group in schema.sequences
        }
        """What the model gets for each group of lists."""
        self._unpooled = any(feature.pooling == "none" for feature in schema.looked_up)
        self._max_features = frozenset(feature.name for feature in schema.features if feature.pooling == "max")
        self.frozen_features = frozenset(f for f, table in self.table_of.items() if tables[table].freeze)
        """Features whose table's rows never change."""

    def plan(self, batch: Batch) -> Plan:
        """Deduplicates the batch's ids per table. CPU only and without the GIL in its loops: meant for a
        prefetching thread. Raises DataError when a feature's arrays do not fit each other or the batch."""
        return self._planner.plan(batch)

    def plan_keyed(self, values_N: Ints, lengths_FB: Int32s) -> Plan:
        """As `plan`, of all features' ids in one array. Raises as `Planner.plan_keyed`."""
        return self._planner.plan_keyed(values_N, lengths_FB)

    @staticmethod
    def plan_together(blocks: Iterable[tuple[Embeddings, Batch]]) -> list[Plan]:
        """As `plan`, of several batches of the same tables, whose plans need the same unique rows."""
        return Planner.plan_together([(embeddings._planner, batch) for embeddings, batch in blocks])

    def lookup(
        self,
        plan: Plan,
        rows: Mapping[str, Rows],
        part: slice | None = None,
        device: torch.device = _CPU,
    ) -> dict[str, torch.Tensor]:
        """The rows of the model's inputs: per feature a fresh leaf, float32 (B, D), that requires grad unless its table
        is frozen; per column of a sequence (N, D). See `inputs`.

        Args:
            rows: per table the values of the plan's unique ids, float32 (U, D), C-contiguous; only read.
            part: range of samples of a micro-batch; None = all.
            device: where the leaves live; all of them travel there in one copy.

        Raises ProtocolError when rows are missing or have another shape."""
        pooled, frozen = self._pool(plan, self._fitting(plan, rows), part, device), self.frozen_features
        return {name: leaf.requires_grad_(name not in frozen) for name, leaf in zip(self.table_of, pooled, strict=True)}

    def lookup_joined(self, plan: Plan, rows: JaggedRows, device: torch.device) -> torch.Tensor:
        """As `lookup`, where every feature is pooled: all features side by side in one leaf (B, sum of D)."""
        host = torch.empty(plan.num_samples, sum(self._dims_F), pin_memory=device.type == "cuda")
        places = _side_by_side(host, self._widths_F)
        kernels.pool_features(*self._arrays(plan), self._fitting(plan, rows).flat, 0, plan.num_samples, *places)
        return host.to(device, non_blocking=True).requires_grad_()

    def _fitting(self, plan: Plan, rows: Mapping[str, Rows]) -> JaggedRows:
        """The rows in the plan's layout. Raises ProtocolError."""
        if isinstance(rows, JaggedRows) and rows.layout.same(plan.unique.layout):
            return rows
        for table, dim in self.table_dims.items():
            _check_rows(table, rows.get(table), (plan.unique[table].size, dim))
        return JaggedRows.of_arrays(plan.unique, {table: rows[table] for table in self.table_dims})

    def inputs(self, plan: Plan, leaves: Mapping[str, torch.Tensor], part: slice | None = None) -> Inputs:
        """What the model gets of the leaves of `lookup` (same `part`): features as they are, the columns of each
        sequence as a Sequence under its name."""
        if not self.sequences:
            return leaves
        inputs: dict[str, torch.Tensor | Sequence] = {name: leaves[name] for name in self.feature_dims}
        for name, shape in self.sequences.items():
            ids = {column: leaves[column] for column in shape.ids}
            first = next(iter(ids))
            device, offsets_B1 = ids[first].device, plan.offsets_of(first, part)
            numbers_NS = torch.from_numpy(plan.numbers[name][offsets_B1[0] : offsets_B1[-1]])
            lengths_B = torch.from_numpy(np.diff(offsets_B1).astype(np.int64))
            inputs[name] = Sequence(ids, numbers_NS.to(device), lengths_B.to(device), shape.max_length)
        return inputs

    def _pool(self, plan: Plan, rows: JaggedRows, part: slice | None, device: torch.device) -> list[torch.Tensor]:
        """The rows (B, D) of each feature, unpooled (N, D), pooled on the host: views of one fresh array."""
        start, stop = plan.range_of(part)
        heights_F = self._heights(plan, part)
        sizes_F = [height * dim for height, dim in zip(heights_F, self._dims_F, strict=True)]
        # torch keeps pinned memory until its copy is done, and for the next one
        host = torch.empty(sum(sizes_F), dtype=torch.float32, pin_memory=device.type == "cuda")
        addresses_F = host.data_ptr() + 4 * (np.cumsum(sizes_F, dtype=np.int64) - np.array(sizes_F, dtype=np.int64))
        kernels.pool_features(*self._arrays(plan), rows.flat, start, stop, addresses_F, self._widths_F)
        pooled = host.to(device, non_blocking=True)
        if len(set(self._dims_F)) == 1 and not self._unpooled:
            return list(pooled.view(len(self._dims_F), stop - start, self._dims_F[0]).unbind())
        parts = zip(torch.split(pooled, sizes_F), heights_F, self._dims_F, strict=True)
        return [values.view(height, dim) for values, height, dim in parts]

    def _heights(self, plan: Plan, part: slice | None) -> list[int]:
        """The rows of each feature's leaf."""
        if self._unpooled:
            return plan.heights(part)
        start, stop = plan.range_of(part)
        return [stop - start] * len(self._dims_F)

    def _arrays(self, plan: Plan) -> tuple[Ints, Int32s, Int32s, Floats, Ints, Ints]:
        """A plan as kernels take it."""
        values_T1, dims_T = plan.unique.layout.values_T1, self._catalog.dims_T
        return plan.features_FK, plan.inverse_N, plan.offsets, plan.weights, values_T1, dims_T

    def collect(
        self,
        plan: Plan,
        leaves: Mapping[str, torch.Tensor],
        grads: JaggedRows,
        part: slice | None = None,
        rows: Mapping[str, Rows] | None = None,
    ) -> None:
        """Adds the gradients of the leaves of `lookup` (same `part`) to the rows' accumulators `grads`.

        Adds in the schema's order, `pooling: max` last, and samples in their order, on every device: equal inputs give
        equal bits. A leaf without a gradient adds nothing. `pooling: max` needs the `rows` of `lookup`. Blocks until a
        device has sent its sums.

        Raises ProtocolError for a gradient or an accumulator of the wrong shape."""
        on_host = self._gradients(plan, leaves, part)  # keeps the memory that the addresses point to
        addresses_F = np.array([on_host[f].data_ptr() if f in on_host else 0 for f in self._dims], dtype=np.int64)
        self._add(plan, addresses_F, self._widths_F, on_host, grads, part, rows)

    def collect_joined(self, plan: Plan, leaf: torch.Tensor, grads: JaggedRows, rows: Mapping[str, Rows]) -> None:
        """As `collect`, of the leaf of `lookup_joined`. Without a gradient it adds nothing."""
        if (grad := leaf.grad) is None:
            return
        _check_gradient("of all", grad, (plan.num_samples, sum(self._dims_F)))
        host = grad.contiguous() if grad.is_cpu else to_host([grad])[0]
        on_host = (
            dict(zip(self._dims, torch.split(host, self._dims_F, dim=1), strict=True)) if self._max_features else {}
        )
        self._add(plan, *_side_by_side(host, self._widths_F), on_host, grads, None, rows)

    def _add(
        self,
        plan: Plan,
        addresses_F: Ints,
        widths_F: Ints,
        on_host: Mapping[str, torch.Tensor],
        grads: JaggedRows,
        part: slice | None,
        rows: Mapping[str, Rows] | None,
    ) -> None:
        """Adds the gradients at the addresses; those of `pooling: max`, last, from `on_host`."""
        if not grads.layout.same(plan.unique.layout):
            raise ProtocolError("the accumulators are of another plan, not JaggedRows.zeros(plan.unique)")
        maxima = dict[str, torch.Tensor]()
        for f, name in enumerate(self._dims) if self._max_features else ():
            if name in self._max_features and name in on_host and plan.features_FK[f, kernels.OFFSETS_AT] >= 0:
                maxima[name], addresses_F[f] = on_host[name].contiguous(), 0
        if addresses_F.any():
            kernels.add_features(*self._arrays(plan), addresses_F, widths_F, *plan.range_of(part), grads.flat)
        for name, grad in maxima.items():
            feature = plan.feature(name, part)
            assert feature.offsets_B1 is not None
            table_UD = _given(rows)[feature.table]
            kernels.add_max(table_UD, grad.numpy(), feature.inverse_N, feature.offsets_B1, grads[feature.table])

    def _gradients(self, plan: Plan, leaves: Mapping[str, torch.Tensor], part: slice | None) -> dict[str, torch.Tensor]:
        """The gradients that the leaves have, on the host, C-contiguous. Raises ProtocolError for a wrong shape."""
        found = dict[str, torch.Tensor]()
        for (name, dim), height in zip(self._dims.items(), self._heights(plan, part), strict=True):
            if (grad := leaves[name].grad) is not None:
                _check_gradient(name, grad, (height, dim))
                found[name] = grad.contiguous() if grad.is_cpu else grad
        on_device = {name: grad for name, grad in found.items() if not grad.is_cpu}
        return found | dict(zip(on_device, to_host(list(on_device.values())), strict=True)) if on_device else found


def non_finite_rows(grad_UD: Rows) -> npt.NDArray[np.bool_]:
    """Whether each row, of C-contiguous float32 (U, D), holds an infinity or a NaN: bool (U,)."""
    bad_U = np.empty(len(grad_UD), dtype=np.bool_)
    kernels.find_non_finite(grad_UD.view(np.uint32), bad_U)
    return bad_U


def scale_rows(grads: JaggedRows, factor: float) -> None:
    """Multiplies gradients in place, in float32; a factor of 1 costs nothing."""
    if factor != 1.0:
        grads.flat *= np.float32(factor)


def all_finite_rows(grads: JaggedRows) -> bool:
    """Whether no row holds an infinity or a NaN."""
    return bool(all_finite(grads.flat.view(np.uint32)))


def _side_by_side(host: torch.Tensor, widths_F: Ints) -> tuple[Ints, Ints]:
    """The address of each feature in a matrix (B, sum of D), and the matrix's width for each."""
    columns_F = np.cumsum(widths_F) - widths_F
    return host.data_ptr() + 4 * columns_F, np.full_like(columns_F, host.shape[1])


def _given(rows: Mapping[str, Rows] | None) -> Mapping[str, Rows]:
    if rows is None:
        raise ProtocolError("collect: a feature has pooling: max, so the rows of lookup must be given")
    return rows


def _check_gradient(feature: str, grad: torch.Tensor, shape: tuple[int, int]) -> None:
    if grad.shape != shape or grad.dtype is not torch.float32:
        form = f"{grad.dtype} gradient {tuple(grad.shape)}"
        raise ProtocolError(f"feature {feature}: {form}; the part is torch.float32 {shape}")


def _check_rows(table: str, rows_UD: Rows | None, shape: tuple[int, int]) -> None:
    if rows_UD is None:
        raise ProtocolError(f"table {table}: no rows for {shape[0]} ids")
    if rows_UD.shape != shape or rows_UD.dtype != np.float32 or not rows_UD.flags.c_contiguous:
        raise ProtocolError(f"table {table}: {rows_UD.dtype} rows {rows_UD.shape}; expected contiguous float32 {shape}")
