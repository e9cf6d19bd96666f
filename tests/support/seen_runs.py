"""What the page and its warnings look at, from a few records that a test writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from shardkeep.page.records import RunRecords
from shardkeep.page.state import RunState
from shardkeep.page.warnings.warning import Sight

NOON = datetime(2026, 11, 25, 12, 0, 0)
Record = Mapping[str, Any]


def at(seconds: float) -> str:
    """A time of day in records, so many seconds after noon."""
    return (NOON + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def progress(seconds: float, step: int, loss: float | None = 0.5, **others: Any) -> Record:
    return {"time": at(seconds), "kind": "progress", "step": step, "total_steps": 10_000, "samples": 100 * step,
            "loss": loss, "samples_per_s": 1000.0, **others}  # fmt: skip


def event(when: float, text: str, **others: Any) -> Record:
    return {"time": at(when), "kind": "event", "text": text, "role": "coordinator", "index": 0, **others}


def telemetry(seconds: float, role: str, index: int, **others: Any) -> Record:
    return {"time": at(seconds), "kind": "telemetry", "role": role, "index": index, "pid": 1, "every_s": 5.0, **others}


def step_of(index: int, *, total: float = 100.0, waits: Record | None = None, **parts: float) -> Record:
    """The telemetry record of a worker with the times of its steps, in ms."""
    return telemetry(0, "worker", index, steps=10, step_ms={"total": total, **parts}, wait_ms=waits or {})


def append(path: Path, *records: Any, end: str = "\n") -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(json.dumps(record) for record in records) + end)


def write_records(run: Path, *records: Record) -> None:
    run.mkdir(exist_ok=True)
    for name, kinds in (("metrics.jsonl", ("progress", "eval", "event", "phase")), ("telemetry.jsonl", ("telemetry",))):
        chosen = [json.dumps(record) + "\n" for record in records if record["kind"] in kinds]
        (run / name).write_text("".join(chosen), encoding="utf-8")


def state_of(run: Path, *records: Record, now: float = 0.0, config: str = "name: job\n", **options: Any) -> RunState:
    """The page's state of a run folder with these records, `now` seconds after noon. Options: as of RunState."""
    write_records(run, *records)
    (run / "config.yaml").write_text(config, encoding="utf-8")
    return RunState(run, clock=lambda: NOON.timestamp() + now, **options)


def sight(
    run: Path,
    *records: Record,
    now: float = 0.0,
    state: str = "training",
    config: Record | None = None,
    checkpoints: Sequence[Record] = (),
    summary: Record | None = None,
) -> Sight:
    """What a warning looks at, `now` seconds after noon."""
    write_records(run, *records)
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    read = RunRecords(run)
    read.refresh()
    seen = [{**dict(row), "at": NOON.timestamp() + row["at"]} for row in checkpoints]
    return Sight(read, state, NOON.timestamp() + now, config or {}, seen)
