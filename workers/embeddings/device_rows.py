"""A step's rows on a device: one transfer there for all tables, one transfer of their gradients back.

What pooling.py does for one feature, for all of a plan, with torch operators. Knows no autograd.
"""
# B = samples of a part, N = ids of the batch, D = embedding dim

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.ps.jagged import JaggedRows
from shardkeep.workers.embeddings.plan import FeaturePlan, Plan
from shardkeep.workers.embeddings.pooling import add_max_with_torch, add_with_torch, pool_with_torch


def send(array: npt.NDArray[np.float32 | np.int32], device: torch.device) -> torch.Tensor:
    """A copy on the device. To a GPU it goes through pinned memory and is not waited for; torch keeps that memory until
    the copy is done, and for the next one."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())  # torch warns about read-only arrays
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, copy=True)


def pool_features(plan: Plan, rows: JaggedRows, part: slice | None, device: torch.device) -> list[torch.Tensor]:
    """The pooled rows (B, D) of each feature, computed on the device."""
    views = _views(rows, send(rows.flat, device))
    return [pool_with_torch(feature, views[feature.table]) for feature in _features(plan, part)]


def add_features(
    plan: Plan,
    grads: Mapping[str, torch.Tensor],
    part: slice | None,
    sums: JaggedRows,
    rows: Mapping[str, npt.NDArray[np.float32]],
) -> None:
    """Adds gradients of pooled rows (B, D), by feature and on one device, to the rows' on the host. Blocks. `rows`: on
    the host; needed for bags with `pooling: max`."""
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
