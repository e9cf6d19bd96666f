"""Quality metrics against torchmetrics, against definitions, and merged over workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.metrics.quality import evaluate_over_workers, evaluate_predictions
from tests.support.ranks import run_ranks


def over_workers(logits, labels, names, collective):
    return evaluate_over_workers(logits, labels, names=names, collective=collective)


def drawn(num_samples, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    labels = (rng.random(num_samples) < 0.3).astype(np.float32)
    logits = (rng.normal(size=num_samples) + labels - 1.0).astype(np.float32)
    return (np.round(logits, 1) if ties else logits), labels


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_auc_equals_torchmetrics(ties):
    from torchmetrics.functional.classification import binary_auroc  # here: with matplotlib, half a second

    logits, labels = drawn(5000, ties=ties)
    probabilities = torch.sigmoid(torch.from_numpy(logits).double())
    expected = float(binary_auroc(probabilities, torch.from_numpy(labels).long(), thresholds=None))
    assert evaluate_predictions(logits, labels)["auc"] == pytest.approx(expected, abs=1e-6)


def test_auc_is_the_share_of_pairs_in_the_right_order():
    logits, labels = drawn(200, ties=True)
    difference = logits[labels == 1][:, None] - logits[labels == 0][None, :]
    expected = float(((difference > 0) + 0.5 * (difference == 0)).mean())
    assert evaluate_predictions(logits, labels)["auc"] == pytest.approx(expected, abs=1e-15)


def test_auc_tells_large_logits_apart_that_are_equal_as_probabilities():
    assert evaluate_predictions(np.array([100.0, 200.0]), np.array([0.0, 1.0]))["auc"] == 1.0


def test_logloss_entropy_and_calibration_follow_their_definitions():
    logits, labels = drawn(3000)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    result = evaluate_predictions(logits, labels)
    logloss = -np.mean(np.where(labels == 1, np.log(p), np.log(1 - p)))
    rate = labels.mean(dtype=np.float64)
    assert result["logloss"] == pytest.approx(logloss, rel=1e-12)
    assert result["normalized_entropy"] == pytest.approx(
        logloss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)), rel=1e-9
    )
    assert result["calibration"] == pytest.approx(p.sum() / labels.sum(), rel=1e-9)
    assert result["samples"] == 3000 and "note" not in result


def test_predicting_the_base_rate_has_normalized_entropy_and_calibration_one():
    labels = np.array([1, 0, 0, 0], np.float32)
    result = evaluate_predictions(np.full(4, np.log(0.25 / 0.75)), labels)
    assert result["normalized_entropy"] == pytest.approx(1.0) and result["calibration"] == pytest.approx(1.0)
    assert result["auc"] == 0.5


def test_huge_logits_stay_finite():
    result = evaluate_predictions(np.array([1e4, -1e4, 1e4]), np.array([1.0, 0.0, 0.0]))
    assert result["logloss"] == pytest.approx(1e4 / 3) and result["calibration"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("logits", "labels", "note"),
    [
        ([], [], "no samples"),
        ([0.1, 0.2], [1, 1], "all 2 labels are 1; AUC needs both classes"),
        ([0.1, 0.2], [0, 0], "all 2 labels are 0; AUC needs both classes"),
        ([0.1, float("nan"), float("inf")], [0, 1, 1], "2 of 3 predictions are not finite"),
    ],
    ids=["empty", "only ones", "only zeros", "not finite"],
)
def test_a_metric_that_is_not_defined_is_none_and_says_why(logits, labels, note):
    result = evaluate_predictions(np.array(logits), np.array(labels))
    assert result["auc"] is None and result["note"] == note


@pytest.mark.parametrize("split", [(500, 500), (1, 999), (0, 1000)], ids=str)
def test_merged_over_workers_equals_all_samples_at_one(split):
    logits, labels = drawn(1000)
    first = split[0]
    parts = [(logits[:first], labels[:first]), (logits[first:], labels[first:])]
    results = run_ranks(ThreadCollective.group(2), lambda c: over_workers(*parts[c.rank], ["label"], c))
    assert results == [evaluate_predictions(logits, labels)] * 2


@pytest.mark.parametrize("split", [(500, 500), (0, 1000)], ids=str)
def test_two_labels_have_metrics_of_their_own(split):
    both = [drawn(1000, seed=seed) for seed in (1, 2)]
    logits, labels = (np.stack(columns, axis=1) for columns in zip(*both, strict=True))
    first = split[0]
    parts = [(logits[:first], labels[:first]), (logits[first:], labels[first:])]
    names = ["click", "buy"]
    results = run_ranks(ThreadCollective.group(2), lambda c: over_workers(*parts[c.rank], names, c))
    expected = {"samples": 1000}
    for name, (own_logits, own_labels) in zip(names, both, strict=True):
        metrics = evaluate_predictions(own_logits, own_labels)
        expected |= {f"{key}/{name}": value for key, value in metrics.items() if key != "samples"}
    assert results == [expected] * 2
    assert expected["auc/click"] != expected["auc/buy"]
