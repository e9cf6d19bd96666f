"""The file of telemetry records: a record per line, in two generations, so that a job of any length has bounded files.

When telemetry.jsonl has half of the size, it becomes telemetry.1.jsonl in place of the one before. One process appends;
any number may read (`lines.py`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkeep.base.logs.log import EventLog
from shardkeep.base.net.descriptors import when_free
from shardkeep.records.json_text import to_json
from shardkeep.records.lines import earlier

MOST_BYTES = 64_000_000
_log = EventLog("run")


class TelemetryFile:
    """Appends records to one file. Thread safe.

    Args:
        path: The file; need not exist.
        most_bytes: The size of both generations together is never above.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes // 2
        self._lock = threading.Lock()
        self._torn: bool | None = None
        """Whether the file may end in the middle of a line; None = nobody has looked."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a record. If that fails, the record is lost; the first failure is logged."""
        line = (to_json(record, compact=True) + "\n").encode()
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                self._torn = True
                text = f"{self._path}: telemetry is not written ({error.strerror or error})"
                _log.warning(text, once=f"{self._path} is not written")

    def _append(self, line: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            size = self._path.stat().st_size
            self._torn = _is_torn(self._path) if self._torn is None else self._torn
            if size + len(line) >= self._most_bytes:
                self._path.replace(earlier(self._path))
                self._torn = False
        if len(line) < self._most_bytes:
            with when_free(lambda: self._path.open("ab")) as file:
                file.write(b"\n" + line if self._torn else line)
            self._torn = False


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
        return file.read(1) not in (b"", b"\n")
