"""How a job ends: completed, failed by a member or a death, or stopped."""

from __future__ import annotations

from shardkeep.base.deadlines import SILENCE_S
from shardkeep.base.errors import JobStopped, UserError
from shardkeep.ps.control.records import Role
from tests.support.cases import every
from tests.support.control_job import Job, formed
from tests.support.recovering import Recovering

SERVER = "server 0 (pid 100 on 10.0.0.7)"
DEATH = "worker 1 (pid 100 on 10.0.0.7) ended: killed by SIGKILL, last seen before its first step"


def test_a_job_is_completed_when_all_workers_left_and_the_summary_is_there() -> None:
    job = formed(Job())
    job.summary()
    for pid in (77, 100):
        job.coordinator.lost(
            "worker", 1, pid=pid, reason="killed by SIGKILL"
        )  # no news: of another, and of one that left
        assert job.leave("worker", 1).state == "training"
    assert job.leave("worker", 0).state == "completed"
    assert (job.state.exit_code, job.coordinator.status().summary) == (0, {"steps": 7})
    assert job.sink.of("finished") == [("finished", "completed", "", {"steps": 7})]
    assert not job.coordinator.wait_drained(0.0)
    job.leave("server", 0)
    assert job.coordinator.wait_drained(0.0)

    job = formed(Job())
    job.leave("worker", 0)
    assert job.leave("worker", 1).message == "all workers are done, but worker 0 reported no summary"
    assert job.state.state == "failed"


@every(
    ("role", "index", "code", "message"),
    [
        ("worker", 1, 1, "worker 1 (pid 100 on 10.0.0.7) failed (exit code 1): no memory"),
        ("server", 0, 0, "server 0 (pid 100 on 10.0.0.7) left before the job was done: no memory"),
    ],
)
def test_a_member_that_leaves_too_early_fails_the_job_and_the_first_failure_stays(
    role: Role, index: int, code: int, message: str
) -> None:
    job = formed(Job())
    assert job.leave(role, index, code, "no memory").message == message
    assert (job.state.state, job.state.exit_code) == ("failed", 1)
    job.leave("worker", 0, 2, "second")
    assert job.state.message == message and job.state.exit_code == 1
    assert len(job.sink.of("finished")) == 1


def test_the_cause_replaces_a_symptom_that_was_heard_first() -> None:
    job = formed(Job())
    job.leave("worker", 0, 1, "worker 1 closed the connection", symptom=True)
    assert "closed the connection" in job.state.message
    job.leave("server", 0, 1, "also lost it", symptom=True)
    job.coordinator.lost("worker", 1, pid=100, reason="killed by SIGKILL")
    assert job.state.message == DEATH
    first, last = job.sink.of("finished")
    assert first[3] == {"symptom": True}, "a launcher may know the cause"
    assert last[2:] == (DEATH, None)


def test_who_leaves_fails_or_dies_before_the_job_has_formed_fails_it() -> None:
    job = Job()
    job.register("worker", 0)
    assert job.leave("worker", 0).message.endswith("left before the job was done")

    job = Job()
    job.register("worker", 0)
    job.leave("worker", 0, 2, "day_0.tsv row 7 column I3: 'x' is no number")
    error = job.state.error()
    assert isinstance(error, UserError) and str(error) == "day_0.tsv row 7 column I3: 'x' is no number"
    assert job.state.exit_code == 2

    died = Job().coordinator.lost("worker", 1, reason="exit code 3")  # a launcher's news need no lease
    assert "worker 1 ended before it registered: exit code 3" in died.message


def test_a_stop_lets_workers_leave_in_order_and_tells_the_step() -> None:
    job = formed(Job())
    job.pass_time(1, alive=job.names, step=12)
    assert job.coordinator.stop("Ctrl-C").state == "stopping"
    assert isinstance(job.state.error(), JobStopped)
    job.leave("worker", 0)
    assert job.state.state == "stopping"
    job.leave("worker", 1, 1, "stopped")
    assert (job.state.state, job.state.message, job.state.exit_code) == ("stopped", "stopped at step 12: Ctrl-C", 1)
    assert job.sink.of("finished") == [
        ("finished", "stopped", "stopped at step 12: Ctrl-C", {"stopped_by": "Ctrl-C", "steps": 12})
    ]

    job = formed(Job())
    job.coordinator.report(token="worker-0-100", sequence=1, kind="progress", record={"step": 3})
    job.coordinator.stop("Ctrl-C")
    for worker in (0, 1):
        job.leave("worker", worker, 1, "stopped")
    assert job.state.message == "stopped at step 3: Ctrl-C"

    job = Job()
    for reason in ("changed my mind", "again"):
        assert job.coordinator.stop(reason).message == "stopped before the first step: changed my mind"
    job = Job()
    job.register("worker", 0)
    job.coordinator.stop("enough")
    state, formation = job.join("worker", 0)
    assert (state.state, formation) == ("stopping", None)


def test_a_stop_waits_neither_for_the_dead_nor_for_ever_for_one_that_is_stuck() -> None:
    job = formed(Job())
    job.coordinator.stop("enough")
    job.leave("worker", 0)
    job.pass_time(16)
    assert job.state.state == "stopped"

    job = formed(Job())
    job.pass_time(1, alive=job.names, step=130)
    record = {"phase": "checkpoint", "step": 100, "bytes": 9}
    job.coordinator.report("worker-0-100", sequence=1, kind="phase", record=record)
    job.coordinator.stop("Ctrl-C")
    job.coordinator.stop("SIGTERM", limit_s=22.0)
    job.coordinator.stop("Ctrl-C")
    job.leave("worker", 1)
    job.pass_time(22, alive=[("server", 0), ("worker", 0)], step=130)
    assert job.state.state == "stopping"
    job.pass_time(1, alive=[("server", 0), ("worker", 0)], step=130)
    late = (
        f"2 members did not leave in 22 s; {SERVER} was last seen at step 130; the last checkpoint is that of step 100"
    )
    assert job.state.message == f"stopped at step 130: Ctrl-C ({late})"


@every(
    ("stops", "phase", "end", "why"),
    [
        (True, "serving", "stopped", f"3 members did not leave in 600 s; {SERVER} was last seen before its first step"),
        (False, "loading", "failed", f"{SERVER} is stuck: loading: 50 rows, none for 601 s"),
    ],
)
def test_long_work_takes_as_long_as_it_moves_and_ends_when_it_is_stuck(
    stops: bool, phase: str, end: str, why: str
) -> None:
    job = formed(Job())
    if stops:
        job.coordinator.stop("enough")
    before, moves = job.state.state, set()
    for rows in range(1, 51):
        job.pass_time(60, alive=job.names, phase=f"{phase}: {rows} rows")
        moves.add(job.coordinator.heartbeat("worker-0-100", phase=f"{phase}: {rows} rows").moves)
    job.pass_time(SILENCE_S - 60, alive=job.names, phase=f"{phase}: 50 rows")
    assert job.state.state == before and len(moves) == 50
    job.pass_time(2, alive=job.names, phase=f"{phase}: 50 rows")
    assert job.state.state == end and why in job.state.message


def test_a_server_that_joins_again_loads_as_long_as_it_moves() -> None:
    job = formed(Recovering())
    job.workers_come_back()
    for rows in range(50):
        job.pass_time(60, alive=job.names, phase=f"loading: {rows} rows")
    assert job.state.state == "recovering" and job.come_back("server", 0) is not None
