"""A coordinator with a clock that the test turns, a sink that remembers, and members by name."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardkeep.base.machine.limits import Limit
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.coordinator import Coordinator
from shardkeep.ps.control.job import JobDeadlines, JobSpec
from shardkeep.ps.control.records import PROTOCOL_VERSION, Formation, Hello, JobState, Member, Offer, Record, Role

VERSIONS = {"shardkeep": "1.0", "torch": "2.13.0"}
TABLES = (TableSpec(name="user", dim=8), TableSpec(name="item", dim=16))


class ListSink:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.kept: Record | None = None

    def members(self, generation: int, members: tuple[Member, ...]) -> None:
        self.calls.append(("members", generation, [member.name for member in members]))

    def standing(self, record: Record) -> None:
        self.kept = record

    def progress(self, record: Record) -> None:
        self.calls.append(("progress", record))

    def event(self, record: Record) -> None:
        self.calls.append(("event", record))

    def telemetry(self, record: Record) -> None:
        self.calls.append(("telemetry", record))

    def finished(self, status: str, message: str, summary: Record | None) -> None:
        self.calls.append(("finished", status, message, summary))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


class Job:
    """Two workers and a server unless told otherwise; a lease of 15 s."""

    def __init__(
        self,
        *,
        servers: int = 1,
        workers: int = 2,
        sink: ListSink | None = None,
        quota: Limit | None = None,
        settings: Record | None = None,
    ) -> None:
        self.now = 0.0
        self.data = ""
        """The fingerprint that workers tell."""
        self.sink = sink or ListSink()
        self.opened: list[int] = []
        self.coordinator = Coordinator(
            JobSpec("name: job\n", servers, workers, JobDeadlines(15.0, form_s=120.0), settings=settings or {}),
            open_store=self._open_store,
            sink=self.sink,
            clock=lambda: self.now,
            versions=VERSIONS,
            quota=quota,
        )
        self.names: list[tuple[Role, int]] = [("server", i) for i in range(servers)]
        self.names += [("worker", i) for i in range(workers)]

    def _open_store(self, generation: int) -> tuple[str, int]:
        self.opened.append(generation)
        return "127.0.0.1", 4000

    def register(
        self, role: Role, index: int, *, pid: int = 100, protocol: int = PROTOCOL_VERSION, **versions: str
    ) -> str:
        """Registers; the token is the member's name and pid."""
        token = f"{role}-{index}-{pid}"
        member = Member(role, index, "10.0.0.7", pid)
        self.coordinator.register(Hello(member, token, protocol, VERSIONS | versions))
        return token

    def join(self, role: Role, index: int, tables: Sequence[TableSpec] = TABLES) -> tuple[JobState, Formation | None]:
        offer = Offer(() if role == "server" else tuple(tables), self.data)
        return self.coordinator.join(f"{role}-{index}-100", offer)

    def form(self) -> Formation:
        for role, index in self.names:
            self.register(role, index)
        for role, index in self.names:
            _, formation = self.join(role, index)
        assert formation is not None
        return formation

    def leave(self, role: Role, index: int, code: int = 0, message: str = "", *, symptom: bool = False) -> JobState:
        return self.coordinator.leave(f"{role}-{index}-100", code=code, message=message, symptom=symptom)

    def summary(self) -> None:
        self.coordinator.report("worker-0-100", sequence=99, kind="summary", record={"steps": 7})

    def pass_time(
        self, seconds: float, *, alive: Sequence[tuple[Role, int]] = (), step: int = -1, phase: str = ""
    ) -> None:
        """Turns the clock in steps of a second with a tick each; `alive` members send heartbeats."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for role, index in alive:
                self.coordinator.heartbeat(f"{role}-{index}-100", step=step, phase=phase)
            self.coordinator.tick()

    @property
    def state(self) -> JobState:
        return self.coordinator.state


J = TypeVar("J", bound=Job)


def formed(job: J) -> J:
    job.form()
    return job


def serve_with_few_descriptors() -> None:
    """Serves a job in a process that may open so many files. Prints its address, and for each line that it reads that
    it could open one more.

    Args of the process: the number of files, the job's token."""
    from shardkeep.ps.control.grpc.server import ControlServer

    descriptors, token = int(sys.argv[1]), sys.argv[2]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    with ControlServer(Job().coordinator, token=token) as server:
        print(json.dumps(server.address), flush=True)
        for _ in sys.stdin:
            Path(os.devnull).open().close()
            print("opened", flush=True)


if __name__ == "__main__":
    serve_with_few_descriptors()
