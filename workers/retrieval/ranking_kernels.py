"""Kernels of ranking: count and choose items by scores that a matrix product has made."""

# P = users of a block, M = items, J = items of a block, B = users, K = best items, N = places that are left out

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.compiling.kernels import kernel

_STEP = 256
"""Items that are compared with the worst of the best at a time, without a branch."""


@kernel("void(float32[:,::1], int64[::1], int64[::1], int64[::1], int64[::1])")
def count_ranks(scores_PM: Floats, targets_B: Ints, offsets_B1: Ints, out_N: Ints, ranks_B: Ints) -> None:
    """For each user 1 + the number of other items whose score is not below that of its target; 0 without a target.

    A score that is no number counts against the target. The items `out_N` of a user, each once, do not count."""
    for b in range(targets_B.size):
        target = targets_B[b]
        if target < 0:
            ranks_B[b] = 0
            continue
        row, bound, count = scores_PM[b], scores_PM[b, target], 0
        for m in range(row.size):
            count += not (row[m] < bound)
        for n in range(offsets_B1[b], offsets_B1[b + 1]):
            count -= out_N[n] != target and not (row[out_N[n]] < bound)
        ranks_B[b] = count


@kernel("boolean(float32[::1], int64[::1], int64, int64)")
def _is_worse(scores_K: Floats, places_K: Ints, a: int, b: int) -> bool:
    return bool(scores_K[a] < scores_K[b] or (scores_K[a] == scores_K[b] and places_K[a] > places_K[b]))


@kernel("void(float32[::1], int64[::1], int64)")
def _sink(scores_K: Floats, places_K: Ints, size: int) -> None:
    """Lets the first of a heap's `size` entries sink to where it belongs: the worst comes first."""
    at, child = 0, 1
    while child < size:
        if child + 1 < size and _is_worse(scores_K, places_K, child + 1, child):
            child += 1
        if not _is_worse(scores_K, places_K, child, at):
            return
        scores_K[at], scores_K[child] = scores_K[child], scores_K[at]
        places_K[at], places_K[child] = places_K[child], places_K[at]
        at, child = child, 2 * child + 1


@kernel("void(float32[:,::1], int64, int64[::1], int64[::1], float32[:,::1], int64[:,::1])")
def keep_best(scores_PJ: Floats, first: int, offsets_B1: Ints, out_N: Ints, scores_BK: Floats, places_BK: Ints) -> None:
    """Puts the items of a block, which begins at place `first`, into the heaps of the best ones, where they belong
    there. Blocks come in order, so that of equal scores the first place stays. Overwrites scores of `out_N`."""
    size = scores_PJ.shape[1]
    for b in range(len(scores_BK)):
        row, scores_K, places_K = scores_PJ[b], scores_BK[b], places_BK[b]
        for n in range(offsets_B1[b], offsets_B1[b + 1]):
            if first <= out_N[n] < first + size:
                row[out_N[n] - first] = -np.inf
        for start in range(0, size, _STEP):
            stop, above, worst = min(start + _STEP, size), 0, scores_K[0]
            for j in range(start, stop):
                above += row[j] > worst
            if above:
                for j in range(start, stop):
                    if row[j] > scores_K[0]:
                        scores_K[0], places_K[0] = row[j], first + j
                        _sink(scores_K, places_K, scores_K.size)


@kernel("void(float32[:,::1], int64[:,::1])")
def sort_best(scores_BK: Floats, places_BK: Ints) -> None:
    """Brings heaps into order, the best item first."""
    for b in range(len(scores_BK)):
        scores_K, places_K = scores_BK[b], places_BK[b]
        for last in range(scores_K.size - 1, 0, -1):
            scores_K[0], scores_K[last] = scores_K[last], scores_K[0]
            places_K[0], places_K[last] = places_K[last], places_K[0]
            _sink(scores_K, places_K, last)
