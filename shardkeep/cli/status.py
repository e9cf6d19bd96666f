"""`shardkeep status`: the state of a job, from its coordinator while it runs, from its run folder afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardkeep.base.errors import TransportError, UserError
from shardkeep.cli.vacancies import awaited, show_killed, show_unled
from shardkeep.ps.control.grpc.client import fetch_status
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.ps.control.grpc.tls import Tls
from shardkeep.ps.control.records import Status
from shardkeep.run.next_steps import resume_line
from shardkeep.run.processes import launcher_there, living
from shardkeep.run.reader import RunReader, latest_run
from shardkeep.run.screen import closing_rows, quality
from shardkeep.run.starts import Starts
from shardkeep.run.text_tables import Trimmed, two_columns

MOST_LINES = 8
"""The most lines for tables. With more tables, each kind of table gets one line."""


def show_run(run: Path | None, console: Console, *, token_file: Path | None = None, tls: Tls | None = None) -> int:
    """Shows the run in folder `run`; None = the newest in runs/. Returns 1 if the job failed or was killed, else 0."""
    path = run or latest_run()
    if path is None:
        raise UserError("no run folder in runs/; name one, or use --coordinator HOST:PORT")
    try:
        if not (path / "config.yaml").exists():
            missing = "is not a run folder (it has no config.yaml)" if path.is_dir() else "there is no such folder"
            raise UserError(f"{path}: {missing}")
        return _show_folder(RunReader(path), console, token_file=token_file, tls=tls)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{path}: a file of this run is damaged ({error})") from error


def _show_folder(folder: RunReader, console: Console, *, token_file: Path | None, tls: Tls | None) -> int:
    path, summary = folder.path, folder.summary()
    if summary is None:
        launcher = launcher_there(path)
        if launcher is False and not living(folder):
            return show_killed(folder, console)
        coordinator = folder.endpoint(token_file)
        if coordinator is None and folder.summary() is not None:  # the job has just ended
            return _show_folder(folder, console, token_file=token_file, tls=tls)
        if coordinator is None:
            return show_unled(folder, console, launched=bool(launcher))
        try:
            return show_job(replace(coordinator, tls=tls), console, run=path, launched=bool(launcher))
        except TransportError:
            if tls is None and (needed := folder.tls_option()) is not None:
                raise UserError(f"the coordinator at {coordinator.address} uses TLS: add --tls {needed}") from None
            return show_unled(folder, console, launched=launcher is not None)
    status, message = str(summary["status"]), str(summary.get("message") or "")
    text = message if message.startswith(status) else f"{status}{': ' + message if message else ''}"
    console.print(text, markup=False, soft_wrap=True)
    console.print(two_columns(closing_rows(summary, path)))
    if summary["status"] == "completed":
        return 0
    console.print(resume_line(path), markup=False, soft_wrap=True)
    return 1


def show_job(coordinator: Endpoint, console: Console, *, run: Path | None = None, launched: bool | None = None) -> int:
    """Shows the state that the coordinator reports. Returns 1 for a failed job, else 0.

    Args:
        coordinator: The job's coordinator.
        console: The output.
        run: The run folder, if known.
        launched: Whether `shardkeep train` started the job; None = unknown.

    Raises:
        TransportError: The coordinator does not answer.
        UserError: The coordinator refuses the request.
    """
    status = fetch_status(coordinator)
    console.print(f"{status.state}{': ' + status.message if status.message else ''}", markup=False, soft_wrap=True)
    for line in awaited(status, where=coordinator.address if run is None else str(run), launched=launched):
        console.print(line, markup=False, soft_wrap=True)
    for line in memory_warnings(status.events):
        console.print(line, markup=False, soft_wrap=True)
    number, step = (1, 0) if run is None else Starts(run).running()
    again = (
        [("start", f"{number} of this job, from step {step:,}; recoveries count from this start")] if number > 1 else []
    )
    console.print(two_columns([*again, *_progress_rows(status)]))
    console.print(Trimmed(_members(status)))
    return 1 if status.state == "failed" else 0


def _progress_rows(status: Status) -> list[tuple[str, str]]:
    rows = [("generation", str(status.generation)), *_table_rows(status)]
    if status.progress:
        progress = status.progress
        rows.append(("step", f"{progress.get('step', 0):,}/{progress.get('total_steps') or 0:,}"))
        if progress.get("loss") is not None:
            rows.append(("loss", f"{progress['loss']:.4f}"))
        rows.append(("speed", f"{progress.get('samples_per_s') or 0:,.0f} samples/s"))
    if status.evaluation:
        rows.append(("evaluation", f"step {status.evaluation.get('step', 0):,}  {quality(status.evaluation)}"))
    if staleness := status.progress.get("staleness"):
        most = max(int(steps) for steps in staleness)
        rows.append(("staleness", f"{_mean(staleness):.2f} steps on average, {most} at most (worker 0)"))
    saved = [event for event in status.events if event.get("phase") == "checkpoint"]
    if saved:
        rows.append(("checkpoint", str(saved[-1].get("text", ""))))
    recoveries = [event for event in status.events if event.get("phase") == "recovery"]
    if recoveries:
        rows.append(("recoveries", f"{len(recoveries)}; the last: {recoveries[-1].get('text', '')}"))
    return rows


def memory_warnings(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The last word of each server on its memory since the group formed, where it nears its limit."""
    last: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if "tables" in event:  # another formation: a server that is still near its limit says so again
            last.clear()
        if "memory" in event:
            last[int(event["index"])] = event
    return [str(last[index]["text"]) for index in sorted(last) if last[index]["memory"].get("near")]


def _table_rows(status: Status) -> list[tuple[str, str]]:
    """One line per table, or per kind of table if there are many. Numbers of rows are not known here."""
    formed = [event for event in status.events if "tables" in event]
    tables = [(str(t["name"]), f"dim {t['dim']}, {t['optimizer']}") for t in formed[-1]["tables"]] if formed else []
    if len(tables) <= MOST_LINES:
        return [(f"table {name}", kind) for name, kind in tables]
    kinds: dict[str, list[str]] = {}
    for name, kind in tables:
        kinds.setdefault(kind, []).append(name)
    return [("tables", f"{len(names)} of {kind}: {', '.join(names)}") for kind, names in kinds.items()]


def _mean(histogram: dict[str, int]) -> float:
    return sum(int(steps) * times for steps, times in histogram.items()) / max(1, sum(histogram.values()))


def _members(status: Status) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("member", "host", "pid", "condition", "last heartbeat", "step", "phase"):
        table.add_column(name, overflow="fold")
    for member in status.members:
        step = str(member.step) if member.step >= 0 else "-"
        age = f"{member.age_s:.1f} s ago"
        table.add_row(
            f"{member.role} {member.index}", member.host, str(member.pid), member.condition, age, step, member.phase
        )
    return table
