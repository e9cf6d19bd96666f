"""The supervisor with the real coordinator and stand-ins: jobs that are stopped, scaled and pinned."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardkeep.base.errors import JobError, JobStopped
from shardkeep.launch.stopping import scale
from shardkeep.launch.stopping.stop import stop_run
from shardkeep.run.folder import RunFolder
from tests.support import stand_ins
from tests.support.cluster import gone, kinds, stalled, within
from tests.support.import_path import ROOT
from tests.support.stand_in import deeds
from tests.support.stand_ins import Job, Jobs, StandIns, jobs_in

pytestmark = pytest.mark.waits_for_processes
ENDLESS = {"steps": 1_000_000}
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.fixture
def jobs(tmp_path: Path, stand_ins: StandIns) -> Iterator[Jobs]:
    with jobs_in(tmp_path, stand_ins) as jobs:
        yield jobs


def send(job: Job, *numbers: signal.Signals) -> None:
    """What the launcher's process gets."""
    with job.interrupts:
        for number in numbers:
            signal.raise_signal(number)


def stopped(job: Job) -> str:
    """How it was stopped, in one line."""
    with pytest.raises(JobStopped) as caught:
        job.end()
    assert "\n" not in str(caught.value)
    assert (job.folder.summary() or {})["status"] == "stopped"
    return str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_in_order(jobs: Jobs, number: signal.Signals) -> None:
    job = jobs.start(ENDLESS)
    members = job.training()
    send(job, number)
    assert re.fullmatch(r"stopped at step \d+: Ctrl-C or SIGTERM", stopped(job))
    assert not gone(members.values(), limit_s=0)
    assert "press Ctrl-C again to end it at once" in job.screen and not job.folder.token_path.exists()


def test_a_request_to_stop_ends_the_job_in_order_and_is_answered_once_it_has_ended(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS)
    members = job.training()
    with job.folder.held():
        with pytest.raises(JobError, match=r"has not ended within 0\.5 s \(--timeout\); it still stops"):
            stop_run(job.folder.path, timeout_s=0.5)  # the test holds the folder, as the launcher's process does
        assert re.fullmatch(r"stopped at step \d+: shardkeep stop", stopped(job))
    assert not gone(members.values(), limit_s=0)


def test_sigterm_at_the_coordinator_of_a_launcher_stops_the_job_in_order(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS)
    members = job.training()
    members["coordinator 0"].terminate()
    assert re.fullmatch(r"stopped at step \d+: SIGTERM", stopped(job))
    assert not gone(members.values(), limit_s=0)


def test_a_second_ctrl_c_ends_a_job_that_hangs_at_once(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS, liveness={"lease_s": 60.0})
    members = job.training()
    with stalled(members["worker 0"]):
        send(job, signal.SIGINT)
        job.until(lambda: "stopping" in job.screen, "not stopping")
        assert job.running
        send(job, signal.SIGINT)
        began = time.monotonic()
        assert stopped(job).startswith("stopped at step ")
    assert time.monotonic() - began < 45  # the lease is 60 s
    assert not gone(members.values(), limit_s=0)


@pytest.mark.parametrize("before", [(), (signal.SIGINT,)], ids=["SIGTERM", "SIGTERM after Ctrl-C"])
def test_a_job_that_cannot_stop_in_its_grace_ends_anyway_and_says_so(
    jobs: Jobs, before: tuple[signal.Signals, ...]
) -> None:
    job = jobs.start(ENDLESS, liveness={"lease_s": 60.0, "grace_s": 3.0}, checkpoint={"every_steps": 10})
    members = job.training()
    with stalled(members["worker 0"]):
        send(job, *before, signal.SIGTERM)
        text = stopped(job)
    why = r"it did not end within 3 s of SIGTERM \(liveness.grace_s\); there is no checkpoint"
    assert re.fullmatch(rf"stopped at step \d+; {why}", text)
    assert not gone(members.values(), limit_s=0)


def test_ctrl_c_is_heard_by_the_coordinator_that_is_started_for_a_killed_one(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS, liveness={"lease_s": 4.0})
    members = job.training()
    members["coordinator 0"].kill()
    send(job, signal.SIGINT)
    assert re.fullmatch(r"stopped at step \d+: Ctrl-C or SIGTERM", stopped(job))
    assert not gone(members.values(), limit_s=0)


def test_ctrl_c_before_the_coordinator_listens_is_heard_once_it_does(jobs: Jobs) -> None:
    """It listens once worker 1 has died twice; by then the job stops."""
    slow = {"after": "worker 1", "times": 2}
    job = jobs.start({"worker 1": {"at": "start", "do": -9, "times": 2}, "coordinator 0": slow})
    job.until(job.folder.log_path("worker", 1).exists, "no worker")
    assert job.folder.address() is None
    send(job, signal.SIGINT)
    assert stopped(job) == "stopped before the first step: Ctrl-C or SIGTERM"


def test_ctrl_c_before_the_first_formation_stops_a_job_that_waits_for_a_member(jobs: Jobs) -> None:
    job = jobs.start({"server 0": {"at": "start", "do": "wait"}})
    job.until(lambda: job.folder.address() is not None, "no coordinator")
    send(job, signal.SIGINT)
    assert stopped(job) == "stopped before the first step: Ctrl-C or SIGTERM"


def test_ctrl_c_after_the_last_step_leaves_a_completed_job(jobs: Jobs) -> None:
    job = jobs.start({"worker 0": {"at": "gathered", "do": "wait"}})
    job.until(lambda: bool(deeds(job.folder.path, "worker 0")), "no last step")
    assert job.running
    send(job, signal.SIGINT)
    summary = job.end()
    assert (summary["status"], summary["steps"]) == ("completed", 5)


def test_two_jobs_side_by_side_end_alone_one_by_ctrl_c_one_with_its_launcher(tmp_path: Path) -> None:
    launchers = [launcher(tmp_path / name) for name in ("first", "second")]
    folders = [RunFolder(tmp_path / name) for name in ("first", "second")]
    try:
        for folder, process in zip(folders, launchers, strict=True):
            within(60, lambda f=folder: "progress" in kinds(f), "no step", lambda p=process: p.poll() is None)
        members, others = ([psutil.Process(m["pid"]) for m in folder.member_list()] for folder in folders)
        launchers[0].send_signal(signal.SIGINT)
        _, told = launchers[0].communicate(timeout=90)
        assert re.fullmatch(r"stopped at step \d+: Ctrl-C or SIGTERM\n", told)
        assert not gone(members, limit_s=0)
        assert launchers[1].poll() is None and folders[1].summary() is None
    finally:
        for process in launchers:
            process.kill()
            process.communicate()
    assert not gone(others, limit_s=90)
    assert [(folder.summary() or {})["status"] for folder in folders] == ["stopped", "stopped"]


def launcher(folder: Path) -> subprocess.Popen[str]:
    """A process of its own with a supervisor of a job that does not end."""
    command = [sys.executable, "-m", stand_ins.__name__, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_scale_stops_the_job_and_the_launcher_finds_the_new_numbers(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS, checkpoint={"every_steps": 10})
    members = job.training()
    with job.folder.held():
        scale.ask(job.folder.path, workers=3, servers=None)
        stopped(job)
    assert scale.taken(job.folder.path) == ["workers=3"]
    assert not gone(members.values(), limit_s=0)


def test_a_run_folder_that_is_removed_while_a_role_is_replaced_ends_the_job_with_one_line(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS)
    members = job.training()
    shutil.rmtree(job.folder.path, ignore_errors=True)  # members may write there meanwhile
    members["worker 1"].kill()
    with pytest.raises(JobError) as caught:
        job.end()
    assert "\n" not in str(caught.value)
    assert not gone(members.values(), limit_s=90)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores and a system that pins processes to them")
def test_each_process_runs_on_its_cores_and_so_does_its_replacement(jobs: Jobs) -> None:
    first, second = CORES[:2]
    pins = {("worker", 0): (first,), ("worker", 1): (second,), ("server", 0): (second, first)}
    job = jobs.start(ENDLESS, pins=pins)
    wanted = {"coordinator 0": set(CORES), "worker 0": {first}, "worker 1": {second}, "server 0": {first, second}}
    members = job.training()
    assert {name: cores_of_threads(process) for name, process in members.items()} == wanted
    members["worker 1"].kill()
    job.until(lambda: pid_of(job, "worker", 1) != members["worker 1"].pid, "no replacement")
    assert cores_of_threads(psutil.Process(pid_of(job, "worker", 1))) == {second}


def pid_of(job: Job, role: str, index: int) -> int:
    return next(m["pid"] for m in job.folder.member_list() if (m["role"], m["index"]) == (role, index))


def cores_of_threads(process: psutil.Process) -> set[int]:
    """Every core that some thread of the process may use."""
    return set().union(*(os.sched_getaffinity(thread.id) for thread in process.threads()))
