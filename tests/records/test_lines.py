"""What the ends of a run folder's files say of a running job."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shardkeep.records.lines import newest, newest_of_each
from shardkeep.records.training import Evaluation, Progress
from shardkeep.view.run_view import RunView
from tests.support.cases import every


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
