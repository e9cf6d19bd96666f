"""Callbacks of jobs with processes: deaths, errors, callbacks that hang. Long tests train, the others use stand-ins."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardkeep
from shardkeep.launch.stopping import scale
from shardkeep.run.folder import RunFolder
from tests.support.callbacks import Notes, fails
from tests.support.cluster import gone, records, within
from tests.support.records import records_in
from tests.support.stand_ins import Start

pytestmark = pytest.mark.waits_for_processes
TINY: dict[str, Any] = {
    "servers": 1,
    "workers": 1,
    "data": {"synthetic": {"train_samples": 4000, "eval_samples": 500, "num_dense": 3, "table_sizes": [50, 90]}},
    "model": {"bottom": [8], "hidden": [8]},
    "tower": {"compile": "off"},
    "train": {"batch_size": 100, "report_every_s": 0.001},
}
STEPS = 20


def test_deaths_lose_no_event_and_repeat_none(start: Start) -> None:
    victims = {4: "coordinator 0", 8: "server 0", 12: "worker 1"}

    def kill(event: Any) -> None:
        if event.step in victims:
            job.members()[victims.pop(event.step)].kill()

    notes = Notes(on_progress=kill)
    job = start({"steps": STEPS, "step_s": 0.05}, callbacks=[notes])
    assert job.end()["steps"] == STEPS and not victims
    notes.check_order()
    assert notes.steps("on_progress") == list(range(1, STEPS + 1))


def test_records_of_repeated_steps_are_in_the_run_folder_and_reported_once(start: Start) -> None:
    notes = Notes()
    plan = {f"worker {index}": {"at": at, "do": -signal.SIGKILL} for index, at in ((1, 5), (0, 12))}
    job = start({"steps": STEPS, **plan}, callbacks=[notes])
    job.end()
    notes.check_order()
    reported = [r["step"] for r in records_in(job.folder.metrics_path) if r["kind"] == "progress"]
    # The last record of worker 0 may die with it.
    assert notes.steps("on_progress") == sorted(set(reported))


def test_a_callback_that_blocks_delays_a_replacement_and_ends_no_job(start: Start) -> None:
    def kill_and_wait(event: Any) -> None:
        if event.step == 5:
            job.members()["worker 1"].kill()
            job.end_lease("worker 1")  # the launcher is in here and reports nothing

            def known() -> bool:
                return any("worker 1" in str(record.get("text", "")) for record in records(job.folder)[before:])

            before = len(records(job.folder))
            within(90, known, "the coordinator does not know of the death", lambda: True)

    notes = Notes(on_progress=kill_and_wait)
    job = start({"steps": STEPS, "step_s": 0.05}, callbacks=[notes])
    assert job.end()["status"] == "completed"
    notes.check_order()
    assert notes.steps("on_progress")[-1] == STEPS


def test_an_error_stops_the_processes_and_the_message_names_it(start: Start) -> None:
    error, other = ValueError("no"), Notes()
    failing = Notes(on_progress=fails(error, at=5))
    job = start({"steps": 1_000_000}, callbacks=[failing, other])
    members = job.training()
    with pytest.raises(ValueError) as caught:
        job.end()
    assert caught.value is error and not gone(members.values(), limit_s=0)
    for notes in (failing, other):
        notes.check_order()
    assert len(other.of("on_progress")) >= len(failing.of("on_progress")) == 5
    summary = job.folder.summary() or {}
    assert (summary["status"], other.of("on_end")[0].message) == ("stopped", summary["message"])
    assert summary["message"].endswith(": Notes.on_progress raised ValueError: no")


@pytest.mark.chaos
def test_a_job_that_is_scaled_starts_once_repeats_no_event_and_its_roles_lack_what_a_callback_adds_to_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scale_once(event: Any) -> None:
        if event.step >= 20 and len(notes.of("on_evaluation")) == 1:
            scale.ask(tmp_path / "run", workers=2, servers=None)

    notes = Notes(on_evaluation=scale_once, on_start=lambda _: monkeypatch.setenv("SET_BY_A_CALLBACK", "1"))
    train = {**TINY["train"], "epochs": 5}
    config = {**TINY, "train": train, "checkpoint": {"every_steps": 1000}, "eval": {"every_steps": 20}}
    summary = shardkeep.train(config, run_dir=tmp_path / "run", callbacks=[notes])
    assert [start.status for start in summary.starts] == ["stopped", "completed"]
    notes.check_order()
    samples = [event.samples for event in notes.of("on_progress")]
    assert samples == sorted(samples) and samples[-1] == 20_000
    printed = capsys.readouterr().out
    assert "formed in" in printed and "environment" not in printed  # as in: started by exec, seconds later


HANGS = """
import os, signal, sys, threading
import shardkeep


class Hangs(shardkeep.Callback):
    def on_progress(self, event):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(100)
    def on_end(self, summary):
        print(f"end {summary.status}")

try:
    shardkeep.train(eval(sys.argv[1]), run_dir="run", quiet=True, callbacks=[Hangs()])
except shardkeep.errors.JobStopped as error:
    print(error)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("servers", [0, 1], ids=["one process", "processes"])
def test_a_second_ctrl_c_ends_a_callback_that_hangs(tmp_path: Path, servers: int) -> None:
    command = [sys.executable, "-c", HANGS, repr({**TINY, "servers": servers})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    end, stopped = done.stdout.splitlines()
    assert (end, stopped[:16]) == ("end stopped", "stopped at step ")


@pytest.mark.chaos  # the tests above, with real roles
def test_a_job_that_loses_its_workers_reports_what_an_undisturbed_one_reports(tmp_path: Path) -> None:
    data = {"synthetic": {**TINY["data"]["synthetic"], "train_samples": 24_000}}
    config = {
        **TINY,
        "workers": 2,
        "consistency": "sync",
        "data": data,
        "eval": {"every_steps": 20},
        "checkpoint": {"every_steps": 40},
        "train": {"batch_size": 100, "report_every_s": 0.01},
        "liveness": {"lease_s": 150.0},
    }
    victims = {25: "worker 1", 50: "worker 0"}

    def kill(event: Any) -> None:
        if victims and event.step >= min(victims):
            victim = victims.pop(min(victims))
            members = RunFolder(tmp_path / "run").member_list()
            (pid,) = [m["pid"] for m in members if f"{m['role']} {m['index']}" == victim]
            psutil.Process(pid).kill()

    whole, notes = Notes(), Notes(on_progress=kill)
    undisturbed = shardkeep.train(config, run_dir=tmp_path / "whole", quiet=True, callbacks=[whole])
    summary = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True, callbacks=[notes])
    assert not victims and summary.recoveries and summary.state_digest == undisturbed.state_digest
    for each in (whole, notes):
        each.check_order()
    evaluations = [[(e.step, dict(e.metrics)) for e in each.of("on_evaluation")] for each in (whole, notes)]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 6
    assert whole.steps("on_checkpoint") == notes.steps("on_checkpoint") == [40, 80, 120]
