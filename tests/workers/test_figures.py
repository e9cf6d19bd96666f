"""A worker's figures, of its dense model too, and the records that are made of them, also where a job is stopped."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import pytest
import torch

from shardkeep.base.errors import JobStopped
from shardkeep.compression.ledger import merge_totals
from shardkeep.config import JobConfig, parse_config
from shardkeep.records.telemetry import check_record
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.dense.products import Products
from shardkeep.workers.reporting.counters import StepCounters
from shardkeep.workers.reporting.dense_figures import DenseFigures, step_share
from shardkeep.workers.reporting.figures import Record, worker_record
from shardkeep.workers.step import StepResult
from shardkeep.workers.timing.clock import PARTS, Part, Stopwatch
from tests.support.cases import every
from tests.support.configs import TINY
from tests.support.local_job import LocalJob, Worker, in_threads
from tests.support.samples import as_data, draw
from tests.support.step_losses import Loss
from tests.support.towers import batch, part_of, tower_of

DATA = {"train_samples": 600, "eval_samples": 100, "num_dense": 3, "table_sizes": [50, 90, 3000]}
SMALL: dict[str, Any] = TINY | {"data": {"synthetic": DATA}}
MAPPINGS = ("bytes", "fp32_bytes", "staleness", "wait_s")
ZEROS = (
    "generation", "step", "samples", "dropped_rows", "skipped_steps", "unsent_rows", "unsent_share", "rss_bytes",
    "limit_bytes", "metrics",
)  # fmt: skip


class Watched:
    """Steps on a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watch = Stopwatch(lambda: self.now)
        self.counts = StepCounters(self.watch)

    def step(self, seconds: float, *, wait_s: float = 0.0, loss: float = 0.5) -> None:
        self.watch.begin(0)
        self.watch.enter("pull_wait")
        self.now += wait_s
        self.watch.enter("forward")
        self.now += seconds - wait_s
        self.watch.enter("other")
        self.counts.step_done(64, StepResult(Loss(loss), True, 0, 0, ids=100, unique_ids=40))

    def figures(self, **changes: Any) -> Record:
        others = {key: {} for key in MAPPINGS} | dict.fromkeys(ZEROS, 0)
        return {**others, **self.counts.figures(), **changes}


def test_a_record_has_the_means_of_the_steps_since_the_last_one() -> None:
    job = Watched()
    job.step(9.0, loss=7.0)
    last = job.figures(wait_s={"server 0": 4.0})
    job.step(0.02, wait_s=0.008, loss=0.4)
    job.step(0.04, wait_s=0.012, loss=0.6)
    record = worker_record(job.figures(wait_s={"server 0": 4.0, "server 1": 0.02}), last)
    assert (record["steps"], record["loss"], record["ids"], record["unique_ids"]) == (2, 0.5, 300, 120)
    assert record["samples_per_s"] == pytest.approx(128 / 0.06)
    parts = {"total": 30.0, "pull_wait": 10.0, "forward": 20.0}
    assert record["step_ms"] | {"other": 0.0} == dict.fromkeys(record["step_ms"], 0.0) | parts
    assert record["wait_ms"] == {"server 1": 10.0}, "a server that nobody waited for is not named"
    record = worker_record(job.figures(), job.figures())  # without a step, and without a division by zero
    assert (record["steps"], record["loss"], record["step_ms"]["total"], record["samples_per_s"]) == (0, None, 0.0, 0.0)


def test_a_loss_that_is_not_finite_is_null_until_the_next_record() -> None:
    job = Watched()
    first = job.figures()
    job.step(1.0, loss=math.nan)
    job.step(1.0, loss=0.5)
    second = job.figures()
    job.step(1.0, loss=0.25)
    assert worker_record(second, first)["loss"] is None
    assert worker_record(job.figures(), second)["loss"] == 0.25


def test_steps_are_counted_by_their_duration_and_their_wait_and_the_time_between_generations_is_none() -> None:
    job = Watched()
    for seconds in (0.0009, 0.018, 0.018, 60.0):
        job.step(seconds, wait_s=seconds / 2)
    job.now += 50.0
    job.counts.enter(0)
    job.step(0.02, wait_s=0.01)
    figures = job.counts.figures()
    assert {bound: n for bound, n in figures["step_histogram"].items() if n} == {"0.001": 1, "0.025": 3, "inf": 1}
    assert {bound: n for bound, n in figures["pull_wait_histogram"].items() if n} == {"0.001": 1, "0.01": 3, "inf": 1}


# Of whole jobs


@functools.cache
def finished_once(changes: str) -> tuple[dict[str, Any], list[Record]]:
    return finished(**json.loads(changes))


def uncompressed(**changes: Any) -> tuple[dict[str, Any], list[Record]]:
    """Of a job that several tests compare with."""
    return finished_once(json.dumps(changes))


def finished(**changes: Any) -> tuple[dict[str, Any], list[Record]]:
    """The summary of a job in this process, and the last record of each worker."""
    config = JobConfig.model_validate({**SMALL, "consistency": {"mode": "sync"}, **changes})
    job = LocalJob(config, open_data(config.data, seed=config.seed))
    summary = job.run()
    last = [record for kind, record in job.records if kind == "telemetry"]
    for record in last:
        check_record(record, "worker")
    for way, size in summary["bytes"]["fp32"].items() if len(last) == config.workers else ():
        assert size == sum(record["fp32_bytes"][way] for record in last), way
    counted = [worker.run.meters.figures is not None and worker.client.waits is not None for worker in job.workers]
    assert counted == [changes.get("telemetry") != {"every_s": "off"}] * config.workers
    return summary, last


def test_the_last_records_add_up_to_the_summary_and_fp32_is_what_was_sent() -> None:
    summary, last = uncompressed()
    assert len(last) == 2
    totals = merge_totals(record["bytes"] for record in last)
    for way in ("push", "pull", "tower", "read"):
        assert totals[way] == summary["bytes"][way], way
    for way in ("push", "pull", "tower"):
        assert sum(record["fp32_bytes"][way] for record in last) == sum(summary["bytes"][way].values()), way
    assert {(record["step"], record["samples"]) for record in last} == {(summary["steps"], summary["samples"])}
    assert sum(sum(record["staleness"].values()) for record in last) == sum(summary["staleness"].values())
    assert sum(record["ids"] for record in last) == 3 * summary["samples"]
    assert all(0 < record["unique_ids"] < record["ids"] for record in last)
    assert all(record["unsent_share"] is None and not record["unsent_rows"] for record in last)


@every(
    ("push", "unsent"),
    [
        ({"values": "fp16", "keep_rows": 0.25, "pool_rows": 5000}, True),
        ({"values": "fp16", "keep_rows": 0.25, "pool_rows": 0}, True),
        ({"values": "int8"}, False),
    ],
    ids=["pool", "no pool", "format only"],
)
def test_fp32_without_compression_is_what_an_uncompressed_job_sends(push: dict[str, Any], unsent: bool) -> None:
    plain, _ = uncompressed()
    compressed, last = finished(compression={"push": push, "pull": {"values": "fp16"}})
    for way in ("push", "pull"):
        values = sum(record["fp32_bytes"][way] for record in last)
        assert values == pytest.approx(sum(plain["bytes"][way].values()), rel=0.15), way
        assert sum(compressed["bytes"][way].values()) < values, way
    shares = [record["unsent_share"] for record in last]
    assert all(0.0 < share < 0.75 for share in shares) if unsent else not any(shares)


def test_a_tower_that_is_compressed_counts_a_plain_sum_of_each_step() -> None:
    plain, _ = uncompressed(consistency={"mode": "bounded"})
    _, last = finished(consistency={"mode": "bounded"}, compression={"tower": {"name": "int8"}})
    counted = sum(record["fp32_bytes"]["tower"] for record in last)
    assert counted == pytest.approx(sum(plain["bytes"]["tower"].values()), rel=0.35)


def test_telemetry_changes_no_bit_of_the_model_and_without_it_nothing_is_reported() -> None:
    with_records, _ = finished(telemetry={"every_s": 0.001})
    without, last = finished(telemetry={"every_s": "off"})
    assert with_records["state_digest"] == without["state_digest"] and last == []
    assert with_records["bytes"]["fp32"] == without["bytes"]["fp32"]


CONFIG = """
workers: 2
model: {name: dlrm, bottom: [8], hidden: [8]}
tables: {default: {dim: 4}}
tower: {compile: off}
train: {batch_size: 8, epochs: 100000}  # the ranks look about twice a second whether to stop
"""


def test_a_stopped_job_tells_its_samples_times_and_bytes_and_the_choices_of_its_tower_once() -> None:
    job = LocalJob(parse_config(CONFIG), as_data(draw(160)))

    def train(worker: Worker) -> None:
        with pytest.raises(JobStopped):
            worker.generation.train(lambda step: step >= 4)

    in_threads([lambda w=worker: train(w) for worker in job.workers])  # to the end of both
    (figures,) = [record["figures"] for kind, record in job.records if kind == "event" and "figures" in record]
    assert 4 <= figures["steps"] < 1_000_000 and figures["samples"] == 16 * figures["steps"]
    assert figures["bytes"]["push"]["values"] > 0 and figures["bytes"]["per_sample"] > 0
    fp32 = figures["bytes"]["fp32"]
    sent = {way: sum(figures["bytes"][way].values()) for way in ("push", "pull", "tower")}
    assert fp32.keys() == sent.keys() and (fp32["push"], fp32["tower"]) == (sent["push"], sent["tower"])
    assert fp32["pull"] >= sent["pull"], "the rows of the next step may not have come"
    assert figures["samples_per_s"] > 0 and figures["step_ms"]["total"] > 0
    assert [record["phase"] for kind, record in job.records if kind == "phase"].count("tower") == 1, "of rank 0 alone"


# Of the dense model


class Trained:
    """A tower and its steps, on a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = Stopwatch(lambda: self.now)
        self.tower, self.counters = tower_of(watch=Stopwatch(lambda: 0.0)), StepCounters(self.watch)
        self.dense = DenseFigures(self.tower.compilation, self.counters)

    def step(self, samples: int, **seconds: float) -> None:
        self.tower.backward(*part_of(batch(0, samples), 0, samples), 1 / samples)
        for part, time_s in seconds.items():
            self.watch.enter(part)  # type: ignore[arg-type]
            self.now += time_s
        self.watch.enter(None)
        self.counters.step_done(samples, StepResult(Loss(0.5), True, 0, 0))

    @property
    def per_sample(self) -> float:
        return self.tower.compilation.products.per_sample

    def figures(self) -> Record:
        others = {key: {} for key in MAPPINGS} | dict.fromkeys(ZEROS, 0)
        return {**others, **self.counters.figures(), **self.dense.figures()}


def test_the_rate_of_products_is_that_of_forward_and_backward_alone() -> None:
    job = Trained()
    assert job.dense.total() == {"compile_s": 0.0}, "without a step only what is known is there"
    for _ in range(3):
        job.step(8, forward=0.25, backward=0.75, push=5.0)
    found = job.dense.total()
    assert found["flops_per_sample"] == job.per_sample > 0
    assert found["flops_per_s"] == pytest.approx(8 * job.per_sample / 1.0)
    assert found["flops_per_s_alone"] > 0
    assert found["compile_s"] == 0.0 and "rss_bytes" not in found, "it was not compiled"


def test_a_record_has_the_rate_since_the_last_one() -> None:
    job = Trained()
    job.step(4, forward=100.0)
    last = job.figures()
    job.step(8, forward=1.0, backward=1.0)
    job.step(8, forward=2.0, collect=9.0)
    now = job.figures()
    found = worker_record(now, last)
    assert (found["flops"], found["flops_per_s"]) == (20 * job.per_sample, 16 * job.per_sample / 4.0)
    assert (found["compile_s"], found["compile_rss_bytes"]) == (0.0, 0)
    assert worker_record(now, now)["flops_per_s"] is None


def test_shares_are_of_the_parts_and_the_rate_on_a_gpu_of_the_whole_step() -> None:
    by_part: dict[Part, float] = dict.fromkeys(PARTS, 1.0)
    assert Products(torch.device("cpu")).seconds(by_part) == 2.0
    assert Products(torch.device("cuda")).seconds(by_part) == len(PARTS), "nothing waits for its kernels"
    step_ms = dict.fromkeys(PARTS, 0.0) | {"total": 8.0, "forward": 2.0, "push": 6.0}
    shares = step_share(step_ms)
    assert (shares["forward"], shares["push"], shares["keep"]) == (0.25, 0.75, 0.0) and "total" not in shares
    assert step_share(dict.fromkeys(("total", *PARTS), 0.0)) == {}


def test_a_job_tells_its_products_and_shares() -> None:
    config = "{workers: 2, model: {name: dnn, hidden: [8]}, tables: {default: {dim: 4}}, telemetry: {every_s: 60}, "
    job = LocalJob(parse_config(f"{config} train: {{batch_size: 8, epochs: 2}}}}"), as_data(draw(64)))
    summary = job.run()
    tower, width = summary["tower"], 4 * 3 + 3
    assert sum(summary["step_share"].values()) == pytest.approx(1.0, abs=1e-3)
    assert tower["flops_per_sample"] == 6 * width * 8 + 6 * 8
    assert tower["flops_per_s"] > 0 < tower["flops_per_s_alone"]
    records = [record for kind, record in job.records if kind == "telemetry" and "flops" in record]
    assert [record["flops"] for record in records] == [64 * tower["flops_per_sample"]] * 2, "each rank had half of them"
    for record in records:
        check_record(record, "worker 0")
