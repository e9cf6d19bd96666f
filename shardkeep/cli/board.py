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
from shardkeep.ps.control.membership import SILENT_S
from shardkeep.ps.control.records import MemberStatus, Status

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

    @property
    def silent(self) -> bool:
        """Whether it misses heartbeats."""
        return self.heartbeat_age_s is not None and self.heartbeat_age_s > SILENT_S

    @property
    def fold(self) -> tuple[str, str, bool]:
        """Processes with the same value may share a line."""
        return self.role, self.state, self.silent


def lines_of(status: Status) -> list[RoleLine]:
    """The coordinator, which has just answered, the servers and the workers."""
    records = {(record.get("role"), record.get("index")): record for record in status.telemetry}
    own = records.get(("coordinator", 0), {})
    first = RoleLine("coordinator", 0, status.state, heartbeat_age_s=0.0, **_figures(own), **_place(own))
    return [first, *(_member(member, records.get((member.role, member.index), {})) for member in status.members)]


def line_of(record: Mapping[str, Any], *, state: str, age_s: float | None) -> RoleLine:
    """A process that is known only by its telemetry record."""
    step = record.get("step")
    figures = _figures(record)
    return RoleLine(
        str(record.get("role")),
        int(record.get("index") or 0),
        state,
        step=None if step is None else int(step),
        heartbeat_age_s=age_s,
        **figures,
        **_place(record),
    )


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


def _member(member: MemberStatus, record: Mapping[str, Any]) -> RoleLine:
    record = record if record.get("pid") == member.pid else {}  # of the process before it
    heard = member.step if member.step >= 0 and member.role == "worker" else None  # servers send no steps
    step = record.get("step") if heard is None else heard
    return RoleLine(
        member.role,
        member.index,
        member.phase if member.condition == "joined" and member.phase else member.condition,
        step=None if step is None else int(step),
        heartbeat_age_s=member.age_s,
        pid=member.pid,
        host=member.host,
        **_figures(record),
    )


def _figures(record: Mapping[str, Any]) -> dict[str, Any]:
    total_ms = (record.get("step_ms") or {}).get("total")
    return {
        "steps_per_s": 1000.0 / total_ms if total_ms else None,
        "request_ms": record.get("request_ms"),
        "rss_bytes": record.get("rss_bytes"),
        "limit_bytes": record.get("limit_bytes"),
    }


def _place(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"pid": record.get("pid"), "host": record.get("host")}


def _folded(lines: Sequence[RoleLine]) -> Iterable[Sequence[RoleLine]]:
    """Yields the lines, those of one state together in roles of many processes."""
    for _, role in groupby(lines, key=lambda line: line.role):
        members = list(role)
        if len(members) <= FOLD_ABOVE:
            yield from ([line] for line in members)
            continue
        groups: dict[Any, list[RoleLine]] = {}
        for line in members:
            groups.setdefault(line.fold, []).append(line)
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
