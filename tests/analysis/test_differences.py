"""Differences of metrics: DeLong beside a transcription of the paper, a paired bootstrap for others, other rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardkeep.analysis.delong import auc_difference
from shardkeep.analysis.differences import Difference, differences
from shardkeep.base.arrays import Bools, Float64s, Floats
from shardkeep.base.errors import UserError
from shardkeep.inference.scoring import EvaluationScores
from shardkeep.workers.label_config import TaskColumn
from shardkeep.workers.metrics.quality import MetricSettings, auc
from tests.support.cases import every


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
    draw = np.random.default_rng(seed)
    positive_N = draw.random(samples) < 0.3
    shared_N, own_2N = draw.normal(size=samples), draw.normal(size=(2, samples))
    first_N, second_N = (shared_N + own_N + gain * positive_N for own_N, gain in zip(own_2N, (1.2, 1.0), strict=True))
    return (first_N, second_N, positive_N) if ties is None else (first_N.round(ties), second_N.round(ties), positive_N)


@every("ties", [None, 0])
def test_midranks_give_what_the_kernel_of_each_pair_gives(ties: int | None) -> None:
    for seed in range(5):
        first_N, second_N, positive_N = made_up(seed, 40, ties=ties)
        assert auc_difference(first_N, second_N, positive_N) == pytest.approx(by_pairs(first_N, second_N, positive_N))
        expected = auc(first_N, positive_N.astype(float)) - auc(second_N, positive_N.astype(float))
        assert auc_difference(first_N, second_N, positive_N)[0] == pytest.approx(expected, abs=1e-12)
        assert auc_difference(first_N, first_N, positive_N) == (0.0, 0.0)


def scores_of(
    logits_N: Floats,
    labels_N: Floats,
    weights_N: Floats | None = None,
    *,
    metrics: tuple[str, ...] = ("auc", "logloss"),
    numbers: bool = False,
) -> EvaluationScores:
    weights = np.empty(0, np.float32) if weights_N is None else weights_N
    asked = MetricSettings(metrics, numbers=numbers)
    return EvaluationScores(logits_N[:, None], labels_N[:, None], np.empty(0, np.int64), weights, asked)


def between(first: EvaluationScores, second: EvaluationScores) -> list[Difference]:
    return [found for _, found in differences([second, first], ["a", "b"])]


def clicks(seed: int, samples: int = 400, *, noise: float = 1.0) -> tuple[Floats, Floats]:
    """Logits of a model that is right but for noise of its own, and labels."""
    draw = np.random.default_rng(7)
    logits_N = draw.normal(size=samples)
    labels_N = (draw.random(samples) < 1 / (1 + np.exp(-logits_N))).astype(np.float32)
    return (logits_N + noise * np.random.default_rng(seed).normal(size=samples)).astype(np.float32), labels_N


def test_auc_has_the_interval_of_delong_and_logloss_that_of_a_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkeep.analysis.differences.RESAMPLES", (200, 200))
    (one_N, labels_N), (other_N, _) = clicks(1, noise=0.2), clicks(2, noise=2.0)
    found = {each.metric: each for each in between(scores_of(one_N, labels_N), scores_of(other_N, labels_N))}
    value, error = auc_difference(one_N, other_N, labels_N > 0.5)
    assert (found["auc"].value, found["auc"].by) == (value, "DeLong")
    assert (found["auc"].low, found["auc"].high) == pytest.approx(
        (value - 1.96 * error, value + 1.96 * error), abs=1e-5
    )
    logloss = found["logloss"]
    assert logloss.by == "bootstrap" and logloss.low < logloss.value < logloss.high < 0
    assert [each.texts("")[4] for each in found.values()] == ["better", "better"]


def test_the_bootstrap_s_interval_of_a_mean_is_about_that_of_its_standard_error() -> None:
    (one_N, labels_N), (other_N, _) = clicks(1), clicks(2)
    losses_2N = [np.logaddexp(0, x) - labels_N * x for x in (one_N.astype(float), other_N.astype(float))]
    error = (losses_2N[0] - losses_2N[1]).std(ddof=1) / np.sqrt(len(labels_N))
    (found,) = [d for d in between(scores_of(one_N, labels_N), scores_of(other_N, labels_N)) if d.metric == "logloss"]
    assert found.value == pytest.approx((losses_2N[0] - losses_2N[1]).mean(), abs=1e-9)
    assert (found.high - found.low) / (2 * 1.96 * error) == pytest.approx(1.0, abs=0.12)


def test_weighted_samples_have_no_delong_but_a_bootstrap_of_the_weighted_auc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkeep.analysis.differences.RESAMPLES", (50, 50))
    (one_N, labels_N), (other_N, _) = clicks(1, noise=0.2), clicks(2, noise=2.0)
    weights_N = np.where(np.arange(len(labels_N)) % 2, 1.0, 3.0).astype(np.float32)
    pair = [scores_of(logits_N, labels_N, weights_N) for logits_N in (one_N, other_N)]
    found = between(*pair)
    assert [(each.metric, each.by) for each in found] == [("auc", "bootstrap"), ("logloss", "bootstrap")]
    assert found[0].value == pytest.approx(pair[0].metrics()["auc"] - pair[1].metrics()["auc"])


def test_runs_with_other_evaluation_rows_are_refused_in_a_line() -> None:
    for rows in (399, 400):  # fewer, other labels
        with pytest.raises(UserError) as refused:
            between(scores_of(np.zeros(rows, np.float32), np.zeros(rows, np.float32)), scores_of(*clicks(1)))
        assert str(refused.value) == (
            f"a and b have other evaluation rows (400 and {rows} rows, or other labels); "
            "allowed: the same --data FILE for all"
        )


def test_all_runs_are_compared_with_the_first() -> None:
    logits, labels_N = [clicks(seed)[0] for seed in (1, 2, 3)], clicks(1)[1]
    found = differences([scores_of(each, labels_N, metrics=("auc",)) for each in logits], ["a", "b", "c"])
    assert [each.texts(pair)[:2] for pair, each in found] == [["AUC", "b - a"], ["AUC", "c - a"]]


@every(
    ("metric", "low", "high", "says"),
    [
        ("auc", 0.001, 0.003, "better"),
        ("logloss", 0.001, 0.003, "worse"),
        ("calibration", 0.001, 0.003, "higher"),
        ("auc", -0.001, 0.003, "no difference shown"),
    ],
)
def test_what_an_interval_says_depends_on_what_is_better(metric: str, low: float, high: float, says: str) -> None:
    assert Difference(metric, (low + high) / 2, low, high, "").texts("b - a")[4] == says


def test_each_resample_has_the_classes_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 rows one or two are positive, or have the second label, which some rows lack."""
    monkeypatch.setattr("shardkeep.analysis.differences.RESAMPLES", (100, 100))
    draw = np.random.default_rng(0)
    first_N, second_N = draw.normal(size=(2, 200)).astype(np.float32)
    weights_N = np.ones(200, np.float32)
    for positives in (1, 2):
        labels_N = (np.arange(200) < positives).astype(np.float32)
        pair = [replace(scores_of(each, labels_N > 0, metrics=("auc",)), weights_N=weights_N)
                for each in (first_N, second_N)]  # fmt: skip
        (found,) = [each for _, each in differences(pair, ["a", "b"])]
        assert found.by == "bootstrap" and np.isfinite([found.low, found.high]).all() and found.low < found.high
    labels_NT = np.stack([np.arange(200) % 3 == 0, np.where(np.arange(200) < 90, np.nan, np.arange(200) == 99)], axis=1)
    tasks = tuple(TaskColumn(column=name) for name in ("clicked", "bought"))
    several = [
        EvaluationScores(draw.normal(size=(200, 2)).astype(np.float32), labels_NT.astype(np.float32), np.empty(0, int),
                         np.empty(0, np.float32), MetricSettings(("auc",), tasks=tasks), ("clicked", "bought"))
        for _ in range(2)
    ]  # fmt: skip
    ends = {each.metric: (each.low, each.high) for _, each in differences(several, ["a", "b"])}
    assert ends.keys() == {"auc/clicked", "auc/bought"} and np.isfinite([*ends.values()]).all()


def test_an_interval_of_one_of_several_labels_is_that_of_the_label_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 rows hardly two have the same twelve labels."""
    monkeypatch.setattr("shardkeep.analysis.differences.RESAMPLES", (100, 100))
    draw, names, weights_N = np.random.default_rng(0), [f"l{t}" for t in range(12)], np.ones(60, np.float32)
    labels_NT, tasks = (draw.random((60, 12)) < 0.5).astype(np.float32), tuple(TaskColumn(column=n) for n in names)
    logits = draw.normal(size=(2, 60, 12)).astype(np.float32)
    asked, groups = MetricSettings(("logloss",), tasks=tasks), np.empty(0, int)
    together = [EvaluationScores(each, labels_NT, groups, weights_N, asked, names) for each in logits]
    ends = {found.metric: found[1:] for _, found in differences(together, ["a", "b"])}
    alone = [scores_of(each[:, 4], labels_NT[:, 4], weights_N, metrics=("logloss",)) for each in logits]
    assert ends["logloss/l4"] == next(differences(alone, ["a", "b"]))[1][1:] and len(ends) == 12
