"""A launcher in the process of the tests: what it starts by exec is forked from the preloaded process of the session,
which has imported what it would import: 6 CPU s a fork server, 5 a score of test data."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

from shardkeep.launch import test_data
from shardkeep.launch.processes import fork_server
from tests.support.forked import (
    SHARDKEEP,
    Forked,
    become,
    close_all_but,
    fork_context,
    redirect,
    subprocess_with,
    waited,
)


class PreloadedServer:
    """A fork server; the part of `subprocess.Popen` that `ForkServer` needs."""

    def __init__(
        self, command: Sequence[str], *, stderr: IO[Any], env: Mapping[str, str], pass_fds: Sequence[int], **_same: Any
    ) -> None:
        (control,) = pass_fds
        ends = [Connection(os.dup(each)) for each in (control, stderr.fileno())]
        self._process = fork_context().Process(target=_serve, args=(list(command), str(Path.cwd()), dict(env), *ends))
        self._process.start()
        for end in ends:
            end.close()
        self.pid: int = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        return waited(self._process, timeout)


def _serve(command: list[str], cwd: str, env: dict[str, str], control: Connection, output: Connection) -> NoReturn:
    """The forked process."""
    os.chdir(cwd)
    redirect(os.open(os.devnull, os.O_RDONLY), output.fileno(), output.fileno())
    close_all_but(control.fileno())
    command[-1] = str(control.fileno())
    os.setsid()
    become(SHARDKEEP, command, command[3:], env)


def _run(command: Sequence[str], *, env: Mapping[str, str], **_same: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of a command of shardkeep."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = Forked(SHARDKEEP, command[3:], env=env, cwd=None, stderr=errors)
        with process.stdin, process.stdout:
            printed, code = process.stdout.read(), process.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, printed, errors.read())


@contextlib.contextmanager
def forked_launchers() -> Iterator[None]:
    """Launchers inside the block start no Python; not on systems other than Linux."""
    if sys.platform != "linux":
        yield
        return
    with (
        mock.patch.object(fork_server, "subprocess", subprocess_with(Popen=PreloadedServer)),
        mock.patch.object(test_data, "subprocess", subprocess_with(run=_run)),
    ):
        yield
