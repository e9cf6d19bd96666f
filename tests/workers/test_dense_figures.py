"""What the dense model of a job costs, in its summary and its records."""

from __future__ import annotations

import pytest
import torch

from shardkeep.config import parse_config
from shardkeep.records.telemetry import check_record
from shardkeep.workers.reporting.counters import StepCounters
from shardkeep.workers.reporting.dense_figures import DenseFigures, step_share
from shardkeep.workers.reporting.figures import worker_record
from shardkeep.workers.step import StepResult
from shardkeep.workers.timing.clock import PARTS, Part, Stopwatch
from tests.support.local_job import LocalJob
from tests.support.samples import as_data, draw
from tests.support.step_losses import Loss
from tests.support.towers import batch, part_of, tower_of


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


def test_the_rate_is_that_of_forward_and_backward_alone() -> None:
    job = Trained()
    for _ in range(3):
        job.step(8, forward=0.25, backward=0.75, push=5.0)
    found = job.dense.total()
    assert found["flops_per_sample"] == job.per_sample > 0
    assert found["flops_per_s"] == pytest.approx(8 * job.per_sample / 1.0)
    assert found["flops_per_s_alone"] > 0
    assert found["compile_s"] == 0.0 and "rss_bytes" not in found, "it was not compiled"


def test_without_a_step_only_what_is_known_is_there() -> None:
    assert Trained().dense.total() == {"compile_s": 0.0}


def test_a_record_has_the_rate_since_the_last_one() -> None:
    job = Trained()
    job.step(4, forward=100.0)
    last = record_of(job)
    job.step(8, forward=1.0, backward=1.0)
    job.step(8, forward=2.0, collect=9.0)
    now = record_of(job)
    found = worker_record(now, last)
    assert (found["flops"], found["flops_per_s"]) == (20 * job.per_sample, 16 * job.per_sample / 4.0)
    assert (found["compile_s"], found["compile_rss_bytes"]) == (0.0, 0)
    assert worker_record(now, now)["flops_per_s"] is None


def record_of(job: Trained) -> dict:
    others = ("bytes", "fp32_bytes", "staleness", "wait_s")
    zero = ("generation", "step", "unsent_rows", "unsent_share", "rss_bytes", "limit_bytes", "metrics")
    return {**{key: {} for key in others}, **dict.fromkeys(zero, 0), **job.counters.figures(), **job.dense.figures()}


def test_on_a_gpu_the_rate_is_of_the_whole_step() -> None:
    from shardkeep.workers.dense.products import Products

    by_part: dict[Part, float] = dict.fromkeys(PARTS, 1.0)
    assert Products(torch.device("cpu")).seconds(by_part) == 2.0
    assert Products(torch.device("cuda")).seconds(by_part) == len(PARTS), "nothing waits for its kernels"


def test_shares_are_of_the_parts_and_none_without_a_step() -> None:
    step_ms = dict.fromkeys(PARTS, 0.0) | {"total": 8.0, "forward": 2.0, "push": 6.0}
    shares = step_share(step_ms)
    assert (shares["forward"], shares["push"], shares["keep"]) == (0.25, 0.75, 0.0) and "total" not in shares
    assert step_share(dict.fromkeys(("total", *PARTS), 0.0)) == {}


CONFIG = """
workers: 2
model: {name: dnn, hidden: [8]}
tables: {default: {dim: 4}}
telemetry: {every_s: 60}
train: {batch_size: 8, epochs: 2}
"""


def test_a_job_tells_its_products_and_shares() -> None:
    job = LocalJob(parse_config(CONFIG), as_data(draw(64)))
    summary = job.run()
    tower, width = summary["tower"], 4 * 3 + 3
    assert sum(summary["step_share"].values()) == pytest.approx(1.0, abs=1e-3)
    assert tower["flops_per_sample"] == 6 * width * 8 + 6 * 8
    assert tower["flops_per_s"] > 0 < tower["flops_per_s_alone"]
    records = [record for kind, record in job.records if kind == "telemetry" and "flops" in record]
    assert [record["flops"] for record in records] == [64 * tower["flops_per_sample"]] * 2, "each rank had half of them"
    for record in records:
        check_record(record, "worker 0")
