"""What the coordinator's metrics say: the job's state, its members, recoveries, evaluations, checkpoints.

`JobCounts` is a sink of records around another one, so it sees what the run folder gets. A job in one process has it
too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from shardkeep.metrics.collector import Sample
from shardkeep.ps.control.records import JobSink, JobStatus, Member, MemberStatus, Record
from shardkeep.records.events import CheckpointEvent
from shardkeep.records.lines import record_of
from shardkeep.view.run_view import RunView

STATES = ("forming", "training", "recovering", "stopping", "completed", "incomplete", "failed", "stopped")


class JobCounts:
    """Passes each record to `sink`, and keeps what metrics need of it. Thread safe.

    Args:
        sink: Where the records go.
        lease_s: Seconds without a heartbeat after which a member counts as dead.
        period_steps: Between two checkpoints; 0 = there are none, None = the job chooses.
        start_step: Of the checkpoint that the job starts from.
    """

    def __init__(
        self,
        sink: JobSink,
        *,
        lease_s: float,
        period_steps: int | None,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink, self._clock = sink, clock
        self._lock = threading.Lock()
        self._generation, self._state = 0, "training"
        self._recoveries: list[float] = []
        self._view = RunView()
        self._view.period_steps = period_steps
        self._checkpoint_at, self._saved_step, self._lease_s = clock(), start_step, lease_s
        self._addresses: dict[tuple[str, int], str] = {}
        self._status: Callable[[], JobStatus] | None = None

    def watch(self, status: Callable[[], JobStatus]) -> None:
        """Reads the job's state and members at every scrape."""
        self._status = status

    def members(self, generation: int, members: tuple[Member, ...]) -> None:
        self._sink.members(generation, members)
        self._generation = generation

    def standing(self, record: Record) -> None:
        self._sink.standing(record)
        recoveries = record["recoveries"]
        self._recoveries = [float(each["seconds"]) for each in recoveries["done"]]
        self._saved_step = int(recoveries["saved_step"])
        if recoveries.get("period") is not None:  # a coordinator that takes over has not heard it
            self._view.period_steps = int(recoveries["period"])
        self._generation = max(self._generation, int(record["state"]["generation"]))

    def progress(self, record: Record) -> None:
        self._sink.progress(record)
        self._view.hear(record_of(record))

    def event(self, record: Record) -> None:
        with self._lock:
            saved = self._view.checkpoint
            self._view.hear(record_of(record))
            if self._view.checkpoint is not saved:
                self._checkpoint_at = self._clock()
        self._sink.event(record)

    def telemetry(self, record: Record) -> None:
        self._sink.telemetry(record)
        with self._lock:
            place = str(record.get("role")), int(record.get("index", 0))
            self._addresses.pop(place, None)
            if address := record.get("metrics"):
                self._addresses[place] = str(address)

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        self._sink.finished(status, message, summary)
        self._state = status

    def addresses(self) -> list[str]:
        """The metrics of each process that has sent a telemetry record, by role and index."""
        with self._lock:
            return [address for _, address in sorted(self._addresses.items())]

    def samples(self) -> Iterator[Sample]:
        """What the records have said so far, and what the coordinator sees now."""
        yield from _states(self._state) if self._status is None else _of_status(self._status())
        yield Sample("lease_seconds", self._lease_s)
        yield Sample("generations_total", self._generation)
        yield Sample("recoveries_total", len(self._recoveries))
        yield Sample("recovery_seconds_total", sum(self._recoveries))
        if (planned := self._view.progress.total_steps) is not None:
            yield Sample("job_planned_steps", planned)
        yield from self._of_evaluation()
        yield from self._of_checkpoint()

    def _of_evaluation(self) -> Iterator[Sample]:
        if (evaluation := self._view.evaluation) is not None:
            yield Sample("evaluation_step", evaluation.step or 0)
            for name, value in evaluation.metrics.items():
                yield Sample("evaluation", value, {"metric": name})

    def _of_checkpoint(self) -> Iterator[Sample]:
        with self._lock:
            checkpoint, at, period = self._view.checkpoint, self._checkpoint_at, self._view.period_steps
        if period is not None:
            yield Sample("checkpoint_period_steps", period)
        known = CheckpointEvent() if checkpoint is None else checkpoint
        yield Sample("checkpoint_step", max(known.step or 0, self._saved_step))
        if checkpoint is not None:
            yield Sample("checkpoint_duration_seconds", known.seconds or 0.0)
            yield Sample("checkpoint_age_seconds", self._clock() - at)
            yield Sample("checkpoint_bytes", known.bytes or 0)


def _states(state: str) -> Iterator[Sample]:
    """One series for each state of a job."""
    for name in STATES:
        yield Sample("job_state", float(name == state), {"state": name})


def _of_status(status: JobStatus) -> Iterator[Sample]:
    """The state of the job, and its members as the coordinator sees them."""
    yield from _states(status.state)
    present = [member for member in status.members if member.condition in ("registered", "joined")]
    for role in ("server", "worker"):
        yield Sample("job_members", sum(member.role == role for member in present), {"member_role": role})
    for member in present:
        yield Sample("member_heartbeat_age_seconds", member.age_s, _place(member))


def _place(member: MemberStatus) -> dict[str, str]:
    return {"member_role": member.role, "member_index": str(member.index)}
