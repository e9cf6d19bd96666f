"""A worker's figures, of its losses and dense model too, and the records of them, also where a job is stopped."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch

from shardkeep.base.errors import JobStopped
from shardkeep.compression.ledger import merge_totals
from shardkeep.config import JobConfig, parse_config
from shardkeep.records.telemetry import check_record
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.dense.products import Products
from shardkeep.workers.reporting.counters import WARM_UP_STEPS, StepCounters
from shardkeep.workers.reporting.dense_figures import DenseFigures, step_share
from shardkeep.workers.reporting.figures import worker_record
from shardkeep.workers.step import StepResult
from shardkeep.workers.timing.clock import PARTS, Stopwatch
from tests.support.cases import every
from tests.support.configs import TINY
from tests.support.local_job import LocalJob, in_threads
from tests.support.samples import as_data, draw
from tests.support.towers import batch, part_of, tower_of

NONE_YET = {key: {} for key in ("bytes", "fp32_bytes", "staleness", "wait_s")} | dict.fromkeys(
    ("generation", "step", "samples", "dropped_rows", "skipped_steps", "unsent_rows", "unsent_share", "rss_bytes",
     "limit_bytes", "metrics"), 0,
)  # fmt: skip


@dataclass
class Loss:
    """A loss as a device gives it: of `value`, there at once, or only after a wait."""

    value: float
    ready: bool = True

    def __float__(self):
        self.ready = True
        return self.value


class Steps:
    """Steps on a clock that the test turns, and the tower whose products they make."""

    def __init__(self):
        self.now = 100.0
        self.watch = Stopwatch(lambda: self.now)
        self.counters = StepCounters(self.watch)
        self.tower = tower_of(watch=Stopwatch(lambda: 0.0))
        self.dense = DenseFigures(self.tower.compilation, self.counters)

    def step(self, loss=0.5, *, ready=True, samples=64, **seconds):
        self.watch.begin(0)
        for part, time_s in seconds.items():
            self.watch.enter(part)
            self.now += time_s
        self.watch.enter(None)
        result = StepResult(Loss(loss, ready), True, 0, 0, ids=100, unique_ids=40)
        self.counters.step_done(samples, result)

    def multiply(self, samples, **seconds):
        self.tower.backward(*part_of(batch(0, samples), 0, samples), 1 / samples)
        self.step(samples=samples, **seconds)

    def figures(self, **changes):
        return {**NONE_YET, **self.counters.figures(), **self.dense.figures(), **changes}


def test_a_record_has_the_means_of_the_steps_since_the_last_one():
    job = Steps()
    job.step(7.0, forward=9.0)
    last = job.figures(wait_s={"server 0": 4.0})
    job.step(0.4, pull_wait=0.008, forward=0.012)
    job.step(0.6, pull_wait=0.012, forward=0.028)
    record = worker_record(job.figures(wait_s={"server 0": 4.0, "server 1": 0.02}), last)
    assert (record["steps"], record["loss"], record["ids"], record["unique_ids"]) == (2, 0.5, 300, 120)
    assert record["samples_per_s"] == pytest.approx(128 / 0.06)
    parts = {"total": 30.0, "pull_wait": 10.0, "forward": 20.0}
    assert record["step_ms"] == dict.fromkeys(record["step_ms"], 0.0) | parts
    assert record["wait_ms"] == {"server 1": 10.0}, "a server that nobody waited for is not named"
    record = worker_record(job.figures(), job.figures())  # without a step, and without a division by zero
    assert (record["steps"], record["loss"], record["step_ms"]["total"], record["samples_per_s"]) == (0, None, 0.0, 0.0)


def test_steps_are_counted_by_their_duration_and_their_wait_and_the_time_between_generations_is_none():
    job = Steps()
    for seconds in (0.0009, 0.018, 0.018, 60.0):
        job.step(pull_wait=seconds / 2, forward=seconds / 2)
    job.now += 50.0
    job.counters.enter(0)
    job.step(pull_wait=0.01, forward=0.01)
    figures = job.counters.figures()
    assert {bound: n for bound, n in figures["step_histogram"].items() if n} == {"0.001": 1, "0.025": 3, "inf": 1}
    assert {bound: n for bound, n in figures["pull_wait_histogram"].items() if n} == {"0.001": 1, "0.01": 3, "inf": 1}


def test_a_report_has_the_mean_of_its_own_interval_and_the_summary_that_of_training_in_the_steady_state():
    job = Steps()
    for _ in range(WARM_UP_STEPS):
        job.step(forward=0.004)
    assert not job.counters.report_due(0.05)
    first = job.counters.report()["step_ms"]
    assert list(first) == ["total", *PARTS]
    assert (first["total"], first["forward"], first["push"]) == (4.0, 4.0, 0.0)
    assert job.counters.step_ms()["total"] == 4.0  # no steady step yet
    job.step(forward=0.001)
    with job.watch.excluded():
        job.now += 1000.0
    job.step(forward=0.002)
    assert job.counters.samples_per_s() == pytest.approx(64 / 0.0015)
    report = job.counters.report()
    assert report["step_ms"]["forward"] == 1.5 and report["samples_per_s"] == pytest.approx(64 / 0.0015)
    assert job.counters.report()["step_ms"]["total"] == 0.0  # no step since
    job.step(forward=0.003)
    assert job.counters.step_ms()["total"] == 2.0


def test_a_loss_that_a_device_still_computes_is_read_one_step_late_and_counted_once():
    job = Steps()
    counts = job.counters.counts
    job.step(1.0, ready=False)
    assert (counts.steps, counts.losses) == (1, 0)
    job.step(math.nan, ready=False)
    assert (counts.losses, counts.loss_sum, counts.bad_losses) == (1, 1.0, 0)
    job.step(2.0)  # there at once
    assert (counts.losses, counts.loss_sum, counts.bad_losses) == (3, 3.0, 1)
    job.step(1.0, ready=False)
    job.counters.enter(0)  # a generation ends; the step is trained again
    counts = job.counters.counts
    assert (counts.losses, counts.samples) == (4, 0)
    job.step(1.0, ready=False)
    job.counters.settle()
    job.counters.settle()
    assert (counts.losses, counts.loss_sum) == (5, 5.0)


def test_a_report_has_the_losses_of_all_its_steps_and_one_that_is_not_finite_is_null_until_the_next():
    for ready in (True, False):
        job = Steps()
        job.step(1.0, ready=ready)
        job.step(4.0, ready=ready)
        found = [job.counters.report()["loss"]]
        job.step(0.5, ready=ready)
        assert [*found, job.counters.report()["loss"], job.counters.report()["loss"]] == [2.5, 0.5, None]
    first = job.figures()
    job.step(math.nan)
    job.step(0.5)
    second = job.figures()
    job.step(0.25)
    assert worker_record(second, first)["loss"] is None and worker_record(job.figures(), second)["loss"] == 0.25


# Of the dense model


def test_the_rate_of_products_is_that_of_forward_and_backward_alone():
    job = Steps()
    assert job.dense.total() == {"compile_s": 0.0}, "without a step only what is known is there"
    for _ in range(3):
        job.multiply(8, forward=0.25, backward=0.75, push=5.0)
    found, per_sample = job.dense.total(), job.tower.compilation.products.per_sample
    assert found["flops_per_sample"] == per_sample > 0
    assert found["flops_per_s"] == pytest.approx(8 * per_sample / 1.0)
    assert found["compile_s"] == 0.0 and "rss_bytes" not in found, "it was not compiled"
    last = job.figures()
    job.multiply(8, forward=1.0, backward=1.0)
    job.multiply(8, forward=2.0, collect=9.0)
    now = job.figures()
    found = worker_record(now, last)
    assert (found["flops"], found["flops_per_s"]) == (40 * per_sample, 16 * per_sample / 4.0)
    assert (found["compile_s"], found["compile_rss_bytes"]) == (0.0, 0)
    assert worker_record(now, now)["flops_per_s"] is None


def test_shares_are_of_the_parts_and_the_rate_on_a_gpu_of_the_whole_step():
    by_part = dict.fromkeys(PARTS, 1.0)
    assert Products(torch.device("cpu")).seconds(by_part) == 2.0
    assert Products(torch.device("cuda")).seconds(by_part) == len(PARTS), "nothing waits for its kernels"
    shares = step_share(dict.fromkeys(PARTS, 0.0) | {"total": 8.0, "forward": 2.0, "push": 6.0})
    assert (shares["forward"], shares["push"], shares["keep"]) == (0.25, 0.75, 0.0) and "total" not in shares
    assert step_share(dict.fromkeys(("total", *PARTS), 0.0)) == {}


# Of whole jobs

DATA = {"train_samples": 600, "eval_samples": 100, "num_dense": 3, "table_sizes": [50, 90, 3000]}


def finished(mode="bounded", **changes):
    config = JobConfig.model_validate(TINY | {"data": {"synthetic": DATA}, "consistency": {"mode": mode}, **changes})
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


uncompressed = functools.cache(finished)


def test_the_last_records_add_up_to_the_summary_and_fp32_is_what_was_sent():
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
    [({"values": "fp16", "keep": 0.25, "pool_rows": 5000}, True), ({"values": "int8"}, False)],
    ids=["pool", "format only"],
)
def test_fp32_without_compression_is_what_an_uncompressed_job_sends(push, unsent):
    plain, _ = uncompressed()
    compression = {"push": push, "pull": {"values": "fp16"}, "tower": {"name": "fp16"}}
    compressed, last = finished(compression=compression)
    for way, most in (("push", 0.15), ("pull", 0.15), ("tower", 0.35)):
        values = sum(record["fp32_bytes"][way] for record in last)
        assert values == pytest.approx(sum(plain["bytes"][way].values()), rel=most), way
        assert sum(compressed["bytes"][way].values()) < values, way
    shares = [record["unsent_share"] for record in last]
    assert all(0.0 < share < 0.75 for share in shares) if unsent else not any(shares)


def test_telemetry_changes_no_bit_of_the_model_and_without_it_nothing_is_reported():
    with_records, _ = finished("sync", telemetry={"every_s": 0.001})
    without, last = finished("sync", telemetry={"every_s": "off"})
    assert with_records["state_digest"] == without["state_digest"] and last == []
    assert with_records["bytes"]["fp32"] == without["bytes"]["fp32"]


def test_a_stopped_job_tells_its_samples_times_and_bytes_and_the_choices_of_its_tower_once():
    config = """
    {workers: 2, model: {name: dlrm, bottom: [8], hidden: [8]}, tables: {default: {dim: 4}}, tower: {compile: off},
    train: {batch_size: 8, epochs: 100000}}
    """  # the ranks look about twice a second whether to stop
    job = LocalJob(parse_config(config), as_data(draw(160)))

    def train(worker):
        with pytest.raises(JobStopped):
            worker.generation.train(lambda step: step >= 4)

    in_threads([functools.partial(train, worker) for worker in job.workers])  # to the end of both
    (figures,) = [record["figures"] for kind, record in job.records if kind == "event" and "figures" in record]
    assert 4 <= figures["steps"] < 1_000_000 and figures["samples"] == 16 * figures["steps"]
    assert figures["bytes"]["push"]["values"] > 0 and figures["bytes"]["per_sample"] > 0
    fp32 = figures["bytes"]["fp32"]
    sent = {way: sum(figures["bytes"][way].values()) for way in ("push", "pull", "tower")}
    assert fp32.keys() == sent.keys() and (fp32["push"], fp32["tower"]) == (sent["push"], sent["tower"])
    assert fp32["pull"] >= sent["pull"], "the rows of the next step may not have come"
    assert figures["samples_per_s"] > 0 and figures["step_ms"]["total"] > 0
    assert [record["phase"] for kind, record in job.records if kind == "phase"].count("tower") == 1, "of rank 0 alone"


@every("workers", [1, 2])
def test_an_evaluation_tells_the_bytes_of_training_of_all_workers_and_a_job_its_products_shares_and_cpu(workers):
    config = f"""
    {{servers: 2, workers: {workers}, model: {{name: dnn, hidden: [8]}}, tables: {{default: {{dim: 4}}}},
    tower: {{compile: off}}, train: {{batch_size: {16 // workers}}}, eval: {{every_steps: 8}},
    telemetry: {{every_s: 60}}}}
    """
    job = LocalJob(parse_config(config), as_data(draw(320), draw(40, seed=1)))
    summary = job.run()
    records = [record for kind, record in job.records if kind == "eval"]
    assert [(r["step"], r["train_samples"]) for r in records] == [(8, 128), (16, 256), (20, 320)]
    totals = [r["train_bytes"]["total"] for r in records]
    assert 0 < totals[0] < totals[1] < totals[2]
    counted = {direction: sum(summary["bytes"][direction].values()) for direction in ("push", "pull", "tower")}
    assert records[-1]["train_bytes"] == counted | {"total": sum(counted.values())}
    assert (counted["tower"] > 0) == (workers > 1)
    assert summary["cpu_ms"]["steps"] == 10 and summary["cpu_ms"]["worker"] > 0
    assert summary["cpu_ms"]["server"] == 0.0  # in this process: counted with the worker
    assert sum(summary["step_share"].values()) == pytest.approx(1.0, abs=1e-3)
    tower, width = summary["tower"], 4 * 3 + 3
    assert tower["flops_per_sample"] == 6 * width * 8 + 6 * 8
    assert tower["flops_per_s"] > 0
    records = [record for kind, record in job.records if kind == "telemetry" and "flops" in record]
    assert [record["flops"] for record in records] == [320 // workers * tower["flops_per_sample"]] * workers
    for record in records:
        check_record(record, "worker 0")
