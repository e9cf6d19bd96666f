"""What each consistency mode promises, measured on whole jobs while servers delay the application of pushes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardkeep import EmbeddingClient, TableSpec
from shardkeep.base.arrays import Bytes
from shardkeep.config import JobConfig
from shardkeep.ps.server import tables
from shardkeep.ps.server.consistency import BoundedGate, ConsistencyGate, Work
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import LocalTransport, Transport
from shardkeep.ps.wire.message import Kind
from tests.support.cases import every
from tests.support.held_gate import HeldGate
from tests.support.local_job import LocalJob, in_process
from tests.support.messages import unpack
from tests.support.resumed_jobs import job_config
from tests.support.samples import as_data, draw
from tests.support.unreliable import UnreliableTransport

STEPS = 16
LIMIT_S = 90.0


def config_of(mode: str, staleness: int | None = None, *, servers: int = 2, workers: int = 2) -> JobConfig:
    bound = {} if staleness is None else {"consistency__staleness": staleness}
    return job_config(servers, workers, mode=mode, train__epochs=1, **bound)


def make_job(config: JobConfig, connect: Callable[[list[ShardService]], Transport] = in_process) -> LocalJob:
    job = LocalJob(config, as_data(draw(STEPS * 8 * config.workers, seed=1)), connect=connect)
    assert job.workers[0].trainer.total_steps == STEPS
    return job


class Watched:
    """A gate that says when it makes a pull wait, and remembers what was applied and admitted, in order."""

    def __init__(self, inner: ConsistencyGate[Any]) -> None:
        self.inner = inner
        self.starved = threading.Event()
        self.log: list[tuple[str, int, int]] = []  # (what, step, rank), rank -1 where it is of all

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def push(self, rank: int, step: int, push: Any) -> bool:
        self.log.append(("push", step, rank))
        return self.inner.push(rank, step, push)

    def arrive(self, rank: int, step: int) -> None:
        self.inner.arrive(rank, step)
        self.log.append(("pull", step, rank))

    def done(self, work: Work[Any]) -> None:
        self.inner.done(work)
        self.log.append(("applied", work.step, -1))

    def admits(self, step: int) -> bool:
        admitted = self.inner.admits(step)
        if not admitted:
            self.starved.set()
        return admitted

    def complete(self, step: int) -> None:
        self.log += [("pull", step, rank) for rank in range(2)]  # a fence says that no rank can push an earlier step
        self.inner.complete(step)


@contextmanager
def pushes_held_until_a_pull_starves(services: list[ShardService]) -> Iterator[list[Watched]]:
    """Each server acknowledges pushes and applies none, until one of its pulls has to wait: the longest delay that
    does not end a job."""
    gates = [Watched(service.applier.gate) for service in services]
    over = threading.Event()

    def feed(held: HeldGate, gate: Watched) -> None:
        while gate.starved.wait(LIMIT_S) and not over.is_set():
            gate.starved.clear()
            held.release()
            held.held = True

    held = [HeldGate(service, gate) for service, gate in zip(services, gates, strict=True)]
    threads = [threading.Thread(target=feed, args=pair, daemon=True) for pair in zip(held, gates, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield gates
    finally:
        over.set()
        for holding, gate, thread in zip(held, gates, threads, strict=True):
            gate.starved.set()
            thread.join(LIMIT_S)
            holding.release()


def histogram(job: LocalJob) -> dict[int, int]:
    """Staleness of the pulls as the workers saw it; checked against what each server counted."""
    summary = job.run()
    seen = {int(steps): count for steps, count in summary["staleness"].items()}
    assert sum(seen.values()) == STEPS * job.config.workers
    worst = max(int(steps) for service in job.services for steps in service.report()["staleness"])
    assert worst == max(seen)
    return seen


# ---- bounded ----


@every(("bound", "workers", "slow"), [(0, 2, 2), (2, 1, 2), (5, 2, 2), (1, 2, 1)])
def test_a_job_never_exceeds_its_bound_while_its_servers_delay_the_application_of_pushes(
    bound: int, workers: int, slow: int
) -> None:
    """One slow server of two is enough to hold the bound."""
    job = make_job(config_of("bounded", bound, workers=workers))
    with pushes_held_until_a_pull_starves(job.services[-slow:]):
        seen = histogram(job)
    assert max(seen) == bound  # reached, so the delay was real, and not exceeded
    assert all(service.report()["pushes"] == STEPS * workers for service in job.services)


def test_with_the_gate_switched_off_the_same_delay_exceeds_the_bound() -> None:
    """The test above can fail: this is the check, turned off."""
    job = make_job(config_of("bounded", 2))
    for service in job.services:
        service.applier.gate = BoundedGate(num_workers=2, start_step=0, bound=None)
    with pushes_held_until_a_pull_starves(job.services):
        seen = histogram(job)
    assert max(seen) == STEPS - 1


def test_async_goes_on_without_waiting_and_measures_how_stale_it_was() -> None:
    job = make_job(config_of("async"))
    with pushes_held_until_a_pull_starves(job.services) as gates:
        seen = histogram(job)
        assert not any(gate.starved.is_set() for gate in gates)
    assert max(seen) == STEPS - 1


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


# ---- sync ----


def test_sync_sees_every_push_of_earlier_steps_and_none_of_its_own() -> None:
    job = make_job(config_of("sync"))
    gates = [Watched(service.applier.gate) for service in job.services]
    for service, gate in zip(job.services, gates, strict=True):
        service.applier.gate = gate  # type: ignore[assignment]
    assert set(histogram(job)) == {0}
    for gate in gates:
        assert [step for what, step, _ in gate.log if what == "applied"] == list(range(STEPS))
        for step in range(STEPS):
            applied = gate.log.index(("applied", step, -1))
            for rank in range(2):
                assert gate.log.index(("push", step, rank)) < gate.log.index(("pull", step + 1, rank)) < applied


# ---- pushes under way ----


class Counted:
    """A server's handler that counts each rank's pushes under way; acknowledges them only to who waits for it."""

    def __init__(self, service: ShardService) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._under_way: Counter[int] = Counter()
        self.most: Counter[int] = Counter()

    def __call__(self, message: Bytes, *then: Bytes) -> Future[Bytes]:
        header = unpack(message)
        answer = self._service.handle(message, *then)
        if header.kind is not Kind.PUSH:
            return answer
        with self._lock:
            self._under_way[header.rank] += 1
            self.most[header.rank] = max(self.most[header.rank], self._under_way[header.rank])
        return _Lazy(answer, lambda: self._arrived(header.rank))

    def _arrived(self, rank: int) -> None:
        with self._lock:
            self._under_way[rank] -= 1


class _Lazy(Future[Bytes]):
    """Done only when somebody waits for it: the latest an acknowledgement can come without ending a job."""

    def __init__(self, answer: Future[Bytes], arrived: Any) -> None:
        super().__init__()
        self._answer, self._arrived = answer, arrived

    def result(self, timeout: float | None = None) -> Bytes:
        if not self.done():
            self.set_result(self._answer.result(timeout))
            self._arrived()
        return super().result(timeout)


@every(("mode", "staleness"), [("sync", None), ("bounded", 1), ("async", 3)])
def test_a_worker_has_no_more_pushes_under_way_than_its_window(mode: str, staleness: int | None) -> None:
    job = make_job(config_of(mode, staleness))
    counted = [Counted(service) for service in job.services]
    for worker in job.workers:
        worker.client.regroup(LocalTransport(counted), 0, 0)  # not metered: a meter would wait for the answers
    job.run()
    window = job.config.consistency.window
    assert [dict(sorted(server.most.items())) for server in counted] == [{0: window, 1: window}] * 2


@every(("mode", "servers"), [("sync", 2), ("bounded", 2), ("async", 1)])
def test_messages_that_come_late_in_another_order_and_twice_count_once(mode: str, servers: int) -> None:
    made: list[UnreliableTransport] = []

    def unreliable(services: list[ShardService]) -> Transport:
        made.append(UnreliableTransport([service.handle for service in services], seed=len(made)))
        return made[-1]

    job = make_job(config_of(mode, servers=servers), unreliable)
    summary = job.run()
    assert sum(transport.twice for transport in made) > 5
    assert (summary["steps"], summary["samples"]) == (STEPS, STEPS * 8 * 2)
    assert [service.report()["applied_steps"] for service in job.services] == [STEPS] * servers
    assert [service.report()["pushes"] for service in job.services] == [STEPS * 2] * servers
    if mode == "sync":
        assert summary["state_digest"] == make_job(config_of("sync")).run()["state_digest"]
