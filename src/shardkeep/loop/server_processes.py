"""The processes behind `EmbeddingClient.serve`: a coordinator and embedding servers on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkeep.assembly.kernel_needs import needed_kernels
from shardkeep.base.compiling.kernels import compile_kernels
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, ShardkeepError, TransportError
from shardkeep.base.logs.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.launch.from_python import script_folder
from shardkeep.launch.processes.fork_server import READY_S
from shardkeep.launch.processes.job_processes import JobProcesses
from shardkeep.launch.processes.role_starts import RoleStarts, of_launcher
from shardkeep.launch.processes.starter import starting
from shardkeep.launch.supervision import POLL_S, Supervision
from shardkeep.loop.joining import Joined, join, only_client, register
from shardkeep.member.access import endpoint_of
from shardkeep.member.listeners import check_listeners
from shardkeep.page.of_job import page_line, page_text
from shardkeep.ps.config import TableSpec
from shardkeep.records.events import Event
from shardkeep.records.lines import from_the_end
from shardkeep.run.folder import RunFolder

_log = EventLog("custom")
JOIN_S = 10.0
"""Seconds that a coordinator started here gets to answer."""
CLOSE_S = 10.0
"""Seconds the processes get to end after the trainer has left."""
TERMINATE_S = 2.0
DEATH_S = 0.5
"""Seconds between a lost connection and the end of its process, at most."""


def addresses(config: JobConfig, run: Path) -> Iterator[tuple[str, str]]:
    """Yields what a person needs to watch a job that runs: the name and the text of a line for stderr."""
    if config.web.has_page and (address := page_line(run)) is not None:
        yield "page", page_text(run, address, sys.stderr)
    if config.web.has_metrics:
        phases = (found for found in from_the_end(run / "metrics.jsonl") if isinstance(found, Event))
        if (last := next((found for found in phases if found.kind == "phase"), Event())).phase == "metrics":
            yield "metrics", last.text


def say_addresses(config: JobConfig, run: Path) -> None:
    """Prints them on stderr, as `shardkeep train` does."""
    with contextlib.suppress(OSError):  # stderr is full
        for name, text in addresses(config, run):
            print(f"{name:<9} {text}", file=sys.stderr, flush=True)


class Serving:
    """A coordinator and servers that run. `run`: the run folder, which names the coordinator's address."""

    def __init__(self, run: Path, supervision: Supervision) -> None:
        self.run = run
        self._supervision = supervision

    def died(self) -> str:
        """How the first of them ended that a signal ended and that is not replaced; "" = none. Others end when the job
        fails, which their trainers tell."""
        return next((death.text() for death in self._supervision.fatal() if death.by_signal), "")

    def wait(self, limit_s: float) -> bool:
        """Waits until all have ended; whether they have."""
        self._supervision.processes.wait(limit_s)
        return not self._supervision.processes.running()


def join_served(config: JobConfig, tables: Sequence[TableSpec], run_dir: str | Path | None, *, quiet: bool) -> Joined:
    """Starts the processes and joins them as their only trainer. Closing the `ending` ends them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_client())
        serving = stack.enter_context(server_processes(config, tables, run_dir))
        if not quiet:
            say_addresses(config, serving.run)
        joined = join(register(endpoint_of(str(serving.run)), 0, JOIN_S, ending=contextlib.ExitStack()), tables)

        @stack.push
        def wait(kind: type[BaseException] | None, _error: object, _trace: object) -> None:
            if kind is None:
                serving.wait(CLOSE_S)

        stack.push(joined.ending)
        return joined._replace(ending=stack.pop_all())


@contextlib.contextmanager
def server_processes(config: JobConfig, tables: Sequence[TableSpec], run_dir: str | Path | None) -> Iterator[Serving]:
    """Starts a coordinator and the config's servers.

    Ends every process afterwards. Replaces an error that follows from a death by one that names the dead process.

    Args:
        config: From `loop_config`.
        tables: The tables of the trainer that connects inside.
        run_dir: See `EmbeddingClient.serve`.
    """
    check_listeners(config)
    code_folder = script_folder() if config.own_modules else None
    with starting(config, _log.warning) as starter, _run_folder(run_dir, config, code_folder) as folder:
        compile_kernels(needed_kernels(config, "server", "client", tables=tables))
        starter.load(needed_kernels(config, "server", tables=tables))
        starts = RoleStarts(config, folder, starter, of_launcher(folder), code_folder=code_folder)
        supervision = Supervision(starts, say=_log.warning, terminate_s=TERMINATE_S)
        starter.ready(READY_S)
        with _watched(supervision, folder), _naming_the_dead(supervision.processes, folder):
            yield Serving(_started(supervision.processes, folder, config), supervision)


def _started(processes: JobProcesses, folder: RunFolder, config: JobConfig) -> Path:
    """Starts all processes. Returns the run folder once it holds the coordinator's address."""
    processes.start("coordinator")
    for index in range(config.servers):
        processes.start("server", index)
    deadline = Deadline(config.liveness.form_timeout_s)
    while folder.endpoint() is None:
        deadline.check("the coordinator to listen")
        if processes.coordinator() is None:
            raise TransportError("the coordinator ended before it listened")
        time.sleep(POLL_S)
    return folder.path


@contextlib.contextmanager
def _watched(supervision: Supervision, folder: RunFolder) -> Iterator[None]:
    """Runs a thread that replaces dead servers. Ends every process afterwards."""
    over = threading.Event()
    watch = threading.Thread(target=supervision.until, args=(over.is_set,), name="replace-dead", daemon=True)
    owner = os.getpid()
    ending = contextlib.ExitStack()
    ending.callback(folder.forget_recovery)
    ending.callback(folder.forget_token)
    ending.enter_context(supervision)
    watch.start()
    try:
        yield
    finally:
        if os.getpid() == owner:  # else a fork ends, and the processes are its parent's
            over.set()
            watch.join()
            ending.close()


@contextlib.contextmanager
def _naming_the_dead(processes: JobProcesses, folder: RunFolder) -> Iterator[None]:
    """Replaces an error that follows from a process's death by one that names the process."""
    try:
        yield
    except ShardkeepError as error:
        deadline = Deadline(DEATH_S if isinstance(error, TransportError) else 0.0)
        while not (deaths := [end for end in processes.ended() if end.code < 0 or end.role == "coordinator"]):
            if deadline.over:
                raise
            time.sleep(POLL_S)
        raise JobError(f"{deaths[0].text()}; logs: {folder.logs}") from error


@contextlib.contextmanager
def _run_folder(run_dir: str | Path | None, config: JobConfig, code_folder: Path | None) -> Iterator[RunFolder]:
    """Yields the caller's folder, or a temporary one that is kept only if an error names its logs."""
    if run_dir is not None:
        yield RunFolder.create(run_dir, config, code_folder=code_folder)
        return
    path = Path(tempfile.mkdtemp(prefix="shardkeep-"))
    keep, owner = False, os.getpid()
    try:
        yield RunFolder.create(path, config, code_folder=code_folder)
    except ShardkeepError as error:
        keep = str(path) in str(error)
        raise
    finally:
        if not keep and os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)
