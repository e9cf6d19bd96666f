"""What `shardkeep status` knows of a job: one JSON object for programs, from which `status_text.py` makes the lines for
a person. docs/reference/status.md explains each key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkeep.cli.board import RoleLine, line_of, lines_of
from shardkeep.ps.control.records import JobStatus, Record
from shardkeep.records.record import Json
from shardkeep.run.next_steps import resume_line
from shardkeep.run.reader import RunReader
from shardkeep.run.starts import Starts
from shardkeep.view.run_view import RunView, age_s

_KEYS = (
    "run", "state", "message", "start", "generation", "step", "total_steps", "epoch", "samples", "loss",
    "samples_per_s", "step_ms", "time_left_s", "progress_age_s", "evaluation", "checkpoint", "journal", "staleness",
    "recoveries", "last_recovery", "warnings", "missing", "missing_left_s", "resume", "tables", "roles", "summary",
)  # fmt: skip
_LISTS: Mapping[str, Any] = {key: [] for key in ("warnings", "missing", "tables", "roles")}
EMPTY: Json = {**dict.fromkeys(_KEYS), "state": "", "message": "", **_LISTS}
"""Every key, for what is not known."""
_PROGRESS = ("step", "total_steps", "epoch", "samples", "loss", "samples_per_s", "step_ms", "staleness")
_NOT_METRICS = ("kind", "role", "index", "time", "seq")


def of_running(status: JobStatus, run: Path | None) -> Json:
    """As the coordinator says."""
    view = RunView.of(run, status)
    saved = (
        {"step": view.checkpoint and view.checkpoint.step, "text": view.checkpoints[-1].text}
        if view.checkpoints
        else None
    )
    return _facts(
        run,
        state=status.state,
        message=status.message,
        generation=status.generation,
        **_progress(view),
        checkpoint=saved,
        journal=view.journal or None,
        recoveries=len(view.recoveries),
        last_recovery=view.recoveries[-1].text if view.recoveries else None,
        warnings=view.memory_warnings,
        missing=list(map(str, status.missing)),
        missing_left_s=status.left_s if status.missing else None,
        tables=[table.to_dict() for table in view.tables],
        roles=_roles(lines_of(view)),
        summary=status.summary,
    )


def of_one_process(folder: RunReader) -> Json:
    """As the files of the run folder of a job in one process say."""
    view = RunView.of(folder.path)
    roles = _roles(line_of(record, state="training", age_s=age_s(record)) for record in view.telemetry)
    return _facts(folder.path, state="training", message="running in one process", **_progress(view), roles=roles)


def of_lost(folder: RunReader, state: str, message: str, *, resume: str | None = None) -> Json:
    """The last known figures of a job whose coordinator does not answer, or whose processes are gone."""
    return _facts(folder.path, state=state, message=message, resume=resume, **_newest(folder))


def of_ended(folder: RunReader, summary: Json) -> Json:
    """As summary.json says, which it has whole."""
    status = str(summary["status"])
    return _facts(
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


def _facts(run: Path | None, **known: Any) -> Json:
    start = None
    if run is not None:
        number, step = Starts(run).running()
        start = {"number": number, "from_step": step}
    return {**EMPTY, "run": None if run is None else str(run.absolute()), "start": start, **known}


def _progress(view: RunView) -> Record:
    found = view.progress.to_dict()
    scores = {} if view.evaluation is None else view.evaluation.to_dict()
    told = {key: value for key, value in scores.items() if key not in _NOT_METRICS}
    known = {"time_left_s": view.left_s, "progress_age_s": age_s(view.progress), "evaluation": told or None}
    return {key: found.get(key) for key in _PROGRESS} | known


def _newest(folder: RunReader) -> Record:
    return _progress(RunView.of(folder.path))


def _roles(lines: Iterable[RoleLine]) -> list[Record]:
    return [asdict(line) for line in lines]
