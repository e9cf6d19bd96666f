"""One log line: `role/index step event key=value ...`. Library code writes events; only mains say where they go.

`src/shardkeep/base/logs/json_log.py` has the same line as a JSON object.
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from enum import StrEnum
from typing import Any, TextIO

from shardkeep.base.logs.json_log import JsonFormat, PrintedLines
from shardkeep.base.printable import printable

ROOT = "shardkeep"


class LogFormat(StrEnum):
    """The form of log lines."""

    TEXT = "text"
    JSON = "json"


class EventLog:
    """Writes events of one part of the program. The same warning is written once per `once` key."""

    def __init__(self, name: str = "") -> None:
        self._logger = logging.getLogger(f"{ROOT}.{name}" if name else ROOT)
        self._warned: set[str] = set()

    def info(self, event: str, /, *, step: int | None = None, **fields: object) -> None:
        """One line at INFO: rare things only, nothing per request."""
        self._write(logging.INFO, event, step, fields)

    def error(self, event: str, /, *, step: int | None = None, **fields: object) -> None:
        self._write(logging.ERROR, event, step, fields)

    def warning(self, event: str, /, *, step: int | None = None, once: str | None = None, **fields: object) -> None:
        """One line at WARNING; with `once`, only the first of this key."""
        if once is not None:
            if once in self._warned:
                return
            self._warned.add(once)
        self._write(logging.WARNING, event, step, fields)

    def _write(self, level: int, event: str, step: int | None, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"step": step, "fields": fields})


class LineFormat(logging.Formatter):
    """Formats a record as `role/index step event key=value ... at=TIME`; `-` where there is no step."""

    def __init__(self, role: str, index: int) -> None:
        super().__init__()
        self._member = f"{role}/{index}"

    def format(self, record: logging.LogRecord) -> str:
        step = getattr(record, "step", None)
        fields: dict[str, object] = dict(getattr(record, "fields", {}))
        if record.levelno >= logging.WARNING:
            fields = {"level": record.levelname.lower(), **fields}
        parts = [self._member, "-" if step is None else str(step), printable(record.getMessage())]
        parts += [f"{key}={_value(value)}" for key, value in fields.items()]
        parts.append(f"at={datetime.fromtimestamp(record.created).isoformat(timespec='milliseconds')}")
        if record.exc_info:
            parts.append("\n" + self.formatException(record.exc_info))
        return " ".join(parts)


def configure(
    role: str,
    index: int,
    *,
    stream: TextIO | None = None,
    level: int = logging.INFO,
    form: LogFormat = LogFormat.TEXT,
) -> None:
    """Sends this process's events to `stream` (left out = stderr). For mains only; a second call replaces the first."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormat(role, index) if form is LogFormat.JSON else LineFormat(role, index))
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def print_json(role: str, index: int, *, errors: TextIO | None = None, stdout: bool = True) -> None:
    """Makes each line that this process prints from here on an object, too. For mains only, after `configure`.

    `errors`: where lines of stderr go instead. `stdout`: also what it prints to stdout."""
    sys.stderr = PrintedLines(errors or sys.stderr, role, index)
    if stdout:
        sys.stdout = PrintedLines(sys.stdout, role, index)


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else printable(str(value).replace("\n", " "))
    return f'"{text}"' if " " in text else text
