"""Importance of columns, beside a plain transcription on a small data set, and the points of plots of calibration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkeep
from shardkeep.analysis.calibration import BINS, quality_of
from shardkeep.analysis.importance import FILE, REPEATS, exchanged, importance_of, write_picture
from shardkeep.base.arrays import Floats, Ints
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.scoring import EvaluationRows, EvaluationScores, evaluation_rows
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.samples import Dataset, gathered
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.metrics.quality import MetricSettings, auc
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model has learned the user, and whose dense columns lead nowhere: their weights are 0."""
    folder = tmp_path_factory.mktemp("importance")
    rows = [row | {"clicked": str(int(row["user"][1:]) % 2)} for row in click_rows(600)]
    job = click_job(write_csv(folder / "train.csv", rows))
    job |= {"train": job["train"] | {"epochs": 6}, "eval": {"batch_size": 400}}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture(scope="module")
def rows(run: Path) -> EvaluationRows:
    return evaluation_rows(run)


@pytest.fixture(scope="module")
def found(rows: EvaluationRows) -> dict[str, Any]:
    return importance(rows)


def importance(rows: EvaluationRows) -> dict[str, Any]:
    return importance_of(rows, lambda _text, _share: None)


def test_the_column_that_decides_is_worth_most_as_a_loop_over_permuted_columns_finds(
    rows: EvaluationRows, found: dict[str, Any]
) -> None:
    first, *others = found["columns"]
    assert (found["metric"], first["column"]) == ("auc", "user") and first["mean"] > 0.3 and first["spread"] > 0
    assert all(abs(other["mean"]) < first["mean"] / 3 for other in others)
    assert {one["column"] for one in found["columns"]} == {"user", "item", "tags", "price", "age"}
    (dataset,), trained = list(rows.datasets), rows.trained
    batch, lost = gathered(dataset, np.arange(len(dataset))), []
    base = auc(trained.logits(batch)[:, 0], batch.label_BT[:, 0])
    for repeat in range(REPEATS):
        order_N = np.random.default_rng(repeat).permutation(len(dataset))
        permuted = Ragged(batch.ids["user"].values_N[order_N])
        logits_NT = trained.logits(replace(batch, ids={**batch.ids, "user": permuted}))
        lost.append(base - auc(logits_NT[:, 0], batch.label_BT[:, 0]))
    expected = {"column": "user", "mean": pytest.approx(np.mean(lost)), "spread": pytest.approx(np.std(lost, ddof=1))}
    assert (found["value"], found["columns"][0]) == (base, expected)


def test_a_permuted_sequence_keeps_its_columns_together() -> None:
    group = SequenceColumns(
        "history", (Feature("viewed", "item", "none"), Feature("where", "page", "none")), ("price",), 9
    )
    schema = Schema(("age",), (Feature("user", "user"),), sequences=(group,))

    def batch_of(order_B: list[int], lengths: list[int], ids: list[int]) -> Batch:
        lengths_B, ids_N = np.array(lengths, np.int32), np.array(ids)
        columns = {"viewed": Ragged(ids_N, lengths_B), "where": Ragged(ids_N + 10, lengths_B)}
        dense_BI = np.array([[1.0], [2.0], [3.0]], np.float32)[order_B]
        numbers = {"history": (ids_N[:, None] / 10).astype(np.float32)}
        user = Ragged(np.array([1, 2, 3])[order_B])
        return Batch(dense_BI, {"user": user, **columns}, np.zeros((3, 1), np.float32), numbers=numbers)

    own, other = batch_of([0, 1, 2], [2, 0, 1], [7, 8, 9]), batch_of([2, 0, 1], [1, 2, 0], [9, 7, 8])
    found = exchanged(own, other, schema, "history")
    assert found.ids["viewed"].values_N.tolist() == [9, 7, 8] and found.ids["where"].values_N.tolist() == [19, 17, 18]
    assert found.numbers["history"][:, 0].tolist() == pytest.approx([0.9, 0.7, 0.8])
    assert found.ids["user"].values_N.tolist() == [1, 2, 3] and found.dense_BI[:, 0].tolist() == [1, 2, 3]
    of_age = exchanged(own, other, schema, "age")
    assert of_age.dense_BI[:, 0].tolist() == [3, 1, 2] and own.dense_BI[:, 0].tolist() == [1, 2, 3]
    assert of_age.ids["viewed"].values_N.tolist() == [7, 8, 9]


@dataclass(frozen=True)
class Counted:
    """A data set that notes how many samples were read of it. Its first dense value may overflow in permuted rows."""

    dataset: Dataset
    reads: list[int]
    overflows: bool = False

    @property
    def schema(self) -> Schema:
        return self.dataset.schema

    def __len__(self) -> int:
        return len(self.dataset)

    def gather(self, rows_B: Ints) -> Batch:
        self.reads.append(len(rows_B))
        batch = self.dataset.gather(rows_B)
        if self.overflows and np.any(np.diff(rows_B) < 0):
            batch.dense_BI[:, 0] = np.inf
        return batch


def test_the_number_of_columns_does_not_change_how_often_a_row_is_read(rows: EvaluationRows) -> None:
    (dataset,), reads = list(rows.datasets), list[int]()
    assert len(importance(replace(rows, datasets=[Counted(dataset, reads)]))["columns"]) == 5
    assert sum(reads) == len(dataset) * (1 + 2 * REPEATS)


def test_a_column_whose_permutation_leaves_no_metric_is_the_last_one_without_figures(rows: EvaluationRows) -> None:
    *others, last = importance(replace(rows, datasets=[Counted(next(iter(rows.datasets)), [], True)]))["columns"]
    assert last == {"column": rows.trained.schema.dense[0], "mean": None, "spread": None}
    assert len(others) == 4 and all(each["spread"] is not None for each in others)


def test_the_picture_is_in_the_run_folder_and_not_in_an_export(
    found: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    picture = write_picture(found, run)
    assert picture == run / FILE and picture.read_bytes().startswith(b"\x89PNG")
    exported = tmp_path / "model"
    export_run(run, exported, told=lambda _text, _share: None)
    assert write_picture(found, exported) is None and not (exported / FILE).exists()


# Calibration, from scores of evaluation rows


def scores_of(chances_N: Floats, labels_N: Floats, **changes: Any) -> EvaluationScores:
    logits_NT = np.log(chances_N / (1 - chances_N)).astype(np.float32)[:, None]
    none, empty = np.empty(0, np.int64), np.empty(0, np.float32)
    return replace(EvaluationScores(logits_NT, labels_N[:, None], none, empty, MetricSettings()), **changes)


def test_a_model_that_is_right_has_points_on_the_diagonal() -> None:
    draw = np.random.default_rng(0)
    chances_N = draw.uniform(0.01, 0.99, 20_000).astype(np.float32)
    labels_N = (draw.random(20_000) < chances_N).astype(np.float32)
    found = quality_of(scores_of(chances_N, labels_N))
    assert found is not None and len(found["calibration"]) == 10
    assert all(abs(share - chance) < 0.04 for chance, share in found["calibration"])
    high = quality_of(scores_of(chances_N**0.5, labels_N))
    assert high is not None and all(share < chance for chance, share in high["calibration"])


def test_the_shares_of_each_label_are_in_the_bins_of_their_probabilities() -> None:
    chances_N, labels_N = np.array([0.11, 0.12, 0.93, 0.11], np.float32), np.array([0, 0, 0, 1], np.float32)
    found = quality_of(scores_of(chances_N, labels_N))
    assert found is not None
    shares = {label: {round(x, 3): share for x, share in bins if share} for label, bins in found["scores"].items()}
    assert shares == {"0": {0.125: pytest.approx(2 / 3), 0.925: pytest.approx(1 / 3)}, "1": {0.125: 1.0}}
    weighted = quality_of(scores_of(chances_N, labels_N, weights_N=np.array([1, 1, 2, 1], np.float32)))
    assert weighted is not None and max(share for _, share in weighted["scores"]["0"]) == pytest.approx(0.5)
    assert all(len(bins) == BINS for bins in found["scores"].values())


@every(
    "changes",
    [
        {"asked": MetricSettings(numbers=True)},
        {"outputs_NT": np.empty((0, 1), np.float32), "labels_NT": np.empty((0, 1), np.float32)},
        {"outputs_NT": np.array([[np.nan], [1.0]], np.float32)},
    ],
    ids=["numbers", "no rows", "not finite"],
)
def test_other_scores_have_no_plots(changes: dict[str, Any]) -> None:
    whole = scores_of(np.array([0.2, 0.6], np.float32), np.array([0, 1], np.float32))
    assert quality_of(whole) is not None and quality_of(replace(whole, **changes)) is None
