"""Jobs of retrieval models: users and candidates of a step are one pull and one push, drawn by seed, step and rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.checkpoints.folder import Checkpoints
from tests.support.cases import every
from tests.support.local_job import LocalJob
from tests.support.retrieval import NEXT, TOWERS, data_of

TWO_TOWER = "{name: two_tower, item: [item, tags, price], hidden: [6], dim: 5, norm: batch}"
SASREC = "{name: sasrec, layers: 1, dropout: 0}"  # workers of one process share the generator of dropout
SETTINGS = """
seed: 3
consistency: {mode: sync}
tables: {default: {dim: 6, optimizer: {name: rowwise_adagrad, lr: 0.3}}}
tower: {optimizer: {name: adam, lr: 0.02}}
train: {batch_size: 8, max_steps: 4, loss: {negatives: {batch: 5, uniform: 6}}}
"""


def job_config(model: str, servers: int = 1, workers: int = 1, **more: Any) -> JobConfig:
    return parse_config(
        f"{SETTINGS}\nmodel: {model}\nservers: {servers}\nworkers: {workers}",
        [f"{key.replace('__', '.')}={value}" for key, value in more.items()],
    )


def job(
    model: str, servers: int = 1, workers: int = 1, *, samples: int = 60, negatives: float = 0.0, **more: Any
) -> LocalJob:
    data = data_of(TOWERS if model == TWO_TOWER else NEXT, samples, negatives=negatives)
    return LocalJob(job_config(model, servers, workers, **more), data)


def digests(model: str, servers: tuple[int, int], workers: int, **more: Any) -> set[str]:
    return {job(model, number, workers, **more).run()["state_digest"] for number in servers}


def test_a_job_has_the_same_bits_with_any_servers() -> None:
    found = [digests(model, (1, 3), 1) for model in (TWO_TOWER, SASREC, "{name: hstu, layers: 1, heads: 2}")]
    assert [len(each) for each in found] == [1, 1, 1] and len(set.union(*found)) == 3


@every("model", [TWO_TOWER, SASREC])
def test_two_workers_have_the_same_bits_with_any_servers(model: str) -> None:
    micro_batches = {"train__accumulate": 2, "train__batch_size": 4, "train__max_steps": 2}
    assert len(digests(model, (1, 2), 2, negatives=0.4, **micro_batches)) == 1
    a_rank_without_samples = {"samples": 17, "train__max_steps": 2}  # of the second step one rank has a sample
    assert len(digests(model, (1, 2), 2, **a_rank_without_samples)) == 1


@every("model", [TWO_TOWER, SASREC])
def test_a_job_whose_workers_lose_a_generation_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, model: str
) -> None:
    undisturbed = job(model, 2, 2)
    disturbed = LocalJob(undisturbed.config, undisturbed.data, rewinds=tmp_path)
    disturbed.lose(2)
    disturbed.continue_at(2)
    assert disturbed.run()["state_digest"] == undisturbed.run()["state_digest"]


def test_a_job_resumes_in_the_middle_of_an_epoch_with_other_servers(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    first, undisturbed = job(SASREC, 1, train__max_steps=2), job(SASREC, 1)
    LocalJob(first.config, first.data, checkpoints=checkpoints).run()
    resumed = LocalJob(job_config(SASREC, 3), first.data, checkpoints=checkpoints, resumed=checkpoints.load(2))
    assert resumed.run()["state_digest"] == undisturbed.run()["state_digest"]


def test_items_of_a_frozen_table_are_read_and_never_trained() -> None:
    tables = job(TWO_TOWER, tables__item__freeze=True).run()["tables"]
    assert {table["name"]: table["rows"] > 0 for table in tables} == {"user": True, "item": False, "tag": True}


def test_what_only_the_uniform_draw_brought_counts_for_no_admission() -> None:
    settings = {"tables__item__admit__min_count": 2, "tables__tag__admit__min_count": 2}
    alone = job(TWO_TOWER, **settings, train__loss__negatives__uniform=0).run()["tables"]
    beside = job(TWO_TOWER, **settings, train__loss__negatives__uniform=40).run()["tables"]
    assert alone == beside
    assert all(table["rows"] and table["refused_rows"] for table in beside if table["name"] != "user")
    freely = {table["name"]: table for table in job(TWO_TOWER, train__loss__negatives__uniform=40).run()["tables"]}
    assert freely["item"]["rows"] > beside[1]["rows"]


def test_a_uniform_negative_that_has_a_row_is_trained() -> None:
    config = {"train__max_steps": 14, "train__epochs": 2, "tables__item__admit__min_count": 2}
    rare = int(data_of(TOWERS, 60).catalogue.ids_M[-1])  # type: ignore[union-attr]
    found = []
    for uniform in (0, 40):
        trained = job(TWO_TOWER, **config, train__loss__negatives__uniform=uniform)
        trained.run()
        client = trained.workers[0].client
        found.append(client.read(client.request({"item": np.array([rare])})).result()["item"])
    assert not np.array_equal(*found)


def test_the_loss_falls() -> None:
    for model in (TWO_TOWER, SASREC):
        learning = job(model, samples=160, train__batch_size=32, train__epochs=5, train__max_steps=25)
        trainer, losses = learning.workers[0].generation.trainer, []
        with trainer.step.pipeline.running(0, trainer.total_steps):
            for _ in range(trainer.total_steps):
                losses.append(float(trainer.step.run(*trainer.step.pipeline.next()).loss))
        assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]), model
