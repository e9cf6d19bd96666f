"""The two workloads of the benchmarks: W1 with the DLRM tower, W2 pulls and pushes alone. Data ready in memory.

26 tables of the Criteo-Kaggle cardinalities (Display Advertising Challenge) capped at 1 M, one id per feature,
Zipf 1.05 over a fixed random popularity order, 13 dense columns, batch 2048.
"""
# B = batch, F = features

from __future__ import annotations

import numpy as np

KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
    5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
TABLE_SIZES = tuple(min(size, 1_000_000) for size in KAGGLE)
NUM_DENSE = 13
BATCH = 2048
ZIPF = 1.05


def draw_ids(num_batches: int, *, seed: int, batch: int = BATCH, sizes: tuple[int, ...] = TABLE_SIZES) -> np.ndarray:
    """Ids, int64 (num_batches, F, B): exact Zipf by inverse CDF, each table's popularity order a fixed permutation."""
    rng = np.random.default_rng(seed)
    ids = np.empty((num_batches, len(sizes), batch), np.int64)
    for f, size in enumerate(sizes):
        cdf = np.cumsum(1.0 / np.arange(1, size + 1) ** ZIPF)
        ranks = np.searchsorted(cdf, rng.random((num_batches, batch)) * cdf[-1])
        ids[:, f] = np.random.default_rng(1000 + f).permutation(size)[np.minimum(ranks, size - 1)]
    return ids


def draw_dense(num_batches: int, *, seed: int, batch: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Dense inputs, float32 (num_batches, B, 13), and labels, float32 (num_batches, B, 1)."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((num_batches, batch, NUM_DENSE)).astype(np.float32)
    return dense, (rng.random((num_batches, batch, 1)) < 0.25).astype(np.float32)
