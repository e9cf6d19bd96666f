"""serve: a coordinator and embedding servers as processes of this machine, for a training loop in this one."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkeep.base.compiling.kernels import compile_kernels
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import ConfigError, JobError, ShardkeepError, TransportError
from shardkeep.compression.config import CompressionConfig
from shardkeep.config import JobConfig
from shardkeep.launch.children import Spawn
from shardkeep.launch.coordinator_line import CoordinatorLine
from shardkeep.launch.processes import JobProcesses
from shardkeep.launch.role_starts import RoleStarts
from shardkeep.loop.client import EmbeddingClient, checked_tables, connect, loop_config
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.roles.kernel_needs import needed_kernels
from shardkeep.run.folder import RunFolder

POLL_S = 0.05
CLOSE_S = 10.0
"""Seconds the processes get to end by themselves after the trainer has left."""
TERMINATE_S = 2.0
DEATH_S = 0.5
"""Seconds a lost connection may precede the end of the process that had it."""


@contextlib.contextmanager
def serve(
    tables: Sequence[TableSpec],
    *,
    servers: int = 2,
    seed: int = 0,
    consistency: ConsistencyConfig | str = "bounded",
    compression: CompressionConfig | None = None,
    run_dir: str | Path | None = None,
) -> Iterator[EmbeddingClient]:
    """Starts a coordinator and `servers` embedding servers on this machine; yields a connected client.

    At the end of the `with` block the servers apply what was pushed, and every process ends; so they do when the block
    raises and when this process is killed. Nothing is saved.

    Args:
        tables: Each with a name, a dim, an optimizer and an initializer.
        servers: Server processes; rows are spread over them by a hash of their ids.
        seed: Seed of the rows' initial values.
        consistency: sync, bounded or async, or a ConsistencyConfig.
        compression: Of pushes and pulls; left out = none.
        run_dir: New folder for logs and summary.json; left out = a temporary one, kept only when the servers failed.

    Raises:
        UserError: A setting is wrong.
        JobError: A process died; the text names it and the folder of its log.
    """
    if servers < 1:
        raise ConfigError(f"servers: {servers}; allowed: 1 or more, or EmbeddingClient.local for none")
    config = loop_config(servers=servers, seed=seed, consistency=consistency, compression=compression)
    tables = checked_tables(tables)
    compile_kernels(needed_kernels(config, "server", "client", tables=tables))
    with _run_folder(run_dir, config) as folder:
        processes = JobProcesses(
            RoleStarts(config, folder, Spawn(), {}, code_folder=None, start_step=0), CoordinatorLine(folder)
        )
        with _ending(processes, folder):
            with _naming_the_dead(processes, folder), connect(_started(processes, folder, config), 0, tables) as client:
                yield client
            processes.wait(CLOSE_S)


def _started(processes: JobProcesses, folder: RunFolder, config: JobConfig) -> Path:
    """Starts all; returns the run folder, which says by now where the coordinator listens."""
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
def _ending(processes: JobProcesses, folder: RunFolder) -> Iterator[None]:
    """Inside, a thread tells the coordinator when a server dies. Every process is gone afterwards."""
    over = threading.Event()
    reporter = threading.Thread(target=_report_deaths, args=(processes, over), name="report-deaths", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()
        processes.end(grace_s=TERMINATE_S)
        folder.forget_token()


def _report_deaths(processes: JobProcesses, over: threading.Event) -> None:
    while not over.wait(POLL_S):
        processes.report_deaths()


@contextlib.contextmanager
def _naming_the_dead(processes: JobProcesses, folder: RunFolder) -> Iterator[None]:
    """Makes of an error that follows from a process's death one that names the process."""
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
    """The caller's folder, or a temporary one that stays only where logs can explain an error of ours."""
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
