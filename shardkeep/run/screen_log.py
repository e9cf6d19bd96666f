"""What a log collector gets of a job: each phase and each record of metrics.jsonl as an event. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardkeep.base.json_log import json_line
from shardkeep.base.log import EventLog

LAUNCHER = ("launcher", 0)
"""Role and index of the log lines of `shardkeep train`."""
_CLOSING = ("status", "steps", "samples", "wall_s", "samples_per_s", "eval", "test")
_log = EventLog("screen")


class ScreenLog:
    """Logs one job. All methods belong to one thread.

    Args:
        listener: Called with each record after it is logged; None = nobody.
    """

    def __init__(self, *, listener: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self._listener = listener

    def phase(self, name: str, text: str) -> None:
        """Logs the phase as event, with the text that a person would see."""
        _log.info(name, text=text)

    def working(self, name: str, text: str, fraction: float) -> None:
        """Nothing: it is drawn over itself on a terminal."""

    def notice(self, text: str) -> str:
        """An object with the text as event."""
        return json_line(*LAUNCHER, text)

    def record(self, record: Mapping[str, Any]) -> None:
        """Logs the record, and passes it on."""
        if record.get("kind") != "event":  # the coordinator's log has those
            self._log(record)
        if self._listener is not None:
            self._listener(record)

    def _log(self, record: Mapping[str, Any]) -> None:
        """Logs the kind, or the name of the phase, as event, and all other keys as fields."""
        fields = {key: value for key, value in record.items() if key not in ("kind", "phase", "step", "time")}
        step = record.get("step")
        event = str(record.get("phase") or record["kind"])
        _log.info(event, step=None if step is None else int(step), **fields)

    def end_bar(self) -> None:
        """Nothing: there is no bar."""

    def closing(self, summary: Mapping[str, Any], run: Path) -> None:
        """Logs the main figures; summary.json has all."""
        _log.info("closing", run=str(run), **{key: summary[key] for key in _CLOSING if key in summary})
