"""The standard error of the difference of two AUCs on the same samples. Needs scipy (the extra `report`).

DeLong, DeLong and Clarke-Pearson, "Comparing the areas under two or more correlated receiver operating characteristic
curves", Biometrics 44 (1988), in the form with midranks of Sun and Xu, "Fast implementation of DeLong's algorithm",
IEEE Signal Processing Letters 21 (2014): O(N log N) instead of a kernel for each pair of a positive and a negative."""

# N = samples, P = positives, Q = negatives

from __future__ import annotations

import math

from shardkeep.base.arrays import Bools, Float64s, Floats


def auc_difference(first_N: Floats, second_N: Floats, positive_N: Bools) -> tuple[float, float]:
    """The AUC of the first scores less that of the second, and its standard error. Ties count one half. There are at
    least two positives and two negatives."""
    pairs = zip(_placements(first_N, positive_N), _placements(second_N, positive_N), strict=True)
    of_P, of_Q = (first - second for first, second in pairs)
    return float(of_P.mean()), math.sqrt(of_P.var(ddof=1) / len(of_P) + of_Q.var(ddof=1) / len(of_Q))


def _placements(scores_N: Floats, positive_N: Bools) -> tuple[Float64s, Float64s]:
    """Of each positive the share of negatives below it, of each negative the share of positives above it."""
    from scipy.stats import rankdata

    rank_N = rankdata(scores_N)
    below_P, below_Q = (rank_N[own_N] - rankdata(scores_N[own_N]) for own_N in (positive_N, ~positive_N))
    return below_P / len(below_Q), 1.0 - below_Q / len(below_P)
