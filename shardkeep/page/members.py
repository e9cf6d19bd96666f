"""Sections of the page about processes: members, and the time line of generations and recoveries."""

from __future__ import annotations

import re
from typing import Any

from shardkeep.page.records import ROLES, Key, Record, RunRecords, number, seconds_of
from shardkeep.page.sections import recoveries

_REGISTERED = re.compile(r"(server|worker) (\d+) \(pid (\d+) on (.*)\) registered")
_LEFT = re.compile(r"(server|worker) (\d+) .*\bleft with code (-?\d+)")
MOST_MARKS = 300


def members(records: RunRecords) -> list[Record]:
    """Each process with its place, its memory and its last record."""
    peaks = {_key(p): p for p in (records.summary or {}).get("processes") or ()}
    places = {_key(m): m for m in records.members}
    deaths: dict[Key, int] = {}
    for event in records.events:
        if event.get("lost") in ROLES:
            key = str(event["lost"]), int(event.get("lost_index") or 0)
            deaths[key] = deaths.get(key, 0) + 1
    for died in (died for recovery in recoveries(records) for died in recovery.get("died") or ()):
        if died.get("role") == "coordinator":  # nobody is there to record the event
            deaths[_key(died)] = deaths.get(_key(died), 0) + 1
    rows = []
    for key in sorted({*peaks, *places, *records.telemetry}, key=lambda k: (ROLES.index(k[0]), k[1])):
        place, told, end = places.get(key, {}), records.telemetry.get(key, {}), peaks.get(key, {})
        rows.append(
            {
                "role": key[0],
                "index": key[1],
                "host": place.get("host") or told.get("host"),
                "pid": place.get("pid") or told.get("pid"),
                "generation": place.get("generation") or told.get("generation"),
                "step": number(told.get("step")),
                "seen": told.get("at"),
                "rss": number(told.get("rss_bytes")),
                "limit": number(told.get("limit_bytes")),
                "peak": number(end.get("peak_rss_bytes")),
                "request_ms": number(told.get("request_ms")),
                "parked": number(told.get("parked_pulls")),
                "journal": number(told.get("journal_bytes")),
                "deaths": deaths.get(key, 0),
            }
        )
    return rows


def time_line(records: RunRecords, state: str) -> Record:
    """When each member lived, when generations formed, what recovered and what was saved."""
    end = records.newest if records.summary or state == "gone" else None
    spans, open_spans = list[Record](), dict[Key, Record]()
    marks = list[Record]()

    def close(key: Key, at: float, how: str) -> None:
        if (span := open_spans.pop(key, None)) is not None:
            span |= {"to": at, "end": how}

    for event in records.events:
        at, text = event["at"], str(event.get("text") or "")
        if found := _REGISTERED.match(text):
            key = found[1], int(found[2])
            close(key, at, "replaced")
            open_spans[key] = span = {"role": key[0], "index": key[1], "from": at, "to": end, "end": ""}
            spans.append(span)
        elif event.get("lost") in ROLES:
            key = str(event["lost"]), int(event.get("lost_index") or 0)
            close(key, at, "died")
            marks.append(_mark("death", at, text, key))
        elif found := _LEFT.match(text):
            close((found[1], int(found[2])), at, "left" if found[3] == "0" else "failed")
        elif ("generation" in text and "formed" in text) or text.startswith("took over"):
            marks.append(_mark("generation", at, text))
        elif event.get("phase") == "recovery":
            marks.append({**_mark("recovery", at, text), "seconds": number(event.get("seconds"))})
        elif event.get("phase") == "checkpoint" and number(event.get("bytes")) is not None:
            marks.append(_mark("checkpoint", at, text))
        elif text.startswith(("warning:", "recovering:", "resumed", "stopped")) and not (
            marks and text.removeprefix("recovering: ") == marks[-1]["text"]  # the death says the same
        ):
            marks.append(_mark("note", at, text))
    if not any(mark["kind"] == "recovery" for mark in marks):
        marks += [
            {**_mark("recovery", at, str(r.get("cause") or "")), "seconds": number(r.get("seconds"))}
            for r in recoveries(records)
            if (at := seconds_of(r.get("time"))) is not None
        ]
    return {"from": records.first, "to": end, "spans": spans, "marks": marks[-MOST_MARKS:]}


def _mark(kind: str, at: float, text: str, key: Key | None = None) -> Record:
    return {"kind": kind, "at": at, "text": text, "member": f"{key[0]} {key[1]}" if key else None}


def _key(record: Any) -> Key:
    role = str(record.get("role"))
    return role if role in ROLES else "worker", int(record.get("index") or 0)
