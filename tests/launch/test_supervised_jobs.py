"""The supervisor with the real coordinator and stand-ins for workers and servers: ends, deaths, restarts, callbacks."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import socket
import stat
from typing import Any

import psutil
import pytest

from shardkeep.base.errors import JobError, JobStopped, UserError
from shardkeep.launch import train_job
from shardkeep.run.folder import NO_SUMMARY
from shardkeep.run.json_files import numbered
from shardkeep.run.state_files import NAMES
from shardkeep.trust.endpoint import read_token
from tests.support.callbacks import Notes
from tests.support.cluster import gone, kinds, listening_ports, records, stalled, within
from tests.support.stand_in import LEASE_S
from tests.support.stand_ins import Job, Start
from tests.support.strangers import GARBAGE

pytestmark = pytest.mark.waits_for_processes
ENDLESS = {"steps": 1_000_000}


def failure(job: Job, kind: type[Exception] = JobError) -> str:
    """The one line of the error of a failed job, which the summary has as well."""
    with pytest.raises(kind) as caught:
        job.end()
    text, summary = str(caught.value), job.folder.summary() or {}
    assert not isinstance(caught.value, JobStopped)
    assert summary["status"] == "failed" and summary["message"] in text and "\n" not in text
    return text


def test_a_completed_job_fills_its_run_folder_and_leaves_nobody(start: Start) -> None:
    job = start({"hold": 1})
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


@pytest.mark.parametrize("victim", ["coordinator 0", "server 0", "worker 1"])
def test_without_restarts_a_killed_process_or_one_that_hangs_ends_the_job_and_the_line_names_it(
    start: Start, victim: str
) -> None:
    notes, hangs = Notes(), victim == "worker 1"
    job = start(ENDLESS, callbacks=[notes], recovery={"restarts": 0})
    members = job.training()
    name = rf"{victim} \(pid {members[victim].pid}.*\)"
    if hangs:
        members[victim].suspend()
        job.end_lease(victim)
        line = rf"{name} sent no heartbeat for {LEASE_S:g} s \(lease_s\), .*at step \d+"
    else:
        members[victim].kill()
        line = rf"{name} ended: killed by SIGKILL, .*step \d+"
    assert re.match(line, failure(job))
    assert not gone(members.values(), limit_s=0)
    notes.check_order()
    assert notes.of("on_end")[0].status == "failed" and victim in notes.of("on_end")[0].message


def test_each_member_that_a_signal_ends_is_replaced_also_together_with_the_coordinator(start: Start) -> None:
    job = start({"hold": 3})
    job.training()
    deaths = [
        ("server 0", signal.SIGKILL, "killed by SIGKILL"),
        ("worker 0", signal.SIGTERM, "left on SIGTERM"),
        ("worker 1", signal.SIGKILL, "killed by SIGKILL"),
        ("server 0", signal.SIGTERM, "left on SIGTERM"),
    ]
    for number, (victim, sent, how) in enumerate(deaths, 1):
        dead = job.members()[victim]
        dead.send_signal(sent)
        job.until(lambda known=number: len(job.recoveries()) == known, f"no recovery of {victim}")
        assert victim in job.recoveries()[-1]["text"]
        assert f"{victim} (pid {dead.pid}) ended: {how}; starting another" in job.screen
        assert dead.pid != job.members()[victim].pid
    members, replaced = job.members(), job.screen.count("starting another")
    members["coordinator 0"].kill()
    members["worker 1"].kill()
    job.until(lambda: len(job.recoveries()) == len(deaths) + 1, "no recovery of worker 1")
    job.go()
    assert job.end()["steps"] == 5
    assert job.screen.count("starting another") == replaced + 2


def test_a_worker_that_dies_before_the_summary_is_reported_is_replaced_and_one_that_dies_after_it_is_not(
    start: Start,
) -> None:
    job = start({"worker 0": {"at": "gathered", "do": -9}, "worker 1": {"at": "reported", "do": -9}})
    assert (job.end()["status"], job.end()["steps"]) == ("completed", 5)
    (recovery,) = job.recoveries()
    assert "worker 0" in recovery["text"] and "training resumes at step 5" in recovery["text"]


def test_a_member_that_hangs_is_replaced_when_its_lease_ends_and_killed(start: Start) -> None:
    job = start({"hold": 3})
    job.training()
    for number, victim in enumerate(("server 0", "worker 0"), 1):
        hung = job.members()[victim]
        with stalled(hung):
            job.end_lease(victim)
            job.recovered(victim)
        assert not gone([hung], limit_s=90)
        assert job.running and len(job.recoveries()) == number


def test_a_member_that_dies_again_and_again_before_its_step_ends_the_job(start: Start) -> None:
    job = start({"hold": 0, "worker 0": {"at": "formed", "do": -9, "times": 9}}, recovery={"restarts": 2})
    assert re.match(r"worker 0 \(pid \d+.*\) ended: killed by SIGKILL.* 3 times without", failure(job))
    assert job.screen.count("starting another") == len(job.recoveries()) == 2


def test_a_place_is_filled_where_a_member_died_before_the_coordinator_listened(start: Start) -> None:
    """The second death's vacancy waits for its backoff, and meanwhile the coordinator begins to listen."""
    died = {"at": "start", "do": -9, "times": 2}
    job = start({"worker 1": died, "coordinator 0": {"after": "worker 1", "times": 2}})
    assert job.end()["status"] == "completed"
    assert job.screen.count("starting another") == 2


def test_wrong_input_of_a_member_ends_the_job_with_its_words_though_another_aborts_after_it(start: Start) -> None:
    job = start({**ENDLESS, "worker 1": {"at": 3, "do": 2}, "worker 0": {"at": "failed", "do": -signal.SIGABRT}})
    assert re.match(r"(worker 1 .*: )?no such column", failure(job, UserError))


def test_a_member_that_ends_without_a_word_to_the_coordinator_is_a_failure_not_a_stop(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_job, "VERDICT_S", 2 * LEASE_S)  # the test ends before: there is no verdict to wait for
    job = start({**ENDLESS, "hold": 2, "worker 1": {"at": 3, "do": "crash"}})
    job.training()
    job.go()
    line = r"worker 1 \(pid .*\) ended: exit code 1: out of luck, .*step \d+.*; its launcher starts no other"
    assert re.match(line, failure(job))


def test_a_job_outlives_its_coordinator_and_one_damaged_file_but_not_both(start: Start) -> None:
    job = start(ENDLESS)
    first = job.training()["coordinator 0"]
    numbered(job.folder.path, NAMES[0], job.folder.number()).write_bytes(b"")
    first.kill()
    job.until(lambda: bool(job.folder.coordinator_pids() - {first.pid}), "no other coordinator")
    (second,) = map(psutil.Process, job.folder.coordinator_pids())
    job.training(job.step() + 5)

    second.suspend()  # it would write the files again
    for name in NAMES:
        numbered(job.folder.path, name, job.folder.number()).unlink()
    second.kill()
    text = failure(job)
    line = rf"coordinator 0 \(pid {second.pid}\) ended: killed by SIGKILL, last step \d+; no coordinator can take over"
    assert re.match(line, text) and f"shardkeep train --resume {job.folder.path}" in text


def test_a_job_outlives_garbage_on_the_coordinators_ports(start: Start) -> None:
    job = start(ENDLESS)
    members = job.training()
    ports = listening_ports(members["coordinator 0"])
    assert len(ports) == 3  # gRPC, the store and the page
    with contextlib.ExitStack() as held:
        for port, garbage in itertools.product(ports, GARBAGE.values()):
            with contextlib.suppress(OSError):  # refused, or hung up on
                held.enter_context(connection := socket.create_connection(("127.0.0.1", port), timeout=1.0))
                connection.sendall(garbage)
        assert job.training(job.step() + 20) == members
        assert all(process.is_running() for process in members.values()) and not job.recoveries()


# ---- callbacks of jobs in processes; of a job in one process: test_callbacks.py ----


STEPS = 20


def test_deaths_lose_no_event_and_repeat_none_though_a_callback_blocks_until_the_coordinator_knows(
    start: Start,
) -> None:
    victims = {4: "coordinator 0", 8: "server 0", 12: "worker 1"}

    def kill(event: Any) -> None:
        if (victim := victims.pop(event.step, "")) == "worker 1":
            before = len(records(job.folder))
            job.members()[victim].kill()
            job.end_lease(victim)  # the launcher is in here and reports nothing

            def known() -> bool:
                return any(victim in str(record.get("text", "")) for record in records(job.folder)[before:])

            within(90, known, "the coordinator does not know of the death", lambda: True)
            job.go()
        elif victim:
            job.members()[victim].kill()

    notes = Notes(on_progress=kill)
    job = start({"steps": STEPS, "hold": 14}, callbacks=[notes])
    assert job.end()["steps"] == STEPS and not victims
    notes.check_order()
    assert notes.steps("on_progress") == list(range(1, STEPS + 1))
