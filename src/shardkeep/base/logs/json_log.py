"""Log lines as JSON objects, one a line, for log collectors. Writer of both: events, and what is printed beside them.

Keys: time (ISO 8601 with the offset from UTC), level (debug, info, warning, error or critical), role, index,
step (null = none), event, fields (an object), exception (a traceback, or null).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TextIO

TRACEBACK = "Traceback (most recent call last):"
_LEVELS = {"error: ": "error", "warning: ": "warning"}
"""How printed lines begin that are no information."""


class JsonFormat(logging.Formatter):
    """Formats a record as one object."""

    def __init__(self, role: str, index: int) -> None:
        super().__init__()
        self._member = {"role": role, "index": index}

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._member,
            "step": getattr(record, "step", None),
            "event": record.getMessage(),
            "fields": _plain(dict(getattr(record, "fields", None) or {})),
            "exception": self.formatException(record.exc_info) if record.exc_info else record.exc_text,
        }
        return json.dumps(content, ensure_ascii=False, allow_nan=False)


def json_line(role: str, index: int, event: str, *, level: str = "info", **more: object) -> str:
    """The object of a text that no logger has. `more`: of the record."""
    return JsonFormat(role, index).format(logging.makeLogRecord({"msg": event, "levelname": level, **more}))


def printed_line(role: str, index: int, text: str) -> str:
    """The object of a line that was printed: `error: TEXT` has the level error and the event TEXT."""
    for head, level in _LEVELS.items():
        if text.startswith(head):
            return json_line(role, index, text.removeprefix(head), level=level)
    return json_line(role, index, text)


def printed_text(line: str) -> str:
    """The inverse of `printed_line`. The event of any other object; a line that is none as it is."""
    try:
        found = json.loads(line)
        level, event = str(found["level"]), str(found["event"])
        head = "" if found["fields"] else next((head for head, name in _LEVELS.items() if name == level), "")
    except (ValueError, KeyError, TypeError):
        return line
    return head + event


class PrintedLines(io.TextIOBase):
    """A text stream that writes each line as one object, and a traceback as one. Thread safe."""

    def __init__(self, stream: TextIO, role: str, index: int) -> None:
        self._stream, self._member = stream, (role, index)
        self._lock = threading.RLock()
        self._line = ""
        self._traceback: list[str] = []

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self._end(line)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            if self._line and not self._traceback:
                line, self._line = self._line, ""
                self._end(line)
            self._stream.flush()

    def _end(self, line: str) -> None:
        """Writes a whole line. The line after the last frame of a traceback is its exception."""
        if line == TRACEBACK or (self._traceback and (line.startswith(" ") or not line)):
            self._traceback.append(line)
        elif self._traceback:
            text, self._traceback = "\n".join([*self._traceback, line]), []
            self._put(json_line(*self._member, line, level="error", exc_text=text))
        elif line.strip():
            self._put(printed_line(*self._member, line))

    def _put(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the line is lost
            self._stream.write(line + "\n")
            self._stream.flush()


def _plain(value: Any) -> Any:
    """JSON types alone: numbers that are not finite, and all other objects, as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and type(value) is int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    return str(value)
