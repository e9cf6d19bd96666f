"""`weight_decay_on: table`: each update decays all rows, as one process with dense gradients does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import ConfigError, ShardkeepError
from shardkeep.compression.config import CompressionConfig
from shardkeep.loop.client import EmbeddingClient
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.push_job import DIM, IDS, Job, gradient
from tests.support.row_formulas import FORMULAS, new_slots
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
    c = job.clients[0].tables["t"].optimizer
    rows, slots = job.rows().astype(np.float64), [new_slots(c, DIM) for _ in IDS]
    trained(job)
    for step in range(STEPS):
        dense = np.zeros(rows.shape)
        for rank in (0, 1):
            mine = np.isin(IDS, ids_of(step, rank))
            dense[mine] += gradient(step, rank, int(mine.sum()))
        for i, g in enumerate(dense):
            rows[i] = FORMULAS[c.name](c, step, c.lr * factor_of(step), rows[i], g, g, slots[i])
    assert np.allclose(job.rows(), rows, rtol=1e-5, atol=1e-6)
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
