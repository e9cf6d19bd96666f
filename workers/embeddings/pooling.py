"""Pooling: the rows of a feature's ids made into one row per sample, and its transpose. Outside autograd.

Two forms of each: kernels on the host (for all features of a step: layer.py), torch operators where the rows are
on a device: there one transfer goes for all tables of a step, and one comes back with their gradients. Knows no
autograd; checks nothing.
"""
# B = samples (of a part), N = ids of one feature, U = unique ids of its table, D = embedding dim

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from shardkeep.base.arrays import Rows
from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.embeddings import kernels
from shardkeep.workers.embeddings.plan import FeaturePlan, Plan

_MODES = {kernels.SUM: "sum", kernels.MEAN: "mean", kernels.MAX: "max"}
_TORCH_MAX = 2  # its number in aten


def add_max_on_host(feature: FeaturePlan, rows_UD: Rows, grad: torch.Tensor, grad_UD: Rows) -> None:
    """Adds the gradient (B, D) of bags with `pooling: max` to that of the rows, in the order of samples."""
    assert feature.offsets_B1 is not None
    kernels.add_max(rows_UD, grad.contiguous().numpy(), feature.inverse_N, feature.offsets_B1, grad_UD)


def to_device(array: npt.NDArray[np.float32 | np.int32], device: torch.device) -> torch.Tensor:
    """A copy of the array on the device."""
    writeable = array if array.flags.writeable else array.copy()  # torch warns about read-only arrays
    return torch.from_numpy(writeable).to(device, copy=True)


def pool_with_torch(feature: FeaturePlan, rows_UD: torch.Tensor) -> torch.Tensor:
    """The pooled rows, float32 (B, D), computed where the rows are; unpooled (N, D)."""
    inverse_N = to_device(feature.inverse_N, rows_UD.device)
    if feature.offsets_B1 is None or feature.pooling == kernels.NONE:
        return rows_UD.index_select(0, inverse_N)
    return F.embedding_bag(
        inverse_N,
        rows_UD,
        to_device(feature.offsets_B1, rows_UD.device),
        mode=_MODES[feature.pooling],
        per_sample_weights=to_device(feature.weights_N, rows_UD.device) if feature.weights_N.size else None,
        include_last_offset=True,
    )


def add_with_torch(feature: FeaturePlan, grad_BD: torch.Tensor, grad_UD: torch.Tensor) -> None:
    """Adds the gradient of the pooled rows to that of the rows, where both are.

    By `index_put_(accumulate=True)`: on CUDA it sorts the positions first and so adds in a fixed order,
    where `index_add_` uses atomics in any order."""
    grad_ND = grad_BD
    if feature.offsets_B1 is not None and feature.pooling != kernels.NONE:
        lengths_B = to_device(np.diff(feature.offsets_B1), grad_BD.device)
        if feature.pooling == kernels.MEAN:
            grad_BD = grad_BD / lengths_B.unsqueeze(1)  # an empty bag divides by 0 and is repeated 0 times
        grad_ND = torch.repeat_interleave(grad_BD, lengths_B, dim=0, output_size=feature.inverse_N.size)
    if feature.weights_N.size:
        grad_ND = grad_ND * to_device(feature.weights_N, grad_BD.device).unsqueeze(1)
    inverse_N = to_device(feature.inverse_N, grad_BD.device).long()
    grad_UD.index_put_((inverse_N,), grad_ND, accumulate=True)


def add_max_with_torch(
    feature: FeaturePlan, rows_UD: torch.Tensor, grad_BD: torch.Tensor, grad_UD: torch.Tensor
) -> None:
    """As `add_max_on_host`, where all are."""
    assert feature.offsets_B1 is not None
    inverse_N, offsets_B1 = (to_device(array, rows_UD.device) for array in (feature.inverse_N, feature.offsets_B1))
    row_BD = torch.embedding_bag(rows_UD, inverse_N, offsets_B1, False, _TORCH_MAX, False, None, True)[3]
    filled_B = offsets_B1.diff() > 0
    row_BD = row_BD[filled_B].long()
    column_BD = torch.arange(row_BD.shape[1], device=row_BD.device).expand_as(row_BD)
    grad_UD.index_put_((row_BD, column_BD), grad_BD[filled_B], accumulate=True)


def send(array: npt.NDArray[np.float32 | np.int32], device: torch.device) -> torch.Tensor:
    """A copy on the device. To a GPU it goes through pinned memory and is not waited for; torch keeps that memory until
    the copy is done, and for the next one."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())  # torch warns about read-only arrays
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, copy=True)


def pool_features(plan: Plan, rows: JaggedRows, part: slice | None, device: torch.device) -> list[torch.Tensor]:
    """The rows (B, D) of each feature, unpooled (N, D), computed on the device."""
    views = _views(rows, send(rows.flat, device))
    return [pool_with_torch(feature, views[feature.table]) for feature in _features(plan, part)]


def add_features(
    plan: Plan,
    grads: Mapping[str, torch.Tensor],
    part: slice | None,
    sums: JaggedRows,
    rows: Mapping[str, npt.NDArray[np.float32]],
) -> None:
    """Adds gradients of what `pool_features` returns, by feature and on one device, to the rows' on the host. Blocks.
    `rows`: on the host; needed for bags with `pooling: max`."""
    device = next(iter(grads.values())).device
    flat = torch.zeros(sums.flat.size, dtype=torch.float32, device=device)
    views = _views(sums, flat)
    for name, feature in zip(plan.names, _features(plan, part), strict=True):
        if name not in grads:
            continue
        if feature.takes_max:
            table_UD = send(rows[feature.table], device)
            add_max_with_torch(feature, table_UD, grads[name], views[feature.table])
        else:
            add_with_torch(feature, grads[name], views[feature.table])
    sums.flat += flat.cpu().numpy()


def _features(plan: Plan, part: slice | None) -> list[FeaturePlan]:
    return [plan.feature(name, part) for name in plan.names]


def _views(rows: JaggedRows, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tables (U, D) in a flat tensor of its values."""
    layout = rows.layout
    parts = torch.split(flat, np.diff(layout.values_T1).tolist())
    dims = layout.catalog.dims_T.tolist()
    return {name: part.view(-1, dim) for name, part, dim in zip(layout.catalog.names, parts, dims, strict=True)}
