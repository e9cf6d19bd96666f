"""What a log collector gets of a job: each phase and each record of metrics.jsonl as an event. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkeep.base.logs.json_log import json_line
from shardkeep.base.logs.log import EventLog
from shardkeep.records.record import Record

LAUNCHER = ("launcher", 0)
"""Role and index of the log lines of `shardkeep train`."""
_CLOSING = ("status", "steps", "samples", "wall_s", "samples_per_s", "eval", "test")
_log = EventLog("screen")


class ScreenLog:
    """Logs one job. All methods belong to one thread.

    Args:
        listener: Called with each record after it is logged; None = nobody.
    """

    def __init__(self, *, listener: Callable[[Record], None] | None = None) -> None:
        self._listener = listener

    def phase(self, name: str, text: str) -> None:
        """Logs the phase as event, with the text that a person would see."""
        _log.info(name, text=text)

    def working(self, name: str, text: str, fraction: float) -> None:
        """Nothing: it is drawn over itself on a terminal."""

    def notice(self, text: str) -> str:
        """An object with the text as event."""
        return json_line(*LAUNCHER, text)

    def record(self, record: Record) -> None:
        """Logs the record, and passes it on: the kind, or the name of the phase, as event, and other keys as fields."""
        if record.kind != "event":  # the coordinator's log has those
            found = record.to_dict()
            step = found.get("step")
            fields = {key: value for key, value in found.items() if key not in ("kind", "phase", "step", "time")}
            event = str(found.get("phase") or record.kind)
            _log.info(event, step=None if step is None else int(step), **fields)
        if self._listener is not None:
            self._listener(record)

    def end_bar(self) -> None:
        """Nothing: there is no bar."""

    def closing(self, summary: Mapping[str, Any], run: Path, warnings: Sequence[Mapping[str, str]] = ()) -> None:
        """Logs the main figures; summary.json has all. Each warning of the page is an event of its own."""
        _log.info("closing", run=str(run), **{key: summary[key] for key in _CLOSING if key in summary})
        for warning in warnings:
            _log.info("found", level=warning["level"], text=warning["text"], advice=warning["advice"])
