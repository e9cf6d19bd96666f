"""What deaths cost, as a job tells it: steps, updates, and who died."""

from __future__ import annotations

from datetime import datetime, timedelta

from shardkeep.ps.control.records import ANY_STEP, ResumeRange, Role
from tests.support.recovering import Recovering, checkpoint, held, report_lost, take_over, told


def test_what_a_dead_worker_had_not_sent_is_told_in_numbers() -> None:
    job = Recovering()
    job.form()
    job.coordinator.heartbeat("worker-1-100", step=4, unsent_rows=1234)
    job.kill("worker", 1)
    job.recover(killed=("worker", 1))
    job.kill("worker", 1, pid=200)
    job.recover(killed=("worker", 1), pid=300, after=2)
    told = [c[1] for c in job.sink.of("event") if c[1].get("phase") == "recovery"]
    assert [record["lost_unsent_rows"] for record in told] == [1234, 0]
    assert told[0]["text"].endswith("unsent gradient of 1,234 rows is lost") and "lost" not in told[1]["text"]


def test_without_a_common_step_all_go_back_to_the_last_checkpoint() -> None:
    job = Recovering()
    job.form()
    job.coordinator.report(
        "worker-0-100", sequence=1, kind="phase", record={"phase": "checkpoint", "step": 20, "bytes": 9}
    )
    job.coordinator.heartbeat("worker-0-100", step=31)
    job.kill("server", 0)
    for index in (0, 1):
        job.come_back("worker", index, held(28, 31))
    job.register("server", 0, pid=200)
    formation = job.come_back("server", 0, held(20, 20), after=0, pid=200)
    assert formation is not None and formation.restores and formation.start_step == 20
    (record,) = [c[1] for c in job.sink.of("event") if c[1].get("phase") == "recovery"]
    assert (record["went_back"], record["lost_steps"]) == (True, 11)


def test_steps_that_were_lost_before_are_not_lost_again() -> None:
    job = Recovering()
    job.form()
    checkpoint(job, 20)
    for number, step in enumerate((31, 24)):
        job.coordinator.heartbeat("worker-0-100", step=step)
        job.kill("server", 0, 100 + number)
        for index in (0, 1):
            job.come_back("worker", index, held(step - 3, step), after=number + 1)
        job.register("server", 0, pid=101 + number)
        formation = job.come_back("server", 0, held(20, 20), after=0, pid=101 + number)
        assert formation is not None and (formation.start_step, formation.generation) == (20, number + 2)
        job.coordinator.heartbeat("worker-0-100", step=step)  # of before: it has not begun to train again
    assert [record["lost_steps"] for record in told(job)] == [11, 4]


def test_a_server_alone_that_lost_updates_is_told_in_numbers() -> None:
    job = Recovering(servers=2)
    job.form()
    checkpoint(job, 20)
    job.coordinator.heartbeat("worker-0-100", step=31)
    job.kill("server", 1)
    for role, index in (("server", 0), ("worker", 0), ("worker", 1)):
        job.come_back(role, index, held(28, 31))
    job.register("server", 1, pid=200)
    report_lost(job, "server-1-200", 20)
    assert job.come_back("server", 1, ResumeRange(0, ANY_STEP, holds=True, saved=20), after=0, pid=200) is not None
    (record,) = told(job)
    assert (record["went_back"], record["step"], record["lost_steps"]) == (False, 31, 11)
    assert [(d["role"], d["index"], d["lost_from"]) for d in record["died"]] == [("server", 1, 20)]
    assert record["text"].endswith("; server 1 lost its updates since step 20")


def test_lost_updates_that_are_told_late_are_in_the_summary_too() -> None:
    job = Recovering(servers=2)
    job.form()
    job.coordinator.heartbeat("worker-0-100", step=31)
    job.kill("server", 1)
    job.kill("worker", 1)
    for role, index in (("server", 0), ("worker", 0)):
        job.come_back(role, index, held(28, 31))
    replaced: list[tuple[Role, int]] = [("server", 1), ("worker", 1)]
    for role, index in replaced:
        job.register(role, index, pid=200)
        job.come_back(role, index, ResumeRange(0, ANY_STEP, holds=role == "server"), after=0, pid=200)
    assert job.state.state == "training"
    report_lost(job, "server-1-200", 20)
    take_over(job)
    record = job.recoveries()["done"][0]
    assert record["lost_steps"] == 11
    assert [(d["role"], d["index"], d["lost_from"]) for d in record["died"]] == [("server", 1, 20), ("worker", 1, None)]


def test_a_record_tells_when_it_was_and_all_who_died() -> None:
    job = Recovering()
    job.form()
    job.kill("server", 0)
    for index in (0, 1):
        job.come_back("worker", index)
    job.kill("worker", 1)
    replaced: list[tuple[Role, int]] = [("server", 0), ("worker", 1)]
    for role, index in replaced:
        job.register(role, index, pid=200)
        job.come_back(role, index, after=0, pid=200)
    (record,) = told(job)
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
    job.register("server", 0, pid=101)
    job.come_back("server", 0, after=0, pid=101)
    for index in (0, 1):
        job.register("worker", index)
        job.come_back("worker", index, after=0)
    assert job.state.state == "training"
    job.come_back("worker", 0, why="ECONNRESET")
    assert "ECONNRESET" in job.state.message
    job.come_back("worker", 1)
    job.come_back("server", 0, after=1, pid=101)
    (record,) = told(job)
    assert record["died"] == [] and "ECONNRESET" in record["cause"]
