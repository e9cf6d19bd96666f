"""What a coordinator writes of a job, and when: in a transaction, once for many calls of hundreds of members. Few wakes
and heartbeats."""

from __future__ import annotations

import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shardkeep.base.deadlines import among_all_s
from shardkeep.base.errors import Superseded
from shardkeep.proto import control_pb2 as pb
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.grpc.messages import from_message, to_message
from shardkeep.ps.control.grpc.server import ControlServer
from shardkeep.ps.control.job import CoordinatedJob as JobParts, JobDeadlines, JobSpec
from shardkeep.ps.control.membership import heartbeat_s, silent_s
from shardkeep.ps.control.records import JobState, Member, Offer, Record
from tests.support.cases import every
from tests.support.control_job import TABLES, Job, ListSink, formed
from tests.support.recovering import Recovering, take_over

LIMIT_S = 30.0
MEMBERS = 20
SPEC = JobSpec("name: job\n", 100, 400, JobDeadlines(lease_s=15.0, form_s=120.0))


class SlowSink(ListSink):
    """Its first write of the persisted state ends once so many events came, or `release` is set."""

    def __init__(self, events: int) -> None:
        super().__init__()
        self.saves, self.awaited = 0, events
        self.writing, self.release = threading.Event(), threading.Event()

    def event(self, record: Record) -> None:
        super().event(record)
        if len(self.of("event")) == self.awaited:
            self.release.set()

    def standing(self, record: Record) -> None:
        self.saves += 1
        self.writing.set()
        assert self.release.wait(LIMIT_S)
        super().standing(record)


def test_calls_that_come_while_the_state_is_written_share_the_next_write() -> None:
    sink = SlowSink(MEMBERS)
    job = Job(workers=MEMBERS, sink=sink)

    def register(index: int) -> None:
        token = job.register("worker", index)
        assert token in {seat["token"] for seat in (sink.kept or {})["seats"]}  # it is answered after its write

    with ThreadPoolExecutor(MEMBERS) as pool:
        list(pool.map(register, range(MEMBERS)))
    assert sink.saves == 2


def test_nobody_learns_of_a_state_that_is_not_on_disk_yet() -> None:
    sink = SlowSink(-1)
    job = Job(sink=sink)
    sink.release.set()
    job.form()
    sink.release.clear()
    sink.writing.clear()
    with ThreadPoolExecutor(2) as pool:
        stopping = pool.submit(job.coordinator.stop, "enough")
        assert sink.writing.wait(LIMIT_S)
        asking = pool.submit(job.coordinator.heartbeat, "worker-0-100", seen=1, wait_s=LIMIT_S)
        with pytest.raises(TimeoutError):
            asking.result(0.2)
        assert job.state.state == "training"
        sink.release.set()
        assert stopping.result(LIMIT_S) and asking.result(LIMIT_S).state == "stopping"


def test_a_change_that_concerns_no_waiting_call_wakes_none() -> None:
    job, looked = JobParts(SPEC, ListSink(), clock=lambda: 0.0), threading.Event()

    def stopping() -> bool:
        looked.set()
        return not job.life.running

    def wait() -> bool:
        with job.locked():
            return job.wait_for(stopping, LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert looked.wait(LIMIT_S)
        looked.clear()
        with job.transaction() as scope:
            scope.save = True
        assert not looked.wait(0.5)
        with job.transaction():
            job.life.stopping("enough")
        assert looked.wait(LIMIT_S) and waiting.result(LIMIT_S)


@every("workers", [2, 40])
def test_the_persisted_state_has_the_tables_of_all_workers_once(workers: int) -> None:
    job = Job(workers=workers)
    for role, index in job.names:
        job.register(role, index)
    for role, index in job.names:  # as they come off the wire
        offer = from_message(to_message(Offer(() if role == "server" else TABLES), pb.Offer), Offer)
        job.coordinator.join(f"{role}-{index}-100", offer)
    text = json.dumps(job.sink.kept)
    assert job.state.state == "training"
    assert [text.count(f'"name": "{table.name}"') for table in TABLES] == [1, 1]
    assert len(text) < 2500 + 700 * (workers + 1)


def test_workers_that_join_with_tables_of_their_own_are_told_apart_after_a_take_over() -> None:
    job = Recovering()
    for role, index in job.names:
        job.register(role, index)
    job.join("worker", 0)
    job.join("worker", 1, TABLES[:1])
    job.coordinator.save()
    take_over(job)
    job.join("server", 0)
    assert "tables differ" in job.state.message


class Recording(Coordinator):
    """Keeps how long each heartbeat may wait."""

    def __init__(self) -> None:
        super().__init__(SPEC, open_store=lambda _: ("127.0.0.1", 1), sink=ListSink())
        self.waits: queue.Queue[float] = queue.Queue()

    def heartbeat(self, token: str, *, wait_s: float = 0.0, **told: Any) -> JobState:
        self.waits.put(wait_s)
        return super().heartbeat(token, wait_s=wait_s, **told)


@every(("members", "wait_s"), [(3, 1.0), (300, 3.0), (9000, 5.0)])
def test_many_members_have_more_time_between_heartbeats_and_for_the_first_call(members: int, wait_s: float) -> None:
    assert heartbeat_s(members) + 1.0 < silent_s(members) < SPEC.deadlines.doubt_s
    coordinator = Recording()
    with ControlServer(coordinator) as server, ControlClient(server.endpoint, role="worker", index=0) as client:
        client.register()
        client.start_heartbeats(members=members)
        assert coordinator.waits.get(timeout=LIMIT_S) == wait_s
    assert (heartbeat_s(6), silent_s(6)) == (1.0, 3.0) and 4.0 < heartbeat_s(500) <= 5.0
    assert among_all_s(10.0, 4) == pytest.approx(10.0, abs=0.1)
    assert among_all_s(10.0, 500) > 10.0 + 170e-6 * 500**2


# ---- transactions: what a call changes is written once, before anybody learns of it ----


class Sink(ListSink):
    """Counts the saves of the persisted state. `full`: it has no room for a summary. `superseded`: another coordinator
    has replaced its own."""

    def __init__(self) -> None:
        super().__init__()
        self.saves, self.full, self.superseded = 0, False, False

    def _check(self) -> None:
        if self.superseded:
            raise Superseded("another coordinator leads")

    def standing(self, record: Record) -> None:
        self._check()
        self.saves += 1
        super().standing(record)

    def event(self, record: Record) -> None:
        self._check()
        super().event(record)

    def members(self, generation: int, members: tuple[Member, ...]) -> None:
        self._check()
        super().members(generation, members)

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        super().finished(status, message, summary)
        if self.full:
            raise OSError("No space left on device")


def test_a_call_saves_once_what_it_changes_and_writes_a_summary_in_its_place_at_the_end() -> None:
    sink = Sink()
    job = Job(sink=sink)
    job.register("server", 0)
    job.register("server", 0)
    assert sink.saves == 1 and sink.kept is not None
    assert [seat["token"] for seat in sink.kept["seats"]] == ["server-0-100"]

    job.form()
    before = sink.saves
    for step in range(5):
        job.coordinator.heartbeat("worker-0-100", step=step)
        job.coordinator.tick()
    assert sink.saves == before
    job.coordinator.lost("server", 0, reason="killed by SIGKILL")
    assert job.state.state == "failed" and sink.saves == before  # a job that is over has a summary in its place
    assert len(sink.of("finished")) == 1


def test_a_job_whose_summary_cannot_be_written_is_not_completed() -> None:
    sink = Sink()
    job = formed(Job(sink=sink))
    job.summary()
    job.leave("worker", 0)
    sink.full = True
    assert job.leave("worker", 1).state == "failed"
    assert job.state.message == "the run folder cannot be written: No space left on device"
    sink.full = False
    job.coordinator.tick()
    assert [call[1] for call in sink.of("finished")] == ["completed", "failed"]


def test_nobody_learns_what_a_superseded_coordinator_made_of_the_job() -> None:
    sink = Sink()
    job = Job(sink=sink)
    for role, index in job.names:
        job.register(role, index)
    job.join("server", 0)
    job.join("worker", 0)
    sink.superseded = True
    with pytest.raises(Superseded):
        job.join("worker", 1)
    assert job.coordinator.state.state == "forming"

    sink = Sink()
    job = formed(Job(sink=sink))
    sink.superseded = True
    before = job.coordinator.state
    for act in (
        lambda: job.coordinator.lost("server", 0, reason="killed by SIGKILL"),  # the job would fail
        lambda: job.coordinator.stop("enough"),
        lambda: job.pass_time(20),  # all leases are over
    ):
        with pytest.raises(Superseded):
            act()
    assert job.coordinator.state == before and not sink.of("finished")
    assert not job.coordinator.wait_over(0.0)
