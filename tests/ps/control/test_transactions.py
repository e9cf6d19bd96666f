"""A call of the coordinator is one transaction: what it changes is written once, before anybody learns of it."""

from __future__ import annotations

import pytest

from shardkeep.base.errors import Superseded
from shardkeep.ps.control.records import Member, Record
from tests.support.control_job import Job, ListSink


class CountingSink(ListSink):
    """Counts the saves of the persisted state, and has no room for a summary on request."""

    def __init__(self) -> None:
        super().__init__()
        self.saves = 0
        self.full = False

    def standing(self, record: Record) -> None:
        self.saves += 1
        super().standing(record)

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        super().finished(status, message, summary)
        if self.full:
            raise OSError("No space left on device")


@pytest.fixture
def sink() -> CountingSink:
    return CountingSink()


@pytest.fixture
def job(sink: CountingSink) -> Job:
    job = Job(sink=sink)
    job.form()
    return job


def test_a_call_that_ends_the_job_writes_one_summary_and_no_state(job: Job, sink: CountingSink) -> None:
    before = sink.saves
    job.coordinator.lost("server", 0, reason="killed by SIGKILL")
    assert job.state.state == "failed" and sink.saves == before  # a job that is over has a summary in its place
    assert len(sink.of("finished")) == 1


def test_a_heartbeat_and_a_tick_without_a_change_save_nothing(job: Job, sink: CountingSink) -> None:
    before = sink.saves
    for step in range(5):
        job.coordinator.heartbeat("worker-0-100", step=step)
        job.coordinator.tick()
    assert sink.saves == before


def test_a_call_that_registers_a_member_saves_it_once_and_a_repeated_one_saves_nothing(sink: CountingSink) -> None:
    job = Job(sink=sink)
    job.register("server", 0)
    job.register("server", 0)
    assert sink.saves == 1 and sink.kept is not None
    assert [seat["token"] for seat in sink.kept["seats"]] == ["server-0-100"]


def test_a_job_whose_summary_cannot_be_written_is_not_completed(job: Job, sink: CountingSink) -> None:
    job.summary()
    job.leave("worker", 0)
    sink.full = True
    assert job.leave("worker", 1).state == "failed"
    assert job.state.message == "the run folder cannot be written: No space left on device"
    sink.full = False
    job.coordinator.tick()
    assert [call[1] for call in sink.of("finished")] == ["completed", "failed"]


class SupersededSink(ListSink):
    """Of a coordinator that another one has replaced, from some moment on."""

    superseded = False

    def standing(self, record: Record) -> None:
        if self.superseded:
            raise Superseded("another coordinator leads")
        super().standing(record)

    def event(self, record: Record) -> None:
        if self.superseded:
            raise Superseded("another coordinator leads")
        super().event(record)

    def members(self, generation: int, members: tuple[Member, ...]) -> None:
        if self.superseded:
            raise Superseded("another coordinator leads")
        super().members(generation, members)


def test_nobody_learns_what_a_superseded_coordinator_made_of_the_job() -> None:
    sink = SupersededSink()
    job = Job(sink=sink)
    job.form()
    sink.superseded = True
    before = job.coordinator.state
    with pytest.raises(Superseded):
        job.coordinator.lost("server", 0, reason="killed by SIGKILL")  # the job would fail
    with pytest.raises(Superseded):
        job.coordinator.stop("enough")
    with pytest.raises(Superseded):
        job.pass_time(20)  # all leases are over
    assert job.coordinator.state == before and not sink.of("finished")
    assert not job.coordinator.wait_over(0.0)


def test_a_superseded_coordinator_forms_no_group_and_fails_none() -> None:
    sink = SupersededSink()
    job = Job(sink=sink, workers=1)
    for role, index in job.names:
        job.register(role, index)
    job.join("server", 0)
    sink.superseded = True
    with pytest.raises(Superseded):
        job.join("worker", 0)
    assert job.coordinator.state.state == "forming"
