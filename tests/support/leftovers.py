"""What a test may leave behind in its process: listeners, child processes, temporary files, changed process state."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

_DUMPABLE = 3  # PR_GET_DUMPABLE of <sys/prctl.h>
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_OF_LIBRARIES = (
    "TORCH",
    "_TORCH",
    "TRITON_",
    "GLOO_",
    "TP_",
    "GRPC_",
    "KINETO_",
    "KMP_",
    "CUDA_",
    "MKL_",
    "TOKENIZERS_",
)
"""Beginnings of variables that a library, or a role for it, sets when it is first used in a process."""
_FOLDERS = ("pymp-", "torchinductor_", "torchelastic_", "matplotlib-", "triton")
"""Folders that libraries keep as long as the process lives, or leave where a signal ends it."""
_OWN = Path("/proc/self")
END_S = 5.0
"""What a closed server or a killed process may take to go."""


@dataclass(frozen=True)
class State:
    """Each field maps what there is to its value."""

    variables: dict[str, str]
    process: dict[str, object]
    """Folder, ids, whether it may be read by others ("dumpable"), handlers of signals."""
    listeners: dict[str, str]
    children: dict[int, str]
    temporary_files: dict[str, None]

    @classmethod
    def now(cls) -> State:
        libc = ctypes.CDLL(None)
        process = {"folder": Path.cwd(), "uid": os.geteuid(), "gid": os.getegid(), "umask": _umask()}
        if sys.platform == "linux":
            process["dumpable"] = libc.prctl(_DUMPABLE)
        process |= {number.name: signal.getsignal(number) for number in _SIGNALS}
        return cls(
            {name: value for name, value in os.environ.items() if not _may_stay(name)},
            process,
            dict(_listeners()),
            dict(_children()),
            dict.fromkeys(name for name in os.listdir(tempfile.gettempdir()) if not name.startswith(_FOLDERS)),  # noqa: PTH208
        )

    def changes(self, later: State) -> list[str]:
        """What `later` has that this state has not, and what of the process and its variables has changed."""
        found = []
        for each in fields(self):
            before, after = getattr(self, each.name), getattr(later, each.name)
            changed = after.keys() - before.keys()
            if each.name in ("variables", "process"):
                changed |= {key for key in before if before[key] != after.get(key)}
            found += [f"{each.name}: {key} = {after.get(key)!r:.200}" for key in sorted(changed, key=str)]
        return found


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """Raises AssertionError where the block leaves anything."""
    before = State.now()
    yield
    if before.changes(State.now()):
        gc.collect()
        end = time.monotonic() + END_S
        while (left := before.changes(State.now())) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, "the test leaves " + "; ".join(left)


def _may_stay(variable: str) -> bool:
    return variable in {"PYTEST_CURRENT_TEST", "PYTEST_VERSION"} or variable.startswith(_OF_LIBRARIES)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _listeners() -> Iterator[tuple[str, str]]:
    """Sockets of this process that wait for connections, by inode."""
    for number in _OWN.joinpath("fd").iterdir() if _OWN.exists() else ():
        with contextlib.suppress(OSError):
            name = str(number.readlink())
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number.name))) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield name, str(copy.getsockname())


def _children() -> Iterator[tuple[int, str]]:
    """Processes that this one started and that run, except those of multiprocessing that live as long as it."""
    for thread in _OWN.joinpath("task").iterdir() if _OWN.exists() else ():
        with contextlib.suppress(OSError):
            for pid in thread.joinpath("children").read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                ended = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
                if not ended and "multiprocessing." not in command:
                    yield int(pid), command
