"""Jobs whose data have sequences, with a model of one's own: from a dataset's lists to the rows and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.config import JobConfig, parse_config
from shardkeep.inference.small_blocks import SmallBlocks
from shardkeep.inference.trained import trained_of_checkpoint
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.workers.data.samples import Data
from shardkeep.workers.embeddings.unseen import Unseen
from tests.support import histories
from tests.support.histories import Histories
from tests.support.local_job import LocalJob

SETTINGS = """
seed: 3
consistency: {mode: sync}
model: {name: "tests.support.histories:Attends"}
tables:
  default: {dim: 6, optimizer: {name: rowwise_adagrad, lr: 0.3}}
  kind: {dim: 3, optimizer: {name: rowwise_adagrad, lr: 0.3}}
tower: {compile: auto, amp: "off", optimizer: {name: adam, lr: 0.02}}
train: {batch_size: 32, order: shuffled}
"""


def job_config(servers: int = 1, workers: int = 1, **more: Any) -> JobConfig:
    return parse_config(
        f"{SETTINGS}\nservers: {servers}\nworkers: {workers}",
        [f"{key.replace('__', '.')}={value}" for key, value in more.items()],
    )


def trained(servers: int = 1, workers: int = 1, **more: Any) -> dict[str, Any]:
    return LocalJob(job_config(servers, workers, **more), data_of()).run()


def data_of() -> Data:
    return Data(Histories(300), Histories(150, seed=1))


def test_a_job_has_the_same_bits_with_one_server_and_with_two() -> None:
    one, two = trained(1), trained(2)
    assert one["state_digest"] == two["state_digest"]
    assert one["eval"]["auc"] == two["eval"]["auc"]
    assert one["eval"]["unseen"].keys() == {"item", "tags", "seen_item", "seen_kind"}


def test_a_job_whose_workers_lose_a_generation_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    settings = {"train__max_steps": 9, "train__batch_size": 7}  # micro-batches, and a rank without samples at the end
    undisturbed = trained(2, 2, train__accumulate=2, **settings)
    job = LocalJob(job_config(2, 2, train__accumulate=2, **settings), data_of(), rewinds=tmp_path)
    job.lose(5)
    job.continue_at(5)
    assert job.run()["state_digest"] == undisturbed["state_digest"]


def test_a_server_scores_small_batches_as_files_are_scored(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    config = job_config(train__max_steps=4)
    LocalJob(config, data_of(), checkpoints=checkpoints).run()
    model = trained_of_checkpoint(config, checkpoints.load(4), histories.SCHEMA, None, run=tmp_path)
    unseen = Unseen(histories.SCHEMA)
    blocks = SmallBlocks(model, unseen)
    blocks.warm()
    batch = Histories(64, seed=5).gather(np.arange(64))
    expected = model.scores(model.logits(batch))
    assert expected.std() > 1e-3
    np.testing.assert_allclose(blocks.scores(batch, 50), expected[:50], atol=1e-6)
    assert unseen.counts()["item"][1] == 50
