"""Metrics of weighted samples: against definitions, against repeated rows, merged over workers, and in bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardkeep.workers.collectives.collective import Collective, Solo, ThreadCollective
from shardkeep.workers.config import METRICS
from shardkeep.workers.metrics.binned import BinnedScores
from shardkeep.workers.metrics.quality import MetricSettings, evaluate_over_workers, evaluate_predictions
from tests.support.cases import every
from tests.support.ranks import run_ranks

CLASSES = MetricSettings(tuple(sorted(METRICS.keys() - {"calibration_buckets"})), 0.3, "user")
NUMBERS = MetricSettings(("mse", "rmse", "mae"), numbers=True)


def drawn(count: int = 2000, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Logits with ties, labels, groups, and weights, a tenth of them 0; whole ones are 0 to 5."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(count) < 0.3).astype(np.float32)
    logits = np.round(rng.normal(size=count) + labels - 1.0, 1).astype(np.float32)
    weights = rng.lognormal(0, 2, count) * (rng.random(count) < 0.9)
    return logits, labels, rng.integers(0, count // 8, count), weights.astype(np.float32)


def whole(seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 6, 2000).astype(np.float32)


@every("seed", range(5))
def test_a_sample_of_a_whole_weight_counts_as_so_many_rows(seed: int) -> None:
    logits, labels, groups, _ = drawn(seed=seed)
    weights = whole(seed)
    often = [np.repeat(values, weights.astype(int)) for values in (logits, labels, groups)]
    found = evaluate_predictions(logits, labels, groups, CLASSES, weights)
    repeated = evaluate_predictions(*often, CLASSES)
    assert found == pytest.approx(repeated | {"samples": 2000, "weights": weights.sum()}, rel=1e-12)
    assert found["auc"] == repeated["auc"] and found["gauc"] is not None
    found = evaluate_predictions(logits, labels, asked=NUMBERS, weights_N=weights)
    assert found == pytest.approx(
        evaluate_predictions(*often[:2], asked=NUMBERS) | {"samples": 2000, "weights": found["weights"]}
    )


def test_auc_is_the_share_of_the_pairs_weights_in_the_right_order() -> None:
    logits, labels, _, weights = drawn(400)
    positive = labels == 1
    difference = logits[positive][:, None] - logits[~positive][None, :]
    pairs = weights[positive].astype(np.float64)[:, None] * weights[~positive][None, :]
    expected = float((pairs * ((difference > 0) + 0.5 * (difference == 0))).sum() / pairs.sum())
    found = evaluate_predictions(logits, labels, weights_N=weights)["auc"]
    assert found == pytest.approx(expected, abs=1e-13)
    assert abs(found - evaluate_predictions(logits, labels)["auc"]) > 1e-3


def test_auc_by_group_is_the_mean_over_groups_by_their_weight() -> None:
    logits, labels, groups, weights = drawn()
    total, summed = 0.0, 0.0
    for group in np.unique(groups):
        part = groups == group
        if (own := evaluate_predictions(logits[part], labels[part], weights_N=weights[part])["auc"]) is not None:
            total += own * float(weights[part].sum())
            summed += float(weights[part].sum())
    assert evaluate_predictions(logits, labels, groups, CLASSES, weights)["gauc"] == pytest.approx(total / summed)


def test_weighted_means_follow_their_definitions() -> None:
    logits, labels, groups, weights = drawn()
    w, x, y = weights.astype(np.float64), logits.astype(np.float64), labels.astype(np.float64)
    p, rate = 1 / (1 + np.exp(-x)), np.average(y, weights=w)
    loss = np.average(-np.where(y == 1, np.log(p), np.log(1 - p)), weights=w)
    called = p >= 0.3
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
    found = evaluate_predictions(logits, labels, groups, CLASSES, weights)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    scaled = evaluate_predictions(logits, labels, groups, CLASSES, weights * np.float32(2.0**-40))
    assert scaled == pytest.approx(found | {"weights": scaled["weights"]}, rel=1e-12)


def test_weights_of_one_give_the_bits_of_no_weights() -> None:
    logits, labels, groups, _ = drawn()
    for asked in (CLASSES, NUMBERS, MetricSettings(("calibration_buckets",))):
        plain = evaluate_predictions(logits, labels, groups, asked)
        ones = evaluate_predictions(logits, labels, groups, asked, np.ones(2000, np.float32))
        assert "weights" not in plain and ones == plain | {"weights": 2000.0}


def test_buckets_hold_equal_numbers_of_rows_and_weighted_means() -> None:
    logits, labels, _, weights = drawn(1005)
    order = np.argsort(logits, kind="stable")
    weights[order[:101]] = 0.0
    asked = MetricSettings(("calibration_buckets",))
    buckets = evaluate_predictions(logits, labels, asked=asked, weights_N=weights)["calibration_buckets"]
    assert [bucket["samples"] for bucket in buckets] == [101] * 4 + [100] * 5  # the first weighs nothing
    last = order[-100:]
    assert buckets[-1]["label"] == pytest.approx(np.average(labels[last], weights=weights[last].astype(np.float64)))


@every(
    ("weights", "note", "defined"),
    [
        ([0, 0, 0, 0], "the weights of all 4 samples are 0", ()),
        ([1, 2, 0, 0], "all 2 labels whose weight is above 0 are 0; AUC needs both classes", ("logloss",)),
        (
            [0, 0, 3, 0],
            "all 1 labels whose weight is above 0 are 1; AUC needs both classes",
            ("calibration", "logloss"),
        ),
        ([1e-38, 1e38, 1e38, 1e-38], None, ("auc", "calibration", "logloss", "normalized_entropy")),
        ([1e-38, 1e-38, 1e38, 1e38], None, ("auc", "calibration", "logloss")),
    ],
    ids=["no weight", "only zeros weigh", "only ones weigh", "far apart", "a class that hardly weighs"],
)
def test_what_the_weights_leave_undefined_is_none_and_says_why(
    weights: list[float], note: str | None, defined: tuple[str, ...]
) -> None:
    logits, labels = np.array([0.1, 0.2, 0.3, 0.1]), np.array([0, 0, 1, 1])
    found = evaluate_predictions(logits, labels, weights_N=np.array(weights, np.float32))
    assert found.get("note") == note
    names = ("auc", "calibration", "logloss", "normalized_entropy")
    assert tuple(name for name in names if found[name] is not None) == defined
    of_numbers = evaluate_predictions(logits, labels, asked=NUMBERS, weights_N=np.array(weights, np.float32))
    assert (of_numbers["mse"] is None) == (not any(weights))


@every("split", [(900, 1100), (0, 2000)], ids=str)
@every("names", [["click"], ["click", "buy"]], ids=["one label", "two labels"])
def test_weights_of_all_workers_are_merged_as_their_samples_are(split: tuple[int, int], names: list[str]) -> None:
    logits, labels, groups, weights = drawn()
    columns = [(logits, labels), (-logits, 1 - labels)][: len(names)]
    matrices = [np.stack(each, axis=1) for each in zip(*columns, strict=True)]

    def rank(collective: Collective) -> dict[str, Any]:
        own = slice(0, split[0]) if collective.rank == 0 else slice(split[0], None)
        parts = [values[own] for values in (*matrices, groups, weights)]
        return evaluate_over_workers(*parts, names=names, collective=collective, asked=CLASSES)

    alone = [evaluate_predictions(*column, groups, CLASSES, weights) for column in columns]
    expected = alone[0]
    if len(names) == 2:
        expected = {k: v for k, v in alone[0].items() if k in ("samples", "weights")}
        for name, metrics in zip(names, alone, strict=True):
            expected |= {f"{key}/{name}": value for key, value in metrics.items() if key not in expected}
    assert run_ranks(ThreadCollective.group(2), rank) == [expected] * 2


@every("asked", [MetricSettings(), NUMBERS], ids=["classes", "numbers"])
def test_metrics_in_bins_are_weighted_too(asked: MetricSettings) -> None:
    logits, labels, _, weights = drawn(20_000)
    scores = BinnedScores(["click"], numbers=asked.numbers)
    for part in np.array_split(np.arange(20_000), 7):
        scores.add(logits[part, None], labels[part, None], weights[part])
    exact = evaluate_predictions(logits, labels, None, asked, weights)
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
    before = np.delete(scores.state().numpy(), 7, axis=-1)  # without the sum of weights
    resumed.load([torch.from_numpy(before)])
    assert resumed.total(Solo()) == scores.total(Solo())
