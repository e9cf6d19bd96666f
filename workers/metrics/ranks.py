"""Quality of retrieval: recall, NDCG and the mean reciprocal rank, from the rank of each sample's target."""

# N = samples

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkeep.base.arrays import Float64s, Floats, Ints


def evaluate_ranks(ranks_N: Ints, weights_N: Floats, metrics: Sequence[str]) -> dict[str, Any]:
    """Means over samples, by the metrics' names: `recall@K`, `ndcg@K` and `mrr`. Exact, in float64.

    Each sample has one right item, so its NDCG is 1 / log2(1 + rank) where the rank is at most K (Järvelin and
    Kekäläinen, 2002), and its recall is 1 there.

    Args:
        ranks_N: From 1 on; 0 = the catalogue lacks the target, which is a miss and counted in `unknown_targets`;
            -1 = the sample has no target, and does not count.
        weights_N: Empty = all 1.

    Returns:
        The metrics, `samples`, with weights their sum as `weights`, and `unknown_targets`. Without samples, or without
        weight, the metrics are None, and `note` says why."""
    weights_N, ranks_N = weights_N[ranks_N >= 0] if len(weights_N) else weights_N, ranks_N[ranks_N >= 0]
    found: dict[str, Any] = dict.fromkeys(metrics) | {"samples": len(ranks_N)}
    if len(weights_N):
        found["weights"] = float(weights_N.astype(np.float64).sum())
    if not len(ranks_N):
        found["note"] = "no samples"
    elif not found.get("weights", 1.0):
        found["note"] = f"the weights of all {len(ranks_N)} samples are 0"
    else:
        if not ranks_N.any():
            found["note"] = f"none of the {len(ranks_N)} samples has an item that the model knows"
        weights = weights_N.astype(np.float64) if len(weights_N) else None
        found |= {name: float(np.average(_gains(name, ranks_N), weights=weights)) for name in metrics}
    return found | {"unknown_targets": int((ranks_N == 0).sum())}


def _gains(metric: str, ranks_N: Ints) -> Float64s:
    """What the target of each sample adds to a metric."""
    kind, _, most = metric.partition("@")
    known_N = (ranks_N > 0) & (ranks_N <= (int(most) if most else np.inf))
    ranks_N = np.maximum(ranks_N, 1)
    gains = {"recall": np.ones(len(ranks_N)), "ndcg": 1 / np.log2(1.0 + ranks_N), "mrr": 1.0 / ranks_N}
    return np.where(known_N, gains[kind], 0.0)
