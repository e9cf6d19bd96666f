"""`--continue`: every state of a run folder means one way to continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardkeep.base.errors import JobError
from shardkeep.base.files import atomic_write
from shardkeep.config import JobConfig
from shardkeep.run.folder import RunFolder
from shardkeep.run.origin.continuing import way_in, way_of
from shardkeep.run.reader import RunReader
from tests.support.cases import every

Found = tuple[dict[str, Any] | None, str | None, int | None]
"""The last summary, the job's state as it was kept, the newest checkpoint."""
FORMED = ("forming", "training", "recovering")
ENDED = ("killed", "stopped", "failed", "incomplete")


def failed(*from_steps: int, before: tuple[tuple[int, str], ...] = ()) -> dict[str, Any]:
    """The summary of a job whose starts at these steps all failed, after others."""
    starts = [{"from_step": step, "status": status} for step, status in before]
    starts += [
        {"from_step": step, "status": "failed", "message": f"cause {number}"} for number, step in enumerate(from_steps)
    ]
    return {"status": "failed", "starts": starts}


STATES: dict[str, tuple[Found, tuple[str, int]]] = {
    "nothing there, or nothing kept": ((None, None, None), ("begin", 0)),
    "nothing kept since it was resumed": ((None, None, 9), ("resume", 9)),
    **{
        f"{state}, with {'a' if step else 'no'} checkpoint": ((None, state, step), ("take over", 0))
        for state in FORMED
        for step in (None, 5)
    },
    "stopping, which nobody finished": ((None, "stopping", 5), ("resume", 5)),
    "stopping, before the first checkpoint": ((None, "stopping", None), ("begin", 0)),
    "completed": (({"status": "completed"}, None, 9), ("completed", 0)),
    "completed, with a state that was written late": (({"status": "completed"}, "training", 9), ("completed", 0)),
    **{f"{status}, with a checkpoint": (({"status": status}, None, 7), ("resume", 7)) for status in ENDED},
    **{f"{status}, without one": (({"status": status}, None, None), ("begin", 0)) for status in ENDED},
    "failed, with given rows": ((failed(0), None, 0), ("resume", 0)),
    "failed twice at a checkpoint": ((failed(5, 5), None, 5), ("resume", 5)),
    "failed three times, each after a newer checkpoint": ((failed(0, 5, 8), None, 9), ("resume", 9)),
    "failed between stops": ((failed(5, before=((0, "failed"), (5, "stopped"))), None, 5), ("resume", 5)),
}


@every(("found", "way"), STATES.values(), ids=STATES)
def test_every_state_of_a_run_folder_has_one_way(found: Found, way: tuple[str, int]) -> None:
    assert way_of(*found) == way


@every(
    ("summary", "checkpoint"),
    [
        (failed(0, 0, 0), None),
        (failed(5, 5, 5, before=((0, "stopped"),)), 5),
        (failed(0, 5, 5), 5),  # the first one wrote the checkpoint, and failed after it
        (failed(0, 0, 0, 0), None),
    ],
    ids=["from the start", "after a stop", "after the start that wrote it", "once more by hand"],
)
def test_the_third_resume_after_a_failure_without_a_new_checkpoint_says_the_first_cause(
    summary: dict[str, Any], checkpoint: int | None
) -> None:
    with pytest.raises(
        JobError, match=r"failed [34] times without a checkpoint after step \d, first: cause 0"
    ) as caught:
        way_of(summary, None, checkpoint)
    assert "\n" not in str(caught.value)


def kept(state: str) -> dict[str, Any]:
    return {"state": {"state": state}}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return begun(tmp_path / "run")


def begun(path: Path) -> RunFolder:
    """Of a coordinator that has just begun a job."""
    folder = RunFolder.create(path, JobConfig())
    folder.claim()
    return folder


def again(folder: RunFolder) -> RunFolder:
    """Opens the folder in another process that continues."""
    other = RunFolder(folder.path)
    other.claim()
    return other


def test_a_killed_job_is_taken_over_and_one_that_was_stopping_is_resumed(folder: RunFolder) -> None:
    job = JobConfig()
    assert way_in(job, again(folder)) == ("begin", 0)
    last = again(folder)
    last.standing(kept("training"))
    last = again(folder)
    assert way_in(job, last) == ("take over", 0)
    assert way_in(job, again(folder)) == ("take over", 0)  # the one before died as it took over
    last = again(folder)
    last.standing(kept("stopping"))
    assert way_in(job, again(folder)) == ("begin", 0)


@every("status", ["completed", "stopped", "failed"])
def test_a_job_that_is_over_stays_over_until_it_is_resumed(tmp_path: Path, status: str) -> None:
    folder = begun(tmp_path)
    folder.finished(status, "why", {"stopped_by": "SIGTERM", "steps": 4})
    for _ in range(3):  # each start claims a number, and ends before it resumes
        folder = again(folder)
        assert folder.summary() is None
        last = folder.last_summary() or {}
        assert (last["status"], last["stopped_by"]) == (status, "SIGTERM")
        assert way_in(JobConfig(), folder)[0] == ("completed" if status == "completed" else "begin")
    resumed = RunFolder.reopen(folder.path, JobConfig(), number=folder.claim())
    assert (resumed.number(), resumed.summary()) == (4, None)
    assert way_in(JobConfig(), again(resumed)) == ("begin", 0)
    assert json.loads((folder.path / "summary-4.json").read_text())["status"] == status


@every("status", ["killed", "stopped"])
def test_nobody_who_waits_for_a_job_that_begins_again_sees_that_it_is_over(tmp_path: Path, status: str) -> None:
    folder = begun(tmp_path)
    if status != "killed":
        folder.finished(status, "why", None)
    number, seen = again(folder).claim(), []

    def write(path: Path, *given: Any, **options: Any) -> None:
        atomic_write(path, *given, **options)
        seen.append(RunReader(folder.path).summary())

    with mock.patch("shardkeep.run.folder.atomic_write", write):
        RunFolder.reopen(folder.path, JobConfig(), number=number)
    assert seen and not any(seen)
    assert json.loads((folder.path / "summary-0.json").read_text())["status"] == status


def test_failures_are_counted_in_the_run_folder(folder: RunFolder) -> None:
    folder.finished("failed", "no data", None)
    for why in ("still none", "none either"):
        folder = again(folder)
        assert way_in(JobConfig(), folder) == ("begin", 0)
        RunFolder.reopen(folder.path, JobConfig(), number=folder.claim()).finished("failed", why, None)
    for _ in range(2):
        folder = again(folder)
        with pytest.raises(JobError, match="3 times without a checkpoint after step 0, first: no data;"):
            way_in(JobConfig(), folder)


def test_what_a_user_had_in_the_folder_stays(tmp_path: Path) -> None:
    (path := tmp_path / "run").mkdir()
    (path / "notes.txt").write_text("mine")
    folder = RunFolder(path)
    folder = RunFolder.create(path, JobConfig(), number=folder.claim())
    RunFolder.reopen(path, JobConfig(), number=again(folder).claim())
    assert (path / "notes.txt").read_text() == "mine"


def test_a_folder_of_an_earlier_version_is_taken_over_or_resumed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    folder.coordinator("127.0.0.1:1", pid=1)  # without a claim, as an earlier version did
    folder.standing(kept("training"))
    assert not list(folder.path.glob("*.[1-9]*.json"))
    resumed = RunFolder.reopen(folder.path, JobConfig())
    assert (resumed.number(), resumed.address(), resumed.has_standing) == (0, None, False)
    assert json.loads((folder.path / "summary-0.json").read_text())["status"] == "killed"
    resumed.standing(kept("training"))
    assert way_in(JobConfig(), again(resumed)) == ("take over", 0)
