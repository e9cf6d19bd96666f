"""`--continue`: every state of a run folder means one way to continue. As processes: what `shardkeep coordinator
--continue` does at each start, and its exit codes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from shardkeep.base.errors import ConfigError, JobError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.cli.main import app
from shardkeep.config import JobConfig, stored_config
from shardkeep.member.access import endpoint_of
from shardkeep.ps.control.grpc.client import ControlClient, request_stop
from shardkeep.ps.control.records import TERMINATED
from shardkeep.run.folder import RunFolder
from shardkeep.run.origin.continuing import led, start_in, way_of
from shardkeep.run.reader import RunReader
from tests.support.cases import every
from tests.support.chaos import EDITED
from tests.support.cluster import Cluster, Command, within

Found = tuple[dict[str, Any] | None, str | None, int | None]
"""The last summary, the job's state as it was kept, the newest checkpoint."""
ENDED = ("killed", "stopped", "failed", "incomplete")


def failed(*from_steps: int, before: tuple[tuple[int, str], ...] = ()) -> dict[str, Any]:
    """The summary of a job whose starts at these steps all failed, after others."""
    starts = [{"from_step": step, "status": status} for step, status in before]
    starts += [
        {"from_step": step, "status": "failed", "message": f"cause {number}"} for number, step in enumerate(from_steps)
    ]
    return {"status": "failed", "starts": starts}


STATES: list[tuple[Found, tuple[str, int]]] = [
    ((None, None, None), ("begin", 0)),
    ((None, None, 9), ("resume", 9)),  # nothing kept since it was resumed
    *(((None, state, step), ("take over", 0)) for state in ("forming", "training", "recovering") for step in (None, 5)),
    ((None, "stopping", 5), ("resume", 5)),
    ((None, "stopping", None), ("begin", 0)),
    (({"status": "completed"}, None, 9), ("completed", 0)),
    (({"status": "completed"}, "training", 9), ("completed", 0)),  # a state that was written late
    *((({"status": status}, None, 7), ("resume", 7)) for status in ENDED),
    *((({"status": status}, None, None), ("begin", 0)) for status in ENDED),
    ((failed(0), None, 0), ("resume", 0)),  # with given rows
    ((failed(5, 5), None, 5), ("resume", 5)),
    ((failed(0, 5, 8), None, 9), ("resume", 9)),  # each after a newer checkpoint
    ((failed(5, before=((0, "failed"), (5, "stopped"))), None, 5), ("resume", 5)),
]


@every(("found", "way"), STATES)
def test_every_state_of_a_run_folder_has_one_way(found: Found, way: tuple[str, int]) -> None:
    assert way_of(*found) == way


@every(
    ("summary", "checkpoint"),
    [
        (failed(0, 0, 0), None),
        (failed(5, 5, 5, before=((0, "stopped"),)), 5),
        (failed(0, 5, 5), 5),  # the first one wrote the checkpoint, and failed after it
        (failed(0, 0, 0, 0), None),  # once more by hand
    ],
)
def test_the_third_resume_after_a_failure_without_a_new_checkpoint_says_the_first_cause(
    summary: dict[str, Any], checkpoint: int | None
) -> None:
    why = r"failed [34] times without a checkpoint after step \d, first: cause 0"
    with pytest.raises(JobError, match=why) as caught:
        way_of(summary, None, checkpoint)
    assert "\n" not in str(caught.value)


def kept(state: str) -> dict[str, Any]:
    return {"state": {"state": state}}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return begun(tmp_path / "run")


def begun(path: Path) -> RunFolder:
    """Of a coordinator that has just begun a job, where a user had a file."""
    path.mkdir(exist_ok=True)
    (path / "notes.txt").write_text("mine")
    return RunFolder.create(path, JobConfig(), number=RunFolder(path).claim())


def again(folder: RunFolder) -> RunFolder:
    """Opens the folder in another process that continues."""
    other = RunFolder(folder.path)
    other.claim()
    return other


def way_in(folder: RunFolder) -> tuple[str, int]:
    start = start_in(JobConfig(), folder)
    return start.way, start.step


def test_a_killed_job_is_taken_over_and_one_that_was_stopping_is_resumed(folder: RunFolder) -> None:
    assert way_in(again(folder)) == ("begin", 0)
    last = again(folder)
    last.standing(kept("training"))
    last = again(folder)
    assert way_in(last) == ("take over", 0)
    assert way_in(again(folder)) == ("take over", 0)  # the one before died as it took over
    last = again(folder)
    last.standing(kept("stopping"))
    assert way_in(again(folder)) == ("begin", 0)


@every("status", ["completed", "stopped", "failed"])
def test_a_job_that_is_over_stays_over_until_it_is_resumed(tmp_path: Path, status: str) -> None:
    folder = begun(tmp_path)
    folder.finished(status, "why", {"stopped_by": "SIGTERM", "steps": 4})
    for _ in range(3):  # each start claims a number, and ends before it resumes
        folder = again(folder)
        assert folder.summary() is None
        last = folder.last_summary() or {}
        assert (last["status"], last["stopped_by"]) == (status, "SIGTERM")
        assert way_in(folder)[0] == ("completed" if status == "completed" else "begin")
    resumed = RunFolder.reopen(folder.path, JobConfig(), number=folder.claim())
    assert (resumed.number(), resumed.summary()) == (4, None)
    assert way_in(again(resumed)) == ("begin", 0)
    assert json.loads((folder.path / "summary-4.json").read_text())["status"] == status
    assert (folder.path / "notes.txt").read_text() == "mine"


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
        assert way_in(folder) == ("begin", 0)
        RunFolder.reopen(folder.path, JobConfig(), number=folder.claim()).finished("failed", why, None)
    for _ in range(2):
        folder = again(folder)
        with pytest.raises(JobError, match="3 times without a checkpoint after step 0, first: no data;"):
            way_in(folder)


def test_a_folder_of_an_earlier_version_is_taken_over_or_resumed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", JobConfig())
    folder.coordinator("127.0.0.1:1", pid=1)  # without a claim, as an earlier version did
    folder.standing(kept("training"))
    assert not list(folder.path.glob("*.[1-9]*.json"))
    resumed = RunFolder.reopen(folder.path, JobConfig())
    assert (resumed.number(), resumed.address(), resumed.has_standing) == (0, None, False)
    assert json.loads((folder.path / "summary-0.json").read_text())["status"] == "killed"
    resumed.standing(kept("training"))
    assert way_in(again(resumed)) == ("take over", 0)


# ---- the config that leads ----

CHANGED: dict[str, Any] = {
    "data.source": {"data": {"train": ["b.csv"]}},
    "tables.user.evict": {"tables": {"user": {"evict": {"ttl_steps": 5}}}},
    "tower.device": {"tower": {"device": "cpu"}},
    "train.epochs": {"train": {"epochs": 9}},
}
"""Edited jobs that continue the job of the run folder at its next start, beside those with a group that may change."""
GROUPS = {"servers", "workers", "threads", "launch", "eval", "checkpoint", "transport", "liveness", "recovery", "web",
          "telemetry", "profile"}  # fmt: skip


@every("key", [*JobConfig.model_fields, *CHANGED])
def test_an_edited_config_leads_from_the_next_start_on_if_it_may_and_never_in_a_completed_job(
    tmp_path: Path, key: str
) -> None:
    folder, given = RunReader(tmp_path), JobConfig.model_validate(CHANGED.get(key) or {key: EDITED[key]})
    folder.config_path.write_text("data: {source: ''}")
    repair = led("take over", 0, given, folder)
    assert repair.config == stored_config(folder.path) and f"not used: {key}" in repair.remark
    with pytest.raises(UserError, match=rf"another config already \(given: {key}.*; choose another folder, or .*--set"):
        led("completed", 0, given, folder)
    if key in GROUPS or key in CHANGED:
        new = led("resume", 5, given, folder)
        assert new.config == given and new.remark.startswith(f"changed: {key}")
    else:
        with pytest.raises(UserError, match=rf"choose another folder; {key}.*may not change when a job continues"):
            led("resume", 5, given, folder)
    assert led("begin", 0, given, folder).config == given


@every(("given", "found"), [("auto", "blocks"), ("blocks", "blocks"), ("rows", None)])
def test_a_job_keeps_the_shuffle_that_it_has_found(tmp_path: Path, given: str, found: str | None) -> None:
    folder, job = RunReader(tmp_path), JobConfig.model_validate({"data": {"shuffle": given}, "servers": 1})
    folder.config_path.write_text("data: {shuffle: blocks}")
    if found is None:
        with pytest.raises(UserError, match=r'data\.shuffle="rows" in place of "blocks": may not change'):
            led("resume", 5, job, folder)
    else:
        assert led("resume", 5, job, folder).config.data.shuffle == found


def test_train_names_what_its_config_has_otherwise_than_the_run_in_its_folder(folder: RunFolder) -> None:
    (job := folder.path.with_name("job.yaml")).write_text("{train: {batch_size: 9}, data: {source: synthetic}}")
    done = CliRunner().invoke(app, ["train", str(job), "--run-dir", str(folder.path)])
    other = 'holds a run with another config already (given: data.source="synthetic" in place of "", train'
    assert done.exit_code == 2 and other in done.stderr and done.stderr.endswith("--set KEY=VALUE`\n")


def test_a_config_that_cannot_be_read_keeps_no_job_from_its_repair(folder: RunFolder) -> None:
    broken = ConfigError("job.yaml: cannot be read (No such file or directory)\nand more")
    repair = led("take over", 0, broken, folder)
    assert repair.config == stored_config(folder.path) and repair.remark.endswith(
        f"not used: {str(broken).splitlines()[0]}"
    )
    for way in ("begin", "resume", "completed"):
        with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
            led(way, 0, broken, folder)  # type: ignore[arg-type]


# ---- as processes ----

JOB: dict[str, Any] = {"name": "job", "servers": 1, "workers": 1, "web": {"page": "off"}}


def start(cluster: Cluster, run: RunReader) -> Command:
    """Starts the same command again, which listens on another port, and waits until it listens."""
    command = cluster.continued(JOB)
    number = run.number()
    assert json.loads(command.line("{"))["coordinator"] == run.address()
    assert run.number() > number
    return command


@pytest.mark.waits_for_processes
def test_a_stop_by_sigterm_is_to_be_restarted_a_stop_by_a_person_is_not_and_a_completed_job_ends_at_once(
    cluster: Cluster, run: RunReader
) -> None:
    first = start(cluster, run)
    first.signal(signal.SIGTERM)
    ended = first.end()
    assert ended.code == 143 and f"stopped before the first step: {TERMINATED}\n" in ended.err
    assert (run.summary() or {})["stopped_by"] == TERMINATED
    second = start(cluster, run)
    assert run.summary() is None
    request_stop(endpoint_of(str(run.path)), "shardkeep stop")
    assert second.end().code == 0
    assert (run.summary() or {})["stopped_by"] == "shardkeep stop"
    folder = RunFolder(run.path)
    folder.claim()
    folder.finished("completed", "", None)
    ended = cluster.continued(JOB).end()
    assert (ended.code, ended.out, ended.err) == (0, "", f"{run.path}: the job is completed\n")
    assert run.number() == 3 and (run.summary() or {})["status"] == "completed"


@pytest.mark.waits_for_processes
def test_of_two_coordinators_the_older_one_ends_and_stops_nobody_and_members_follow_to_the_other(
    cluster: Cluster, run: RunReader
) -> None:
    first = start(cluster, run)
    with ControlClient(endpoint_of(str(run.path)), role="server", index=0) as member:
        member.register()
        member.start_heartbeats()
        before = member.address
        second = start(cluster, run)
        ended = first.end()
        assert ended.code == 0 and "another coordinator leads the job; this" in ended.err
        assert "resume" not in ended.err and run.address() != before
        within(60, lambda: member.address == run.address(), "the member does not follow", lambda: second.running)
        assert not member.state.over and run.summary() is None and run.token_path.exists()
        request_stop(endpoint_of(str(run.path)), TERMINATED)  # as the node of the first machine does
        assert member.stop_requested.wait(60)
        member.leave(0)
    assert second.end().code == 143


@pytest.mark.waits_for_processes
@every("option", [("--take-over",), ("--start-step", "3")], ids=["take over", "start step"])
def test_continue_is_given_alone(cluster: Cluster, option: tuple[str, ...]) -> None:
    ended = cluster.continued(JOB, *option).end()
    assert (ended.code, ended.err) == (2, "error: --continue: excludes --take-over and --start-step\n")
