"""What a log collector gets of a job that `shardkeep train` runs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.logs.log import ROOT, LogFormat, configure
from shardkeep.records.lines import record_of
from shardkeep.view.screen_log import LAUNCHER, ScreenLog


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    logger = logging.getLogger(ROOT)
    before = (logger.handlers[:], logger.level, logger.propagate)
    stream = io.StringIO()
    configure(*LAUNCHER, stream=stream, form=LogFormat.JSON)
    yield stream
    logger.handlers[:], logger.level, logger.propagate = before


def test_phases_and_records_are_events_with_their_values(out: io.StringIO) -> None:
    heard: list[Any] = []
    view = ScreenLog(listener=heard.append)
    records = [
        {"time": "now", "kind": "progress", "role": "worker", "index": 0, "step": 5, "loss": 0.5},
        {"kind": "phase", "phase": "checkpoint", "step": 5, "text": "step 5 is kept"},
        {"kind": "event", "text": "worker 1 registered"},
    ]
    view.phase("start", "one process")
    view.working("data", "converting", 0.5)
    for record in records:
        view.record(record_of(record))
    view.end_bar()
    view.closing({"status": "completed", "steps": 5, "eval": {"auc": 0.75}, "bytes": {}}, Path("runs/a"))
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(each["event"], each["step"], each["fields"]) for each in found] == [
        ("start", None, {"text": "one process"}),
        ("progress", 5, {"role": "worker", "index": 0, "loss": 0.5}),
        ("checkpoint", 5, {"text": "step 5 is kept"}),
        ("closing", None, {"run": "runs/a", "status": "completed", "steps": 5, "eval": {"auc": 0.75}}),
    ]
    assert [record.to_dict() for record in heard] == records


def test_the_notice_of_a_signal_handler_is_an_object() -> None:
    assert json.loads(ScreenLog().notice("stopping"))["event"] == "stopping"
