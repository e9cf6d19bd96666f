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
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.snapshot import walk
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.marked_tables import Between, checkpointed, loaded, same, state
from tests.support.push_job import DIM, IDS, Job, gradient
from tests.support.tables import gradients

STEPS = 12
NO_IDS = np.empty(0, np.int64)
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
every_optimizer = every("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


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


def totals(job: Job) -> int:
    return sum(found["t"] for found in job.digests) % (1 << 128)


@every_optimizer
def test_a_sync_job_trains_as_one_process_with_dense_gradients(optimizer: dict[str, Any]) -> None:
    job = Job("sync", optimizer, workers=2, servers=1)
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


@every_optimizer
def test_the_rows_do_not_depend_on_the_number_of_servers(optimizer: dict[str, Any]) -> None:
    one, three = (trained(Job("sync", optimizer, workers=2, servers=servers)) for servers in (1, 3))
    lazy = trained(Job("sync", {**optimizer, "weight_decay_on": "touched"}, workers=2))
    assert totals(one) == totals(three) != totals(lazy)


@every("workers", [1, 2])
@every("mode", ["sync", "bounded", "async"])
def test_rows_that_no_rank_touches_decay_once_a_step(mode: str, workers: int) -> None:
    job = Job(mode, OPTIMIZERS["sgd"], workers=workers, init={"name": "constant", "value": 1.0})
    for step in range(4):
        job.step(step, ids=dict.fromkeys(range(workers), NO_IDS if step else IDS), size=0.0)
    job.fenced(4)
    once = 1.0 - 0.005 if mode == "sync" else (1.0 - 0.005 / workers) ** workers
    assert np.allclose(job.rows(), once**4, rtol=1e-6, atol=0)


def test_a_row_decays_from_the_update_on_that_creates_it() -> None:
    job = Job("sync", OPTIMIZERS["sgd"], init={"name": "constant", "value": 1.0})
    for step in range(3):
        job.step(step, ids={0: IDS[step : step + 1]}, size=0.0)
    job.fenced(3)
    assert np.allclose(job.rows(IDS[:4])[:, 0], [0.995**3, 0.995**2, 0.995, 1.0], rtol=1e-6, atol=0)


@every_optimizer
def test_a_replay_of_the_journal_decays_the_same_rows(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    killed = trained(Job("sync", optimizer, workers=2, journals=tmp_path))
    assert [killed.replayed().tables.digests()] == killed.digests


@every_optimizer
def test_checkpoints_hold_all_rows_as_they_were_whatever_decays_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: dict[str, Any]
) -> None:
    monkeypatch.setattr(walk, "ROWS_AT_ONCE", 300)
    specs = [TableSpec(name="t", dim=DIM, optimizer=optimizer), TableSpec(name="u", dim=3, optimizer=optimizer)]
    tables, ids = Tables(specs, seed=7), np.arange(3000)
    tables.changed.follow("")
    for t, spec in enumerate(specs):
        tables.apply([gradients({t: (ids, np.ones((ids.size, spec.dim), np.float32))})], step=0)
    few = gradients({0: (np.array([3, 20_000]), np.ones((2, DIM), np.float32))})
    monkeypatch.setattr(walk, "time", Between(lambda: tables.apply([few], step=1)))
    checkpoints, base = Checkpoints(tmp_path), None
    for step in (1, 2):
        before = state(tables)
        base = checkpointed([tables], checkpoints, step, base)
        assert len(base.chain) == step  # the second is an increment
        (read,) = loaded(specs, base)
        assert same(state(read), before) and not same(state(tables), before)


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
