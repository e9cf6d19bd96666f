"""The processes behind `EmbeddingClient.serve`: a coordinator and embedding servers on this machine."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkeep.base.compiling.kernels import compile_kernels
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, ShardkeepError, TransportError
from shardkeep.base.log import EventLog
from shardkeep.config import JobConfig
from shardkeep.launch.children import Spawn
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.processes import JobProcesses
from shardkeep.launch.replacing import Replacing
from shardkeep.launch.role_starts import RoleStarts
from shardkeep.launch.silence import watch_silence
from shardkeep.loop.joining import Joined, check_no_other, join, register
from shardkeep.page.of_job import page_line
from shardkeep.ps.config import TableSpec
from shardkeep.roles.kernel_needs import needed_kernels
from shardkeep.roles.listeners import check_listeners
from shardkeep.run.folder import RunFolder
from shardkeep.run.newest_records import newest_of_kind

_log = EventLog("custom")
POLL_S = 0.05
JOIN_S = 10.0
"""Seconds that a coordinator started here gets to answer."""
CLOSE_S = 10.0
"""Seconds the processes get to end after the trainer has left."""
TERMINATE_S = 2.0
DEATH_S = 0.5
"""Seconds between a lost connection and the end of its process, at most."""


def addresses(config: JobConfig, run: Path) -> Iterator[tuple[str, str]]:
    """Yields what a person needs to watch a job that runs: the name and the text of a line. The address of the page has
    a token, so it goes to no log."""
    if config.page.on and (address := page_line(run)) is not None:
        yield "page", address
    if config.metrics.on:
        found = newest_of_kind(run / "metrics.jsonl", "phase")
        if found.get("phase") == "metrics":
            yield "metrics", str(found["text"])


def say_addresses(config: JobConfig, run: Path) -> None:
    """Prints them on stderr, as `shardkeep train` does."""
    with contextlib.suppress(OSError):  # stderr is full
        for name, text in addresses(config, run):
            print(f"{name:<9} {text}", file=sys.stderr, flush=True)


class Serving:
    """A coordinator and servers that run. `run`: the run folder, which names the coordinator's address."""

    def __init__(self, run: Path, processes: JobProcesses, replacing: Replacing) -> None:
        self.run = run
        self._processes, self._replacing = processes, replacing

    def died(self) -> str:
        """How the first of them ended that a signal ended and that is not replaced; "" = none. Others end when the job
        fails, which their trainers tell."""
        return next((death.text() for death in self._replacing.fatal() if death.by_signal), "")

    def wait(self, limit_s: float) -> bool:
        """Waits until all have ended; whether they have."""
        self._processes.wait(limit_s)
        return not self._processes.running()


def join_served(config: JobConfig, tables: Sequence[TableSpec], run_dir: str | Path | None, *, quiet: bool) -> Joined:
    """Starts the processes and joins them as their only trainer. Closing the `ending` ends them."""
    check_no_other()
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(server_processes(config, tables, run_dir))
        if not quiet:
            say_addresses(config, serving.run)
        joined = join(register(serving.run, 0, JOIN_S), tables)

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
    compile_kernels(needed_kernels(config, "server", "client", tables=tables))
    with _run_folder(run_dir, config) as folder:
        line = CoordinatorLine(folder)
        processes = JobProcesses(RoleStarts(config, folder, Spawn(), {}, code_folder=None, start_step=0), line)
        replacing = Replacing(
            processes,
            line,
            folder,
            limit=config.liveness.restarts,
            step=lambda: _step(line),
            say=lambda text: _log.warning(text),
        )
        with _ending(processes, folder, line, replacing), _naming_the_dead(processes, folder):
            run = _started(processes, folder, config)
            if config.liveness.restarts:
                watch_silence(line, processes, lease_s=config.liveness.lease_s)
            yield Serving(run, processes, replacing)


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
def _ending(processes: JobProcesses, folder: RunFolder, line: CoordinatorLine, replacing: Replacing) -> Iterator[None]:
    """Runs a thread that replaces dead servers. Ends every process afterwards."""
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(processes, replacing, over), name="replace-dead", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()
        line.close()
        processes.end(grace_s=TERMINATE_S)
        folder.forget_token()
        folder.forget_recovery()


def _watch(processes: JobProcesses, replacing: Replacing, over: threading.Event) -> None:
    while not over.wait(POLL_S):
        replacing.replace_dead()
        processes.report_deaths()


def _step(line: CoordinatorLine) -> int | None:
    """The last step that the coordinator knows of; None = it does not answer, or there is none."""
    from shardkeep.ps.control.grpc.client import fetch_status

    with contextlib.suppress(ShardkeepError):
        if (endpoint := line.endpoint()) is not None:
            return max((member.step for member in fetch_status(endpoint, timeout_s=1.0).members), default=None)
    return None


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
def _run_folder(run_dir: str | Path | None, config: JobConfig) -> Iterator[RunFolder]:
    """Yields the caller's folder, or a temporary one that is kept only if an error names its logs."""
    if run_dir is not None:
        yield RunFolder.create(run_dir, config)
        return
    path = Path(tempfile.mkdtemp(prefix="shardkeep-"))
    keep = False
    try:
        yield RunFolder.create(path, config)
    except ShardkeepError as error:
        keep = str(path) in str(error)
        raise
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)
