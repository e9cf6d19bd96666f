"""Watches and ends role processes on this machine. Knows nothing of jobs.

A child holds the read end of a pipe, and only the launcher holds the other end. When the launcher dies, the pipe
closes and the child ends (`end_with_parent`). By the same pipe the launcher asks a child to leave that heeds no signal.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkeep.base.deadlines import Deadline
from shardkeep.base.exit_codes import signal_left_on
from shardkeep.base.logs.json_log import printed_text
from shardkeep.launch.processes.role_output import LAST_LINES_S

_NATIVE_LOG = re.compile(r"\[[IW]\d{4} ")  # information and warnings from torch's C++ code
SHARDKEEP = (sys.executable, "-P", str(Path(__file__).resolve().parents[2] / "__main__.py"))
"""The command of this package, from any folder. It adds nothing to the import path."""
LAST_SECONDS_S = 5.0
"""Seconds an interrupted child gets to end cleanly."""
LEAVE = b"leave\n"
"""What a launcher writes to the pipe."""


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
    limit: str = ""
    """The limit of a control group that ended it, in words; may be empty."""

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended the process, at once or cleanly. It did not fail."""
        return self.code < 0 or signal_left_on(self.code) is not None

    def how(self) -> str:
        """`killed by SIGKILL`, `left on SIGTERM` or `exit code 1: last line of its log`; and the limit that it met."""
        limit = f"; {self.limit}" if self.limit else ""
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}{limit}"
        if (name := signal_left_on(self.code)) is not None:
            return f"left on {name}"
        return f"exit code {self.code}" + (f": {self.last_words}" if self.last_words else "") + limit

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


class ForkedProcess:
    """A forked child of this process. Like `subprocess.Popen`. `pipe`: the end of its stdin here; None = none."""

    def __init__(self, pid: int, pipe: int | None = None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = None if pipe is None else os.fdopen(pipe, "wb", buffering=0)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, or minus the signal's number. None while the role runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else Deadline(timeout)
        while deadline is not None and self.poll() is None:
            if deadline.over:
                raise subprocess.TimeoutExpired(str(self.pid), deadline.timeout_s)
            time.sleep(0.02)
        return self._wait(0) or 0

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, options)
                except ChildProcessError:  # this program ignores SIGCHLD or waits for any child; Popen does the same
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode


class Child:
    """One role process. It leads its own session, so that Ctrl-C reaches only the launcher."""

    def __init__(
        self,
        role: str,
        index: int,
        process: subprocess.Popen[bytes] | ForkedProcess,
        *,
        log: Path,
        reader: threading.Thread | None = None,
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

    def ask_to_leave(self) -> None:
        """Does what SIGTERM does, also for a role that heeds no signal of others."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._process.stdin.write(LEAVE)
                self._process.stdin.flush()

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


def end_with_parent(
    *, patience_s: float, last_s: float = LAST_SECONDS_S, admit: Callable[[], object] = lambda: None, stops: bool = True
) -> None:
    """Starts the thread of a child that ends its process group when the launcher's end of stdin closes, and leaves when
    the launcher asks for it.

    Args:
        patience_s: Seconds before SIGTERM, in which the main thread may end.
        last_s: Seconds between SIGTERM and SIGKILL.
        admit: Called before SIGTERM.
        stops: Whether it gets SIGTERM when the launcher is gone, not SIGKILL at once.
    """

    def terminate() -> None:
        admit()
        os.kill(os.getpid(), signal.SIGTERM)

    def outlive_nobody() -> None:
        while word := os.read(0, 1024):
            if LEAVE in word:
                terminate()
        with contextlib.suppress(OSError):  # stderr may be a pipe to the launcher, too
            print("error: the launcher is gone; ending", file=sys.stderr, flush=True)
        if stops:
            time.sleep(patience_s)
            terminate()
            time.sleep(last_s)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=outlive_nobody, name="parent-pipe", daemon=True).start()


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
