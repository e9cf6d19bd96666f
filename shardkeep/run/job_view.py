"""JobView: what shows a job: `screen.py` draws it for a person, `screen_log.py` logs it for programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class JobView(Protocol):
    """Shows one job. All methods belong to one thread."""

    def phase(self, name: str, text: str) -> None:
        """A phase has begun or is done."""

    def working(self, name: str, text: str, fraction: float) -> None:
        """How far a phase is that takes a while."""

    def notice(self, text: str) -> str:
        """Returns the line, without its end, that a signal handler may write to stderr."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Shows one record of metrics.jsonl."""

    def end_bar(self) -> None:
        """What is shown next stays alone."""

    def closing(self, summary: Mapping[str, Any], run: Path) -> None:
        """The figures of a completed job."""
