"""A worker over two generations, without processes: what its run keeps, and what a newcomer takes from the others."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import CheckpointError, TransportError
from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.workers.data.samples import Data
from shardkeep.workers.generation import Link
from tests.support.cases import every
from tests.support.local_job import LocalJob
from tests.support.samples import as_data, draw

STEPS, LOST = 12, 5


def job_config(workers: int = 2, **more: Any) -> JobConfig:
    return parse_config(
        f"""
        seed: 3
        servers: 2
        workers: {workers}
        consistency: {{mode: sync}}
        model: {{name: dlrm, bottom: [8], hidden: [8]}}
        tables: {{default: {{dim: 4}}}}
        tower: {{compile: off, optimizer: {{name: adam, lr: 0.01}}}}
        train: {{batch_size: 4}}
        eval: {{every_steps: {LOST}}}
        """,
        [f"{key.replace('__', '.')}={value}" for key, value in more.items()],
    )


def data_of(workers: int = 2) -> Data:
    return as_data(draw(4 * workers * STEPS), draw(30, seed=1))


def records(job: LocalJob, kind: str) -> list[dict[str, Any]]:
    return [record for name, record in job.records if name == kind]


def is_closed(link: Link) -> bool:
    future = link.transport.send(0, np.zeros(1, np.uint8), timeout_s=1.0)
    return isinstance(future.exception(timeout=90.0), TransportError)


@functools.cache
def undisturbed(workers: int) -> dict[str, Any]:
    return LocalJob(job_config(workers), data_of(workers)).run()


@every(("workers", "lost"), [(1, LOST), (2, 0)])
def test_the_same_processes_continue_to_the_model_of_an_undisturbed_job(
    tmp_path: Path, workers: int, lost: int
) -> None:
    whole = undisturbed(workers)
    job = LocalJob(job_config(workers), data_of(workers), rewinds=tmp_path)
    job.lose(before=lost)
    assert is_closed(job.workers[0].generation.link)
    job.continue_at(lost)
    assert [worker.client.pushes.next_step for worker in job.workers] == [lost] * workers
    summary = job.run()
    assert summary["state_digest"] == whole["state_digest"] and summary["eval"] == whole["eval"]
    assert (summary["steps"], summary["samples"]) == (STEPS, whole["samples"])
    phases = [record["phase"] for record in records(job, "phase")]
    assert phases.count("tower") == 1  # the tower's choices are reported once in a process's life
    assert summary["bytes"]["push"]["values"] == whole["bytes"]["push"]["values"]  # nothing counts twice
    assert summary["bytes"]["per_sample"] == pytest.approx(whole["bytes"]["per_sample"], rel=0.2)


@every(("replaced", "source"), [(0, 1), (1, 0)])
def test_a_newcomer_takes_the_tower_of_another_and_changes_no_bit(tmp_path: Path, replaced: int, source: int) -> None:
    whole = undisturbed(2)
    job = LocalJob(job_config(), data_of(), rewinds=tmp_path)
    job.lose(before=LOST)
    job.continue_at(LOST, source=source, replaced=(replaced,))
    assert job.run()["state_digest"] == whole["state_digest"]


def test_what_follows_from_an_evaluation_of_a_lost_generation_is_reported_again(tmp_path: Path) -> None:
    """The first report may have died with its process, and the evaluations outlive it."""
    plateau = {"train__plateau__patience": 1, "train__plateau__min_delta": 1.0}  # the second evaluation is no better
    job = LocalJob(job_config(1, **plateau), data_of(1), rewinds=tmp_path)
    job.lose(before=2 * LOST)
    reported = [record for record in records(job, "eval") + records(job, "phase") if record.get("step") == 2 * LOST]
    assert [record.get("lr_factor") for record in reported] == [None, 0.1]
    job.progress.records.clear()
    job.continue_at(2 * LOST)
    job.run()
    again = [record for record in records(job, "eval") + records(job, "phase") if record.get("step") == 2 * LOST]
    assert [record.get("lr_factor") for record in again] == [None, 0.1]


def test_the_evaluation_and_the_last_step_of_a_lost_generation_are_repeated_and_count_as_a_retry(
    tmp_path: Path,
) -> None:
    job = LocalJob(job_config(1, consistency__mode="async"), data_of(1), rewinds=tmp_path)
    job.lose(before=LOST)
    job.continue_at(LOST - 1)  # the step before it is trained again
    summary = job.run()
    assert summary["bytes"]["push"]["retries"] > 0 and summary["samples"] == 4 * STEPS
    assert [record["step"] for record in records(job, "eval")] == [LOST, LOST, 2 * LOST, STEPS]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Of step 3, taken by one worker; two continue from it."""
    folder = tmp_path / "checkpoints"
    LocalJob(job_config(1, checkpoint__every_steps=3, train__max_steps=3), data_of(), Checkpoints(folder)).run()
    return Checkpoints(folder).load(3)


def test_a_newcomer_without_checkpoints_counts_samples_as_the_others_do(tmp_path: Path, checkpoint: Checkpoint) -> None:
    whole = LocalJob(job_config(), data_of(), resumed=checkpoint).run()
    job = LocalJob(job_config(), data_of(), resumed=checkpoint, rewinds=tmp_path / "rewinds")
    shutil.rmtree(checkpoint.folder.parent)
    job.lose(before=LOST)
    job.continue_at(LOST, replaced=(1,))
    summary = job.run()
    assert summary["state_digest"] == whole["state_digest"]
    assert (summary["steps"], summary["samples"]) == (whole["steps"], whole["samples"])


def test_a_worker_that_cannot_enter_a_generation_closes_its_connections(tmp_path: Path, checkpoint: Checkpoint) -> None:
    job = LocalJob(job_config(1), data_of(), resumed=checkpoint, rewinds=tmp_path / "rewinds")
    job.lose(before=LOST)
    with pytest.raises(CheckpointError, match="no worker is left that knows how to count"):
        job.continue_at(LOST, replaced=(0,))
    assert is_closed(job.links[0])
