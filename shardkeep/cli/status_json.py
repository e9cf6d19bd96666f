"""`shardkeep status --json`: one JSON object. docs/reference/status.md explains each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkeep.cli.board import RoleLine, line_of, lines_of
from shardkeep.cli.status_text import memory_warnings
from shardkeep.cli.vacancies import killed_lines, unled_lines
from shardkeep.ps.control.records import Record, Status
from shardkeep.run.json_files import to_json
from shardkeep.run.newest_records import age_s, newest_of_kind, newest_telemetry, seconds_per_step
from shardkeep.run.next_steps import resume_line
from shardkeep.run.reader import RunReader
from shardkeep.run.starts import Starts
from shardkeep.run.trend import time_left_s

EMPTY: Mapping[str, Any] = {
    "run": None,
    "state": "",
    "message": "",
    "start": None,
    "generation": None,
    "step": None,
    "total_steps": None,
    "epoch": None,
    "samples": None,
    "loss": None,
    "samples_per_s": None,
    "time_left_s": None,
    "evaluation": None,
    "checkpoint": None,
    "staleness": None,
    "recoveries": None,
    "warnings": [],
    "missing": [],
    "missing_left_s": None,
    "resume": None,
    "tables": [],
    "roles": [],
    "summary": None,
}
"""Every key, for what is not known."""
_PROGRESS = ("step", "total_steps", "epoch", "samples", "loss", "samples_per_s", "staleness")
_NOT_METRICS = ("kind", "role", "index", "time", "seq")


class StatusJson:
    """Writes an object by `write`, once."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def running(self, status: Status, *, where: str, run: Path | None, launched: bool | None) -> None:
        """As the coordinator says."""
        formed = [event for event in status.events if "tables" in event]
        saved = [event for event in status.events if event.get("phase") == "checkpoint" and "bytes" in event]
        self._object(
            run,
            state=status.state,
            message=status.message,
            generation=status.generation,
            **_progress(status.progress, status.evaluation, run),
            checkpoint={"step": saved[-1]["step"], "text": saved[-1]["text"]} if saved else None,
            recoveries=sum(event.get("phase") == "recovery" for event in status.events),
            warnings=memory_warnings(status.events),
            missing=list(status.missing),
            missing_left_s=status.left_s if status.missing else None,
            tables=formed[-1]["tables"] if formed else [],
            roles=_roles(lines_of(status)),
            summary=status.summary,
        )

    def alone(self, folder: RunReader) -> None:
        """As the files of the run folder say."""
        records = newest_telemetry(folder.telemetry_path)
        self._object(
            folder.path,
            state="training",
            message="running in one process",
            **_newest(folder),
            roles=_roles(line_of(record, state="training", age_s=age_s(record)) for record in records),
        )

    def unled(self, folder: RunReader, *, launched: bool) -> None:
        """The last known figures, and in the message what a person would read."""
        text = "; ".join(unled_lines(folder, launched=launched))
        self._object(folder.path, state="unreachable", message=text, **_newest(folder))

    def killed(self, folder: RunReader) -> None:
        """The last known figures."""
        text = next(killed_lines(folder)).partition(": ")[2]
        self._object(folder.path, state="killed", message=text, resume=resume_line(folder.path), **_newest(folder))

    def over(self, folder: RunReader, summary: Mapping[str, Any]) -> None:
        """As summary.json says, which it has whole."""
        status = str(summary["status"])
        self._object(
            folder.path,
            state=status,
            message=str(summary.get("message") or ""),
            **_newest(folder) | {"step": summary.get("steps"), "samples": summary.get("samples"), "time_left_s": None},
            recoveries=len(summary.get("recoveries") or ()),
            warnings=list(summary.get("warnings") or ()),
            resume=None if status == "completed" else resume_line(folder.path),
            tables=list(summary.get("tables") or ()),
            summary=dict(summary),
        )

    def _object(self, run: Path | None, **known: Any) -> None:
        start = None
        if run is not None:
            number, step = Starts(run).running()
            start = {"number": number, "from_step": step}
        self._write(to_json({**EMPTY, "run": None if run is None else str(run.absolute()), "start": start, **known}))


def _progress(progress: Record, evaluation: Record, run: Path | None) -> Record:
    step_s = None if run is None else seconds_per_step(RunReader(run).metrics_path)
    scores = {key: value for key, value in evaluation.items() if key not in _NOT_METRICS}
    figures = {key: progress.get(key) for key in _PROGRESS}
    return figures | {"time_left_s": time_left_s(progress, step_s), "evaluation": scores or None}


def _newest(folder: RunReader) -> Record:
    progress, evaluation = (newest_of_kind(folder.metrics_path, kind) for kind in ("progress", "eval"))
    return _progress(progress, evaluation, folder.path)


def _roles(lines: Iterable[RoleLine]) -> list[Record]:
    return [asdict(line) for line in lines]
