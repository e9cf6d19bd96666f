"""The metrics of ranks are those of the formulas, sample by sample."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardkeep.workers.metrics.ranks import evaluate_ranks
from tests.support.cases import every

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
