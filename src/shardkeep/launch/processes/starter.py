"""Starter: starts roles from a fork server, or by exec where there is none and once it has failed."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkeep.base.logs.log import LogFormat
from shardkeep.base.machine.topology import Cores
from shardkeep.config import JobConfig
from shardkeep.config.affinity import pin
from shardkeep.config.launch import forks
from shardkeep.core_plan import worker_threads
from shardkeep.launch.processes.children import SHARDKEEP, Child, ForkedProcess, child_environment
from shardkeep.launch.processes.fork_server import LIBRARIES, ROLES, ForkServer, NoFork
from shardkeep.launch.processes.role_output import RoleOutput, role_output


@dataclass(frozen=True)
class RoleCommand:
    """A role to start. `arguments`: after its name; `cores`: on which it runs, None = the system chooses."""

    role: str
    index: int
    arguments: Sequence[str]
    log: Path
    env: Mapping[str, str]
    cores: Cores | None = None


class Starter:
    """Starts roles.

    Args:
        server: None = by exec.
        say: Shows why the server is no longer used.
        log_format: Of every role's log.
    """

    def __init__(
        self,
        server: ForkServer | None = None,
        say: Callable[[str], None] = lambda _text: None,
        log_format: LogFormat = LogFormat.TEXT,
    ) -> None:
        self._server, self._say, self._format = server, say, log_format

    def load(self, kernels: Sequence[str]) -> None:
        """Loads the modules that roles need, and these compiled kernels, in the background."""
        if self._server is not None:
            self._server.load([*ROLES, *kernels])

    def ready(self, wait_s: float) -> bool:
        """Waits up to `wait_s` until roles can start at once; returns whether they can."""
        try:
            return self._server is None or self._server.ready(wait_s)
        except NoFork as error:
            self._give_up(error)
            return True

    def start(self, command: RoleCommand) -> Child:
        """Starts a role; may block for seconds."""
        as_json = self._format is LogFormat.JSON
        form = ["--log-format", self._format.value] if as_json else []
        words = [command.role, *command.arguments, *form, "--parent-pipe"]
        with role_output(command.log, command.role, command.index, as_json=as_json) as output:
            process = self._fork(words, command, output) or _spawn(words, command, output)
        return Child(command.role, command.index, process, log=command.log, reader=output.reader)

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _fork(self, words: Sequence[str], command: RoleCommand, output: RoleOutput) -> ForkedProcess | None:
        if self._server is None:
            return None
        out, errors = output.stdout, output.stderr
        try:
            return self._server.fork(words, log=out, errors=errors, env=command.env, cores=command.cores)
        except NoFork as error:
            self._give_up(error)
            return None

    def _give_up(self, why: NoFork) -> None:
        self.close()
        self._say(f"{why}; roles are started by exec from now on")


def _spawn(words: Sequence[str], command: RoleCommand, output: RoleOutput) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*SHARDKEEP, *words],
        stdin=subprocess.PIPE,
        stdout=output.stdout,
        stderr=output.stderr,
        env=dict(command.env),
        start_new_session=True,
    )
    if command.cores is not None:
        with contextlib.suppress(ProcessLookupError):  # it has already ended; `death` reports that
            pin(process.pid, command.cores)  # at once: threads that it starts later inherit this
    return process


@contextlib.contextmanager
def starting(
    config: JobConfig, say: Callable[[str], None], log_format: LogFormat = LogFormat.TEXT
) -> Iterator[Starter]:
    """Yields the starter of a job's roles, with logs of this form. A fork server starts its imports at once."""
    server = None
    if forks(config.launch, servers=config.servers, device=config.tower.device):
        server = ForkServer(child_environment(os.environ, threads=worker_threads(config)))
        server.load(LIBRARIES)
    with contextlib.closing(Starter(server, say, log_format)) as starter:
        yield starter
