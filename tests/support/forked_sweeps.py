"""Sweeps whose runs are stand-ins for `shardkeep train` (tests/support/sweep_runs.py), forked from a process that has
imported what they need: half a CPU second of imports a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

from rich.console import Console

from shardkeep.base.errors import ShardkeepError
from shardkeep.sweep import sweep
from shardkeep.sweep.plan import load_sweep
from tests.support.forked import (
    SHARDKEEP,
    Forked,
    become,
    close_all_but,
    fork_context,
    forked_run,
    redirect,
    started,
    subprocess_with,
    waited,
)
from tests.support.import_path import IMPORT_PATH
from tests.support.sweep_runs import TRAIN

STAND_IN = "tests.support.sweep_runs:script"


@contextlib.contextmanager
def forked_runs() -> Iterator[None]:
    """Runs of sweeps inside the block are forked from the preloaded process; on Linux."""
    if sys.platform != "linux":
        yield
        return
    with mock.patch.object(sweep, "subprocess", subprocess_with(Popen=PreloadedRun)):
        yield


class PreloadedRun:
    """A run; the part of `subprocess.Popen` that a sweep needs."""

    def __init__(
        self, command: Sequence[str], *, stdout: IO[Any], env: Mapping[str, str], pass_fds: Sequence[int], **_same: Any
    ) -> None:
        reads, writes = os.pipe()
        (lock,) = pass_fds
        ends = [Connection(reads), Connection(os.dup(stdout.fileno())), Connection(os.dup(lock))]
        self._process = fork_context().Process(target=_run, args=(list(command), dict(env), ends))
        self._process.start()
        for end in ends:
            end.close()
        self.pid: int = self._process.pid
        self.stdin = os.fdopen(writes, "wb", buffering=0)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return waited(self._process, timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(command: list[str], env: dict[str, str], ends: Sequence[Connection]) -> NoReturn:
    stdin, output, lock = (end.fileno() for end in ends)
    redirect(stdin, output, output)
    close_all_but(lock)
    os.setsid()
    become(STAND_IN if command[:3] == list(TRAIN) else SHARDKEEP, command[3:], env)


def started_sweep(folder: Path) -> Forked | subprocess.Popen[str]:
    """The sweep of `sweep.yaml` into `out`, in a process of its own."""
    return started([str(folder)], env={**os.environ, "PYTHONPATH": IMPORT_PATH}, main=f"{__name__}:main")


def main() -> None:
    """The sweep below the folder in `sys.argv`; its runs are forked from here."""
    folder = Path(sys.argv[1])
    if sys.platform == "linux":
        sweep.subprocess = subprocess_with(Popen=forked_run(STAND_IN))  # type: ignore[assignment, attr-defined]
    try:
        sweep.sweep(load_sweep(folder / "sweep.yaml"), out=folder / "out", console=Console(width=200), train=TRAIN)
    except ShardkeepError as error:
        print(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
