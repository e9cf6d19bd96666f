"""DeLong's standard error: beside a transcription of the paper, and how often its interval has the true difference."""

from __future__ import annotations

import numpy as np
import pytest

from shardkeep.analysis.delong import auc_difference
from shardkeep.base.arrays import Bools, Float64s
from shardkeep.workers.metrics.quality import auc
from tests.support.cases import every

MADE_UP = 100
BAND = (89, 100)
"""Of 100 intervals of 95 %, fewer than 89 have the true value once in 200 tries."""


def by_pairs(first_N: Float64s, second_N: Float64s, positive_N: Bools) -> tuple[float, float]:
    """The paper's formulas with its kernel for each pair of a positive and a negative: O(PQ)."""
    scores_2N = np.stack([first_N, second_N])
    above_2PQ = scores_2N[:, positive_N, None] - scores_2N[:, None, ~positive_N]
    kernel_2PQ = np.where(above_2PQ > 0, 1.0, np.where(above_2PQ == 0, 0.5, 0.0))
    of_positives_2P, of_negatives_2Q = kernel_2PQ.mean(axis=2), kernel_2PQ.mean(axis=1)
    covariance = np.cov(of_positives_2P) / positive_N.sum() + np.cov(of_negatives_2Q) / (~positive_N).sum()
    contrast = np.array([1.0, -1.0])
    aucs = kernel_2PQ.mean(axis=(1, 2))
    return float(contrast @ aucs), float(np.sqrt(contrast @ covariance @ contrast))


def made_up(seed: int, samples: int, *, ties: int | None = None) -> tuple[Float64s, Float64s, Bools]:
    """Scores of two models that share a part of their noise, and labels."""
    draw = np.random.default_rng(seed)
    positive_N = draw.random(samples) < 0.3
    shared_N, own_2N = draw.normal(size=samples), draw.normal(size=(2, samples))
    first_N, second_N = (shared_N + own_N + gain * positive_N for own_N, gain in zip(own_2N, (1.2, 1.0), strict=True))
    return (first_N, second_N, positive_N) if ties is None else (first_N.round(ties), second_N.round(ties), positive_N)


@every("ties", [None, 0], ids=["no ties", "many ties"])
def test_midranks_give_what_the_kernel_of_each_pair_gives(ties: int | None) -> None:
    for seed in range(5):
        first_N, second_N, positive_N = made_up(seed, 40, ties=ties)
        assert auc_difference(first_N, second_N, positive_N) == pytest.approx(by_pairs(first_N, second_N, positive_N))


def test_the_difference_is_that_of_the_metric() -> None:
    first_N, second_N, positive_N = made_up(3, 500, ties=1)
    expected = auc(first_N, positive_N.astype(float)) - auc(second_N, positive_N.astype(float))
    assert auc_difference(first_N, second_N, positive_N)[0] == pytest.approx(expected, abs=1e-12)


def test_a_model_beside_itself_differs_by_nothing_for_sure() -> None:
    first_N, _, positive_N = made_up(1, 100)
    assert auc_difference(first_N, first_N, positive_N) == (0.0, 0.0)


def test_about_95_of_100_intervals_have_the_true_difference() -> None:
    true = np.mean([auc_difference(*made_up(1000 + seed, 20_000))[0] for seed in range(20)])
    inside = 0
    for seed in range(MADE_UP):
        difference, error = auc_difference(*made_up(seed, 300))
        inside += abs(difference - true) <= 1.96 * error
    assert BAND[0] <= inside <= BAND[1]
