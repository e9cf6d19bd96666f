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

from shardkeep.affinity import Cores, Pins, pin
from shardkeep.base.errors import JobError
from shardkeep.config import JobConfig
from shardkeep.launch.callback_calls import CallbackCalls
from shardkeep.launch.children import Child, Spawn, child_environment
from shardkeep.launch.fork_server import ForkServer
from shardkeep.launch.interrupts import Interrupts
from shardkeep.launch.supervisor import Supervisor
from shardkeep.run.callback import Callback, StartEvent
from shardkeep.run.folder import RunFolder
from shardkeep.run.screen import Screen
from tests.support import stand_in
from tests.support.cluster import kinds, within

LIMIT_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


class StandIns(Spawn):
    """Starts stand-ins: on Linux each is forked from one process, in milliseconds."""

    def __init__(self) -> None:
        self._env = child_environment({**os.environ, "PYTHONPATH": str(ROOT)}, threads=1)
        self._server: ForkServer | None = None
        if sys.platform == "linux":
            self._server = ForkServer(self._env, main=f"{stand_in.__name__}:main")
            self._server.load(
                [stand_in.__name__, "shardkeep.cli.main", "shardkeep.ps.control.grpc.server", "shardkeep.run.storage"]
            )

    def start(
        self,
        role: str,
        index: int,
        arguments: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        cores: Cores | None = None,
    ) -> Child:
        given = [role, *arguments, "--parent-pipe"]
        with log.open("ab") as output:
            if self._server is not None:
                process: Any = self._server.fork(given, log=output.fileno(), env=self._env, cores=cores, limit_s=60.0)
                return Child(role, index, process, log=log)
            process = subprocess.Popen(
                [sys.executable, stand_in.__file__, *given],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._env,
                start_new_session=True,
            )
        if cores is not None:
            pin(process.pid, cores)
        return Child(role, index, process, log=log)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


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
        """`config`: of the job, with one server and two workers where it does not say."""
        self.config = JobConfig.model_validate({"servers": 1, "workers": 2, **config})
        self.folder = RunFolder.create(folder, self.config)
        self.interrupts = Interrupts()
        (folder / stand_in.PLAN).write_text(json.dumps({"steps": 5, "step_s": 0.01, **plan}))
        self._out = StringIO()
        self._calls = CallbackCalls(callbacks, self.interrupts, lambda text: screen.phase("callback", text))
        screen = Screen(Console(file=self._out, width=1000), listener=self._calls.record if callbacks else None)
        self._supervisor = Supervisor(self.config, self.folder, screen, self.interrupts, None, pins, 0, starter)
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

    def training(self) -> dict[str, psutil.Process]:
        """Waits for the first step; the processes by `role index`."""
        self.until(lambda: "progress" in kinds(self.folder), "no step")
        return {f"{m['role']} {m['index']}": psutil.Process(m["pid"]) for m in self.folder.member_list()}

    def go(self) -> None:
        """Lets the workers continue where they hold."""
        (self.folder.path / stand_in.GO).touch()

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
