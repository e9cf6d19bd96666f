"""The opponents' data: a pool of ready batches of the workload as torch tensors, ids numbered over all 26 tables."""

# B = batch, I = dense inputs, F = features, N = B * F

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a spawned process inherits it
import workload

NUM_BATCHES = 64
NUM_DENSE = workload.NUM_DENSE
TABLE_SIZES = workload.TABLE_SIZES
NUM_FEATURES = len(TABLE_SIZES)
NUM_ROWS = sum(TABLE_SIZES)
OFFSETS = np.concatenate([[0], np.cumsum(TABLE_SIZES)[:-1]])
"""Where a table begins in the merged one."""

# Row-wise Adagrad, alike for all.
ROW_LR = 0.01
ROW_EPS = 1e-8
ROW_SCALE = 0.05
"""Rows begin uniform in +-ROW_SCALE."""


@dataclass(frozen=True)
class Batch:
    dense_BI: torch.Tensor
    label_B1: torch.Tensor
    merged_N: torch.Tensor
    """Ids in the merged table, sample by sample."""
    ids_FB: torch.Tensor
    """Ids in each table."""


def pool(batch: int, *, seed: int, device: str = "cpu") -> list[Batch]:
    """`NUM_BATCHES` ready batches; workers give different seeds."""
    ids = workload.draw_ids(NUM_BATCHES, seed=seed, batch=batch)
    merged = np.ascontiguousarray((ids + OFFSETS[None, :, None]).transpose(0, 2, 1)).reshape(NUM_BATCHES, -1)
    dense, label = workload.draw_dense(NUM_BATCHES, seed=seed, batch=batch)
    parts = [torch.from_numpy(part).to(device) for part in (dense, label, merged, ids)]
    return [Batch(*(part[i].clone() for part in parts)) for i in range(NUM_BATCHES)]


def row_gradients(batch: int, dim: int, *, device: str = "cpu") -> torch.Tensor:
    """What replaces the tower's gradient in W2: (N, D)."""
    return (torch.randn(batch * NUM_FEATURES, dim) * 1e-3).to(device)
