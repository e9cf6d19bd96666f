"""The board of `shardkeep status`: one line for each process of a job. Knows no coordinator and no files.

On a terminal, processes of one role in the same state share a line if there are many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from shardkeep.base.sizes import size_text
from shardkeep.ps.control.membership import silent_s
from shardkeep.ps.control.records import MemberStatus
from shardkeep.records.telemetry import ServerTelemetry, Telemetry, WorkerTelemetry
from shardkeep.view.run_view import RunView

FOLD_ABOVE = 8
"""Processes of one role from which those in the same state share a line on a terminal."""
COLUMNS = ("role", "state", "step", "rate", "memory", "heartbeat", "pid", "host")
DROPPED = ("host", "pid")
"""Columns that a narrow terminal does not show, the first one first."""
_GAP = "  "
_NONE = "-"


@dataclass(frozen=True, slots=True)
class RoleLine:
    """One process. None = not known: no telemetry record has come yet, or the role has no such figure."""

    role: str
    index: int
    state: str
    step: int | None = None
    steps_per_s: float | None = None
    request_ms: float | None = None
    rss_bytes: int | None = None
    limit_bytes: int | None = None
    heartbeat_age_s: float | None = None
    pid: int | None = None
    host: str | None = None


def lines_of(view: RunView) -> list[RoleLine]:
    """The coordinator, which has just answered, the servers and the workers."""
    records = {record.place: record for record in view.telemetry}
    own = records.get(("coordinator", 0), Telemetry())
    first = line_of(own, role="coordinator", state=view.state, age_s=0.0, step=None)
    return [first, *(_member(member, records.get((member.role, member.index))) for member in view.members)]


def line_of(record: Telemetry, *, state: str, age_s: float | None, **known: Any) -> RoleLine:
    """A process by its telemetry record. `known`: what is known better."""
    told: dict[str, Any] = {"role": record.role, "index": record.index, "pid": record.pid, "host": record.host}
    if isinstance(record, WorkerTelemetry):
        total_ms = record.step_ms.get("total")
        told |= {"step": record.step, "steps_per_s": 1000.0 / total_ms if total_ms else None}
    elif isinstance(record, ServerTelemetry):
        told |= {"step": record.step, "request_ms": record.request_ms}
    memory = {"rss_bytes": record.rss_bytes, "limit_bytes": record.limit_bytes}
    return RoleLine(**{**told, **memory, **known}, state=state, heartbeat_age_s=age_s)


def board(lines: Sequence[RoleLine], console: Console) -> list[Text]:
    """The header and the lines, without spaces at their ends."""
    rows = [[_cells([line]) for line in lines], [_cells(group) for group in _folded(lines)]][console.is_terminal]
    columns = list(COLUMNS)
    table = _columns(columns, rows)
    for name in DROPPED if console.is_terminal else ():
        if sum(max(map(len, column)) + len(_GAP) for column in table) - len(_GAP) > console.width:
            columns.remove(name)
            table = _columns(columns, rows)
    padded = ([cell.ljust(max(map(len, column))) for cell in column] for column in table)
    head, *rest = (_GAP.join(row).rstrip() for row in zip(*padded, strict=True))
    return [Text(head, style="bold"), *map(Text, rest)]


def _member(member: MemberStatus, record: Telemetry | None) -> RoleLine:
    if record is None or record.pid != member.pid:  # it is of the process before it
        record = Telemetry()
    known: dict[str, Any] = {"role": member.role, "index": member.index, "pid": member.pid, "host": member.host}
    if member.step >= 0 and member.role == "worker":  # servers send no steps
        known["step"] = member.step
    state = member.phase if member.condition == "joined" and member.phase else member.condition
    return line_of(record, state=state, age_s=member.age_s, **known)


def _folded(lines: Sequence[RoleLine]) -> Iterable[Sequence[RoleLine]]:
    """Yields the lines, those of one state together in roles of many processes, without those that miss heartbeats."""
    late_s = silent_s(len(lines) - 1)
    for _, role in groupby(lines, key=lambda line: line.role):
        members = list(role)
        if len(members) <= FOLD_ABOVE:
            yield from ([line] for line in members)
            continue
        groups: dict[Any, list[RoleLine]] = {}
        for line in members:
            groups.setdefault((line.state, (line.heartbeat_age_s or 0.0) > late_s), []).append(line)
        yield from groups.values()


def _columns(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    return [[name, *(row[name] for row in rows)] for name in names]


def _cells(lines: Sequence[RoleLine]) -> dict[str, str]:
    """A row of the board: of one process, or of several that share it."""
    first, alone = lines[0], len(lines) == 1
    shares = [(line.rss_bytes, line.limit_bytes) for line in lines if line.rss_bytes]
    rss, limit = max(shares, default=(None, None), key=lambda pair: pair[0] or 0)
    share = f" ({100 * rss / limit:.0f} %)" if rss and limit else ""
    up_to = "" if alone else "up to "
    ages = [line.heartbeat_age_s for line in lines if line.heartbeat_age_s is not None]
    name = first.role if first.role == "coordinator" else f"{first.role} {first.index}"
    return {
        "role": name if alone else f"{first.role}s {_indices([line.index for line in lines])}",
        "state": first.state,
        "step": _range([line.step for line in lines], lambda step: f"{step:,}", ""),
        "rate": _rates(lines),
        "memory": f"{up_to}{size_text(rss)}{share}" if rss else _NONE,
        "heartbeat": f"{up_to}{max(ages):.1f} s ago" if ages else _NONE,
        "pid": _NONE if first.pid is None else str(first.pid) if alone else f"{len(lines)} processes",
        "host": _range(sorted({line.host for line in lines if line.host}), str, "", between=", "),
    }


def _rates(lines: Sequence[RoleLine]) -> str:
    if lines[0].role == "server":
        return _range([line.request_ms for line in lines], lambda ms: f"{ms:.2f}", " ms/request")
    return _range([line.steps_per_s for line in lines], lambda rate: f"{rate:.1f}", " steps/s")


def _range(values: Iterable[Any], text: Callable[[Any], str], unit: str, *, between: str = " to ") -> str:
    """`24.0 to 25.1 steps/s`, or one value if all read the same."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return _NONE
    shown = dict.fromkeys((text(known[0]), text(known[-1])))
    return between.join(shown) + unit


def _indices(indices: Sequence[int]) -> str:
    """`0-11, 13, 15-63`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1][1:] = [index]
        else:
            runs.append([index])
    return ", ".join("-".join(map(str, run)) for run in runs)
