"""The supervisor with the real coordinator and stand-ins: jobs that are stopped, scaled and pinned."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from shardkeep.base.errors import JobError, JobStopped
from shardkeep.launch.stopping import scale
from shardkeep.launch.stopping.stop import stop_run
from shardkeep.run.folder import RunFolder
from tests.support.callbacks import Notes
from tests.support.cluster import gone, members_in, stalled
from tests.support.forked import started
from tests.support.import_path import IMPORT_PATH
from tests.support.stand_in import deeds
from tests.support.stand_ins import Job, StandIns, Start

pytestmark = pytest.mark.waits_for_processes
ENDLESS = {"steps": 1_000_000}
SAVES = {"checkpoint": {"every_steps": 10}}
"""A job that writes a checkpoint may take ten minutes to stop."""
BY_SIGNAL = r"stopped at step \d+: Ctrl-C or SIGTERM"
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def send(job: Job, *numbers: signal.Signals) -> None:
    """What the launcher's process gets."""
    with job.interrupts:
        for number in numbers:
            signal.raise_signal(number)


def assert_stopped(job: Job, line: str, members: dict[str, psutil.Process]) -> None:
    """The job ends with this one line, and nobody is left."""
    with pytest.raises(JobStopped) as caught:
        job.end()
    assert re.fullmatch(line, str(caught.value))
    assert (job.folder.summary() or {})["status"] == "stopped"
    assert not gone(members.values(), limit_s=0)


def test_sigterm_stops_the_job_in_order(start: Start) -> None:
    notes = Notes()
    job = start(ENDLESS, callbacks=[notes])
    members = job.training()
    send(job, signal.SIGTERM)
    assert_stopped(job, BY_SIGNAL, members)
    assert "press Ctrl-C again to end it at once" in job.screen and not job.folder.token_path.exists()
    notes.check_order()
    assert notes.of("on_end")[0].status == "stopped"


def launch_job() -> None:
    """A launcher: `sys.argv` has the run folder of its job."""
    with contextlib.closing(StandIns()) as starter:
        Job(Path(sys.argv[1]), starter, ENDLESS, {}).training()
        print("training", flush=True)
        signal.pause()


def test_a_job_whose_launcher_is_killed_ends_in_order(tmp_path: Path) -> None:
    folder, env = RunFolder(tmp_path / "run"), {**os.environ, "PYTHONPATH": IMPORT_PATH}
    launcher = started([str(folder.path)], env=env, main=f"{__name__}:{launch_job.__name__}")
    assert launcher.stdin is not None and launcher.stdout is not None and launcher.stderr is not None
    with launcher.stdin, launcher.stdout, launcher.stderr:
        assert launcher.stdout.readline() == "training\n"
        members = members_in(folder)
        launcher.kill()
        launcher.wait()
    assert len(members) == 4 and not gone(members.values(), limit_s=90)
    assert (folder.summary() or {})["status"] == "stopped"
    assert "the launcher is gone" in folder.log_path("coordinator", 0).read_text()


def test_a_request_to_stop_ends_the_job_in_order_and_is_answered_once_it_has_ended(start: Start) -> None:
    job = start(ENDLESS)
    members = job.training()
    with job.folder.held():
        with pytest.raises(JobError, match=r"has not ended within 0\.5 s \(--timeout\); it still stops"):
            stop_run(job.folder.path, timeout_s=0.5)  # the test holds the folder, as the launcher's process does
        assert_stopped(job, r"stopped at step \d+: shardkeep stop", members)


def test_sigterm_at_the_coordinator_of_a_launcher_stops_the_job_in_order(start: Start) -> None:
    job = start(ENDLESS)
    members = job.training()
    members["coordinator 0"].terminate()
    assert_stopped(job, r"stopped at step \d+: SIGTERM", members)


def test_a_second_ctrl_c_ends_a_job_that_hangs_at_once(start: Start) -> None:
    job = start(ENDLESS, **SAVES)
    members = job.training()
    with stalled(members["worker 0"]):
        send(job, signal.SIGINT)
        job.until(lambda: "stopping" in job.screen, "not stopping")
        assert job.running
        send(job, signal.SIGINT)
        assert_stopped(job, r"stopped at step .*", members)


def test_a_job_that_cannot_stop_in_its_grace_ends_anyway_and_says_so(start: Start) -> None:
    job = start(ENDLESS, liveness={"grace_s": 2.0}, **SAVES)
    members = job.training()
    with stalled(members["worker 0"]):
        send(job, signal.SIGINT, signal.SIGTERM)
        why = r"it did not end within 2 s of SIGTERM \(liveness.grace_s\); there is no checkpoint"
        assert_stopped(job, rf"stopped at step \d+; {why}", members)


def test_ctrl_c_is_heard_by_the_coordinator_that_is_started_for_a_killed_one(start: Start) -> None:
    job = start(ENDLESS)
    members = job.training()
    members["coordinator 0"].kill()
    send(job, signal.SIGINT)
    assert_stopped(job, BY_SIGNAL, members)


def test_ctrl_c_before_the_coordinator_listens_is_heard_once_it_does(start: Start) -> None:
    """It listens once worker 1 has died twice; by then the job stops."""
    slow = {"after": "worker 1", "times": 2}
    job = start({"worker 1": {"at": "start", "do": -9, "times": 2}, "coordinator 0": slow})
    job.until(job.folder.log_path("worker", 1).exists, "no worker")
    assert job.folder.address() is None
    send(job, signal.SIGINT)
    assert_stopped(job, "stopped before the first step: Ctrl-C or SIGTERM", {})


def test_ctrl_c_after_the_last_step_leaves_a_completed_job(start: Start) -> None:
    job = start({"worker 0": {"at": "gathered", "do": "wait"}})
    job.until(lambda: bool(deeds(job.folder.path, "worker 0")), "no last step")
    assert job.running
    send(job, signal.SIGINT)
    summary = job.end()
    assert (summary["status"], summary["steps"]) == ("completed", 5)


def test_scale_stops_the_job_and_the_launcher_finds_the_new_numbers(start: Start) -> None:
    job = start(ENDLESS, **SAVES)
    members = job.training()
    with job.folder.held():
        scale.ask(job.folder.path, workers=3, servers=None)
        assert_stopped(job, r"stopped at step .*", members)
    assert scale.taken(job.folder.path) == ["workers=3"]


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores and a system that pins processes to them")
def test_each_process_runs_on_its_cores_and_so_does_its_replacement(start: Start) -> None:
    def cores_of_threads(process: psutil.Process) -> set[int]:
        return set().union(*(os.sched_getaffinity(thread.id) for thread in process.threads()))

    first, second = CORES[:2]
    pins = {("worker", 0): (first,), ("worker", 1): (second,), ("server", 0): (second, first)}
    job = start(ENDLESS, pins=pins)
    wanted = {"coordinator 0": set(CORES), "worker 0": {first}, "worker 1": {second}, "server 0": {first, second}}
    assert {name: cores_of_threads(process) for name, process in job.training().items()} == wanted
    job.members()["worker 1"].kill()
    job.recovered("worker 1")
    assert cores_of_threads(job.members()["worker 1"]) == {second}
