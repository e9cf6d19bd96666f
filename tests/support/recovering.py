"""A job whose members die and come back, without processes: what the tests of recovery share."""

from __future__ import annotations

import json
from typing import Any

from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.job import JobDeadlines, JobSpec
from shardkeep.ps.control.records import Formation, Offer, Record, ResumeRange, Shared
from shardkeep.ps.control.recovery import Losses
from tests.support.control_job import TABLES, VERSIONS, Job


def held(first: int, last: int) -> ResumeRange:
    return ResumeRange(first, last, holds=True)


THREE_OR_FOUR = held(3, 4)


class Recovering(Job):
    """A formed job whose members come back with spans."""

    def __init__(
        self,
        *,
        servers: int = 1,
        workers: int = 2,
        restarts: int = 2,
        replace_timeout_s: float = 120.0,
        losses: Losses | None = None,
        shared: Shared | None = None,
        run_dir: str = "/runs/first",
    ) -> None:
        super().__init__(servers=servers, workers=workers)
        self.losses, self.shared, self.run_dir = losses, shared, run_dir
        self.closed = 0
        self.restarts, self.replace_timeout_s = restarts, replace_timeout_s
        self.coordinator = self.another()

    def another(self, standing: dict[str, object] | None = None) -> Coordinator:
        spec = JobSpec(
            config_yaml="name: job\n",
            num_servers=sum(role == "server" for role, _ in self.names),
            num_workers=sum(role == "worker" for role, _ in self.names),
            deadlines=JobDeadlines(lease_s=15.0, form_s=5.0, replace_s=self.replace_timeout_s, doubt_s=0.0),
            restarts=self.restarts,
            losses=self.losses or Losses(),
            shared=self.shared,
            run_dir=self.run_dir,
        )
        return Coordinator(
            spec,
            open_store=self._open_store,
            close_store=self._close_store,
            sink=self.sink,
            clock=lambda: self.now,
            before=standing,
            versions=VERSIONS,
        )

    def recoveries(self) -> Record:
        """The deaths and recoveries, as another coordinator would find them."""
        self.coordinator.save()
        return dict((self.sink.kept or {})["recoveries"])

    def _close_store(self) -> None:
        self.closed += 1

    def kill(self, role: str, index: int, pid: int = 100) -> None:
        self.coordinator.lost(role, index, pid=pid, reason="killed by SIGKILL")

    def come_back(
        self,
        role: str,
        index: int,
        span: ResumeRange = THREE_OR_FOUR,
        *,
        after: int = 1,
        pid: int = 100,
        why: str = "EOF",
    ) -> Formation | None:
        token, tables = f"{role}-{index}-{pid}", TABLES if role == "worker" else ()
        return self.coordinator.join(token, Offer(tables, self.data, span), after=after, why=why)[1]

    def workers_come_back(self, span: ResumeRange = THREE_OR_FOUR, *, after: int = 1) -> None:
        """The first two, none of which completes the group."""
        for index in (0, 1):
            assert self.come_back("worker", index, span, after=after) is None

    def replaced(self, role: str, index: int, span: ResumeRange = THREE_OR_FOUR, *, pid: int = 200) -> Formation | None:
        self.register(role, index, pid=pid)
        return self.come_back(role, index, span, pid=pid, after=0)

    def recover(self, *, killed: tuple[str, int] = ("server", 0), pid: int = 200, after: int = 1) -> Formation:
        """One death, one replacement; the new formation."""
        formation = None
        for role, index in self.names:
            if (role, index) == killed:
                formation = self.replaced(role, index, pid=pid)
            else:
                formation = self.come_back(role, index, after=after)
        assert formation is not None
        return formation


def checkpoint(job: Recovering, step: int, *, sequence: int = 1) -> None:
    record = {"phase": "checkpoint", "step": step, "bytes": 9}
    job.coordinator.report("worker-0-100", sequence=sequence, kind="phase", record=record)


def reported(job: Recovering) -> list[dict[str, Any]]:
    return [call[1] for call in job.sink.of("event") if call[1].get("phase") == "recovery"]


def take_over(job: Recovering) -> None:
    job.coordinator = job.another(json.loads(json.dumps(job.sink.kept)))
