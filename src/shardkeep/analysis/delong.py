"""DeLong's test: the standard error of the difference of two AUCs on the same samples. Needs scipy (extra `report`).

DeLong, DeLong and Clarke-Pearson, "Comparing the areas under two or more correlated receiver operating characteristic
curves", Biometrics 44 (1988), in the form with midranks of Sun and Xu, "Fast implementation of DeLong's algorithm",
IEEE Signal Processing Letters 21 (2014): O(N log N) instead of a kernel for each pair of a positive and a negative."""

# N = samples, P = positives, Q = negatives

from __future__ import annotations

import math

from shardkeep.base.arrays import Bools, Float64s, Floats


def auc_difference(first_N: Floats, second_N: Floats, positive_N: Bools) -> tuple[float, float]:
    """The AUC of the first scores less that of the second, and its standard error. Ties count one half.

    `positive_N` has at least two of each kind."""
    first, second = (_placements(scores_N, positive_N) for scores_N in (first_N, second_N))
    of_positives_P, of_negatives_Q = (one - other for one, other in zip(first, second, strict=True))
    variance = of_positives_P.var(ddof=1) / len(of_positives_P) + of_negatives_Q.var(ddof=1) / len(of_negatives_Q)
    return float(of_positives_P.mean()), math.sqrt(variance)


def _placements(scores_N: Floats, positive_N: Bools) -> tuple[Float64s, Float64s]:
    """Of each positive the share of negatives below it, of each negative the share of positives above it."""
    from scipy.stats import rankdata

    of_all_N = rankdata(scores_N)
    above_P = of_all_N[positive_N] - rankdata(scores_N[positive_N])
    below_Q = of_all_N[~positive_N] - rankdata(scores_N[~positive_N])
    return above_P / len(below_Q), 1.0 - below_Q / len(above_P)
