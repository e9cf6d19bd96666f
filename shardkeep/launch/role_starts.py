"""Builds the command lines of a job's roles on this machine, and starts the roles."""

from __future__ import annotations

import os
from pathlib import Path

from shardkeep.affinity import Pins
from shardkeep.config import JobConfig
from shardkeep.launch.children import Child, Starter, child_environment
from shardkeep.run.folder import RunFolder


class RoleStarts:
    """Starts the roles of one job."""

    def __init__(
        self,
        config: JobConfig,
        folder: RunFolder,
        starter: Starter,
        pins: Pins,
        *,
        code_folder: Path | None,
        start_step: int,
    ) -> None:
        self._folder, self._starter, self._pins, self._start_step = folder, starter, pins, start_step
        self._env = child_environment(os.environ, threads=config.threads)
        self._code = [] if code_folder is None else ["--code", str(code_folder)]

    def ready(self, wait_s: float) -> bool:
        """See `Starter`."""
        return self._starter.ready(wait_s)

    def coordinator(self) -> Child:
        """Starts the first coordinator, or one that takes over at the address of its dead predecessor."""
        start = ["--start-step", str(self._start_step)] if self._start_step else []
        if (address := self._folder.address()) is not None:
            start += ["--listen", address, "--take-over"]
        return self._start(
            "coordinator", 0, [str(self._folder.config_path), "--run-dir", str(self._folder.path), *start]
        )

    def member(self, role: str, index: int) -> Child:
        """Starts a worker or a server."""
        run = str(self._folder.path)
        code = self._code if role == "worker" else []
        return self._start(role, index, ["--coordinator", run, "--index", str(index), "--run-dir", run, *code])

    def _start(self, role: str, index: int, arguments: list[str]) -> Child:
        log, cores = self._folder.log_path(role, index), self._pins.get((role, index))
        return self._starter.start(role, index, arguments, log=log, env=self._env, cores=cores)
