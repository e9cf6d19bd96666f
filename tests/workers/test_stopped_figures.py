"""What a job that is stopped says of the steps that it trained."""

from __future__ import annotations

import pytest

from shardkeep.base.errors import JobStopped
from shardkeep.config import parse_config
from tests.support.local_job import LocalJob, Worker, in_threads
from tests.support.samples import as_data, draw

CONFIG = """
workers: 2
model: {name: dlrm, bottom: [8], hidden: [8]}
tables: {default: {dim: 4}}
tower: {compile: off}
train: {batch_size: 8, epochs: 100000}  # the ranks look about twice a second whether to stop
"""


def test_a_stopped_job_tells_its_samples_times_and_bytes() -> None:
    job = LocalJob(parse_config(CONFIG), as_data(draw(160)))

    def train(worker: Worker) -> None:
        with pytest.raises(JobStopped):
            worker.generation.train(lambda step: step >= 4)

    in_threads([lambda w=worker: train(w) for worker in job.workers])  # to the end of both
    (figures,) = [record["figures"] for kind, record in job.records if kind == "event" and "figures" in record]
    assert 4 <= figures["steps"] < 1_000_000 and figures["samples"] == 16 * figures["steps"]
    assert figures["bytes"]["push"]["values"] > 0 and figures["bytes"]["per_sample"] > 0
    fp32, sent = (
        figures["bytes"]["fp32"],
        {way: sum(figures["bytes"][way].values()) for way in ("push", "pull", "tower")},
    )
    assert fp32.keys() == sent.keys() and (fp32["push"], fp32["tower"]) == (sent["push"], sent["tower"])
    assert fp32["pull"] >= sent["pull"], "the rows of the next step may not have come"
    assert figures["samples_per_s"] > 0 and figures["step_ms"]["total"] > 0


def test_the_choices_of_the_tower_are_reported_once_and_by_rank_0_alone() -> None:
    config = CONFIG.replace("epochs: 100000", "epochs: 1, max_steps: 5")
    job = LocalJob(parse_config(config), as_data(draw(160)))
    job.run()
    assert [record["phase"] for kind, record in job.records if kind == "phase"].count("tower") == 1
