"""The loss of a step: the bits of a sum in Python, on every device, and read late without being lost."""

from __future__ import annotations

import math

import pytest
import torch

from shardkeep.workers.dense.loss_sum import LossSum
from shardkeep.workers.reporting.counters import StepCounters
from shardkeep.workers.step import StepResult
from shardkeep.workers.timing.clock import Stopwatch
from tests.support.step_losses import Loss

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_has_the_bits_of_python_numbers_added_in_order(device: str) -> None:
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 1e3 / 3
    found, expected = LossSum(torch.device(device), 300, 700), 0.0
    for loss in losses.to(device):
        found.add(loss)
    for loss in losses.tolist():
        expected += loss
    found.send()
    assert float(found) == expected * 700 / 300
    assert found.ready and float(found) == float(found)


def test_a_loss_on_a_cpu_waits_for_nothing_and_one_that_is_not_finite_stays_so() -> None:
    found = LossSum(torch.device("cpu"), 1, 1)
    found.add(torch.tensor(math.inf))
    assert found.ready and math.isinf(float(found))


def test_a_rank_without_samples_has_a_loss_of_zero() -> None:
    found = LossSum(torch.device("cpu"), 0, 5)
    found.add(torch.tensor(0.0))
    assert float(found) == 0.0


def trained(counters: StepCounters, *losses: Loss) -> None:
    for loss in losses:
        counters.step_done(8, StepResult(loss, applied=True, dropped_rows=0, staleness=0))


def test_a_loss_that_is_there_is_counted_with_its_step() -> None:
    counters = StepCounters(Stopwatch())
    trained(counters, Loss(1.0), Loss(3.0))
    assert (counters.counts.losses, counters.counts.loss_sum) == (2, 4.0)


def test_a_loss_that_a_device_still_computes_is_read_one_step_late() -> None:
    counters = StepCounters(Stopwatch())
    trained(counters, Loss(1.0, ready=False))
    assert (counters.counts.steps, counters.counts.losses) == (1, 0)
    trained(counters, Loss(math.nan, ready=False))
    assert (counters.counts.losses, counters.counts.loss_sum, counters.counts.bad_losses) == (1, 1.0, 0)
    trained(counters, Loss(2.0, ready=False))
    assert (counters.counts.losses, counters.counts.loss_sum, counters.counts.bad_losses) == (2, 1.0, 1)


def test_a_report_has_the_losses_of_all_its_steps_however_late_they_are() -> None:
    records = []
    for ready in (True, False):
        counters = StepCounters(Stopwatch(lambda: 0.0))
        trained(counters, *(Loss(value, ready) for value in (1.0, 4.0)))
        first = counters.report()
        trained(counters, Loss(0.5, ready))
        records.append([first, counters.report(), counters.report()])
    assert records[0] == records[1]
    assert [record["loss"] for record in records[0]] == [2.5, 0.5, None]


def test_a_loss_before_the_end_of_a_generation_is_counted_once() -> None:
    counters = StepCounters(Stopwatch())
    trained(counters, Loss(1.0, ready=False))
    counters.enter(0)  # the step is trained again
    assert (counters.counts.losses, counters.counts.samples) == (1, 0)
    trained(counters, Loss(1.0, ready=False))
    counters.settle()
    counters.settle()
    assert (counters.counts.losses, counters.counts.loss_sum) == (2, 2.0)
