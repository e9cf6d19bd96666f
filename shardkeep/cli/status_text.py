"""`shardkeep status` for a person: the figures of a job, then the board of its processes.

Without a terminal no line is wrapped or cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from shardkeep.cli.board import RoleLine, board, line_of, lines_of
from shardkeep.cli.vacancies import awaited, killed_lines, unled_lines
from shardkeep.ps.control.records import Record, Status
from shardkeep.run.newest_records import age_s, newest_of_kind, newest_telemetry, seconds_per_step
from shardkeep.run.next_steps import resume_line
from shardkeep.run.reader import RunReader
from shardkeep.run.screen import closing_rows, quality
from shardkeep.run.starts import Starts
from shardkeep.run.text_tables import two_columns
from shardkeep.run.trend import clock_text, speed_text, step_text, time_left_s

MOST_LINES = 8
"""The most lines for tables. With more tables, each kind of table gets one line."""


class StatusText:
    """Writes to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def running(self, status: Status, *, where: str, run: Path | None, launched: bool | None) -> None:
        """The state, what it waits for, warnings, figures, and the board."""
        self._print(f"{status.state}{': ' + status.message if status.message else ''}")
        self._print(*awaited(status, where=where, launched=launched), *memory_warnings(status.events))
        number, step = (1, 0) if run is None else Starts(run).running()
        text = f"{number} of this job, from step {step:,}; recoveries count from this start"
        again = [("start", text)] if number > 1 else []
        self._console.print(two_columns([*again, *_rows(status, _step_s(run))]))
        self._board(lines_of(status))

    def alone(self, folder: RunReader) -> None:
        """The last known figures, and one line for the process."""
        self._print("running in one process")
        progress, scores = (newest_of_kind(folder.metrics_path, kind) for kind in ("progress", "eval"))
        age = age_s(progress)
        reported = [] if age is None else [("reported", f"{age:.1f} s ago")]
        self._console.print(two_columns([*_progress_rows(progress, scores, _step_s(folder.path)), *reported]))
        self._board(
            line_of(record, state="training", age_s=age_s(record)) for record in newest_telemetry(folder.telemetry_path)
        )

    def unled(self, folder: RunReader, *, launched: bool) -> None:
        """Which processes are alive, and what to type."""
        self._print(*unled_lines(folder, launched=launched))

    def killed(self, folder: RunReader) -> None:
        """How to resume."""
        self._print(*killed_lines(folder))

    def over(self, folder: RunReader, summary: Mapping[str, Any]) -> None:
        """How it ended, the closing table, and how to resume."""
        status, message = str(summary["status"]), str(summary.get("message") or "")
        self._print(message if message.startswith(status) else f"{status}{': ' + message if message else ''}")
        self._console.print(two_columns(closing_rows(summary, folder.path)))
        if summary["status"] != "completed":
            self._print(resume_line(folder.path))

    def _board(self, lines: Iterable[RoleLine]) -> None:
        if shown := list(lines):
            self._console.print()
            for line in board(shown, self._console):
                self._console.print(line, soft_wrap=True)

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True)


def _step_s(run: Path | None) -> float | None:
    return None if run is None else seconds_per_step(RunReader(run).metrics_path)


def _rows(status: Status, step_s: float | None) -> list[tuple[str, str]]:
    rows = [("generation", str(status.generation)), *_table_rows(status)]
    rows += _progress_rows(status.progress, status.evaluation, step_s)
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


def _progress_rows(progress: Record, evaluation: Record, step_s: float | None) -> list[tuple[str, str]]:
    rows = []
    if progress:
        rows.append(("step", step_text(progress)))
        if progress.get("loss") is not None:
            rows.append(("loss", f"{progress['loss']:.4f}"))
        if (speed := speed_text(progress)) is not None:
            rows.append(("speed", speed))
        if left_s := time_left_s(progress, step_s):
            rows.append(("time left", clock_text(left_s)))
    if evaluation:
        rows.append(("evaluation", f"step {evaluation.get('step', 0):,}  {quality(evaluation)}"))
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
