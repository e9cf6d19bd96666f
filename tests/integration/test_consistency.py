"""Rows that go by the clock, and messages that come late, in another order and twice, in whole jobs of each mode."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.config import JobConfig
from shardkeep.ps.server import tables
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import Transport
from tests.support.cases import every
from tests.support.local_job import LocalJob, in_process
from tests.support.resumed_jobs import job_config
from tests.support.samples import as_data, draw
from tests.support.unreliable import UnreliableTransport

STEPS = 16


def config_of(mode: str, servers: int = 2) -> JobConfig:
    return job_config(servers, 2, mode=mode, train__epochs=1)


def make_job(config: JobConfig, connect: Callable[[list[ShardService]], Transport] = in_process) -> LocalJob:
    job = LocalJob(config, as_data(draw(STEPS * 8 * config.workers, seed=1)), connect=connect)
    assert job.workers[0].trainer.total_steps == STEPS
    return job


@every("mode", ["bounded", "async"])
def test_rows_go_by_the_clock(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Whatever the steps: row 1 is 16 s old in the end, row 2 is 8 s old."""
    now = 1_700_000_000.0
    monkeypatch.setattr(tables, "time", SimpleNamespace(time=lambda: now))
    spec = TableSpec(name="user", dim=2, evict={"ttl_s": 10.0, "sweep_steps": 1})
    with EmbeddingClient.local([spec], consistency=mode) as client:
        ids = {"user": torch.tensor([1, 2, 3])}
        initial = client.read(ids)["user"]
        for step in range(30):
            rows = client.lookup({"user": torch.tensor([1, 2] if step < 10 else [2, 3] if step < 20 else [3])})
            rows["user"].sum().backward()
            client.apply(rows)
            now += 8.0 if step in (9, 19) else 0.0
        (figures,) = client.summary()["tables"]
        assert (figures["rows"], figures["evicted_rows"]) == (2, 1)
        same = (client.read(ids)["user"] == initial).all(dim=1)
        assert same.tolist() == [True, False, False], "a row that went is initial again"


@every(("mode", "servers"), [("sync", 2), ("bounded", 2), ("async", 1)])
def test_messages_that_come_late_in_another_order_and_twice_count_once(mode: str, servers: int) -> None:
    made: list[UnreliableTransport] = []

    def unreliable(services: list[ShardService]) -> Transport:
        made.append(UnreliableTransport([service.handle for service in services], seed=len(made)))
        return made[-1]

    job = make_job(config_of(mode, servers), unreliable)
    summary = job.run()
    assert sum(transport.twice for transport in made) > 5
    assert (summary["steps"], summary["samples"]) == (STEPS, STEPS * 8 * 2)
    assert [service.report()["applied_steps"] for service in job.services] == [STEPS] * servers
    assert [service.report()["pushes"] for service in job.services] == [STEPS * 2] * servers
    if mode == "sync":
        assert summary["state_digest"] == make_job(config_of("sync")).run()["state_digest"]
