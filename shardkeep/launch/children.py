"""Starts, watches and ends role processes on this machine. Knows nothing of jobs.

A child holds the read end of a pipe, and only the launcher holds the other end. When the launcher dies, the pipe
closes and the child ends (`end_with_parent`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from shardkeep.affinity import Cores, pin
from shardkeep.base.deadlines import Deadline
from shardkeep.base.exit_codes import signal_left_on
from shardkeep.base.json_log import printed_text
from shardkeep.base.log import LogFormat
from shardkeep.launch.role_output import LAST_LINES_S, role_output

_NATIVE_LOG = re.compile(r"\[[IW]\d{4} ")  # information and warnings from torch's C++ code
SHARDKEEP = (sys.executable, "-P", str(Path(__file__).resolve().parents[1] / "__main__.py"))
"""The command of this package, from any folder. It adds nothing to the import path."""
LAST_SECONDS_S = 5.0
"""Seconds an interrupted child gets to end cleanly."""


@dataclass(frozen=True)
class Death:
    """How a child ended."""

    role: str
    index: int
    pid: int
    code: int
    """Exit code, or minus the signal's number."""
    last_words: str
    """The last error line of its log, or its last line; may be empty."""

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended the process, at once or cleanly. It did not fail."""
        return self.code < 0 or signal_left_on(self.code) is not None

    def how(self) -> str:
        """`killed by SIGKILL`, `left on SIGTERM` or `exit code 1: last line of its log`."""
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        if (name := signal_left_on(self.code)) is not None:
            return f"left on {name}"
        return f"exit code {self.code}" + (f": {self.last_words}" if self.last_words else "")

    def text(self) -> str:
        """`worker 1 (pid 123) ended: killed by SIGKILL`."""
        return f"{self.role} {self.index} (pid {self.pid}) ended: {self.how()}"


def child_environment(base: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """The environment of roles: a fixed number of threads, and a quiet gRPC."""
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {
        **base,
        **dict.fromkeys(counts, str(threads)),
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }


class Process(Protocol):
    """The part of `subprocess.Popen` that `Child` uses."""

    pid: int
    returncode: int | None

    @property
    def stdin(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def terminate(self) -> None: ...


class Child:
    """One role process. It leads its own session, so that Ctrl-C reaches only the launcher."""

    def __init__(
        self, role: str, index: int, process: Process, *, log: Path, reader: threading.Thread | None = None
    ) -> None:
        """`reader`: writes a part of the log; see `role_output`."""
        self.role, self.index, self._process, self._log = role, index, process, log
        self._reader = reader
        self._swept = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        if self._process.poll() is None:
            return True
        if not self._swept:  # once, at the first look: later another process may have this number
            self._swept = True
            self._kill_group()
        return False

    def death(self) -> Death | None:
        """How it ended; None while it runs."""
        if self.running:
            return None
        if self._reader is not None:
            self._reader.join(LAST_LINES_S)
            self._reader = None  # a second look need not wait again
        return Death(self.role, self.index, self.pid, self._process.returncode or 0, last_words(self._log))

    def terminate(self) -> None:
        """Sends SIGTERM."""
        if self.running:
            self._process.terminate()

    def kill(self) -> None:
        """Kills the process and its children (compile workers), collects its exit code and closes the pipe."""
        if self.running:
            self._swept = True
            self._kill_group()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS: EPERM for a zombie
            os.killpg(self.pid, signal.SIGKILL)


class Starter(Protocol):
    """Starts roles."""

    def load(self, kernels: Sequence[str]) -> None:
        """Loads the modules that roles need, and these compiled kernels, in the background."""

    def ready(self, wait_s: float) -> bool:
        """Waits up to `wait_s` until roles can start at once; returns whether they can."""

    def start(
        self,
        role: str,
        index: int,
        arguments: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        cores: Cores | None = None,
    ) -> Child:
        """Starts a role; may block for seconds. `cores`: the cores it runs on; None = the system chooses."""


class Spawn:
    """Starts each role with exec. `log_format`: of every role's log."""

    def __init__(self, log_format: LogFormat = LogFormat.TEXT) -> None:
        self._format = log_format

    def load(self, kernels: Sequence[str]) -> None:
        pass

    def ready(self, wait_s: float) -> bool:
        return True

    def start(
        self,
        role: str,
        index: int,
        arguments: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        cores: Cores | None = None,
    ) -> Child:
        with role_output(log, role, index, as_json=self._format is LogFormat.JSON) as output:
            process = subprocess.Popen(
                [*SHARDKEEP, *role_arguments(role, arguments, self._format)],
                stdin=subprocess.PIPE,
                stdout=output.stdout,
                stderr=output.stderr,
                env=dict(env),
                start_new_session=True,
            )
        if cores is not None:
            with contextlib.suppress(ProcessLookupError):  # it has already ended; `death` reports that
                pin(process.pid, cores)  # at once: threads that it starts later inherit this
        return Child(role, index, process, log=log, reader=output.reader)


def role_arguments(role: str, arguments: Sequence[str], log_format: LogFormat) -> list[str]:
    """The arguments after `shardkeep` on the command line of a role with a launcher."""
    form = [] if log_format is LogFormat.TEXT else ["--log-format", log_format.value]
    return [role, *arguments, *form, "--parent-pipe"]


def end_all(children: Iterable[Child], *, grace_s: float) -> list[Child]:
    """Ends every child and its group: SIGTERM, `grace_s` seconds, SIGKILL. Returns the children that SIGKILL ended."""
    children = list(children)
    for child in children:
        child.terminate()
    wait_all(children, Deadline(grace_s))
    killed = [child for child in children if child.running]
    for child in children:
        child.kill()
    return killed


def wait_all(children: Sequence[Child], deadline: Deadline) -> bool:
    """Waits until all children have ended. Returns False if the time runs out first."""
    while any(child.running for child in children):
        if deadline.over:
            return False
        time.sleep(0.02)
    return True


def end_with_parent(*, patience_s: float, last_s: float = LAST_SECONDS_S) -> None:
    """Starts the thread of a child that ends its process group when the launcher's end of stdin closes.

    Args:
        patience_s: Seconds before SIGTERM, in which the main thread may end.
        last_s: Seconds between SIGTERM and SIGKILL.
    """
    arguments = (patience_s, last_s)
    threading.Thread(target=_outlive_nobody, args=arguments, name="parent-pipe", daemon=True).start()


def _outlive_nobody(patience_s: float, last_s: float) -> None:
    while os.read(0, 1024):
        pass
    print("error: the launcher is gone; ending", file=sys.stderr, flush=True)
    time.sleep(patience_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(last_s)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def last_words(log: Path, *, tail_bytes: int = 16_384) -> str:
    """The last `error:` line of a log, or its last line if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - tail_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [printed_text(line.strip()) for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not _NATIVE_LOG.match(line)]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1][:500]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
