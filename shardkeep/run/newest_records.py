"""The newest records of a running job, from the ends of the files in its run folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

_TAIL_BYTES = 1 << 20
"""Has a telemetry record of each of some hundred processes."""
RECENT_S = 300.0
"""Seconds of a job whose mean step tells the time left."""
_ORDER = {"coordinator": 0, "server": 1, "worker": 2}


def newest_of_kind(path: Path, kind: str) -> dict[str, Any]:
    """The last record of a kind in a metrics.jsonl; {} = none near its end."""
    return next((record for record in _from_the_end(path) if record.get("kind") == kind), {})


def newest_telemetry(path: Path) -> list[dict[str, Any]]:
    """The last record of each process in a telemetry.jsonl: coordinator, servers, workers, each by index."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for record in _from_the_end(path):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            found.setdefault((str(record["role"]), int(record["index"])), record)
    return [found[place] for place in sorted(found, key=lambda place: (_ORDER.get(place[0], 3), place[1]))]


def seconds_per_step(path: Path) -> float | None:
    """Mean seconds of a step over the last minutes of a metrics.jsonl, with evaluations and checkpoints; None = it has
    too few records of progress."""
    last: tuple[int, float] | None = None
    first: tuple[int, float] | None = None
    for record in _from_the_end(path):
        if record.get("kind") != "progress" or (made_s := _made_s(record)) is None:
            continue
        step = int(record.get("step") or 0)
        last = last or (step, made_s)
        if made_s < last[1] - RECENT_S or (first is not None and step > first[0]):  # the job went back to this step
            break
        first = step, made_s
    if first is None or last is None or last[0] <= first[0] or last[1] <= first[1]:
        return None
    return (last[1] - first[1]) / (last[0] - first[0])


def age_s(record: dict[str, Any]) -> float | None:
    """Seconds since a record was made, by this machine's clock; None = it does not say when."""
    made_s = _made_s(record)
    return None if made_s is None else max(0.0, time.time() - made_s)


def _made_s(record: dict[str, Any]) -> float | None:
    """When a record was made, in seconds since 1970."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return datetime.fromisoformat(str(record["time"])).timestamp()
    return None


def _from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects near the end of a file of lines, the last one first. The first and the last may be cut."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
