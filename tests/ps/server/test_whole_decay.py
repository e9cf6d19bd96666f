"""`weight_decay_on: table`: each update decays all rows, as one process with dense gradients does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardkeep.base.errors import ConfigError, ShardkeepError
from shardkeep.compression.config import CompressionConfig
from shardkeep.loop.client import EmbeddingClient
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.push_job import IDS, Job, gradient
from tests.support.tables import gradients

STEPS = 12
ALL = {"weight_decay": 0.05, "weight_decay_on": "table"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.1, **ALL},
    "adagrad": {"name": "adagrad", "lr": 0.1, **ALL},
    "rowwise_adagrad": {"name": "rowwise_adagrad", "lr": 0.1, **ALL},
    "adam": {"name": "adam", "lr": 0.01, "eps_after_correction": True, **ALL},
    "partial_rowwise_adam": {"name": "partial_rowwise_adam", "lr": 0.01, **ALL},
    "rmsprop": {"name": "rmsprop", "lr": 0.01, **ALL},
    "adadelta": {"name": "adadelta", "lr": 1.0, **ALL},
}


class RowwiseAdagrad(torch.optim.Optimizer):
    """The formula of the documents, for dense gradients."""

    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        for w in group["params"]:
            g = w.grad + group["weight_decay"] * w
            s = self.state[w]["s"] = self.state[w].get("s", 0.0) + (g * g).mean(1, keepdim=True)
            w.data -= group["lr"] * g / s.sqrt()


class PartialRowwiseAdam(torch.optim.Optimizer):
    """The formula of the documents with its default betas and eps, for dense gradients."""

    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        for w in group["params"]:
            g, state = w.grad + group["weight_decay"] * w.detach(), self.state[w]
            t = state["t"] = state.get("t", 0) + 1
            m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
            v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * (g * g).mean(1, keepdim=True)
            w.data -= group["lr"] * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


DENSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": lambda p, **settings: RowwiseAdagrad(p, settings),
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "partial_rowwise_adam": lambda p, **settings: PartialRowwiseAdam(p, settings),
}


def ids_of(step: int, rank: int) -> np.ndarray:
    """All rows at first, then a few; at some steps none."""
    if step == 0:
        return IDS
    return IDS[np.random.default_rng([step, rank]).random(IDS.size) < (0.0 if step % 4 == 3 else 0.2)]


def factor_of(step: int) -> float:
    return 0.5 if step > 6 else 1.0


def trained(job: Job, steps: range = range(STEPS)) -> Job:
    for step in steps:
        ids = {rank: ids_of(step, rank) for rank in range(len(job.clients))}
        job.step(step, factor=factor_of(step), ids=ids)
    return job.fenced(steps.stop)


@every("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_sync_job_trains_as_one_process_with_dense_gradients_on_any_number_of_servers_and_in_a_replay(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    job = Job("sync", optimizer, workers=2, journals=tmp_path)
    dense = torch.nn.Parameter(torch.from_numpy(job.rows().astype(np.float64)))
    name, lr = optimizer["name"], optimizer["lr"]
    reference = DENSE[name]([dense], lr=lr, weight_decay=optimizer["weight_decay"])
    trained(job)
    for step in range(STEPS):
        dense.grad = torch.zeros_like(dense)
        for rank in (0, 1):
            ids = ids_of(step, rank)
            dense.grad[np.isin(IDS, ids)] += torch.from_numpy(gradient(step, rank, ids.size))
        reference.param_groups[0]["lr"] = lr * factor_of(step)
        reference.step()
    assert np.allclose(job.rows(), dense.detach().numpy(), rtol=1e-5, atol=1e-6)
    lazy = trained(Job("sync", {**optimizer, "weight_decay_on": "touched"}, workers=2))
    assert job.total == trained(Job("sync", optimizer, workers=2, servers=3)).total != lazy.total
    assert [job.replayed().tables.digests()] == job.digests


@every(("mode", "workers"), [("sync", 2), ("bounded", 1), ("bounded", 2), ("async", 2)])
def test_rows_that_no_rank_touches_decay_once_a_step_from_the_update_on_that_creates_them(
    mode: str, workers: int
) -> None:
    job = Job(mode, OPTIMIZERS["sgd"], workers=workers, init={"name": "constant", "value": 1.0})
    for step in range(4):
        job.step(step, ids=dict.fromkeys(range(workers), IDS[2 * step : 2 * step + 2]), size=0.0)
    job.fenced(4)
    once = 1.0 - 0.005 if mode == "sync" else (1.0 - 0.005 / workers) ** workers
    after = np.repeat([once**4, once**3, once**2, once, 1.0], 2)
    assert np.allclose(job.rows(IDS[:10])[:, 0], after, rtol=1e-6, atol=0)


def test_a_table_with_too_many_rows_and_a_loop_with_selection_are_refused_in_one_line() -> None:
    tables = Tables([TableSpec(name="t", dim=1, optimizer=OPTIMIZERS["sgd"])], seed=1)
    tables.apply([gradients({0: (np.arange(1_000_000), np.zeros((1_000_000, 1), np.float32))})], step=0)
    with pytest.raises(ShardkeepError) as caught:
        tables.apply([gradients({0: (np.array([-1]), np.zeros((1, 1), np.float32))})], step=1)
    assert str(caught.value) == (
        "table t: 1000001 rows on one server with optimizer.weight_decay_on: table; allowed: 1000000; "
        "set weight_decay_on: touched, or use more servers"
    )

    table = TableSpec(name="t", dim=4, optimizer=OPTIMIZERS["adam"])
    selecting = CompressionConfig(push={"keep_rows": 0.1, "pool_rows": 9})
    with pytest.raises(
        ConfigError, match=r"^tables\.t\.optimizer\.weight_decay_on: table with compression\.push\.keep"
    ):
        EmbeddingClient.local([table], compression=selecting)
