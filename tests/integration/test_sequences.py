"""Jobs whose data have sequences, with a model of one's own: from a dataset's lists to the rows and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkeep.config import JobConfig, parse_config
from shardkeep.workers.data.samples import Data
from tests.support.cases import every
from tests.support.cluster import Cluster
from tests.support.histories import Histories
from tests.support.local_job import LocalJob

ROOT = Path(__file__).parents[2]
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
    data = Data(Histories(640), Histories(150, seed=1))
    return LocalJob(job_config(servers, workers, **more), data).run()


def test_a_job_has_the_same_bits_with_one_server_and_with_two() -> None:
    one, two = trained(1), trained(2)
    assert one["state_digest"] == two["state_digest"]
    assert one["eval"]["auc"] == two["eval"]["auc"]


@pytest.mark.slow
@every("workers", [1, 2])
def test_processes_train_sequences_to_the_same_bits_and_evaluate_has_their_numbers(
    cluster: Cluster, workers: int
) -> None:
    data = {"source": "tests.support.histories:samples", "root": str(ROOT)}
    config = {**yaml.safe_load(SETTINGS), "workers": workers, "data": data, "checkpoint": {"every_steps": 8}}
    digests, aucs = set(), []
    for servers in (1, 2):
        job, folder = cluster.job({**config, "servers": servers}, name=f"{workers}-{servers}")
        assert job.end().code == 0
        summary = folder.summary()
        digests.add(summary["state_digest"])
        evaluate = cluster.command("evaluate", str(folder.path), "--json").end()
        assert evaluate.code == 0, evaluate.err
        aucs += [summary["eval"]["auc"], json.loads(evaluate.out)["auc"]]
    assert len(digests) == len(set(aucs)) == 1
