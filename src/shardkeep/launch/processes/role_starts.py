"""Builds the command lines of a job's roles on this machine, and starts the roles."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardkeep.config import JobConfig
from shardkeep.config.affinity import Pins
from shardkeep.core_plan import worker_threads
from shardkeep.launch.processes.children import Child, child_environment
from shardkeep.launch.processes.starter import RoleCommand, Starter
from shardkeep.run.reader import RunReader


@dataclass(frozen=True)
class RoleStarts:
    """Starts the roles of one job, with the environment that this process has now.

    Attributes:
        folder: The run folder.
        starter: Starts a process.
        coordinator: Returns the arguments of a coordinator that starts now.
        member: Further arguments of a worker or server, such as those that say who may connect.
        keep: Folder for what members keep for their replacements; None = the run folder.
        code_folder: Folder of the user's own modules, if the config names any.
        pins: The cores of each role.
    """

    config: JobConfig
    folder: RunReader
    starter: Starter
    coordinator: Callable[[], list[str]]
    member: Sequence[str] = ()
    keep: Path | None = None
    code_folder: Path | None = None
    pins: Pins = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def start(self, role: str, index: int) -> Child:
        """Starts a worker, a server, or a coordinator: the first one, or one that takes over from its predecessor."""
        arguments = self.coordinator() if role == "coordinator" else self._arguments(role, index)
        log, cores = self.folder.log_path(role, index), self.pins.get((role, index))
        env = child_environment(self.environment, threads=worker_threads(self.config))
        return self.starter.start(RoleCommand(role, index, arguments, log, env, cores))

    def _arguments(self, role: str, index: int) -> list[str]:
        code = [] if self.code_folder is None else ["--code", str(self.code_folder)]
        keep = self.keep or self.folder.path
        place = ["--coordinator", str(self.folder.path), "--index", str(index), "--run-dir", str(keep)]
        return [*place, *self.member, *code]


def of_launcher(folder: RunReader, start_step: int = 0) -> Callable[[], list[str]]:
    """The arguments of a coordinator whose launcher made the folder: the first, or one that takes over at the address
    of its dead predecessor."""
    known: str | None = None

    def arguments() -> list[str]:
        nonlocal known
        known = folder.address() or known  # one that took over may have died before it listened
        start = ["--start-step", str(start_step)] if start_step else []
        start += [] if known is None else ["--listen", known, "--take-over"]
        return [str(folder.config_path), "--run-dir", str(folder.path), *start]

    return arguments
