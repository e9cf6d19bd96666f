"""Jobs of the supervisor with stand-ins as workers and servers, and the real coordinator: tests/support/stand_in.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from shardkeep.base.errors import JobError
from shardkeep.config import JobConfig
from shardkeep.config.affinity import Pins, pin
from shardkeep.launch.callback_calls import CallbackCalls
from shardkeep.launch.processes.children import Child, child_environment
from shardkeep.launch.processes.fork_server import ForkServer
from shardkeep.launch.processes.role_starts import RoleStarts, of_launcher
from shardkeep.launch.processes.starter import RoleCommand, Starter
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.train_job import TrainJob
from shardkeep.run.folder import RunFolder
from shardkeep.view.callback import Callback, StartEvent
from shardkeep.view.screen import Screen
from tests.support import stand_in
from tests.support.cluster import members_in, records, within
from tests.support.import_path import IMPORT_PATH

LIMIT_S = 90.0


class StandIns(Starter):
    """Starts stand-ins: on Linux each is forked from one process, in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self._env = child_environment({**os.environ, "PYTHONPATH": IMPORT_PATH}, threads=1)
        self._forks: ForkServer | None = None
        if sys.platform == "linux":
            self._forks = ForkServer(self._env, main=f"{stand_in.__name__}:main")
            self._forks.load(
                [
                    "shardkeep.cli.main",
                    "shardkeep.roles.coordinator",
                    "grpc._channel",
                    "grpc._server",
                    stand_in.__name__,
                ]
            )

    def start(self, command: RoleCommand) -> Child:
        given = [command.role, *command.arguments, "--parent-pipe"]
        with command.log.open("ab") as output:
            if self._forks is not None:
                out, env = output.fileno(), self._env
                process: Any = self._forks.fork(given, log=out, env=env, cores=command.cores, limit_s=60.0)
                return Child(command.role, command.index, process, log=command.log)
            process = subprocess.Popen(
                [sys.executable, stand_in.__file__, *given],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._env,
                start_new_session=True,
            )
        if command.cores is not None:
            pin(process.pid, command.cores)
        return Child(command.role, command.index, process, log=command.log)

    def close(self) -> None:
        if self._forks is not None:
            self._forks.close()


class Job:
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
        self.interrupts = Interrupts()
        (folder / stand_in.PLAN).write_text(json.dumps({"steps": 5, "step_s": 0.01, **plan}))
        self._out = StringIO()
        self._calls = CallbackCalls(callbacks, self.interrupts, lambda text: screen.phase("callback", text))
        screen = Screen(Console(file=self._out, width=1000), listener=self._calls.record if callbacks else None)
        roles = RoleStarts(self.config, self.folder, starter, of_launcher(self.folder), pins=pins)
        self._supervisor = TrainJob(roles, self.folder, screen, self.interrupts)
        self._result: dict[str, Any] | BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def screen(self) -> str:
        return self._out.getvalue()

    def end(self, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The summary of a completed job; raises what the supervisor raised."""
        self._thread.join(limit_s)
        assert not self.running, f"the job still runs after {limit_s:g} s"
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        return self._result

    def wait(self, limit_s: float) -> None:
        self._thread.join(limit_s)

    def training(self, step: int = 1) -> dict[str, psutil.Process]:
        """Waits for a step; the processes of the current generation by `role index`."""
        self.until(lambda: self.last_step >= step, f"no step {step}")
        return self.members()

    def members(self) -> dict[str, psutil.Process]:
        return members_in(self.folder)

    def go(self) -> None:
        """Lets the workers continue where they hold."""
        (self.folder.path / stand_in.GO).touch()

    def end_lease(self, member: str) -> None:
        stand_in.end_lease(self.folder.path, member)

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return [record for record in records(self.folder) if record.get("phase") == "recovery"]

    @property
    def last_step(self) -> int:
        return max((r["step"] for r in records(self.folder) if r["kind"] == "progress"), default=0)

    def recovered(self, victim: str) -> None:
        """Waits until the group has formed again after the death of a member."""
        self.until(lambda: any(victim in recovery["text"] for recovery in self.recoveries), f"no recovery of {victim}")

    def until(self, true: Callable[[], bool], otherwise: str) -> None:
        within(LIMIT_S, true, otherwise, lambda: self.running)

    def _run(self) -> None:
        try:
            with self._calls.ending(self.folder):
                self._calls.start(StartEvent(self.config, self.folder.path, 0, 0))
                self._result = self._supervisor.run()
        except BaseException as error:
            self._result = error

    def show(self) -> None:
        """For a test that failed."""
        print(self.screen)
        for log in sorted(self.folder.logs.glob("*.log")):
            print(f"---- {log}\n{log.read_text(errors='replace')[-4000:]}")


class Jobs:
    """The jobs of one test, below one folder."""

    def __init__(self, folder: Path, starter: StandIns) -> None:
        self._folder, self._starter = folder, starter
        self._jobs: list[Job] = []

    def start(
        self,
        plan: Mapping[str, Any] | None = None,
        *,
        pins: Pins | None = None,
        callbacks: Sequence[Callback] = (),
        **config: Any,
    ) -> Job:
        self._jobs.append(Job(self._folder / "run", self._starter, plan or {}, pins or {}, callbacks, **config))
        return self._jobs[-1]

    def close(self) -> None:
        for job in self._jobs:
            job.interrupts.count, job.interrupts.at_once = 2, True
            with contextlib.suppress(Exception):
                job.end()
            job.show()


@contextlib.contextmanager
def jobs_in(folder: Path, starter: StandIns) -> Iterator[Jobs]:
    jobs = Jobs(folder, starter)
    with contextlib.closing(jobs):
        yield jobs


def main() -> None:
    """A launcher of a job that does not end: `sys.argv` has its run folder."""
    with contextlib.closing(StandIns()) as starter:
        job = Job(Path(sys.argv[1]), starter, {"steps": 1_000_000}, {})
        with job.interrupts:
            try:
                while job.running:
                    job.wait(0.1)
                job.end()
            except JobError as error:
                sys.exit(str(error))


if __name__ == "__main__":
    main()
