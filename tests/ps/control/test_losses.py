"""How much a job may lose by a recovery, and where its checkpoints go: by members that a test plays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardkeep.base.errors import ConfigError
from shardkeep.ps.control.records import (
    PROTOCOL_VERSION,
    Hello,
    Member,
    Offer,
    RecoveryFolder,
    Registration,
    ResumeRange,
    Role,
    Shared,
)
from shardkeep.ps.control.recovery import Losses
from tests.support.cases import every
from tests.support.control_job import TABLES, VERSIONS, formed
from tests.support.recovering import Recovering, checkpoint, held, reported, take_over

JOURNAL = "server 0 came back without its journal, which was kept in /a/recovery/J/server-0 on one"
SHARED = Shared("/runs/first/checkpoints", "token")


def reborn(job: Recovering, span: ResumeRange, *, step: int) -> None:
    """Server 0 is killed at a step, and another comes with a resume range."""
    job.coordinator.heartbeat("worker-0-100", step=step)
    job.kill("server", 0)
    job.workers_come_back(held(step - 3, step))
    job.replaced("server", 0, span)


def report(job: Recovering, sequence: int, **record: Any) -> None:
    job.coordinator.report("worker-0-100", sequence=sequence, kind="phase", record={"phase": "checkpoint", **record})


def test_a_server_without_its_journal_ends_a_job_that_keeps_no_checkpoint() -> None:
    job = formed(Recovering(losses=Losses(None, 0)))
    reborn(job, replace(held(0, 0), why=JOURNAL), step=31)
    assert (job.state.state, job.state.exit_code) == ("failed", 1)
    assert job.state.message == (
        "server 0 (pid 100 on 10.0.0.7) ended: killed by SIGKILL, the job was at step 31; "
        f"{JOURNAL}; 31 steps would be lost by going back to step 0, as no checkpoint is there; "
        "recovery.max_lost_steps allows 0, as no checkpoints are kept"
    )


@every(
    ("most", "every", "step", "goes_on"),
    [
        (None, 20, 59, True),  # the checkpoint of step 40 may be being written
        (None, 20, 61, False),
        (11, 20, 31, True),
        (10, 20, 31, False),
        (1000, 0, 999, True),
        (None, None, 119, True),  # auto: too early to say
        (None, None, 121, False),
        (0, 0, 20, True),
    ],
)
def test_a_job_goes_back_by_as_many_steps_as_it_may(
    most: int | None, every: int | None, step: int, goes_on: bool
) -> None:
    job = formed(Recovering(losses=Losses(most, every)))
    checkpoint(job, 20)
    reborn(job, held(20, 20), step=step)
    assert job.state.state == ("training" if goes_on else "failed")
    assert not goes_on or reported(job)[0]["step"] == 20


def test_a_period_is_one_after_a_failed_checkpoint_and_for_another_coordinator() -> None:
    job = formed(Recovering(losses=Losses(None, 20)))
    checkpoint(job, 20)
    report(job, 2, step=40, text="no checkpoint: disk full")
    reborn(job, held(20, 20), step=45)
    assert job.state.state == "failed" and "allows 20, of one checkpoint period" in job.state.message

    job = formed(Recovering(losses=Losses(None, None)))
    report(job, 1, step=50, every_steps=400)
    take_over(job)
    reborn(job, held(0, 0), step=700)
    assert job.state.state == "training"


def test_a_server_that_goes_on_alone_from_too_old_rows_ends_the_job() -> None:
    span = ResumeRange(0, 20, holds=True, saved=20, lost_from=20, why=JOURNAL)
    for most, state in ((11, "training"), (10, "failed")):
        job = formed(Recovering(losses=Losses(most, 20)))
        reborn(job, span, step=31)
        assert job.state.state == state
    assert f"{JOURNAL}; 11 steps would be lost by following the others from step 20" in job.state.message


@every("most", [0, 31])
def test_the_last_worker_with_the_tower_and_a_server_dead_at_once_end_a_job_or_bring_it_back(most: int) -> None:
    why = "worker 0 came back without its tower states"
    job = formed(Recovering(workers=1, losses=Losses(most, 0)))
    job.coordinator.heartbeat("worker-0-100", step=31)
    job.kill("server", 0)
    job.kill("worker", 0)
    job.replaced("server", 0, held(31, 31))
    job.replaced("worker", 0, ResumeRange(why=why))
    text = reported(job)[0]["text"] if most else job.state.message
    assert (f"; 31 steps are lost: {why}" if most else f"{why}; 31 steps") in text


def test_nobody_goes_back_to_a_deleted_checkpoint() -> None:
    job = formed(Recovering(losses=Losses(100, 20)))
    checkpoint(job, 20)
    checkpoint(job, 40, sequence=2)
    reborn(job, replace(held(20, 20), saved=20), step=45)
    assert (job.state.state, reported(job)[0]["step"]) == ("training", 20)
    texts = [call[1].get("text") for call in job.sink.of("event")]
    assert "warning: the checkpoint of step 40 is missing" in texts


# ---- what a member kept, and the folder that all may share ----


def admission(job: Recovering, role: Role, index: int, pid: int) -> Registration:
    member = Member(role, index, "10.0.0.7", pid)
    return job.coordinator.register(Hello(member, f"{role}-{index}-{pid}", PROTOCOL_VERSION, VERSIONS))


@every("taken_over", [False, True])
def test_a_replacement_hears_where_the_one_before_kept_its_state(taken_over: bool) -> None:
    job = Recovering()
    kept = RecoveryFolder("one", "/a/recovery/J/server-0")
    job.register("server", 0)
    job.coordinator.join("server-0-100", Offer(), kept=kept)
    for index in (0, 1):
        job.register("worker", index)
        job.join("worker", index)
    if taken_over:
        take_over(job)
    for dead, another in ((100, 200), (200, 300)):  # the second one dies before it has joined
        job.kill("server", 0, pid=dead)
        assert admission(job, "server", 0, another).kept == kept
    job.kill("worker", 1)
    assert admission(job, "worker", 1, 300).kept == RecoveryFolder()


def test_a_refused_replacement_leaves_its_place_to_another() -> None:
    job = formed(Recovering(restarts=1))
    job.coordinator.heartbeat("worker-0-100", step=4)
    job.kill("server", 0)
    for pid in (200, 201, 202):
        job.register("server", 0, pid=pid)
        job.coordinator.leave(f"server-0-{pid}", code=2, message="server 0 cannot be replaced", refused=True)
        assert job.state.state == "recovering"
    job.workers_come_back()
    assert job.replaced("server", 0, pid=300) is not None


def joined(job: Recovering, **unseen: str) -> None:
    for role, index in job.names:
        assert admission(job, role, index, 100).shared == job.shared
        offer = Offer(TABLES if role == "worker" else None, unseen=unseen.get(f"{role}_{index}", ""))
        job.coordinator.join(f"{role}-{index}-100", offer)


def test_checkpoints_go_to_the_coordinators_folder_when_all_members_see_it_and_stay_there() -> None:
    job = Recovering(shared=SHARED)
    joined(job)
    job.coordinator.heartbeat("worker-0-100", step=4)
    job.kill("server", 0)
    another = admission(job, "server", 0, 200)
    assert another.formation is not None and another.formation.checkpoints == SHARED.folder
    assert another.shared is None
    job.workers_come_back()
    again = job.come_back("server", 0, pid=200, after=0)
    assert again is not None and again.checkpoints == SHARED.folder


ALONE, APART = ["one", "one", "one"], ["one", "two", "three"]
KEEPS = "/runs/first/recovery/J/server-0"


@every(
    ("setting", "hosts", "blind", "expected"),
    [
        ("auto", APART, "", "fsync"),
        ("auto", APART, "worker 1", "fsync"),
        ("auto", ["one", "one", "two"], "", "fsync"),
        ("auto", ["one", "one", "two"], "worker 1", f"os; no other host is known to see {KEEPS} of server 0"),
        ("auto", APART, "server 0", f"os; no other host is known to see {KEEPS} of server 0"),
        ("auto", ALONE, "", "os"),
        ("fsync", ALONE, "server 0", "fsync"),
        ("off", APART, "", "off"),
        ("", APART, "", ""),
    ],
)
def test_journals_are_synced_where_other_hosts_see_them_or_as_the_config_says_and_stay_so(
    setting: str, hosts: list[str], blind: str, expected: str
) -> None:
    job = Recovering(losses=Losses(journal=setting))
    for (role, index), host in zip(job.names, hosts, strict=True):
        token, sees = f"{role}-{index}-100", blind != f"{role} {index}"
        kept = RecoveryFolder() if index else RecoveryFolder(host, KEEPS, shared=sees)
        job.coordinator.register(Hello(Member(role, index, host, 100), token, PROTOCOL_VERSION, VERSIONS))
        offer = Offer(TABLES if role == "worker" else None, unseen="" if sees and index else "no")
        job.coordinator.join(token, offer, kept=kept)
    journal, _, why = expected.partition("; ")
    take_over(job)
    job.kill("server", 0)
    admission(job, "server", 0, 200)
    job.workers_come_back()
    again = job.come_back("server", 0, pid=200, after=0)
    assert again is not None and again.journal == journal
    events = [call[1] for call in job.sink.of("event")]
    lines = [event["text"] for event in events if event.get("phase") == "journal"]
    assert len(lines) == bool(setting) and all(text.startswith(f"{journal}: ") and text.endswith(why) for text in lines)
    assert {event["journal"] for event in events if event.get("phase") == "formed"} == {journal}


def test_a_member_that_does_not_see_the_folder_leaves_the_job_without_checkpoints_unless_it_asked_for_them() -> None:
    job = Recovering(shared=SHARED, losses=Losses(None, None))
    joined(job, worker_1="on two /runs/first/checkpoints: no such file or directory")
    take_over(job)
    job.kill("server", 0)
    again = admission(job, "server", 0, 200)
    assert again.formation is not None and again.formation.checkpoints == ""
    warning = (
        "no checkpoints are kept: not all members can use /runs/first/checkpoints (worker 1: on two "
        "/runs/first/checkpoints: no such file or directory); set checkpoint.dir to a folder that all members share"
    )
    assert f"warning: {warning}" in [call[1].get("text") for call in job.sink.of("event")]
    job.summary()
    for index in (0, 1):
        job.leave("worker", index)
    ((_, status, _, summary),) = job.sink.of("finished")
    assert status == "incomplete" and summary is not None and summary["warnings"] == [warning]
    assert job.state.exit_code == 1 and "the model is not saved" in job.state.message

    job = Recovering(shared=replace(SHARED, needed_by="checkpoint.every_steps: 20"))
    joined(job, server_0="on two: no such file or directory")
    assert (job.state.state, job.state.exit_code) == ("failed", ConfigError.exit_code)
    assert job.state.message.startswith("checkpoint.every_steps: 20: not all members can use /runs/first/checkpoints")
