"""`shardkeep status` for a person: what is special about the job, its figures, then the board of its processes.

Without a terminal no line is wrapped or cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console

from shardkeep.cli.board import RoleLine, board
from shardkeep.ps.control.recovery import JOURNALS
from shardkeep.records.record import Json
from shardkeep.records.training import Evaluation, Progress
from shardkeep.view.run_view import clock_text, speed_text, step_text
from shardkeep.view.screen import closing_rows, quality
from shardkeep.view.text_tables import two_columns

MOST_LINES = 8
"""The most lines for tables. With more tables, each kind of table gets one line."""


def show(facts: Json, lines: Iterable[str], console: Console) -> None:
    """Shows a job. `lines`: what stands before its figures, or in their place."""
    _print(console, *lines)
    if facts["state"] in ("unreachable", "killed"):
        return
    if facts["summary"] and not facts["roles"]:
        console.print(two_columns(closing_rows(facts["summary"], Path(facts["run"]))))
        _print(console, *filter(None, [facts["resume"]]))
        return
    console.print(two_columns(_rows(facts)))
    if roles := [RoleLine(**role) for role in facts["roles"]]:
        console.print()
        for line in board(roles, console):
            console.print(line, soft_wrap=True)


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _rows(facts: Json) -> list[tuple[str, str]]:
    rows, alone = [], facts["generation"] is None
    if not alone:
        if (start := facts["start"]) and start["number"] > 1:
            text = f"{start['number']} of this job, from step {start['from_step']:,}; recoveries count from this start"
            rows.append(("start", text))
        rows += [("generation", str(facts["generation"])), *_table_rows(facts["tables"])]
    rows += _progress_rows(facts)
    if alone and facts["progress_age_s"] is not None:
        rows.append(("reported", f"{facts['progress_age_s']:.1f} s ago"))
    if not alone and (staleness := facts["staleness"]):
        most = max(int(steps) for steps in staleness)
        rows.append(("staleness", f"{_mean(staleness):.2f} steps on average, {most} at most (worker 0)"))
    if facts["checkpoint"]:
        rows.append(("checkpoint", facts["checkpoint"]["text"]))
    if facts["journal"]:
        rows.append(("journal", JOURNALS[facts["journal"]]))
    if facts["last_recovery"]:
        rows.append(("recoveries", f"{facts['recoveries']}; the last: {facts['last_recovery']}"))
    return rows


def _progress_rows(facts: Json) -> list[tuple[str, str]]:
    rows, progress = [], Progress.of(facts)
    if progress.step is not None:
        rows.append(("step", step_text(progress)))
        if progress.loss is not None:
            rows.append(("loss", f"{progress.loss:.4f}"))
        if (speed := speed_text(progress)) is not None:
            rows.append(("speed", speed))
        if facts["time_left_s"]:
            rows.append(("time left", clock_text(facts["time_left_s"])))
    if facts["evaluation"]:
        found = Evaluation.of(facts["evaluation"])
        rows.append(("evaluation", f"step {found.step or 0:,}  {quality(found.others)}"))
    return rows


def _table_rows(tables: Iterable[Json]) -> list[tuple[str, str]]:
    """One line per table, or per kind of table if there are many. Numbers of rows are not known here."""
    found = [(table["name"], f"dim {table['dim']}, {table['optimizer']}") for table in tables]
    if len(found) <= MOST_LINES:
        return [(f"table {name}", kind) for name, kind in found]
    kinds: dict[str, list[str]] = {}
    for name, kind in found:
        kinds.setdefault(kind, []).append(name)
    return [("tables", f"{len(names)} of {kind}: {', '.join(names)}") for kind, names in kinds.items()]


def _mean(histogram: Mapping[str, int]) -> float:
    return sum(int(steps) * times for steps, times in histogram.items()) / max(1, sum(histogram.values()))
