"""StatusView: what shows the state of a job. `status_text.py` writes for a person, `status_json.py` for programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shardkeep.ps.control.records import Status
from shardkeep.run.reader import RunReader


class StatusView(Protocol):
    """Shows one state of a job, once."""

    def running(self, status: Status, *, where: str, run: Path | None, launched: bool | None) -> None:
        """The state that the coordinator reports. `where`: the value of the members' --coordinator. `launched`: by
        `shardkeep train`; None = not known."""

    def alone(self, folder: RunReader) -> None:
        """A running job in one process."""

    def unled(self, folder: RunReader, *, launched: bool) -> None:
        """A job whose coordinator does not answer."""

    def killed(self, folder: RunReader) -> None:
        """A job of `shardkeep train` whose processes ended without a summary."""

    def over(self, folder: RunReader, summary: Mapping[str, Any]) -> None:
        """A job that has ended."""
