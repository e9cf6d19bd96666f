"""What the coordinator's metrics say: the job's state, its members, recoveries, evaluations, checkpoints.

`JobCounts` is a sink of records around another one, so it sees what the run folder gets. A job in one process has it
too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardkeep.metrics.collector import Sample, each
from shardkeep.ps.control.records import JobSink, Member, MemberStatus, Record, Status

STATES = ("forming", "training", "recovering", "stopping", "completed", "failed", "stopped")
_NO_METRICS = frozenset({"step", "samples", "weights", "train_samples", "seq", "index"})
"""Numbers in the record of an evaluation that are no metric."""


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
        self._planned_steps: int | None = None
        self._evaluation: Record = {}
        self._checkpoint: Record = {}
        self._checkpoint_at, self._saved_step, self._lease_s = clock(), start_step, lease_s
        self._period_steps = period_steps
        self._addresses: dict[tuple[str, int], str] = {}
        self._status: Callable[[], Status] | None = None

    def watch(self, status: Callable[[], Status]) -> None:
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
            self._period_steps = int(recoveries["period"])
        self._generation = max(self._generation, int(record["state"]["generation"]))

    def progress(self, record: Record) -> None:
        self._sink.progress(record)
        self._planned_steps = record.get("total_steps", self._planned_steps)

    def event(self, record: Record) -> None:
        with self._lock:
            self._note(record)
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

    def _note(self, record: Record) -> None:
        if record.get("kind") == "eval":
            self._evaluation = dict(record)
        elif record.get("phase") == "checkpoint" and "every_steps" in record:
            self._period_steps = int(record["every_steps"])
        elif record.get("phase") == "checkpoint" and "bytes" in record:
            self._checkpoint, self._checkpoint_at = dict(record), self._clock()

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
        if self._planned_steps is not None:
            yield Sample("job_planned_steps", self._planned_steps)
        yield from self._of_evaluation()
        yield from self._of_checkpoint()

    def _of_evaluation(self) -> Iterator[Sample]:
        if evaluation := self._evaluation:
            yield from each("evaluation_step", evaluation, "step")
            for name, value in metrics_of(evaluation):
                yield Sample("evaluation", value, {"metric": name})

    def _of_checkpoint(self) -> Iterator[Sample]:
        with self._lock:
            checkpoint, at, period = self._checkpoint, self._checkpoint_at, self._period_steps
        if period is not None:
            yield Sample("checkpoint_period_steps", period)
        yield Sample("checkpoint_step", max(checkpoint.get("step", 0), self._saved_step))
        if checkpoint:
            yield Sample("checkpoint_duration_seconds", checkpoint["seconds"])
            yield Sample("checkpoint_age_seconds", self._clock() - at)
            yield Sample("checkpoint_bytes", checkpoint["bytes"])


def metrics_of(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and value of each metric of an evaluation; of several labels, METRIC/LABEL."""
    for name, value in evaluation.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NO_METRICS:
            yield name, float(value)


def _states(state: str) -> Iterator[Sample]:
    """One series for each state of a job."""
    for name in STATES:
        yield Sample("job_state", float(name == state), {"state": name})


def _of_status(status: Status) -> Iterator[Sample]:
    """The state of the job, and its members as the coordinator sees them."""
    yield from _states(status.state)
    present = [member for member in status.members if member.condition in ("registered", "joined")]
    for role in ("server", "worker"):
        yield Sample("job_members", sum(member.role == role for member in present), {"member_role": role})
    for member in present:
        yield Sample("member_heartbeat_age_seconds", member.age_s, _place(member))


def _place(member: MemberStatus) -> dict[str, str]:
    return {"member_role": member.role, "member_index": str(member.index)}
