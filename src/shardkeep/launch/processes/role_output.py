"""Where a role's output goes: its log. With `--log-format json` also what libraries write past Python, as objects.

Python's own lines go to stdout, which is the log itself: they do not pass through the launcher, and are not lost with
it. stderr is a pipe then. A thread of the launcher makes objects of its lines.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardkeep.base.logs.json_log import PrintedLines

LAST_LINES_S = 1.0
"""Seconds that the last lines of a role get to reach its log. A process that it started may keep the pipe open."""


@dataclass(frozen=True)
class RoleOutput:
    """Descriptors for a role that starts, and the thread that reads its stderr; None = the log is read by nobody."""

    stdout: int
    stderr: int
    reader: threading.Thread | None = None


@contextlib.contextmanager
def role_output(log: Path, role: str, index: int, *, as_json: bool) -> Iterator[RoleOutput]:
    """Opens the output of a role inside the `with`, in which the role starts. Raises OSError."""
    with log.open("ab") as file:
        if not as_json:
            yield RoleOutput(file.fileno(), file.fileno())
            return
        source, target = os.pipe()
        reader = threading.Thread(target=_write_objects, args=(source, log, role, index), name="role-log", daemon=True)
        reader.start()
        try:
            yield RoleOutput(file.fileno(), target, reader)
        finally:
            os.close(target)


def _write_objects(source: int, log: Path, role: str, index: int) -> None:
    """Appends an object for each line, until the role and all that it has started have ended."""
    with (
        contextlib.suppress(OSError),  # a full disk
        os.fdopen(source, encoding="utf-8", errors="replace") as lines,
        log.open("a", encoding="utf-8") as file,
        PrintedLines(file, role, index) as objects,
    ):
        for line in lines:
            objects.write(line)
