"""The warning of weights that are no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkeep.config import parse_config
from shardkeep.workers.data.samples import Data, doubtful_weights
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.local_job import LocalJob


def weighted(folder: Path, weights: str) -> Data:
    """200 samples; of three tags each, with these weights, and every fifth one without any."""
    lines = ["tags,w,y", *(f"a;b;{i % 9},{weights},{i % 2}" if i % 5 else f",,{i % 2}" for i in range(200))]
    (folder / "a.csv").write_text("\n".join(lines))
    column: dict[str, Any] = {"column": "tags", "separator": ";", "pooling": "weighted", "weights": "w"}
    config = {"source": "csv", "root": str(folder), "train": "a.csv", "label": "y", "sparse": [column]}
    return open_data(DataConfig.model_validate(config), seed=0)


@every(("weights", "rms"), [("38;52;17", "38.5"), ("-900;900;0", "735"), ("0.01;0.01;17.4", "10")])
def test_weights_of_ages_are_doubtful(tmp_path: Path, weights: str, rms: str) -> None:
    (text,) = doubtful_weights(weighted(tmp_path, weights).train)
    assert text.startswith(f"feature tags: its weights have a root mean square of {rms}, so its pooled rows are ")


@every("weights", ["1;1;1", "5;3;1", "0;0;0", "9.9;9.9;9.9"])
def test_ordinary_weights_are_not(tmp_path: Path, weights: str) -> None:
    assert doubtful_weights(weighted(tmp_path, weights).train) == []


def test_a_job_tells_of_doubtful_weights_once_at_its_start(tmp_path: Path) -> None:
    config = parse_config(
        "{servers: 1, workers: 2, consistency: {mode: sync}, model: {name: dlrm, hidden: [4]}, "
        "tower: {compile: off}, train: {batch_size: 8, epochs: 2}}"
    )
    job = LocalJob(config, weighted(tmp_path, "38;52;17"))
    job.run()
    told = [record["text"] for kind, record in job.records if kind == "phase" and record["phase"] == "data"]
    assert len(told) == 1 and told[0].startswith("warning: feature tags: its weights have a root mean square of 38.5")
