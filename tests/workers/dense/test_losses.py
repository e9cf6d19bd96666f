"""The loss of a step, read late without being lost; of several labels beside a transcription in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.dense.loss import TaskLoss, joint_logits
from shardkeep.workers.dense.loss_sum import LossSum
from shardkeep.workers.label_config import TaskColumn
from shardkeep.workers.metrics.outputs import joint_outputs
from tests.support.cases import every
from tests.support.ranks import run_ranks
from tests.support.towers import batch, part_of, seeded_model, tower_of, values_of

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
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


def test_a_loss_on_a_cpu_waits_for_nothing_and_without_samples_is_zero() -> None:
    for loss, samples, expected in ((math.inf, 1, math.inf), (0.0, 0, 0.0)):  # one that is not finite stays so
        found = LossSum(torch.device("cpu"), samples, 5)
        found.add(torch.tensor(loss))
        assert found.ready and float(found) == expected


NAN = float("nan")


def tasks_of(*settings: dict[str, Any]) -> tuple[TaskColumn, ...]:
    return tuple(TaskColumn.model_validate({"column": f"t{t}"} | each) for t, each in enumerate(settings))


CHAIN = tasks_of({}, {"after": "t0", "weight": 2.0}, {"after": "t1"}, {"loss": {"name": "huber", "delta": 0.5}})


def drawn(tasks: tuple[TaskColumn, ...], count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels of which a third is missing."""
    torch.manual_seed(3)
    label_BT = (torch.rand(count, len(tasks)) < 0.4).float()
    label_BT[torch.rand(count, len(tasks)) < 0.3] = NAN
    return torch.randn(count, len(tasks)) * 3, label_BT


def transcribed(logits: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The loss of CHAIN, sample by sample and label by label: probabilities as sums of logsigmoids."""
    total = logits.new_zeros(())
    for b in range(len(logits)):
        logs = [F.logsigmoid(logits[b, t]) for t in range(3)]
        joint = [logs[0], logs[0] + logs[1], logs[0] + logs[1] + logs[2]]
        for t, log_p in enumerate(joint):
            y = labels[b, t]
            if not y.isnan():
                weight = 2.0 if t == 1 else 1.0
                total = total - weight * factors[b] * (y * log_p + (1 - y) * torch.log1p(-log_p.exp()))
        if not labels[b, 3].isnan():
            error = (logits[b, 3] - labels[b, 3]).abs()
            total = total + factors[b] * (0.5 * error**2 if error <= 0.5 else 0.5 * (error - 0.25))
    return total


def test_loss_and_gradients_are_those_of_the_formulas() -> None:
    logits, label_BT = drawn(CHAIN)
    factors_B = torch.rand(len(logits))
    own = logits.clone().requires_grad_()
    loss = TaskLoss(CHAIN)(own, label_BT, factors_B)
    loss.backward()
    exact = logits.double().requires_grad_()
    expected = transcribed(exact, label_BT.double(), factors_B.double())
    expected.backward()
    assert own.grad is not None and exact.grad is not None
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@every("missing", [slice(None), slice(0, 1)], ids=["all labels", "one label"])
def test_a_label_that_no_sample_has_adds_zero_with_a_graph(missing: slice) -> None:
    logits, label_BT = drawn(CHAIN)
    label_BT = label_BT.nan_to_num(0.0)
    label_BT[:, missing] = NAN
    logits[0] = 200.0
    if missing == slice(None):
        logits[1, 3] = torch.inf  # a mask behind the loss would make NaN of it
    logits.requires_grad_()
    loss = TaskLoss(CHAIN)(logits, label_BT)
    loss.backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and loss.isfinite()
    if missing == slice(None):
        assert loss == 0 and not logits.grad.any()


@every("size", [0.0, 1.0, 20.0, 90.0, 1e4])
def test_joint_logits_stay_exact_where_probabilities_end(size: float) -> None:
    """At 90 and beyond, 1 - p is 0 in float32, and the logit of a product has no other form."""
    logits = torch.tensor([[a * size, b * size] for a in (-1.0, 0.5, 1.0) for b in (-1.0, 0.25, 1.0)])
    exact = logits.double().requires_grad_()
    odds_against = (-exact).exp().add(1).prod(dim=1) - 1  # in float64, for small ones
    found = joint_logits(logits, [None, 0])[:, 1]
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), torch.from_numpy(joint_outputs(logits.numpy(), CHAIN[:2])[:, 1]))
    if size <= 20:
        torch.testing.assert_close(found.double(), -odds_against.detach().log(), rtol=1e-5, atol=1e-4)


def several(labels: torch.Tensor) -> torch.Tensor:
    """Three labels of the samples of `batch`, one of them missing here and there."""
    label_BT = torch.cat([labels, labels * (torch.arange(len(labels))[:, None] % 2), labels + 0.5], dim=1)
    label_BT[::3, 2] = NAN
    return label_BT


TASKS = tasks_of({}, {"after": "t0"}, {"loss": "mse", "weight": 0.3})


def three_outputs(seed: int = 0) -> nn.Module:
    return seeded_model(seed, name="dnn", labels=("t0", "t1", "t2"))


@every("splits", [[(0, 24), (24, 24)], [(0, 3), (3, 24)]])
def test_ranks_together_train_several_labels_as_one_worker(splits: list[tuple[int, int]]) -> None:
    def steps(tower: Any, start: int, stop: int) -> torch.Tensor:
        for step in range(3):
            dense, leaves, label = batch(step, 24)
            whole = dense, leaves, several(label)
            part = part_of(whole, start, stop) if stop > start else part_of(whole, 0, 1)
            tower.backward(*part, 1 / 24 if stop > start else 0.0)
            tower.update(step)
        return values_of(tower)

    def work(collective: ThreadCollective) -> torch.Tensor:
        tower = tower_of(model=models[collective.rank], collective=collective, tasks=TASKS)
        return steps(tower, *splits[collective.rank])

    alone = steps(tower_of(model=three_outputs(), tasks=TASKS), 0, 24)
    models = [three_outputs(rank) for rank in range(len(splits))]
    for values in run_ranks(ThreadCollective.group(len(splits)), work):
        torch.testing.assert_close(values, alone, rtol=1e-5, atol=1e-6)
