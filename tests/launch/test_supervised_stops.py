"""The supervisor with the real coordinator and stand-ins: jobs that are stopped, scaled and pinned."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from shardkeep.base.errors import JobError, JobStopped
from shardkeep.launch.stopping import scale
from shardkeep.launch.stopping.stop import stop_run
from shardkeep.run.folder import RunFolder
from tests.support import stand_ins
from tests.support.callbacks import Notes
from tests.support.cluster import gone, kinds, stalled, within
from tests.support.forked import started
from tests.support.import_path import IMPORT_PATH
from tests.support.stand_in import deeds
from tests.support.stand_ins import Job, Jobs

pytestmark = pytest.mark.waits_for_processes
ENDLESS = {"steps": 1_000_000}
SAVES = {"checkpoint": {"every_steps": 10}}
"""A job that writes a checkpoint may take ten minutes to stop."""
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


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


def test_sigterm_stops_the_job_in_order(jobs: Jobs) -> None:
    notes = Notes()
    job = jobs.start(ENDLESS, callbacks=[notes])
    members = job.training()
    send(job, signal.SIGTERM)
    assert re.fullmatch(r"stopped at step \d+: Ctrl-C or SIGTERM", stopped(job))
    assert not gone(members.values(), limit_s=0)
    assert "press Ctrl-C again to end it at once" in job.screen and not job.folder.token_path.exists()
    notes.check_order()
    assert notes.of("on_end")[0].status == "stopped"


def test_ctrl_c_stops_one_of_two_jobs_and_the_other_ends_with_its_launcher(jobs: Jobs, tmp_path: Path) -> None:
    job, other = jobs.start(ENDLESS), RunFolder(tmp_path / "other")
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    launcher = started([str(other.path)], env=env, main=f"{stand_ins.__name__}:main")
    try:
        members = job.training()
        within(90, lambda: "progress" in kinds(other), "no step", lambda: launcher.poll() is None)
        others = [psutil.Process(m["pid"]) for m in other.member_list()]
        send(job, signal.SIGINT)
        assert re.fullmatch(r"stopped at step \d+: Ctrl-C or SIGTERM", stopped(job))
        assert not gone(members.values(), limit_s=0)
        assert launcher.poll() is None and other.summary() is None
    finally:
        launcher.kill()
        launcher.wait(90)
        for stream in (launcher.stdin, launcher.stdout, launcher.stderr):
            assert stream is not None
            stream.close()
    assert not gone(others, limit_s=90)
    assert (other.summary() or {})["status"] == "stopped"


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
    job = jobs.start(ENDLESS, **SAVES)
    members = job.training()
    with stalled(members["worker 0"]):
        send(job, signal.SIGINT)
        job.until(lambda: "stopping" in job.screen, "not stopping")
        assert job.running
        send(job, signal.SIGINT)
        assert stopped(job).startswith("stopped at step ")
    assert not gone(members.values(), limit_s=0)


def test_a_job_that_cannot_stop_in_its_grace_ends_anyway_and_says_so(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS, liveness={"grace_s": 3.0}, **SAVES)
    members = job.training()
    with stalled(members["worker 0"]):
        send(job, signal.SIGINT, signal.SIGTERM)
        text = stopped(job)
    why = r"it did not end within 3 s of SIGTERM \(liveness.grace_s\); there is no checkpoint"
    assert re.fullmatch(rf"stopped at step \d+; {why}", text)
    assert not gone(members.values(), limit_s=0)


def test_ctrl_c_is_heard_by_the_coordinator_that_is_started_for_a_killed_one(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS)
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


def test_scale_stops_the_job_and_the_launcher_finds_the_new_numbers(jobs: Jobs) -> None:
    job = jobs.start(ENDLESS, **SAVES)
    members = job.training()
    with job.folder.held():
        scale.ask(job.folder.path, workers=3, servers=None)
        stopped(job)
    assert scale.taken(job.folder.path) == ["workers=3"]
    assert not gone(members.values(), limit_s=0)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores and a system that pins processes to them")
def test_each_process_runs_on_its_cores_and_so_does_its_replacement(jobs: Jobs) -> None:
    first, second = CORES[:2]
    pins = {("worker", 0): (first,), ("worker", 1): (second,), ("server", 0): (second, first)}
    job = jobs.start(ENDLESS, pins=pins)
    wanted = {"coordinator 0": set(CORES), "worker 0": {first}, "worker 1": {second}, "server 0": {first, second}}
    members = job.training()
    assert {name: cores_of_threads(process) for name, process in members.items()} == wanted
    members["worker 1"].kill()
    job.recovered("worker 1")
    assert cores_of_threads(job.members()["worker 1"]) == {second}


def cores_of_threads(process: psutil.Process) -> set[int]:
    """Every core that some thread of the process may use."""
    return set().union(*(os.sched_getaffinity(thread.id) for thread in process.threads()))
