"""Records of a real job: each is read by its class, and written again as the same line. The ends of files of a running
job."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shardkeep.records.events import CheckpointEvent, Event, RecoveryEvent
from shardkeep.records.lines import newest, newest_of_each, parsed, record_of
from shardkeep.records.record import Record
from shardkeep.records.telemetry import CoordinatorTelemetry, ServerTelemetry, WorkerTelemetry
from shardkeep.records.training import Evaluation, Progress, Scores
from shardkeep.view.run_view import RunView
from tests.support.cases import every

METRICS, TELEMETRY = ((Path(__file__).parent / "golden") / f"{name}.jsonl" for name in ("metrics", "telemetry"))
"""Of a job with two servers and two workers, in which server 1 was killed."""
LINES = [*METRICS.read_bytes().splitlines(), *TELEMETRY.read_bytes().splitlines()]


def written(record: Record, line: bytes) -> bytes:
    separators = (",", ":") if b'":"' in line else None
    return json.dumps(record.to_dict(), ensure_ascii=False, separators=separators).encode()


def test_records_of_a_real_job_are_written_as_they_were_read() -> None:
    for line in LINES:
        record = parsed(line, record_of)
        assert record is not None and record.at is not None and written(record, line) == line
        assert isinstance(record, Scores) or not record.others


def test_all_classes_of_records_are_in_the_real_job() -> None:
    found = {type(record) for line in LINES if (record := parsed(line, record_of)) is not None}
    events = {Event, CheckpointEvent, RecoveryEvent}
    assert found == {Progress, Evaluation, *events, CoordinatorTelemetry, ServerTelemetry, WorkerTelemetry}


def test_keys_that_are_missing_unknown_or_of_another_type_are_tolerated() -> None:
    line = b'{"colour": [1], "kind": "progress", "step": "many", "loss": null, "step_ms": 3, "index": null}'
    record = parsed(line, record_of)
    assert isinstance(record, Progress)
    assert (record.step, record.loss, record.samples, record.index, record.at) == (None, None, None, 0, None)
    assert record.step_ms == {} and record.others == {"colour": [1]}
    assert list(record.to_dict()) == ["colour", "kind", "step", "loss", "step_ms", "index"]


def test_a_line_that_was_cut_off_has_no_record() -> None:
    assert parsed(b'{"kind": "ev', record_of) is None and parsed(b"[1]", record_of) is None


# ---- the ends of the files of a running job ----


def at(seconds: float, **more: Any) -> str:
    time = datetime.fromtimestamp(1_800_000_000 + seconds).isoformat(timespec="milliseconds")
    return json.dumps({"time": time, "kind": "progress"} | more) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_file_that_is_missing_empty_or_cut_says_nothing(path: Path) -> None:
    assert newest(path, Evaluation) is None and newest_of_each(path) == [] and RunView.of(path.parent).step_s is None
    path.write_text('cut off"}\n' + at(0, step=5) + '{"kind": "ev')
    last = newest(path, Progress)
    assert newest(path, Evaluation) is None and last is not None and last.step == 5
    assert RunView.of(path.parent).step_s is None


@every(
    ("steps", "step_s"),
    [
        ([(0, 10), (10, 20), (30, 40)], 1.0),
        ([(0, 0), (1000, 10), (1200, 50)], 5.0),
        ([(0, 100), (50, 20), (70, 30)], 2.0),
        ([(0, 10), (10, 10)], None),
    ],
    ids=["all", "the last minutes", "since it went back", "no step"],
)
def test_the_mean_step_is_that_of_the_last_minutes(
    path: Path, steps: list[tuple[float, int]], step_s: float | None
) -> None:
    path.write_text("".join(at(seconds, step=step) for seconds, step in steps))
    assert RunView.of(path.parent).step_s == step_s


def test_the_newest_record_of_each_process_comes_in_the_order_of_roles(path: Path) -> None:
    records = [("worker", 1, 1), ("worker", 0, 2), ("coordinator", 0, 3), ("server", 0, 4), ("worker", 1, 5)]
    path.write_text("".join(at(0, kind="telemetry", role=role, index=index, pid=step) for role, index, step in records))
    assert [(*found.place, found.pid) for found in newest_of_each(path)] == [
        ("coordinator", 0, 3),
        ("server", 0, 4),
        ("worker", 0, 2),
        ("worker", 1, 5),
    ]
