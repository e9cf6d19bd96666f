"""The supervisor with the real coordinator and stand-ins for workers and servers: ends, deaths, restarts."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkeep.base.errors import JobError, JobStopped, UserError
from shardkeep.launch import train_job
from shardkeep.run.folder import NO_SUMMARY
from shardkeep.run.json_files import numbered
from shardkeep.run.state_files import NAMES
from shardkeep.trust.endpoint import read_token
from tests.support.cluster import gone, kinds, listening_ports, records, stalled
from tests.support.stand_ins import Jobs, StandIns, jobs_in
from tests.support.strangers import GARBAGE

pytestmark = pytest.mark.waits_for_processes
ENDLESS = {"steps": 1_000_000}
LONG_S = 150.0
"""A lease, so that a job ends long before it, on a busy machine too."""
VICTIMS = ["server 0", "worker 0", "worker 1"]


@pytest.fixture
def jobs(tmp_path: Path, stand_ins: StandIns) -> Iterator[Jobs]:
    with jobs_in(tmp_path, stand_ins) as jobs:
        yield jobs


def recoveries(job: Any) -> list[dict[str, Any]]:
    return [record for record in records(job.folder) if record.get("phase") == "recovery"]


def test_a_completed_job_fills_its_run_folder_and_leaves_nobody(jobs: Jobs) -> None:
    job = jobs.start({"hold": 1})
    members = job.training()
    token = read_token(job.folder.token_path)
    assert stat.S_IMODE(job.folder.token_path.stat().st_mode) == 0o600
    for process in members.values():
        assert token not in " ".join([*process.cmdline(), *process.environ().values()])
    job.go()
    summary = job.end()
    assert token not in job.screen
    assert not [path for path in job.folder.path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert summary == job.folder.summary()
    assert set(NO_SUMMARY) | {"status", "versions", "machine"} <= set(summary)
    assert (summary["status"], summary["steps"]) == ("completed", 5)
    roles = ["coordinator 0", "server 0", "worker 0", "worker 1"]
    assert list(members) == roles and not gone(members.values(), limit_s=0)
    assert {(m["host"], m["generation"]) for m in job.folder.member_list()} == {("127.0.0.1", 1)}
    assert {"progress", "event"} <= kinds(job.folder)
    assert sorted(log.stem for log in job.folder.logs.iterdir()) == [name.replace(" ", "-") for name in roles]
    assert re.search(r"^start +coordinator, 1 server, 2 workers; formed in [\d.]+ s$", job.screen, re.MULTILINE)
    assert not job.folder.token_path.exists() and not (job.folder.path / "recovery").exists()


@pytest.mark.parametrize("victim", ["coordinator 0", *VICTIMS])
def test_without_restarts_a_killed_process_ends_the_job_and_the_line_names_it(jobs: Jobs, victim: str) -> None:
    job = jobs.start(ENDLESS, liveness={"lease_s": LONG_S}, recovery={"restarts": 0})
    members = job.training()
    began = time.monotonic()
    members[victim].kill()
    with pytest.raises(JobError) as caught:
        job.end()
    assert time.monotonic() - began < LONG_S / 2
    line = rf"{victim} \(pid {members[victim].pid}.*\) ended: killed by SIGKILL, .*step \d+"
    assert re.match(line, str(caught.value)) and "\n" not in str(caught.value)
    summary = job.folder.summary() or {}
    assert summary["status"] == "failed" and summary["message"] in str(caught.value)
    assert not gone(members.values(), limit_s=0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked to leave"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_member_that_a_signal_ends_is_replaced_and_the_coordinator_hears_of_it(
    jobs: Jobs, victim: str, number: signal.Signals
) -> None:
    job = jobs.start({"hold": 3})
    dead = job.training()[victim]
    dead.send_signal(number)
    job.until(lambda: bool(recoveries(job)), "no recovery")
    job.go()
    assert job.end()["steps"] == 5
    (recovery,) = recoveries(job)
    assert victim in recovery["text"]
    how = "killed by SIGKILL" if number == signal.SIGKILL else "left on SIGTERM"
    assert f"{victim} (pid {dead.pid}) ended: {how}; starting another" in job.screen
    assert dead.pid not in [m["pid"] for m in job.folder.member_list()]


def test_a_worker_that_dies_before_it_reports_the_summary_is_replaced_and_the_job_completes(jobs: Jobs) -> None:
    job = jobs.start({"worker 0": {"at": "gathered", "do": -9}})
    assert job.end()["steps"] == 5
    (recovery,) = recoveries(job)
    assert "worker 0" in recovery["text"] and "training resumes at step 5" in recovery["text"]


@pytest.mark.parametrize("victim", ["worker 0", "worker 1"])
def test_a_worker_that_dies_after_the_summary_is_reported_changes_nothing(jobs: Jobs, victim: str) -> None:
    job = jobs.start({victim: {"at": "reported", "do": -9}})
    assert job.end()["status"] == "completed"
    assert not recoveries(job)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_member_that_hangs_is_replaced_when_its_lease_ends_and_killed(jobs: Jobs, victim: str) -> None:
    job = jobs.start({**ENDLESS, "step_s": 0.02}, liveness={"lease_s": 3.0})
    hung = job.training()[victim]
    with stalled(hung):
        job.until(lambda: bool(recoveries(job)), "no recovery")
    assert not gone([hung], limit_s=90)
    assert job.running and victim in recoveries(job)[0]["text"]


def test_without_restarts_a_member_that_hangs_is_named_when_its_lease_ends(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS, liveness={"lease_s": 3.0}, recovery={"restarts": 0})
    members = job.training()
    pid = members["worker 1"].pid
    with stalled(members["worker 1"]), pytest.raises(JobError) as caught:
        job.end()
    line = rf"worker 1 \(pid {pid} on 127.0.0.1\) sent no heartbeat for 3 s \(lease_s\), .*at step \d+"
    assert re.match(line, str(caught.value)) and "\n" not in str(caught.value)
    assert not gone(members.values(), limit_s=0)


def test_a_member_that_dies_again_and_again_before_its_step_ends_the_job(jobs: Jobs) -> None:
    job = jobs.start({"hold": 0, "worker 0": {"at": "formed", "do": -9, "times": 9}}, recovery={"restarts": 2})
    with pytest.raises(JobError, match=r"^worker 0 \(pid \d+.*\) ended: killed by SIGKILL.* 3 times without"):
        job.end()
    assert job.screen.count("starting another") == 2
    assert len(recoveries(job)) == 2


def test_a_place_is_filled_where_a_member_died_before_the_coordinator_listened(jobs: Jobs) -> None:
    """The second death's vacancy waits for its backoff, and meanwhile the coordinator begins to listen."""
    died = {"at": "start", "do": -9, "times": 2}
    job = jobs.start({"worker 1": died, "coordinator 0": {"after": "worker 1", "times": 2}})
    assert job.end()["status"] == "completed"
    assert job.screen.count("starting another") == 2


@pytest.mark.parametrize(("code", "error"), [(1, JobError), (2, UserError)])
def test_a_member_that_fails_by_itself_ends_the_job_at_once_with_its_words(
    jobs: Jobs, code: int, error: type[Exception]
) -> None:
    job = jobs.start({**ENDLESS, "worker 1": {"at": 3, "do": code}}, liveness={"lease_s": LONG_S})
    began = time.monotonic()
    with pytest.raises(error, match=r"^(worker 1 .*: )?no such column") as caught:
        job.end()
    assert time.monotonic() - began < LONG_S / 2 and "\n" not in str(caught.value)
    assert (job.folder.summary() or {})["status"] == "failed"


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_member_that_aborts_after_anothers_failure_is_not_the_cause(jobs: Jobs, restarts: int) -> None:
    plan = {**ENDLESS, "worker 1": {"at": 3, "do": 1}, "worker 0": {"at": "failed", "do": -signal.SIGABRT}}
    job = jobs.start(plan, recovery={"restarts": restarts})
    with pytest.raises(JobError, match=r"^worker 1 .*: no such column"):
        job.end()
    assert "no such column" in (job.folder.summary() or {})["message"]


def test_a_member_that_ends_without_a_word_to_the_coordinator_is_a_failure_not_a_stop(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_job, "VERDICT_S", LONG_S)
    job = jobs.start({**ENDLESS, "hold": 2, "worker 1": {"at": 3, "do": "crash"}})
    job.training()
    job.go()
    began = time.monotonic()
    line = r"^worker 1 \(pid .*\) ended: exit code 1: out of luck, .*step \d+.*; its launcher starts no other"
    with pytest.raises(JobError, match=line) as caught:
        job.end()
    assert time.monotonic() - began < LONG_S / 2, "it waited for a verdict that cannot come"
    assert not isinstance(caught.value, JobStopped)
    assert (job.folder.summary() or {})["status"] == "failed"


def test_a_job_outlives_its_coordinator_and_one_damaged_file_but_not_both(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS, liveness={"lease_s": 4.0})
    first = job.training()["coordinator 0"]
    numbered(job.folder.path, NAMES[0], job.folder.number()).write_bytes(b"")
    first.kill()
    job.until(lambda: bool(job.folder.coordinator_pids() - {first.pid}), "no other coordinator")
    (second,) = map(psutil.Process, job.folder.coordinator_pids())
    reached = last_step(job)
    job.until(lambda: last_step(job) > reached + 5, "no more steps")

    second.suspend()  # it would write the files again
    for name in NAMES:
        numbered(job.folder.path, name, job.folder.number()).unlink()
    second.kill()
    with pytest.raises(JobError) as caught:
        job.end()
    line = rf"coordinator 0 \(pid {second.pid}\) ended: killed by SIGKILL, last step \d+; no coordinator can take over"
    assert re.match(line, str(caught.value)) and "\n" not in str(caught.value)
    assert f"shardkeep train --resume {job.folder.path}" in str(caught.value)


def last_step(job: Any) -> int:
    return max(r["step"] for r in records(job.folder) if r["kind"] == "progress")


def test_a_member_and_the_coordinator_that_die_together_are_both_replaced(jobs: Jobs) -> None:
    job = jobs.start({"hold": 3}, liveness={"lease_s": 4.0})
    members = job.training()
    members["coordinator 0"].kill()
    members["worker 1"].kill()
    job.until(lambda: any("worker 1" in recovery["text"] for recovery in recoveries(job)), "no recovery")
    job.go()
    assert job.end()["steps"] == 5
    assert job.screen.count("starting another") == 2


def test_a_job_outlives_garbage_on_the_coordinators_ports(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS)
    members = job.training()
    ports = listening_ports(members["coordinator 0"])
    assert len(ports) == 3  # gRPC, the store and the page
    with contextlib.ExitStack() as held:
        for port, garbage in itertools.product(ports, GARBAGE.values()):
            with contextlib.suppress(OSError):  # refused, or hung up on
                held.enter_context(connection := socket.create_connection(("127.0.0.1", port), timeout=1.0))
                connection.sendall(garbage)
        reached = last_step(job)
        job.until(lambda: last_step(job) > reached + 20, "no step after the garbage")
        assert all(process.is_running() for process in members.values()) and not recoveries(job)
