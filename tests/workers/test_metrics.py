"""Quality metrics, of ranks too, against torchmetrics and definitions, and merged over workers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.metrics.quality import MetricSettings, evaluate_over_workers, evaluate_predictions
from shardkeep.workers.metrics.ranks import evaluate_ranks
from tests.support.cases import every
from tests.support.ranks import run_ranks


def over_workers(logits, labels, names, collective):
    return evaluate_over_workers(logits, labels, names=names, collective=collective)


def drawn(num_samples, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    labels = (rng.random(num_samples) < 0.3).astype(np.float32)
    logits = (rng.normal(size=num_samples) + labels - 1.0).astype(np.float32)
    return (np.round(logits, 1) if ties else logits), labels


@every("ties", [False, True], ids=["distinct", "ties"])
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


@every(
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


@every("split", [(500, 500), (1, 999), (0, 1000)], ids=str)
def test_merged_over_workers_equals_all_samples_at_one(split):
    logits, labels = drawn(1000)
    first = split[0]
    parts = [(logits[:first], labels[:first]), (logits[first:], labels[first:])]
    results = run_ranks(ThreadCollective.group(2), lambda c: over_workers(*parts[c.rank], ["label"], c))
    assert results == [evaluate_predictions(logits, labels)] * 2


@every("split", [(500, 500), (0, 1000)], ids=str)
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


def asked_for(*metrics, **settings):
    return MetricSettings(metrics=metrics, **settings)


@every("threshold", [0.2, 0.5])
def test_accuracy_precision_and_recall_are_those_of_torchmetrics(threshold):
    from torchmetrics.functional import classification as tm

    logits, labels = drawn(2000)
    asked = asked_for("accuracy", "precision", "recall", threshold=threshold)
    found = evaluate_predictions(logits, labels, asked=asked)
    p, y = torch.sigmoid(torch.from_numpy(logits).double()), torch.from_numpy(labels).long()
    for name, function in (
        ("accuracy", tm.binary_accuracy),
        ("precision", tm.binary_precision),
        ("recall", tm.binary_recall),
    ):
        assert found[name] == pytest.approx(float(function(p, y, threshold=threshold)), abs=1e-6), name


def test_errors_are_of_probabilities_or_of_values():
    from torchmetrics.functional import r2_score

    logits, labels = drawn(500)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for predictions, numbers in ((p, False), (logits.astype(np.float64), True)):
        found = evaluate_predictions(logits, labels, asked=asked_for("mse", "rmse", "mae", numbers=numbers))
        assert found["mse"] == pytest.approx(np.mean((predictions - labels) ** 2))
        assert found["rmse"] == pytest.approx(found["mse"] ** 0.5)
        assert found["mae"] == pytest.approx(np.abs(predictions - labels).mean())
        asked = replace(asked_for("mse", "r2", numbers=numbers), label_means=(0.25,) if numbers else ())
        found = evaluate_predictions(logits, labels, asked=asked)
        assert found["r2"] == pytest.approx(float(r2_score(torch.tensor(predictions), torch.tensor(labels))))
    assert found["baseline_mse"] == pytest.approx(np.mean((0.25 - labels) ** 2)) and "baseline_r2" not in found
    assert "note" not in evaluate_predictions(logits, np.full(500, 2.5), asked=asked_for("mse", numbers=True))


def test_auc_by_group_is_the_mean_over_groups_with_both_classes():
    logits, labels = drawn(3000, ties=True)
    groups = np.random.default_rng(1).integers(-5, 300, 3000)
    found = evaluate_predictions(logits, labels, groups, asked_for("gauc", group_by="user"))
    total, samples = 0.0, 0
    for group in np.unique(groups):
        part = groups == group
        if 0 < labels[part].sum() < part.sum():
            total += part.sum() * evaluate_predictions(logits[part], labels[part])["auc"]
            samples += part.sum()
    assert found["gauc"] == pytest.approx(total / samples, rel=1e-12)
    assert 0 < samples < 3000
    lonely = evaluate_predictions(logits, labels, np.arange(3000), asked_for("gauc", group_by="user"))
    assert lonely["gauc"] is None


def test_buckets_of_calibration_hold_equal_numbers_of_samples_in_order():
    logits, labels = drawn(1005)
    (buckets,) = [evaluate_predictions(logits, labels, asked=asked_for("calibration_buckets"))["calibration_buckets"]]
    assert [bucket["samples"] for bucket in buckets] == [101] * 5 + [100] * 5
    assert [bucket["prediction"] for bucket in buckets] == sorted(bucket["prediction"] for bucket in buckets)
    last = np.argsort(logits, kind="stable")[-100:]
    assert buckets[-1]["label"] == pytest.approx(labels[last].mean())


def test_what_has_no_positives_has_no_precision_and_no_recall():
    asked = asked_for("accuracy", "precision", "recall", "auc")
    found = evaluate_predictions(np.full(3, -9.0), np.zeros(3), asked=asked)
    assert (found["accuracy"], found["precision"], found["recall"], found["auc"]) == (1.0, None, None, None)
    assert found["note"] == "all 3 labels are 0; AUC needs both classes"


def test_what_both_classes_leave_undefined_says_why_too():
    labels, groups = np.array([0.0, 1.0, 1.0]), np.array([1, 2, 2])
    found = evaluate_predictions(np.full(3, -9.0), labels, asked=asked_for("auc", "precision"))
    assert found["precision"] is None and found["note"] == "no sample is predicted positive; precision needs one"
    found = evaluate_predictions(np.full(3, -9.0), labels, groups, asked=asked_for("gauc"))
    assert found["gauc"] is None and found["note"] == "no group has labels of both classes; GAUC needs one"


def test_groups_of_all_workers_are_evaluated_together():
    logits, labels = drawn(400)
    groups = np.arange(400) % 7
    asked = asked_for("gauc", "mse", group_by="user")

    def rank(collective):
        part = slice(0, 150) if collective.rank == 0 else slice(150, None)
        parts = logits[part, None], labels[part, None], groups[part]
        return evaluate_over_workers(*parts, names=["label"], collective=collective, asked=asked)

    assert run_ranks(ThreadCollective.group(2), rank) == [evaluate_predictions(logits, labels, groups, asked)] * 2


RANKS = np.array([1, 0, 3, 11, 2])
NO_WEIGHTS = np.empty(0, np.float32)
ASKED = ("recall@1", "recall@10", "ndcg@2", "ndcg@10", "mrr")


def test_metrics_are_means_of_the_gains_of_each_rank() -> None:
    found = evaluate_ranks(RANKS, NO_WEIGHTS, ASKED)
    assert found == {
        "recall@1": pytest.approx(1 / 5),
        "recall@10": pytest.approx(3 / 5),
        "ndcg@2": pytest.approx((1 + 1 / math.log2(3)) / 5),
        "ndcg@10": pytest.approx((1 + 1 / math.log2(4) + 1 / math.log2(3)) / 5),
        "mrr": pytest.approx((1 + 1 / 3 + 1 / 11 + 1 / 2) / 5),
        "samples": 5,
        "unknown_targets": 1,
    }


def test_a_sample_of_weight_3_counts_as_3() -> None:
    weights = np.array([3, 1, 0, 2, 1], np.float32)
    found, repeated = (
        evaluate_ranks(RANKS, weights, ASKED),
        evaluate_ranks(np.repeat(RANKS, weights.astype(int)), NO_WEIGHTS, ASKED),
    )
    assert [found[name] for name in ASKED] == pytest.approx([repeated[name] for name in ASKED])
    assert found["weights"] == 7.0


@every(
    ("ranks", "weights", "note"),
    [([], [], "no samples"), ([1, 2], [0, 0], "the weights of all 2 samples are 0")],
    ids=["no sample", "no weight"],
)
def test_without_samples_or_weight_no_metric_has_a_value(ranks: list[int], weights: list[int], note: str) -> None:
    found = evaluate_ranks(np.array(ranks, np.int64), np.array(weights, np.float32), ASKED)
    assert all(found[name] is None for name in ASKED) and found["note"] == note


def test_a_sample_without_a_target_does_not_count() -> None:
    ranks, weights = np.array([1, -1, 5]), np.array([1, 9, 3], np.float32)
    found = evaluate_ranks(ranks, weights, ("recall@1",))
    assert found["recall@1"] == 0.25 and found["samples"] == 2 and found["weights"] == 4.0


def test_where_no_item_is_known_a_note_says_why_all_is_0() -> None:
    found = evaluate_ranks(np.array([0, 0, -1]), np.empty(0, np.float32), ASKED)
    assert {found[name] for name in ASKED} == {0.0} and found["unknown_targets"] == 2
    assert found["note"] == "none of the 2 samples has an item that the model knows"
    assert "note" not in evaluate_ranks(np.array([0, 9]), np.empty(0, np.float32), ASKED)
