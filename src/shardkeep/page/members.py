"""Sections of the page about processes: members, and the time line of generations and recoveries."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardkeep.page.counts import Key
from shardkeep.page.records import Json, RunRecords
from shardkeep.page.sections import recoveries
from shardkeep.records.events import CheckpointEvent, RecoveryEvent
from shardkeep.records.record import number
from shardkeep.records.telemetry import ROLES, Telemetry

_NOTED = ("recovering", "resumed", "stopped", None)
"""Phases whose text is shown. An event of a start from other rows has none."""
MOST_MARKS = 300


def members(records: RunRecords) -> list[Json]:
    """Each process with its place, its memory and its last record."""
    peaks = {_key(p): p for p in (records.summary or {}).get("processes") or ()}
    places = {_key(m): m for m in records.members()}
    died = [(event.lost, event.lost_index or 0) for event in records.events if event.lost in ROLES]
    died += [each.place for found in recoveries(records) for each in found.died if each.role == "coordinator"]
    deaths = Counter(died)  # of a coordinator nobody is there to record the event
    rows = []
    for key in sorted({*peaks, *places, *records.counts.newest}, key=lambda k: (ROLES.index(k[0]), k[1])):
        place, told, end = places.get(key, {}), records.counts.newest.get(key, Telemetry()), peaks.get(key, {})
        rows.append(
            {
                "role": key[0],
                "index": key[1],
                "host": place.get("host") or told.host,
                "pid": place.get("pid") or told.pid,
                "generation": place.get("generation") or told.generation,
                "step": getattr(told, "step", None),
                "seen": told.at,
                "rss": told.rss_bytes,
                "limit": told.limit_bytes,
                "peak": number(end.get("peak_rss_bytes")),
                "request_ms": getattr(told, "request_ms", None),
                "parked": getattr(told, "parked_pulls", None),
                "journal": getattr(told, "journal_bytes", None),
                "deaths": deaths[key],
            }
        )
    return rows


def time_line(records: RunRecords, state: str) -> Json:
    """When each member lived, when generations formed, what recovered and what was saved."""
    end = records.newest if records.summary or state == "gone" else None
    spans, open_spans = list[Json](), dict[Key, Json]()
    marks = list[Json]()

    def close(key: Key, at: float, how: str) -> None:
        if (span := open_spans.pop(key, None)) is not None:
            span |= {"to": at, "end": how}

    for event in records.events:
        at, text, member = event.at or 0.0, event.text, event.member
        if event.phase == "registered" and member is not None:
            close(member.place, at, "replaced")
            open_spans[member.place] = span = {"role": member.role, "index": member.index, "from": at, "to": end,
                                               "end": ""}  # fmt: skip
            spans.append(span)
        elif event.phase == "left" and member is not None:
            close(member.place, at, "failed" if event.code else "left")
        elif event.lost in ROLES:
            key = event.lost, event.lost_index or 0
            close(key, at, "died")
            marks.append(_mark("death", at, text, key))
        elif event.formed:
            marks.append(_mark("generation", at, text))
        elif isinstance(event, RecoveryEvent):
            marks.append({**_mark("recovery", at, text), "seconds": event.seconds})
        elif isinstance(event, CheckpointEvent):
            marks += [] if event.bytes is None else [_mark("checkpoint", at, text)]
        elif (event.warning or event.phase in _NOTED) and not (
            marks and event.reason == marks[-1]["text"]  # the death says the same
        ):
            marks.append(_mark("note", at, text))
    if not any(mark["kind"] == "recovery" for mark in marks):
        marks += [
            {**_mark("recovery", each.at, each.cause or ""), "seconds": each.seconds}
            for each in recoveries(records)
            if each.at is not None
        ]
    return {"from": records.first, "to": end, "spans": spans, "marks": marks[-MOST_MARKS:]}


def _mark(kind: str, at: float, text: str, key: Key | None = None) -> Json:
    return {"kind": kind, "at": at, "text": text, "member": f"{key[0]} {key[1]}" if key else None}


def _key(record: Any) -> Key:
    role = str(record.get("role"))
    return role if role in ROLES else "worker", int(record.get("index") or 0)
