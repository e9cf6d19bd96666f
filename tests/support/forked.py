"""`shardkeep ...` forked from one preloaded process per test session: the real main, without seconds of imports.

The process leads its own session and starts its roles from a fork server, as one that was
started by exec. Linux only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn
from unittest import mock

from shardkeep.launch.processes.children import child_environment
from tests.support.import_path import IMPORT_PATH

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.testing",
    "numpy.ma",
    "pyarrow.compute",
    "pyarrow.csv",
    "pyarrow.parquet",
    "shardkeep.cli.main",
    "shardkeep.launch.job",
    "shardkeep.launch.train_job",
    "shardkeep.loop.with_command",
    "shardkeep.nn",
    "shardkeep.experiments.sweep",
    "shardkeep.view.screen",
    "shardkeep.launch.processes.fork_server",
    "shardkeep.ps.control.grpc.server",
    "shardkeep.roles.coordinator",
    "shardkeep.roles.server",
    "shardkeep.roles.worker",
    "shardkeep.inference.files",
    "shardkeep.inference.predictor",
    "shardkeep.inference.scoring",
    "shardkeep.workers.data.sources.csv_files",
    "shardkeep.workers.data.sources.forms",
    "shardkeep.workers.data.sources.parquet_files",
    "tests.support.towers",
    "tests.support.frozen_heap",  # the last
]
"""What one process imports for all commands and ranks of the session: no kernels, none that starts a thread."""
OWN = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTHONPATH": IMPORT_PATH,  # else it would import the checkout that is installed
}
"""Variables of that process alone."""
_POSSIBLE = sys.platform == "linux"
SHARDKEEP = "shardkeep.cli.main:main"
SCRIPT = "tests.support.scripts:main"


def fork_context() -> Any:
    """The multiprocessing context whose processes are forked from the preloaded one; elsewhere they are spawned."""
    if not _POSSIBLE:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, {**child_environment({}, threads=1), **OWN}):
        forkserver.ensure_running()  # libraries read at import what every role sets
    return context


def adopt_preloaded() -> None:
    """In a process forked from the one that started the preloaded process: takes commands from it. Only its parent may
    ask the system whether it still runs, as `ensure_running` does."""
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def end_preloaded() -> None:
    """Ends the preloaded process and waits for it, so that its CPU seconds count as this process's. It does not end
    while a command runs that a test left behind."""
    stop = threading.Thread(target=forkserver._forkserver._stop, daemon=True)  # type: ignore[attr-defined]
    stop.start()
    stop.join(10.0)


def started(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    main: str = SHARDKEEP,
    stderr: IO[Any] | None = None,
) -> Forked | subprocess.Popen[str]:
    """A process that is forked where this is possible, with pipes of text. `main`: `module:function`, which
    `python -m module` runs too. `stderr`: a file; None = a pipe."""
    if _POSSIBLE:
        return Forked(main, arguments, env=env, cwd=cwd, stderr=stderr)
    command = [*program(main), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=stderr or pipe, text=True, cwd=cwd, env=env, start_new_session=True
    )


def program(main: str) -> list[str]:
    return [sys.executable, "-m", "shardkeep" if main == SHARDKEEP else main.partition(":")[0]]


class Forked:
    """A process under way; the part of `subprocess.Popen` that its users need."""

    def __init__(
        self,
        main: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        stderr: IO[Any] | None,
    ) -> None:
        """Starts the process; as `started`."""
        context = fork_context()
        (their_in, end_in), (end_out, their_out), (end_err, their_err) = (context.Pipe(duplex=False) for _ in range(3))
        if stderr is not None:
            their_err.close()
            their_err = Connection(os.dup(stderr.fileno()), readable=False)
        given = (main, list(arguments), str(cwd or Path.cwd()), dict(env), (their_in, their_out, their_err))
        self._process = context.Process(target=_run, args=given)
        self._process.start()
        for end in (their_in, their_out, their_err):
            end.close()
        self.pid: int = self._process.pid
        self.stdin, self.stdout = _text(end_in, "w"), _text(end_out)
        self.stderr = _text(end_err) if stderr is None else None

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        return waited(self._process, timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Child:
    """A child that this process forks; the part of `subprocess.Popen` that launchers need."""

    def __init__(self, act: Callable[[], NoReturn], stdin: IO[bytes] | None = None) -> None:
        self.stdin = stdin
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            act()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended = os.pidfd_open(self.pid)
            with os.fdopen(ended):
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _forked_server(
    command: Sequence[str], *, stderr: IO[Any], env: Mapping[str, str], pass_fds: Sequence[int], **_same: Any
) -> Child:
    """A launcher's fork server, forked from it."""

    def act() -> NoReturn:
        redirect(os.open(os.devnull, os.O_RDONLY), stderr.fileno(), stderr.fileno())
        close_all_but(*pass_fds)
        os.setsid()
        become(SHARDKEEP, command[3:], env)

    return Child(act)


class StandBy:
    """What becomes the Python command of a `shardkeep with`: forked from it before it has a thread."""

    def __init__(self) -> None:
        reads, self._writes = os.pipe()
        self._child = Child(lambda: self._wait(reads))
        os.close(reads)

    def start(self, command: Sequence[str], *, env: Mapping[str, str]) -> Child | subprocess.Popen[bytes]:
        """As `subprocess.Popen`."""
        if command[0] != sys.executable or command[1] == "-c":
            return subprocess.Popen(command, env=env)
        with os.fdopen(self._writes, "w", encoding="utf-8") as pipe:
            json.dump([list(command), dict(env)], pipe)
        return self._child

    def _wait(self, reads: int) -> NoReturn:
        os.close(self._writes)
        with os.fdopen(reads, encoding="utf-8") as pipe:
            given = pipe.read()
        if not given:
            os._exit(0)
        command, env = json.loads(given)
        become(SCRIPT, command[1:], env)


def waited(process: Any, timeout: float | None) -> int:
    """The exit code of a process of multiprocessing. Raises TimeoutExpired."""
    process.join(timeout)
    if process.exitcode is None:
        raise subprocess.TimeoutExpired(str(process.pid), timeout or 0.0)
    return int(process.exitcode)


def _text(end: Connection, mode: str = "r") -> IO[Any]:
    with end:
        return os.fdopen(os.dup(end.fileno()), mode, encoding="utf-8")


def _run(main: str, arguments: list[str], cwd: str, env: dict[str, str], ends: Sequence[Connection]) -> NoReturn:
    os.chdir(cwd)
    redirect(*(end.fileno() for end in ends))
    close_all_but()
    os.setsid()
    _fork_from_here(arguments)
    become(main, arguments, env)


def _fork_from_here(arguments: Sequence[str]) -> None:
    """Makes a launcher in this process fork what it would start: this process has imported what that would import."""
    from shardkeep.launch.processes import fork_server
    from shardkeep.loop import with_command

    fork_server.subprocess = subprocess_with(Popen=_forked_server)  # type: ignore[assignment, attr-defined]
    if "with" in arguments[:1]:
        with_command.subprocess = subprocess_with(Popen=StandBy().start)  # type: ignore[assignment, attr-defined]


def subprocess_with(**other: Callable[..., Any]) -> SimpleNamespace:
    """The module `subprocess` for a launcher, except these."""
    return SimpleNamespace(**{**vars(subprocess), **other})


def become(main: str, arguments: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Runs `main`, `module:function`, as a process that exec started, and ends with its exit code."""
    import numpy as np

    code = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None  # of the process that this one was forked from
        np.random.seed()
        sys.argv = [main, *arguments]
        module, _, function = main.partition(":")
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:  # as Python ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(code)


def redirect(*descriptors: int) -> None:
    """Makes the descriptors this process's input, output and error output."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", 1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def close_all_but(*kept: int) -> None:
    low = 3
    for number in sorted(kept):
        os.closerange(low, number)
        low = number + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
