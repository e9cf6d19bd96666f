"""serve: a coordinator and embedding servers as processes of this machine, for a training loop in this one."""

from __future__ import annotations

import contextlib
import os
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
from shardkeep.launch.children import Child, Death, Spawn, child_environment, end_all, wait_all
from shardkeep.loop.client import EmbeddingClient, checked_tables, connect, loop_config
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.control.grpc.client import report_death
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.roles.kernel_needs import needed_kernels
from shardkeep.run.folder import RunFolder

POLL_S = 0.05
CLOSE_S = 10.0
"""Seconds the processes get to end by themselves after the trainer has left."""
TERMINATE_S = 2.0


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
        tables: Each with a name, a dim, an optimizer and the law of its initial values.
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
        processes = _Processes(folder, config)
        try:
            with processes.told(), connect(processes.start(), 0, tables) as client:
                yield client
            processes.wait()
        finally:
            processes.end()


class _Processes:
    """The coordinator and the servers; a thread tells the coordinator when a server dies."""

    def __init__(self, folder: RunFolder, config: JobConfig) -> None:
        self._folder, self._config = folder, config
        self._env = child_environment(os.environ, threads=1)
        self._children: list[Child] = []
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch-servers", daemon=True)
        self._coordinator: Endpoint | None = None

    def start(self) -> Path:
        """Starts all; returns the run folder, which tells where the coordinator listens."""
        self._child("coordinator", 0, [str(self._folder.config_path), "--run-dir", str(self._folder.path)])
        deadline = Deadline(self._config.liveness.form_timeout_s)
        while (coordinator := self._folder.endpoint()) is None:
            deadline.check("the coordinator to listen")
            if self._deaths():
                raise TransportError("the coordinator ended before it listened")
            time.sleep(POLL_S)
        for index in range(self._config.servers):
            self._child("server", index, ["--coordinator", str(self._folder.path), "--index", str(index)])
        self._coordinator = coordinator
        self._watcher.start()
        return self._folder.path

    def wait(self) -> None:
        """Gives the processes the time to end by themselves."""
        wait_all(self._children, Deadline(CLOSE_S))

    def end(self) -> None:
        """Ends what is left. Every process is gone when it returns."""
        self._ended.set()
        if self._watcher.is_alive():
            self._watcher.join()
        end_all(self._children, grace_s=TERMINATE_S)
        self._folder.forget_token()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Makes of an error that follows from a process's death one that names the process."""
        try:
            yield
        except ShardkeepError as error:
            deaths = [death for death in self._deaths() if death.code < 0 or death.role == "coordinator"]
            if not deaths:
                raise
            raise JobError(f"{deaths[0].text()}; logs: {self._folder.logs}") from error

    def _child(self, role: str, index: int, arguments: Sequence[str]) -> None:
        log = self._folder.log_path(role, index)
        self._children.append(Spawn().start(role, index, arguments, log=log, env=self._env))

    def _deaths(self) -> list[Death]:
        return [death for child in self._children if (death := child.death()) is not None]

    def _watch(self) -> None:
        told: set[int] = set()
        coordinator = self._coordinator
        while not self._ended.wait(POLL_S):
            for death in self._deaths():
                if coordinator is not None and death.pid not in told and death.role != "coordinator":
                    told.add(death.pid)
                    with contextlib.suppress(ShardkeepError):  # the coordinator may be gone, too
                        report_death(coordinator, role=death.role, index=death.index, pid=death.pid, reason=death.how())


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
