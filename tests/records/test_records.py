"""Records of a real job: each is read by its class, and written again as the same line."""

from __future__ import annotations

import json
from pathlib import Path

from shardkeep.records.events import CheckpointEvent, Event, RecoveryEvent
from shardkeep.records.lines import parsed, record_of
from shardkeep.records.record import Record
from shardkeep.records.telemetry import CoordinatorTelemetry, ServerTelemetry, WorkerTelemetry
from shardkeep.records.training import Evaluation, Progress, Scores

GOLDEN = Path(__file__).parent / "golden"
METRICS, TELEMETRY = (GOLDEN / f"{name}.jsonl" for name in ("metrics", "telemetry"))
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
