"""Jobs of the supervisor with stand-ins as workers and servers, and the real coordinator: tests/support/stand_in.py.
Linux only."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from shardkeep.config import JobConfig
from shardkeep.config.affinity import Pins
from shardkeep.launch.callback_calls import CallbackCalls
from shardkeep.launch.processes.children import Child, child_environment
from shardkeep.launch.processes.fork_server import ForkServer
from shardkeep.launch.processes.role_starts import RoleStarts, of_launcher
from shardkeep.launch.processes.starter import RoleCommand, Starter
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.train_job import TrainJob
from shardkeep.run.folder import RunFolder
from shardkeep.run.reader import RunReader
from shardkeep.view.callback import Callback, StartEvent
from shardkeep.view.screen import Screen
from tests.support import stand_in
from tests.support.cluster import members_in, records, within
from tests.support.import_path import IMPORT_PATH

IMPORTS = [
    "shardkeep.cli.main",
    "shardkeep.roles.coordinator",
    "grpc._channel",
    "grpc._server",
    stand_in.__name__,
]


class StandIns(Starter):
    """Starts stand-ins, each forked from one process in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self._env = child_environment({**os.environ, "PYTHONPATH": IMPORT_PATH}, threads=1)
        self._forks = ForkServer(self._env, main=f"{stand_in.__name__}:main")
        self._forks.load(IMPORTS)

    def start(self, command: RoleCommand) -> Child:
        arguments = [command.role, *command.arguments, "--parent-pipe"]
        with command.log.open("ab") as output:
            process = self._forks.fork(arguments, log=output.fileno(), env=self._env, cores=command.cores, limit_s=60.0)
        return Child(command.role, command.index, process, log=command.log)

    def close(self) -> None:
        self._forks.close()


class Watched:
    """A job as its run folder shows it, and what lets its stand-ins continue."""

    def __init__(self, run: RunReader, limit_s: float, running: Callable[[], bool]) -> None:
        """`limit_s`: of each wait, which fails at once when nothing is `running`."""
        self.run, self._limit_s, self._running = run, limit_s, running

    def members(self) -> dict[str, psutil.Process]:
        return members_in(self.run)

    def recoveries(self) -> list[dict[str, Any]]:
        return [record for record in records(self.run) if record.get("phase") == "recovery"]

    def step(self) -> int:
        return max((r["step"] for r in records(self.run) if r["kind"] == "progress"), default=0)

    def until(self, true: Callable[[], bool], otherwise: str) -> None:
        within(self._limit_s, true, otherwise, self._running)

    def training(self, step: int = 1) -> dict[str, psutil.Process]:
        """Waits for a step; the processes then."""
        self.until(lambda: self.step() >= step, f"no step {step}")
        return self.members()

    def go(self) -> None:
        (self.run.path / stand_in.GO).touch()

    def end_lease(self, *members: str) -> None:
        """Has the coordinator declare these dead."""
        for member in members:
            stand_in.end_lease(self.run.path, member)

    def show_logs(self) -> None:
        """For a test that failed."""
        for log in sorted(self.run.logs.glob("*.log")):
            print(f"---- {log}\n{log.read_text(errors='replace')[-4000:]}")


class Job(Watched):
    """A job under a supervisor in a thread of its own, so that the test can act meanwhile."""

    def __init__(
        self,
        folder: Path,
        starter: StandIns,
        plan: Mapping[str, Any],
        pins: Pins,
        callbacks: Sequence[Callback] = (),
        **config: Any,
    ) -> None:
        """`config`: of the job, with one server, two workers and lasting leases where it does not say."""
        liveness = {"lease_s": stand_in.LEASE_S, **config.pop("liveness", {})}
        self.config = JobConfig.model_validate({"servers": 1, "workers": 2, "liveness": liveness, **config})
        self.folder = RunFolder.create(folder, self.config)
        super().__init__(self.folder, 90.0, lambda: self.running)
        self.interrupts = Interrupts()
        (folder / stand_in.PLAN).write_text(json.dumps({"steps": 5, "step_s": 0.01, **plan}))
        self._out = StringIO()
        self._calls = CallbackCalls(callbacks, self.interrupts, lambda text: screen.phase("callback", text))
        screen = Screen(Console(file=self._out, width=1000), listener=self._calls.record if callbacks else None)
        roles = RoleStarts(self.config, self.folder, starter, of_launcher(self.folder), pins=pins)
        self._supervisor = TrainJob(roles, self.folder, screen, self.interrupts)
        self._result: dict[str, Any] | BaseException = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def screen(self) -> str:
        return self._out.getvalue()

    def end(self) -> dict[str, Any]:
        """The summary of a completed job; raises what the supervisor raised."""
        self._thread.join(self._limit_s)
        assert not self.running, f"the job still runs after {self._limit_s:g} s"
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def recovered(self, victim: str) -> None:
        """Waits until the group has formed again after the death of a member."""
        self.until(lambda: any(victim in recovery["text"] for recovery in self.recoveries()), f"{victim}: no recovery")

    def close(self) -> None:
        self.interrupts.count, self.interrupts.at_once = 2, True
        with contextlib.suppress(Exception):
            self.end()
        print(self.screen)
        self.show_logs()

    def _run(self) -> None:
        try:
            with self._calls.ending(self.folder):
                self._calls.start(StartEvent(self.config, self.folder.path, 0, 0))
                self._result = self._supervisor.run()
        except BaseException as error:
            self._result = error


Start = Callable[..., Job]


@contextlib.contextmanager
def jobs_in(folder: Path, starter: StandIns) -> Iterator[Start]:
    """What starts the job of a test, by its plan and its config, in the run folder `run`; it ends with the block."""
    with contextlib.ExitStack() as ends:

        def start(
            plan: Mapping[str, Any] | None = None,
            pins: Pins | None = None,
            callbacks: Sequence[Callback] = (),
            **config: Any,
        ) -> Job:
            job = Job(folder / "run", starter, plan or {}, pins or {}, callbacks, **config)
            ends.callback(job.close)
            return job

        yield start
