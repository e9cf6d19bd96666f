"""The factors of an update: a push's factor of the learning rate, its rank's share of the weight decay, and the weight
decay of all rows (`weight_decay_on: table`)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import ConfigError, ProtocolError, RemoteError, ShardkeepError
from shardkeep.compression.config import CompressionConfig
from shardkeep.loop.client import EmbeddingClient
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.optimizers.registry import OPTIMIZERS as REGISTRY
from shardkeep.ps.server.tables import Tables
from shardkeep.ps.wire.message import FLUSH, Kind, lr_factor_of, push_value, read
from tests.support.cases import every
from tests.support.messages import Message, pack, text_of
from tests.support.push_job import DIM, IDS, Job, gradient
from tests.support.row_formulas import FORMULAS, new_slots
from tests.support.services import answer
from tests.support.tables import gradients

FACTORS = [1.0, 1.0, 0.5, 0.3, 0.3, 1.7]
CODED = {"ids": "coded", "push": {"values": "int8"}, "pull": {"values": "fp16"}}


# ---- the share of the weight decay ----


@every("name", sorted(REGISTRY.keys() - {"ftrl"}))
def test_one_of_two_ranks_decays_its_rows_by_half_and_both_once_a_step(name: str) -> None:
    settings, few = {"name": name, "lr": 0.1}, {0: IDS, 1: np.empty(0, np.int64)}
    job = Job("bounded", {**settings, "weight_decay": 0.5}, workers=2)
    alone = Job("bounded", {**settings, "weight_decay": 0.25})
    for step in range(3):
        job.push(step, ids=few)
        alone.push(step)
    assert job.digests() == alone.digests()
    for mode, once in (("sync", 1.0 - 0.05), ("async", (1.0 - 0.05 / 2) ** 2)) if name == "sgd" else ():
        job = Job(mode, {**settings, "weight_decay": 0.5}, workers=2, init={"name": "constant", "value": 1.0})
        job.push(0, size=0.0)
        assert np.allclose(job.fenced(1).rows(), once, rtol=1e-6, atol=0)


# ---- the factor of the learning rate ----


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.1, "weight_decay": 0.01},
    "adagrad": {"name": "adagrad", "lr": 0.1},
    "rowwise_adagrad": {"name": "rowwise_adagrad", "lr": 0.1},
    "adam": {"name": "adam", "lr": 0.01, "schedule": {"warmup_steps": 4}},
    "partial_rowwise_adam": {"name": "partial_rowwise_adam", "lr": 0.01},
    "lars_sgd": {"name": "lars_sgd", "lr": 3.0, "weight_decay": 0.01},
    "lamb": {"name": "lamb", "lr": 0.01, "weight_decay": 0.01},
}


@every(("optimizer", "factor"), zip(OPTIMIZERS.values(), itertools.cycle([0.5, 0.3, 2.5])), ids=OPTIMIZERS)
def test_a_factor_gives_the_bits_of_a_table_with_that_learning_rate(optimizer: dict[str, Any], factor: float) -> None:
    scaled = {**optimizer, "lr": optimizer["lr"] * float(np.float32(factor))}
    assert Job("sync", optimizer).train([factor] * 4).digests() == Job("sync", scaled).train([1.0] * 4).digests()


@every(("mode", "servers", "compression"), [("sync", 2, CODED), ("bounded", 1, None), ("bounded", 2, CODED)])
def test_a_factor_holds_for_its_step_alone(mode: str, servers: int, compression: dict[str, Any] | None) -> None:
    """Against plain arithmetic for what is not compressed; else against a server that got no factor."""
    job = Job(mode, {"name": "sgd", "lr": 0.1}, workers=2, servers=servers, compression=compression)
    changes = []
    for step, factor in enumerate(FACTORS):
        before = job.rows()
        job.push(step, factor=factor)
        if mode == "bounded":
            changes.append(job.rows() - before)
    job.fenced(len(FACTORS))
    if mode == "sync":
        plain = Job(mode, {"name": "sgd", "lr": 0.1}, workers=2, servers=servers, compression=compression)
        assert job.digests() != plain.train([1.0] * len(FACTORS)).digests()
    else:
        for step, (change, factor) in enumerate(zip(changes, FACTORS, strict=True)):
            grads = [gradient(step, rank, IDS.size) for rank in (0, 1)]
            tolerance = 2e-6 if compression is None else 2e-2
            assert np.allclose(change, -0.1 * factor * (grads[0] + grads[1]), rtol=0, atol=tolerance)


def test_ftrl_scales_the_gradient_in_z_as_its_schedule_does() -> None:
    job = Job("sync", {"name": "ftrl", "lr": 0.1}, init="zeros")
    c, rows = job.specs[0].optimizer, np.zeros((IDS.size, DIM))
    slots = [new_slots(c, DIM) for _ in IDS]
    job.train([0.25] * 3)
    for step in range(3):
        for i, g in enumerate(gradient(step, 0, IDS.size).astype(np.float64)):
            rows[i] = FORMULAS["ftrl"](c, step, c.lr * 0.25, rows[i], g, g, slots[i])
    assert np.allclose(job.rows(), rows, rtol=1e-4, atol=1e-6)


def test_in_sync_another_factor_of_another_rank_is_refused_in_one_line_also_after_a_replay(tmp_path: Path) -> None:
    job = Job("sync", {"name": "sgd"}, workers=2, journals=tmp_path)
    requests = [client.request({"t": IDS}) for client in job.clients]
    for client, request, factor in zip(job.clients, requests, [0.25, 1.0], strict=True):
        client.pull(0, request).result()
        client.push(0, request, client.gradients(0, request), lr_factor=factor)
    job.clients[0].wait_acknowledged()
    with pytest.raises(RemoteError) as caught:
        job.clients[1].wait_acknowledged()
    line = "step 0: worker 0 pushed lr_factor 0.25, worker 1 1; in sync all workers push the same"
    assert line in str(caught.value) and "\n" not in str(caught.value)
    message = answer(job.replayed().handle(pack(Message(Kind.PUSH, 0, 1, 0, ()))))
    assert message.kind is Kind.ERROR and line in text_of(message)


def test_a_factor_that_is_no_number_above_zero_is_refused() -> None:
    job = Job("bounded", {"name": "sgd"})
    for factor in (0.0, -1.0, np.inf, np.nan, 1e-39, 1e60):
        with pytest.raises(ProtocolError, match=r"lr_factor: .*; allowed: 1.17549e-38 to 3.40282e\+38"):
            job.push(0, factor=factor)
    for bits in (0, 1 << 31, 0x7F800000, 0x7FC00000, 0xFF800000):
        value = 2 | (bits << 32)
        value -= 2**64 if value >= 2**63 else 0
        message = answer(job.services[0].handle(pack(Message(Kind.PUSH, 0, 0, 0, (), value))))
        assert message.kind is Kind.ERROR and "learning-rate factor" in text_of(message), hex(bits)
    job.push(0)


@every("factor", [1.0, 0.3, 1e-30, 3.4e38])
@every("flush", [False, True])
def test_a_factor_takes_eight_bytes_more_and_comes_back_as_float32(factor: float, flush: bool) -> None:
    value = push_value(flush=flush, lr_factor=factor)
    plain, marked = (pack(Message(Kind.PUSH, 0, 0, 0, (), v)) for v in (0, value))
    assert lr_factor_of(read(marked)) == float(np.float32(factor))
    assert marked.size - plain.size == (0 if factor == 1.0 else 8) and bool(value & FLUSH) == flush
    if factor == 1.0:
        assert value == (FLUSH if flush else 0)


# ---- journal and replay ----


@every(("mode", "compression"), [("sync", CODED), ("bounded", None), ("async", CODED)])
def test_a_replay_applies_the_factors_and_the_shares(
    tmp_path: Path, mode: str, compression: dict[str, Any] | None
) -> None:
    optimizer = {"name": "adagrad", "lr": 0.1, "weight_decay": 0.05}
    killed = Job(mode, optimizer, workers=2, compression=compression, journals=tmp_path).train(FACTORS)
    assert killed.replayed().tables.digests() == killed.digests()
    assert killed.digests() != Job(mode, optimizer, workers=2, compression=compression).train([1.0] * 6).digests()


# ---- weight decay of the whole table: as one process with dense gradients does ----

STEPS = 12
ALL = {"weight_decay": 0.05, "weight_decay_on": "table"}
DECAYING: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.1, **ALL},
    "adagrad": {"name": "adagrad", "lr": 0.1, **ALL},
    "rowwise_adagrad": {"name": "rowwise_adagrad", "lr": 0.1, **ALL},
    "adam": {"name": "adam", "lr": 0.01, "eps_after_correction": True, **ALL},
    "partial_rowwise_adam": {"name": "partial_rowwise_adam", "lr": 0.01, **ALL},
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
        job.push(step, factor=factor_of(step), ids=ids)
    return job.fenced(steps.stop)


@every("optimizer", DECAYING.values(), ids=DECAYING)
def test_a_sync_job_trains_as_one_process_with_dense_gradients_on_any_number_of_servers_and_in_a_replay(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    job = Job("sync", optimizer, workers=2, journals=tmp_path)
    c = job.specs[0].optimizer
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
    assert job.digests() == trained(Job("sync", optimizer, workers=2, servers=3)).digests() != lazy.digests()
    assert job.replayed().tables.digests() == job.digests()


@every(("mode", "workers"), [("sync", 2), ("bounded", 1), ("bounded", 2), ("async", 2)])
def test_rows_that_no_rank_touches_decay_once_a_step_from_the_update_on_that_creates_them(
    mode: str, workers: int
) -> None:
    job = Job(mode, DECAYING["sgd"], workers=workers, init={"name": "constant", "value": 1.0})
    for step in range(4):
        job.push(step, ids=dict.fromkeys(range(workers), IDS[2 * step : 2 * step + 2]), size=0.0)
    job.fenced(4)
    once = 1.0 - 0.005 if mode == "sync" else (1.0 - 0.005 / workers) ** workers
    after = np.repeat([once**4, once**3, once**2, once, 1.0], 2)
    assert np.allclose(job.rows(IDS[:10])[:, 0], after, rtol=1e-6, atol=0)


def test_a_table_with_too_many_rows_and_a_loop_with_selection_are_refused_in_one_line() -> None:
    tables = Tables([TableSpec(name="t", dim=1, optimizer=DECAYING["sgd"])], seed=1)
    tables.apply([gradients({0: (np.arange(1_000_000), np.zeros((1_000_000, 1), np.float32))})], step=0)
    with pytest.raises(ShardkeepError) as caught:
        tables.apply([gradients({0: (np.array([-1]), np.zeros((1, 1), np.float32))})], step=1)
    assert str(caught.value) == (
        "table t: 1000001 rows on one server with optimizer.weight_decay_on: table; allowed: 1000000; "
        "set weight_decay_on: touched, or use more servers"
    )

    table = TableSpec(name="t", dim=4, optimizer=DECAYING["adam"])
    selecting = CompressionConfig(push={"keep": 0.1, "pool_rows": 9})
    with pytest.raises(
        ConfigError, match=r"^tables\.t\.optimizer\.weight_decay_on: table with compression\.push\.keep"
    ):
        EmbeddingClient.local([table], compression=selecting)
