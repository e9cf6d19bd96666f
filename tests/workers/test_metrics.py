"""Quality metrics, of ranks too: against definitions, weighted, merged over workers, in bins; the best evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardkeep.base.errors import ConfigError
from shardkeep.workers.collectives.collective import Collective, Solo, ThreadCollective
from shardkeep.workers.config import METRICS, EarlyStoppingConfig, PlateauConfig
from shardkeep.workers.evaluation.history import EvaluationHistory
from shardkeep.workers.metrics.binned import BinnedScores
from shardkeep.workers.metrics.quality import MetricSettings, evaluate_over_workers, evaluate_predictions
from shardkeep.workers.metrics.ranks import evaluate_ranks
from tests.support.cases import every
from tests.support.ranks import run_ranks

CLASSES = MetricSettings(tuple(sorted(METRICS.keys() - {"calibration_buckets"})), 0.3, "user")
NUMBERS = MetricSettings(("mse", "rmse", "mae"), numbers=True)


def asked_for(*metrics: str, **settings: Any) -> MetricSettings:
    return MetricSettings(metrics=metrics, **settings)


def drawn(count: int = 2000, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Logits with ties, labels, groups, and weights, a tenth of them 0."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(count) < 0.3).astype(np.float32)
    logits = np.round(rng.normal(size=count) + labels - 1.0, 1).astype(np.float32)
    weights = rng.lognormal(0, 2, count) * (rng.random(count) < 0.9)
    return logits, labels, rng.integers(0, count // 8, count), weights.astype(np.float32)


def auc_of_pairs(logits: Any, labels: Any, weights: Any) -> float:
    """The share of the pairs' weights in the right order."""
    positive = labels == 1
    difference = logits[positive][:, None] - logits[~positive][None, :]
    pairs = weights[positive].astype(np.float64)[:, None] * weights[~positive][None, :]
    return float((pairs * ((difference > 0) + 0.5 * (difference == 0))).sum() / pairs.sum())


def test_auc_is_the_share_of_the_pairs_weights_in_the_right_order() -> None:
    logits, labels, _, weights = drawn(400)
    found, plain = (evaluate_predictions(logits, labels, weights_N=w)["auc"] for w in (weights, None))
    assert found == pytest.approx(auc_of_pairs(logits, labels, weights), abs=1e-13)
    assert plain == pytest.approx(auc_of_pairs(logits, labels, np.ones(400)), abs=1e-15)
    assert abs(found - plain) > 1e-3
    distinct = np.random.default_rng(1).permutation(400).astype(np.float32)
    found = evaluate_predictions(distinct, labels)["auc"]
    assert found == pytest.approx(auc_of_pairs(distinct, labels, np.ones(400)), abs=1e-15)
    large = evaluate_predictions(np.array([100.0, 200.0]), np.array([0.0, 1.0]))
    assert large["auc"] == 1.0, "equal as probabilities"


@every("weighted", [False, True])
@every("threshold", [0.2, 0.5])
def test_means_follow_their_definitions(weighted: bool, threshold: float) -> None:
    logits, labels, groups, weights = drawn()
    w = weights.astype(np.float64) if weighted else np.ones(2000)
    x, y = logits.astype(np.float64), labels.astype(np.float64)
    p, rate = 1 / (1 + np.exp(-x)), np.average(y, weights=w)
    loss = np.average(-np.where(y == 1, np.log(p), np.log(1 - p)), weights=w)
    called = p >= threshold
    expected = {
        "logloss": loss,
        "normalized_entropy": loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)),
        "calibration": (w * p).sum() / (w * y).sum(),
        "accuracy": np.average(called == y, weights=w),
        "precision": w[called & (y == 1)].sum() / w[called].sum(),
        "recall": w[called & (y == 1)].sum() / w[y == 1].sum(),
        "mse": np.average((p - y) ** 2, weights=w),
        "rmse": np.average((p - y) ** 2, weights=w) ** 0.5,
        "mae": np.average(abs(p - y), weights=w),
    }
    asked, given = replace(CLASSES, threshold=threshold), weights if weighted else None
    found = evaluate_predictions(logits, labels, groups, asked, given)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert found["samples"] == 2000 and "note" not in found and ("weights" in found) == weighted
    if weighted:
        scaled = evaluate_predictions(logits, labels, groups, asked, weights * np.float32(2.0**-40))
        assert scaled == pytest.approx(found | {"weights": scaled["weights"]}, rel=1e-12)


def test_errors_are_of_probabilities_or_of_values_and_stay_finite() -> None:
    logits, labels, _, _ = drawn(500)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for predictions, numbers in ((p, False), (logits.astype(np.float64), True)):
        asked = asked_for("mse", "rmse", "mae", "r2", numbers=numbers)
        found = evaluate_predictions(logits, labels, asked=replace(asked, label_means=(0.25,)) if numbers else asked)
        assert found["mse"] == pytest.approx(np.mean((predictions - labels) ** 2))
        assert found["rmse"] == pytest.approx(found["mse"] ** 0.5)
        assert found["mae"] == pytest.approx(np.abs(predictions - labels).mean())
        assert found["r2"] == pytest.approx(1.0 - np.mean((predictions - labels) ** 2) / labels.astype(float).var())
    assert found["baseline_mse"] == pytest.approx(np.mean((0.25 - labels) ** 2)) and "baseline_r2" not in found
    assert "note" not in evaluate_predictions(logits, np.full(500, 2.5), asked=asked_for("mse", numbers=True))
    base_rate = evaluate_predictions(np.full(4, np.log(0.25 / 0.75)), np.array([1, 0, 0, 0], np.float32))
    assert base_rate["normalized_entropy"] == pytest.approx(1.0) == base_rate["calibration"] and base_rate["auc"] == 0.5
    huge = evaluate_predictions(np.array([1e4, -1e4, 1e4]), np.array([1.0, 0.0, 0.0]))
    assert huge["logloss"] == pytest.approx(1e4 / 3) and huge["calibration"] == pytest.approx(2.0)


@every("weighted", [False, True])
def test_auc_by_group_is_the_mean_over_groups_with_both_classes_by_their_weight(weighted: bool) -> None:
    logits, labels, groups, weights = drawn()
    given = weights if weighted else np.ones(2000, np.float32)
    total, summed = 0.0, 0.0
    for group in np.unique(groups):
        part = groups == group
        if (own := evaluate_predictions(logits[part], labels[part], weights_N=given[part])["auc"]) is not None:
            total += own * float(given[part].sum())
            summed += float(given[part].sum())
    found = evaluate_predictions(logits, labels, groups, CLASSES, given if weighted else None)
    assert found["gauc"] == pytest.approx(total / summed) and 0 < summed < given.sum()
    assert evaluate_predictions(logits, labels, np.arange(2000), CLASSES)["gauc"] is None


def test_buckets_hold_equal_numbers_of_rows_in_order_and_weighted_means() -> None:
    logits, labels, _, weights = drawn(1005)
    order, asked = np.argsort(logits, kind="stable"), asked_for("calibration_buckets")
    last = order[-100:]
    buckets = evaluate_predictions(logits, labels, asked=asked)["calibration_buckets"]
    assert [bucket["samples"] for bucket in buckets] == [101] * 5 + [100] * 5
    assert [bucket["prediction"] for bucket in buckets] == sorted(bucket["prediction"] for bucket in buckets)
    assert buckets[-1]["label"] == pytest.approx(labels[last].mean())
    weights[order[:101]] = 0.0
    buckets = evaluate_predictions(logits, labels, asked=asked, weights_N=weights)["calibration_buckets"]
    assert [bucket["samples"] for bucket in buckets] == [101] * 4 + [100] * 5  # the first weighs nothing
    assert buckets[-1]["label"] == pytest.approx(np.average(labels[last], weights=weights[last].astype(np.float64)))


# What is not defined


FOUR, BOTH = [0.1, 0.2, 0.3, 0.1], [0, 0, 1, 1]
NAN, INF = float("nan"), float("inf")


@every(
    ("logits", "labels", "weights", "note", "defined"),
    [
        ([], [], None, "no samples", ""),
        ([0.1, 0.2], [1, 1], None, "all 2 labels are 1; AUC needs both classes", "calibration logloss"),
        ([0.1, 0.2], [0, 0], None, "all 2 labels are 0; AUC needs both classes", "logloss"),
        ([0.1, NAN, INF], [0, 1, 1], None, "2 of 3 predictions are not finite", ""),
        (FOUR, BOTH, [0, 0, 0, 0], "the weights of all 4 samples are 0", ""),
        (FOUR, BOTH, [1, 2, 0, 0], "all 2 labels whose weight is above 0 are 0; AUC needs both classes", "logloss"),
        (FOUR, BOTH, [0, 0, 3, 0], "all 1 labels whose weight is above 0 are 1; AUC needs both classes",
         "calibration logloss"),
        (FOUR, BOTH, [1e-38, 1e38, 1e38, 1e-38], None, "auc calibration logloss normalized_entropy"),  # far apart
        (FOUR, BOTH, [1e-38, 1e-38, 1e38, 1e38], None, "auc calibration logloss"),  # a class that hardly weighs
    ],
)  # fmt: skip
def test_a_metric_that_is_not_defined_is_none_and_says_why(
    logits: list[float], labels: list[int], weights: list[float] | None, note: str | None, defined: str
) -> None:
    weights_N = None if weights is None else np.array(weights, np.float32)
    found = evaluate_predictions(np.array(logits), np.array(labels), weights_N=weights_N)
    assert found.get("note") == note
    names = ("auc", "calibration", "logloss", "normalized_entropy")
    assert [name for name in names if found[name] is not None] == defined.split()
    if weights is not None:
        of_numbers = evaluate_predictions(np.array(logits), np.array(labels), asked=NUMBERS, weights_N=weights_N)
        assert (of_numbers["mse"] is None) == (not any(weights))


def test_what_has_no_predicted_positive_has_no_precision_and_says_why() -> None:
    asked, logits = asked_for("accuracy", "precision", "recall", "auc"), np.full(3, -9.0)
    found = evaluate_predictions(logits, np.zeros(3), asked=asked)
    assert (found["accuracy"], found["precision"], found["recall"], found["auc"]) == (1.0, None, None, None)
    assert found["note"] == "all 3 labels are 0; AUC needs both classes"
    labels, groups = np.array([0.0, 1.0, 1.0]), np.array([1, 2, 2])
    found = evaluate_predictions(logits, labels, asked=asked_for("auc", "precision"))
    assert found["precision"] is None and found["note"] == "no sample is predicted positive; precision needs one"
    found = evaluate_predictions(logits, labels, groups, asked=asked_for("gauc"))
    assert found["gauc"] is None and found["note"] == "no group has labels of both classes; GAUC needs one"


# Merged over workers, and in bins


@every(
    ("split", "names", "weighted"),
    [(500, ["click"], True), (1, ["click"], False), (0, ["click", "buy"], True), (500, ["click", "buy"], False)],
)
def test_samples_of_all_workers_are_evaluated_together(split: int, names: list[str], weighted: bool) -> None:
    logits, labels, groups, weights = drawn(1000)
    columns = [(logits, labels), drawn(1000, seed=2)[:2]][: len(names)]
    matrices = [np.stack(each, axis=1) for each in zip(*columns, strict=True)]

    def rank(collective: Collective) -> dict[str, Any]:
        own = slice(0, split) if collective.rank == 0 else slice(split, None)
        parts = [values[own] for values in (*matrices, groups, *([weights] if weighted else []))]
        return evaluate_over_workers(*parts, names=names, collective=collective, asked=CLASSES)

    alone = [evaluate_predictions(*column, groups, CLASSES, weights if weighted else None) for column in columns]
    expected = alone[0]
    if len(names) == 2:
        expected = {k: v for k, v in alone[0].items() if k in ("samples", "weights")}
        for name, metrics in zip(names, alone, strict=True):
            expected |= {f"{key}/{name}": value for key, value in metrics.items() if key not in expected}
        assert expected["auc/click"] != expected["auc/buy"]
    assert run_ranks(ThreadCollective.group(2), rank) == [expected] * 2


@every("asked", [MetricSettings(), NUMBERS], ids=["classes", "numbers"])
def test_metrics_in_bins_are_weighted_too(asked: MetricSettings) -> None:
    logits, labels, _, weights = drawn(20_000)
    weights *= 1 + 3 * labels
    scores = BinnedScores(["click"], numbers=asked.numbers)
    for part in np.array_split(np.arange(20_000), 7):
        scores.add(logits[part, None], labels[part, None], weights[part])
    exact = evaluate_predictions(logits, labels, None, asked, weights)
    assert asked.numbers or exact["unweighted_calibration"] > 1.1 * exact["calibration"]
    del exact["weights"]
    assert scores.total(Solo()) == pytest.approx(exact, abs=1e-5)
    nothing = BinnedScores(["click"], numbers=asked.numbers)
    nothing.add(logits[:9, None], labels[:9, None], np.zeros(9, np.float32))
    assert nothing.total(Solo()) == dict.fromkeys(asked.metrics) | {"samples": 9}


@every("numbers", [False, True], ids=["classes", "numbers"])
def test_bins_of_a_version_without_weights_are_taken_as_they_were_meant(numbers: bool) -> None:
    logits, labels, _, _ = drawn()
    scores, resumed = (BinnedScores(["click"], numbers=numbers) for _ in range(2))
    scores.add(logits[:, None], labels[:, None])
    for lacks in ([7, 8, 9], [8, 9]):  # the sum of weights, those without them
        resumed.load([torch.from_numpy(np.delete(scores.state().numpy(), lacks, axis=-1))])
        assert resumed.total(Solo()) == scores.total(Solo())


# Of ranks

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
    weights = np.array([3, 1, 0, 2, 1], np.float32)
    weighted = evaluate_ranks(RANKS, weights, ASKED)
    repeated = evaluate_ranks(np.repeat(RANKS, weights.astype(int)), NO_WEIGHTS, ASKED)
    assert [weighted[name] for name in ASKED] == pytest.approx([repeated[name] for name in ASKED])
    assert weighted["weights"] == 7.0


def test_a_sample_without_a_target_does_not_count_and_one_of_an_unknown_item_is_a_miss() -> None:
    found = evaluate_ranks(np.array([1, -1, 5]), np.array([1, 9, 3], np.float32), ("recall@1",))
    assert found["recall@1"] == 0.25 and found["samples"] == 2 and found["weights"] == 4.0
    found = evaluate_ranks(np.array([0, 0, -1]), NO_WEIGHTS, ASKED)
    assert {found[name] for name in ASKED} == {0.0} and found["unknown_targets"] == 2
    assert found["note"] == "none of the 2 samples has an item that the model knows"
    assert "note" not in evaluate_ranks(np.array([0, 9]), NO_WEIGHTS, ASKED)
    for ranks, weights, note in (([], [], "no samples"), ([1, 2], [0, 0], "the weights of all 2 samples are 0")):
        found = evaluate_ranks(np.array(ranks, np.int64), np.array(weights, np.float32), ASKED)
        assert all(found[name] is None for name in ASKED) and found["note"] == note


# The best evaluation and early stopping, by hand-made evaluations


def best_of(*values: float | None, **settings: Any) -> EvaluationHistory:
    metric = settings.get("metric", "auc")
    best = EvaluationHistory(EarlyStoppingConfig.model_validate(settings))
    for at, value in enumerate(values):
        best.add(10 * (at + 1), {metric: value})
    return best


@every(
    ("best", "step", "ends"),
    [
        (best_of(), None, False),
        (best_of(0.6), 10, False),
        (best_of(0.6, 0.7, 0.69), 20, False),
        (best_of(0.6, 0.7, 0.69, 0.7), 20, True),  # two are not better
        (best_of(0.6, 0.5, 0.61, 0.6), 30, False),
        (best_of(0.6, 0.604, 0.608, min_delta=0.005), 30, False),
        (best_of(0.6, 0.604, 0.604, min_delta=0.005), 10, True),
        (best_of(0.5, 0.4, 0.45, 0.41, metric="logloss"), 20, True),  # less is better
        (best_of(0.5, 0.4, 0.45, metric="logloss", patience=1), 20, True),
    ],
)
def test_the_best_evaluation_and_whether_the_job_ends(best: EvaluationHistory, step: int | None, ends: bool) -> None:
    assert (best.step, best.ends) == (step, ends)


@every("metric", ["auc", "auc/like"])
@every("key", ["early_stopping", "plateau"])
def test_a_watched_metric_that_is_undefined_is_an_error_at_once_that_names_it_and_the_cause(
    key: str, metric: str
) -> None:
    stopping, plateau = EarlyStoppingConfig.model_validate({"metric": metric}), PlateauConfig(metric=metric)
    best = EvaluationHistory(stopping) if key == "early_stopping" else EvaluationHistory(None, plateau)
    best.add(10, {metric: 0.6, metric.replace("auc", "logloss"): None})
    with pytest.raises(ConfigError) as caught:
        note = metric.replace("auc", "note")
        best.add(1020, {metric: None, note: "all 9 labels are 0; AUC needs both classes"})
    assert str(caught.value) == (
        f"train.{key}.metric: {metric} is undefined after 1,020 steps (all 9 labels are 0; AUC needs both classes); "
        "allowed: another metric, or evaluation data that define it"
    )


def test_a_step_that_is_evaluated_again_counts_once_and_a_job_that_goes_back_forgets() -> None:
    best = best_of(0.6, 0.5, 0.4)
    assert best.ends
    best.forget_after(20)
    assert not best.ends
    best.add(20, {"auc": 0.5})
    assert not best.ends and best.step == 10
    best.add(30, {"auc": 0.65})
    assert best.metrics() == {"step": 30, "auc": 0.65}


def test_a_checkpoint_or_a_file_of_the_process_before_gives_the_same_best(tmp_path: Path) -> None:
    best, other = best_of(0.6, 0.7, 0.69), best_of()
    other.load(best.facts()["evaluations"])
    assert other.facts() == best.facts() and best.facts()["best_step"] == 20
    other.load([[10, {"auc": None}], [20, {"auc": 0.6}], [30, {"auc": None}]])  # undefined ones of an earlier version
    assert (other.step, other.ends) == (20, False)
    best = best_of(0.6)
    best.keep_in(tmp_path / "evaluations.json")
    best.add(20, {"auc": 0.7})
    replacement = best_of()
    replacement.keep_in(tmp_path / "evaluations.json")
    assert replacement.facts() == best.facts() and best.step == 20
    best = EvaluationHistory(None)  # without stopping nothing is recorded
    best.keep_in(tmp_path / "other.json")
    best.add(10, {"auc": 0.6})
    assert (best.step, best.ends, best.metrics(), best.facts()) == (None, False, None, {})
    assert [path.name for path in tmp_path.iterdir()] == ["evaluations.json"]


def test_ranks_take_the_evaluations_of_the_one_that_has_most() -> None:
    def work(collective: ThreadCollective) -> dict[str, Any]:
        best = best_of(0.6, 0.7) if collective.rank == 1 else best_of()
        best.share(collective)
        return best.facts()

    assert run_ranks(ThreadCollective.group(3), work) == [best_of(0.6, 0.7).facts()] * 3


@every(("metric", "mode"), [("auc", "max"), ("logloss", "min")])
@every(("patience", "min_delta"), [(1, 0.0), (2, 0.0), (3, 0.02)])
def test_the_learning_rate_factor_is_that_of_torch(metric: str, mode: Any, patience: int, min_delta: float) -> None:
    values = (0.5 + np.random.default_rng(5).normal(0, 0.05, 60)).tolist()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, 0.5, patience - 1, threshold=min_delta, threshold_mode="abs", min_lr=0.01, eps=0.0
    )  # its patience counts the evaluations before the one that lowers the rate
    config = {"metric": metric, "patience": patience, "min_delta": min_delta, "factor": 0.5, "min_factor": 0.01}
    best = EvaluationHistory(None, PlateauConfig.model_validate(config))
    found = []
    for at, value in enumerate(values):
        best.add(at + 1, {metric: value})
        torchs.step(value)
        assert best.lr_factor == pytest.approx(optimizer.param_groups[0]["lr"])
        found.append(best.lr_factor)
    assert len(set(found)) > 4 and found[-1] == 0.01
    best.forget_after(30)
    assert best.lr_factor == found[29]
    other = EvaluationHistory(None, PlateauConfig.model_validate(config))
    other.load(best.facts()["evaluations"])
    assert other.lr_factor == found[29] and (best.step, best.ends) == (None, False)


def test_a_metric_that_is_not_evaluated_is_one_line() -> None:
    best = EvaluationHistory(EarlyStoppingConfig(metric="auc/clicked"))
    with pytest.raises(ConfigError, match=r"metric: auc/clicked is not evaluated; allowed: auc, logloss$"):
        best.add(10, {"auc": 0.6, "logloss": 0.1, "samples": 3})
    with pytest.raises(ValueError, match="allowed: auc, "):
        EarlyStoppingConfig(metric="calibration")
