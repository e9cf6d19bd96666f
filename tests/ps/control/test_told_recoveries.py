"""What recoveries cost, as a job tells it: steps, updates, and who died. What another coordinator knows of them, of the
members and of the end of a job whose coordinator died."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest

from shardkeep.base.errors import UserError
from shardkeep.ps.control.records import ResumeRange
from shardkeep.ps.control.recovery import Losses
from tests.support.cases import every
from tests.support.control_job import formed
from tests.support.recovering import Recovering, checkpoint, held, reported, take_over


def test_what_a_dead_worker_had_not_sent_is_told_in_numbers_also_by_another_coordinator() -> None:
    job = formed(Recovering())
    job.coordinator.heartbeat("worker-1-100", step=4, unsent_rows=1234)
    job.kill("worker", 1)
    take_over(job)
    job.recover(killed=("worker", 1))
    job.kill("worker", 1, pid=200)
    job.recover(killed=("worker", 1), pid=300, after=2)
    _, first, second = reported(job)  # after the coordinator's own
    assert (first["lost_unsent_rows"], second["lost_unsent_rows"]) == (1234, 0)
    assert first["text"].endswith("unsent gradient of 1,234 rows is lost") and "lost" not in second["text"]


def test_without_a_common_step_all_go_back_to_the_last_checkpoint_and_no_step_is_lost_twice() -> None:
    job = formed(Recovering())
    checkpoint(job, 20)
    for number, step in enumerate((31, 24)):
        job.coordinator.heartbeat("worker-0-100", step=step)
        job.coordinator.heartbeat("worker-1-100", step=step - 2)
        job.kill("server", 0, 100 + number)
        job.workers_come_back(held(step - 3, step), after=number + 1)
        formation = job.replaced("server", 0, held(20, 20), pid=101 + number)
        assert formation is not None and formation.restores
        assert (formation.start_step, formation.generation) == (20, number + 2)
        job.coordinator.heartbeat("worker-0-100", step=step)  # of before: it has not begun to train again
    assert [(record["went_back"], record["lost_steps"]) for record in reported(job)] == [(True, 11), (True, 4)]


FILE = "/a/journal/g000001-000002.journal"
ENDS = f"the journal of server 1 ends at byte 4096 of {FILE}"


@every(
    ("lost_from", "why", "text"),
    [
        (24, "", f"; server 1 lost its updates since step 24 (7 steps): {ENDS}"),
        (24, "it was given up", "; server 1 lost its updates since step 24 (7 steps): it was given up"),
        (None, "", f"; 11 steps are lost: {ENDS}"),
    ],
    ids=["bounded", "without a journal", "sync"],
)
def test_what_a_short_journal_costs_is_told_in_numbers_and_outlives_the_coordinator(
    lost_from: int | None, why: str, text: str
) -> None:
    job = formed(Recovering(servers=2))
    checkpoint(job, 20)
    job.coordinator.heartbeat("worker-0-100", step=31)
    for role, index in (("server", 1), ("worker", 1)):
        job.kill(role, index)
    for role, index in (("server", 0), ("worker", 0)):
        job.come_back(role, index, held(28, 31))
    job.replaced("worker", 1, ResumeRange())
    span = ResumeRange(0, 24, holds=True, saved=20, lost_from=lost_from, why=why, file=FILE, byte=4096)
    assert job.replaced("server", 1, span) is not None
    take_over(job)
    record = job.recoveries()["done"][0]
    back, lost = lost_from is None, 0 if lost_from is None else 7
    assert (record["went_back"], record["step"], record["lost_steps"]) == (back, 20 if back else 31, lost or 11)
    server, worker = record["died"]
    assert (server["lost_from"], server["lost_steps"], server["file"], server["byte"]) == (lost_from, lost, FILE, 4096)
    assert (worker["lost_from"], worker["lost_steps"], "file" in worker) == (None, 0, False)
    assert reported(job)[0]["text"].endswith(text)


@every(
    ("losses", "journal", "saved", "text"),
    [
        (Losses(None, 20), "os", 0, ", at most 20, and those trained while one is written; above 40 steps the job"),
        (Losses(None, None), "off", 40, "off: a lost server may cost the steps since the last checkpoint"),
        (Losses(None, None), "fsync", 0, "of all workers may cost the steps since the last checkpoint, or all before"),
        (Losses(None, 0), "os", 0, "os: a lost machine may cost the steps since the last checkpoint, or all, as"),
        (Losses(7, 0), "os", 40, " of step 40, as no other is kept; above 7 steps the job ends (recovery.max_lost_"),
        (Losses(period=0), "os", 0, "the steps since the last checkpoint (client.checkpoint), or all without one"),
    ],
)
def test_a_job_tells_before_its_first_step_what_a_machine_failure_may_cost(
    losses: Losses, journal: str, saved: int, text: str
) -> None:
    assert text in losses.at_risk(journal, saved)
    job = formed(Recovering(losses=Losses(losses.most, losses.period, journal=journal)))
    assert losses.at_risk(journal, 0) in [call[1].get("text") for call in job.sink.of("event")]


def test_a_record_tells_when_it_was_and_all_who_died() -> None:
    job = formed(Recovering())
    job.kill("server", 0)
    job.workers_come_back()
    job.kill("worker", 1)
    job.replaced("server", 0)
    job.replaced("worker", 1)
    (record,) = reported(job)
    assert [(d["role"], d["index"]) for d in record["died"]] == [("server", 0), ("worker", 1)]
    assert [d["cause"].split(":")[0] for d in record["died"]] == [
        "server 0 (pid 100 on 10.0.0.7) ended",
        "worker 1 (pid 100 on 10.0.0.7) ended",
    ]
    assert record["cause"] == record["died"][1]["cause"]
    assert abs(datetime.now() - datetime.fromisoformat(record["time"])) < timedelta(minutes=5)


def test_who_died_before_the_first_generation_is_not_told_with_a_later_death() -> None:
    job = Recovering()
    job.register("server", 0)
    job.kill("server", 0)
    job.replaced("server", 0, pid=101)
    for index in (0, 1):
        job.register("worker", index)
        job.come_back("worker", index, after=0)
    assert job.state.state == "training"
    job.come_back("worker", 0, why="ECONNRESET")
    assert "ECONNRESET" in job.state.message
    job.come_back("worker", 1)
    job.come_back("server", 0, after=1, pid=101)
    (record,) = reported(job)
    assert record["died"] == [] and "ECONNRESET" in record["cause"]


# ---- after a take-over ----


def test_causes_outlive_the_coordinator() -> None:
    job = formed(Recovering(servers=2))
    job.kill("server", 0)
    job.kill("server", 1)
    take_over(job)
    for role, index in (("worker", 0), ("worker", 1)):
        job.come_back(role, index)
    for index in (0, 1):
        job.replaced("server", index)
    restart, recovery = reported(job)
    assert restart["text"].startswith("the coordinator was restarted while the job was recovering: server 1 (pid 100")
    assert [d["role"] for d in restart["died"]] == ["coordinator"]
    assert [(d["role"], d["index"]) for d in recovery["died"]] == [("server", 0), ("server", 1)]
    assert recovery["text"].startswith("server 1 (pid 100 on 10.0.0.7) ended: killed by SIGKILL")
    assert "; so did server 0 before; training resumes" in recovery["text"]


def test_another_coordinator_tells_of_a_death_and_of_a_lost_group_what_is_known() -> None:
    job = formed(Recovering())
    job.coordinator.heartbeat("worker-0-100", step=12)
    checkpoint(job, 10)
    job.coordinator.heartbeat("worker-0-100", step=57)
    take_over(job)
    job.kill("server", 0)
    assert job.state.message.endswith("killed by SIGKILL, the job was at step 12 or later")

    job = formed(Recovering())
    job.come_back("worker", 1, why="ECONNRESET")
    take_over(job)
    for role, index in job.names:
        job.come_back(role, index)
    assert reported(job)[1]["text"].startswith(
        "worker 1 (pid 100 on 10.0.0.7) lost the others: ECONNRESET; training resumes"
    )


def test_a_job_that_does_not_form_again_under_another_coordinator_says_why() -> None:
    job = formed(Recovering(replace_timeout_s=10.0))
    job.kill("server", 0)
    take_over(job)
    job.pass_time(11, alive=[("worker", 0), ("worker", 1)])
    assert job.state.state == "failed"
    assert job.state.message.startswith("server 0 (pid 100 on 10.0.0.7) ended: killed by SIGKILL, last seen before")
    assert "; the job did not form within 10 s (recovery.replace_timeout_s)" in job.state.message


def test_a_coordinators_restart_is_recorded_at_the_step_that_it_is_told() -> None:
    job = formed(Recovering())
    job.coordinator.heartbeat("worker-0-100", step=12)
    take_over(job)
    (record,) = reported(job)
    assert record["step"] is None and record["text"] == "the coordinator was restarted; training resumed meanwhile"
    job.coordinator.heartbeat("server-0-100", step=0)  # where the generation began
    job.coordinator.heartbeat("worker-1-100", step=57)
    take_over(job)
    job.coordinator.heartbeat("worker-1-100", step=80)
    assert [record["step"] for record in job.recoveries()["done"]] == [57, 80]


def test_a_step_that_was_told_to_the_coordinator_before_is_none_of_after_going_back() -> None:
    job = formed(Recovering(workers=1))
    checkpoint(job, 20)
    job.coordinator.heartbeat("worker-0-100", step=31)
    job.kill("server", 0)
    job.come_back("worker", 0, held(28, 31))
    assert job.replaced("server", 0, held(20, 20)) is not None
    take_over(job)
    job.coordinator.heartbeat("worker-0-100", step=31)
    assert job.recoveries()["reached"] == 20
    job.coordinator.heartbeat("worker-0-100", step=22)
    assert (job.recoveries()["reached"], job.coordinator.status().members[1].step) == (22, 22)


def test_another_coordinator_takes_over_with_all_places_and_the_summary() -> None:
    job = formed(Recovering())
    job.coordinator.heartbeat("worker-0-100", step=12)
    job.kill("server", 0)
    job.recover()
    name, version = job.coordinator.id, job.state.version
    take_over(job)
    assert (job.state.state, job.state.generation, job.coordinator.id) == ("training", 2, name)
    assert job.state.version > version  # so that every member learns of it at once
    assert job.coordinator.heartbeat("worker-1-100").state == "training"
    job.kill("worker", 1)
    for role, index, pid in (("server", 0, 200), ("worker", 0, 100)):
        job.come_back(role, index, after=2, pid=pid)
    formation = job.replaced("worker", 1, pid=300)
    assert formation is not None and formation.generation == 3
    assert [r["cause"].split(" (")[0] for r in job.recoveries()["done"]] == [
        "server 0",
        "the coordinator was restarted",
        "worker 1",
    ]


def test_a_job_that_was_stopping_has_its_time_to_stop_after_a_take_over_too() -> None:
    job = Recovering()
    job.now = 10_000.0
    job.form()
    job.coordinator.stop("enough")
    take_over(job)
    job.pass_time(20, alive=job.names)
    assert job.state.state == "stopping"
    for index in (0, 1):
        job.leave("worker", index)
    assert job.state.state == "stopped"


def test_what_cannot_be_taken_over_and_what_another_version_kept_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"the coordinator.s stored state of the job is damaged \(KeyError"):
        Recovering().another({"job": "x", "protocol_version": 5})
    job = formed(Recovering())
    for version in (None, 4, 6):
        kept = {**json.loads(json.dumps(job.sink.kept)), "protocol_version": version}
        with pytest.raises(UserError, match=f"control protocol {version or 'before 5'}, and this shardkeep speaks 5"):
            job.another(kept)
