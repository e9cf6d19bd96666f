"""A call of the coordinator is one transaction: what it changes is written once, before anybody learns of it."""

from __future__ import annotations

import pytest

from shardkeep.ps.control.records import Record
from tests.support.control_job import Job, ListSink


class CountingSink(ListSink):
    """Counts the saves of the persisted state, and loses its disk on request."""

    def __init__(self) -> None:
        super().__init__()
        self.saves = 0
        self.full = False

    def standing(self, record: Record) -> None:
        self.saves += 1
        super().standing(record)

    def event(self, record: Record) -> None:
        if self.full:
            raise OSError("No space left on device")
        super().event(record)


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


def test_a_job_whose_last_event_cannot_be_written_is_not_completed(job: Job, sink: CountingSink) -> None:
    job.summary()
    job.leave("worker", 0)
    sink.full = True
    assert job.leave("worker", 1).state == "failed"
    assert job.state.message == "the run folder cannot be written: No space left on device"
    assert [call[1] for call in sink.of("finished")] == ["failed"]
