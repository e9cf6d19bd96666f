"""What only protects a job, or informs of it, does not end the job when it cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep.base.logs.json_log import PrintedLines
from shardkeep.config import JobConfig
from shardkeep.ps.control.records import Member
from shardkeep.ps.server.journal.journal import Journal, RecordKind
from shardkeep.run.folder import RunFolder
from shardkeep.workers.checkpoint.tower_state import save_tower, tower_state
from shardkeep.workers.config import EarlyStoppingConfig
from shardkeep.workers.evaluation.history import EvaluationHistory
from shardkeep.workers.rewind import Rewind
from tests.support.cases import every
from tests.support.configs import ALONE
from tests.support.full_disk import FullMeanwhile, full_disk
from tests.support.records import records_in
from tests.support.towers import tower_of

Write = Callable[[], Any]
MEMBERS = [Member("worker", 0, "127.0.0.1", 7)]


def journal(place: Path) -> Write:
    found = Journal(place / "journal", sync=True)
    found.begin(1, step=0, facts={})

    def write() -> None:
        found.append(RecordKind.PUSH, rank=0, step=0)
        found.roll()
        found.begin(2, step=1, facts={})

    return write


def evaluations(place: Path) -> Write:
    best = EvaluationHistory(EarlyStoppingConfig(metric="auc", patience=2))
    best.keep_in(place / "evaluations.json")
    return lambda: best.add(10, {"auc": 0.7})


def tower_states(place: Path) -> Write:
    rewind, tower = Rewind(place / "kept", depth=2), tower_of()

    def write() -> None:
        rewind.keep(tower)
        rewind.take_back(tower, 0)

    return write


def printed_lines(place: Path) -> Write:
    def write() -> None:
        file = (place / "log").open("w")
        print("a line", file=PrintedLines(file, "worker", 0))
        with pytest.raises(OSError, match="File too large"):
            file.close()

    return write


@every("writer", [journal, evaluations, tower_states, printed_lines])
def test_a_full_disk_costs_what_was_to_be_written_and_nothing_else(
    tmp_path: Path, writer: Callable[[Path], Write]
) -> None:
    write = writer(tmp_path)
    with full_disk():
        write()
        write()


def test_what_the_run_folder_lost_is_counted_in_the_warnings_of_the_summary(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    folder.members(1, MEMBERS)
    with full_disk():
        folder.progress({"step": 1})
        folder.progress({"step": 2})
        folder.event({"text": "something"})
        folder.standing({"job": "one"})
        folder.telemetry({"time": "", "step": 1})
        folder.members(2, MEMBERS)
    folder.progress({"step": 3})
    folder.event({"role": "server", "index": 0, "text": "its journal is given up", "unkept": "journal"})
    folder.finished("completed", "", {"warnings": ["of a member"]})
    first, metrics, *others, journal = (folder.summary() or {})["warnings"]
    assert (first, journal) == ("of a member", "its journal is given up")
    lost = f"{folder.metrics_path}: not written (File too large); the job continues without"
    assert metrics == f"{lost} (3 times; this is the last)" and "standing.json: not written" in others[0]
    assert [record["step"] for record in records_in(folder.metrics_path) if "step" in record] == [3]
    assert not folder.has_standing  # an older state would mislead


def test_what_a_full_disk_does_to_a_dense_model_names_its_file(tmp_path: Path) -> None:
    state = tower_state(tower_of())
    with full_disk(), pytest.raises(OSError, match="File too large") as raised:
        save_tower(state, tmp_path)
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "tower" / "tower.safetensors")


def test_a_job_on_a_disk_that_is_full_for_a_while_trains_on_and_is_completed(tmp_path: Path) -> None:
    config = ALONE | {"telemetry": {"every_s": 0.001}, "checkpoint": {"every_steps": 10}}
    config["train"] = {"batch_size": 25, "report_every_s": 0.001}
    whole = shardkeep.train(config, run_dir=tmp_path / "whole", quiet=True)
    callback = FullMeanwhile()
    found = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True, callbacks=[callback])
    assert callback.full and (found.status, found.state_digest) == ("completed", whole.state_digest)
    texts = "\n".join(found.warnings)
    assert "metrics.jsonl: not written (File too large)" in texts and "no checkpoint at step" in texts
    assert whole.warnings == ()
