"""Labels of a dataset of the user's own: they must be those of its schema."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from shardkeep.base.errors import DataError
from shardkeep.config import parse_config
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.samples import Data
from tests.support.cases import every
from tests.support.local_job import LocalJob
from tests.support.samples import ArrayDataset, draw

CONFIG = """
servers: 1
workers: 1
model: {name: dlrm, bottom: [8], hidden: [8]}
tables: {default: {dim: 4}}
tower: {compile: off}
train: {batch_size: 8}
"""


class TwoLabels:
    """The samples of a dataset, with two columns of labels where its schema names one."""

    def __init__(self, dataset: ArrayDataset) -> None:
        self.schema = dataset.schema
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def gather(self, rows_B: np.ndarray) -> Batch:
        batch = self.dataset.gather(rows_B)
        return dataclasses.replace(batch, label_BT=np.repeat(batch.label_BT, 2, axis=1))


@every("wrong", ["train", "eval"])
def test_labels_that_the_schema_does_not_name_are_refused(wrong: str) -> None:
    parts = {"train": draw(16), "eval": draw(16, seed=1)}
    job = LocalJob(parse_config(CONFIG), Data(**parts | {wrong: TwoLabels(parts[wrong])}))
    with pytest.raises(
        DataError, match=r"returned labels \(\d+, 2\); expected \(\d+, 1\): its schema has the labels label"
    ):
        job.run()
