"""A launcher in the process of the tests: what it starts by exec is forked from a process that has imported what it
would import: 6 CPU s a fork server, 5 a score of test data.

The roles of a fork server become children of the launcher, so the server must be a descendant of the launcher's
process. Hence each process that runs tests keeps a child without threads, the template of its fork servers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

from shardkeep.launch import test_data
from shardkeep.launch.processes import fork_server
from tests.support.forked import PRELOADED, SHARDKEEP, Forked, become, close_all_but, redirect, subprocess_with


class Template:
    """A child of this process that forks fork servers. Make it before this process has threads."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            self._requests.close()
            _fork_servers(theirs)
        theirs.close()

    def start(
        self, command: Sequence[str], *, stderr: IO[Any], env: Mapping[str, str], pass_fds: Sequence[int], **_same: Any
    ) -> TemplatedServer:
        """As `subprocess.Popen` of a fork server."""
        given = {"command": list(command), "cwd": str(Path.cwd()), "env": dict(env)}
        return TemplatedServer(self._ask(given, [*pass_fds, stderr.fileno()]), self)

    def close(self) -> None:
        self._requests.close()

    def exit_code(self, pid: int) -> int:
        return self._ask({"ended": pid}, [])

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
        return int(self._requests.recv(100))


class TemplatedServer:
    """A fork server; the part of `subprocess.Popen` that `ForkServer` needs."""

    def __init__(self, pid: int, template: Template) -> None:
        self.pid, self._template = pid, template
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)  # until `wait` it keeps its number

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            with os.fdopen(os.pidfd_open(self.pid)) as ended:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._code = self._template.exit_code(self.pid)
        return self._code


def _fork_servers(requests: socket.socket) -> NoReturn:
    """The template: ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all
    while True:
        packet, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not packet:
            os._exit(0)
        request = json.loads(packet)
        if "ended" in request:
            requests.send(str(os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])).encode())
            continue
        for name in PRELOADED:
            importlib.import_module(name)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _serve(request["command"], request["cwd"], request["env"], *descriptors)
        requests.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _serve(command: list[str], cwd: str, env: dict[str, str], control: int, output: int) -> NoReturn:
    os.chdir(cwd)
    redirect(os.open(os.devnull, os.O_RDONLY), output, output)
    close_all_but(control)
    command[-1] = str(control)
    os.setsid()
    become(SHARDKEEP, command[3:], env)


def _run(command: Sequence[str], *, env: Mapping[str, str], **_same: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of a command of shardkeep."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = Forked(SHARDKEEP, command[3:], env=env, cwd=None, stderr=errors)
        with process.stdin, process.stdout:
            printed, code = process.stdout.read(), process.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, printed, errors.read())


@contextlib.contextmanager
def forked_launchers(template: Template | None) -> Iterator[None]:
    """Launchers inside the block start no Python; without a template, on systems other than Linux, they do."""
    if template is None:
        yield
        return
    with (
        mock.patch.object(fork_server, "subprocess", subprocess_with(Popen=template.start)),
        mock.patch.object(test_data, "subprocess", subprocess_with(run=_run)),
    ):
        yield
