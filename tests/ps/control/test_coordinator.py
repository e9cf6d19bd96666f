"""The coordinator's decisions, with a clock that the test turns and no sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkeep.base.errors import (
    ConfigError,
    JobError,
    JobStopped,
    MemberLost,
    PlaceLost,
    ProtocolError,
    ShardkeepError,
    UserError,
)
from shardkeep.base.machine.limits import Limit
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.coordinator import STOP_PATIENCE_S
from shardkeep.ps.control.records import Formation, JobState, Record, Role
from shardkeep.ps.server.table.optimizers.adam import AdamConfig
from tests.support.cases import every
from tests.support.control_groups import Groups
from tests.support.control_job import TABLES, Job, ListSink


def test_members_form_a_generation_once_all_have_joined() -> None:
    job = Job(servers=1, workers=2)
    for role, index in job.names:
        job.register(role, index)
    assert job.join("worker", 0)[1] is None
    assert job.join("server", 0)[1] is None
    state, formation = job.join("worker", 1)
    assert formation is not None and formation == job.join("worker", 0)[1] == job.join("server", 0)[1]
    assert (state.state, formation.generation, formation.store_port) == ("training", 1, 4000)
    assert [member.name for member in formation.members] == ["server 0", "worker 0", "worker 1"]
    assert [member.name for member in formation.of_role("worker")] == ["worker 0", "worker 1"]
    assert formation.tables == TABLES
    assert job.opened == [1]
    assert job.sink.of("members") == [("members", 1, ["server 0", "worker 0", "worker 1"])]


def test_registration_hands_out_the_config_and_may_be_repeated() -> None:
    job = Job()
    job.register("worker", 1)
    job.register("worker", 1)
    assert len(job.coordinator.status().members) == 1


@every(
    ("role", "index", "kind", "told"),
    [
        ("worker", 2, ConfigError, "worker index 2: the job has 2 workers; allowed: 0..1"),
        ("worker", -1, ConfigError, "worker index -1: the job has 2 workers; allowed: 0..1"),
        ("server", 1, ConfigError, "server index 1: the job has 1 servers; allowed: 0..0"),
        ("chief", 0, ProtocolError, "unknown role 'chief'; allowed: server, worker"),
    ],
    ids=["too high", "negative", "server", "role"],
)
def test_a_place_that_does_not_exist_is_refused(role: Role, index: int, kind: type[ShardkeepError], told: str) -> None:
    with pytest.raises(kind) as refused:
        Job().register(role, index)
    assert str(refused.value) == told


def test_no_servers_is_told_as_none() -> None:
    with pytest.raises(ConfigError, match="allowed: none"):
        Job(servers=0).register("server", 0)


def test_a_place_held_by_a_live_member_is_refused() -> None:
    job = Job()
    job.register("worker", 0)
    with pytest.raises(UserError, match=r"worker 0 is already in the job \(worker 0 \(pid 100 on 10.0.0.7\)\)"):
        job.register("worker", 0, pid=200)


def test_another_protocol_is_refused_and_both_versions_are_named() -> None:
    with pytest.raises(ProtocolError, match=r"speaks control protocol 9 \(shardkeep 3.0\).*speaks 5 \(shardkeep 1.0\)"):
        Job().register("worker", 0, protocol=9, shardkeep="3.0")


@pytest.mark.parametrize("package", ["shardkeep", "torch"])
def test_another_version_is_refused_and_both_are_named(package: str) -> None:
    with pytest.raises(ProtocolError, match=rf"worker 0 runs {package} 0.9, the coordinator "):
        Job().register("worker", 0, **{package: "0.9"})


def test_nobody_registers_once_the_job_is_over() -> None:
    job = Job()
    job.register("worker", 0)
    job.leave("worker", 0, 1, "it broke")
    with pytest.raises(JobError, match=r"worker 1 comes too late: the job is failed: .*it broke"):
        job.register("worker", 1)


def test_a_member_that_is_silent_for_its_lease_fails_the_job_by_name() -> None:
    job = Job()
    job.form()
    others: list[tuple[Role, int]] = [("server", 0), ("worker", 0)]
    job.pass_time(10, alive=[*others, ("worker", 1)], step=40)
    job.pass_time(15, alive=others, step=41)
    assert job.state.state == "training"
    job.pass_time(1, alive=others, step=41)
    assert job.state.message == (
        "worker 1 (pid 100 on 10.0.0.7) sent no heartbeat for 15 s (lease_s), last seen at step 40"
    )
    assert (job.state.state, job.state.exit_code) == ("failed", 1)
    assert isinstance(job.state.error(), MemberLost)
    assert job.sink.of("finished") == [("finished", "failed", job.state.message, None)]


def test_a_quota_that_slows_the_coordinator_is_named_beside_a_silent_member(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/", {"all": ("/", "")})
    groups.write({"all/cpu.max": "10000 100000", "all/cpu.stat": "nr_periods 9\nnr_throttled 3"})
    job = Job(quota=Limit("cpu", groups.root))
    job.form()
    groups.write({"all/cpu.stat": "nr_periods 99\nnr_throttled 93"})
    job.pass_time(16, alive=[("server", 0), ("worker", 0)])
    why = f"the cpu limit of 10000 100000 was reached ({groups.path('all')}/cpu.max: raise it, or run fewer processes)"
    assert "sent no heartbeat for 15 s" in job.state.message and job.state.message.endswith(f"; {why}")


def test_a_lost_server_is_told_with_the_step_of_the_job() -> None:
    job = Job()
    job.form()
    job.pass_time(1, alive=[("worker", 0), ("worker", 1)], step=40)
    job.coordinator.lost("server", 0, pid=100, reason="killed by SIGKILL")
    assert job.state.message == "server 0 (pid 100 on 10.0.0.7) ended: killed by SIGKILL, the job was at step 40"


def test_leases_hold_while_the_coordinator_itself_stood_still() -> None:
    job = Job()
    job.form()
    job.now += 600
    job.coordinator.tick()
    job.pass_time(10)
    assert job.state.state == "training"
    job.pass_time(6)
    assert job.state.state == "failed"


def test_a_lease_also_ends_before_the_job_has_formed() -> None:
    job = Job()
    job.register("server", 0)
    job.pass_time(16)
    assert job.state.message.startswith("server 0 (pid 100 on 10.0.0.7) sent no heartbeat")
    assert job.state.message.endswith("last seen before its first step")


def test_a_job_that_does_not_form_in_time_names_who_is_missing() -> None:
    job = Job()
    job.register("worker", 0)
    job.register("server", 0)
    job.join("worker", 0)
    alive: list[tuple[Role, int]] = [("worker", 0), ("server", 0)]
    job.pass_time(120, alive=alive)
    assert job.state.state == "forming"
    job.pass_time(1, alive=alive)
    assert job.state.message == (
        "the job did not form within 120 s (form_timeout_s); missing: "
        "server 0 (pid 100 on 10.0.0.7) (registered, not ready), worker 1 (not started)"
    )


def test_the_time_to_form_counts_from_the_last_newcomer() -> None:
    job = Job()
    alive: list[tuple[Role, int]] = []
    for role, index in job.names:
        job.pass_time(100, alive=alive)
        assert job.state.state == "forming"
        job.register(role, index)
        job.register(role, index)  # said again, it is none
        alive.append((role, index))
        assert job.coordinator.status().left_s == 120.0
    job.pass_time(119, alive=alive)
    assert job.coordinator.status().left_s == 1.0


ADAM = TableSpec(name="item", dim=16, optimizer=AdamConfig(lr=0.5))


@every(
    ("tables", "told"),
    [
        ((TABLES[0],), "worker 0 has table item, worker 1 has not"),
        ((*TABLES, TableSpec(name="ad")), "worker 1 has table ad, worker 0 has not"),
        (TABLES[::-1], "their order is user, item on worker 0 and item, user on worker 1"),
        ((TABLES[0], TableSpec(name="item", dim=32)), "item.dim is 16 on worker 0 and 32 on worker 1"),
        ((TABLES[0], ADAM), "item.optimizer.betas is None on worker 0 and [0.9, 0.999] on worker 1"),
    ],
    ids=["missing", "extra", "order", "dim", "optimizer"],
)
def test_workers_whose_tables_differ_fail_the_job(tables: tuple[TableSpec, ...], told: str) -> None:
    job = Job(servers=0)
    for index in range(2):
        job.register("worker", index)
    job.join("worker", 0)
    state, formation = job.join("worker", 1, tables)
    assert formation is None
    assert state.message == f"the workers' tables differ: {told}; all must read the same config and data"
    assert isinstance(state.error(), JobError)
    assert job.opened == []


def joined_with(job: Job, *fingerprints: str) -> tuple[JobState, Formation | None]:
    """Workers that read these data, in the order of their indices; what the last one is answered."""
    for index, job.data in enumerate(fingerprints):
        job.register("worker", index)
        answer = job.join("worker", index)
    return answer


def test_workers_that_read_other_training_data_than_the_first_fail_the_job_as_the_users_mistake() -> None:
    job = Job(servers=0)
    state, formation = joined_with(job, "aaaa-eeee", "bbbb-eeee")
    assert formation is None and state.exit_code == 2
    told = "worker 1 (pid 100 on 10.0.0.7) reads other training data (fingerprint bbbb) than "
    told += "worker 0 (pid 100 on 10.0.0.7) reads (fingerprint aaaa); all workers must read the same files"
    assert state.message.startswith(told)


def test_other_evaluation_data_are_told_and_form_a_group() -> None:
    job = Job(servers=0)
    _, formation = joined_with(job, "aaaa-eeee", "aaaa-ffff")
    assert formation is not None and formation.data == "aaaa-eeee"
    told = [call[1]["text"] for call in job.sink.of("event") if call[1].get("phase") == "data"]
    assert len(told) == 1 and "worker 1 (pid 100 on 10.0.0.7) reads other evaluation data (fingerprint ffff)" in told[0]


def test_a_worker_that_does_not_know_its_data_s_fingerprint_joins_any_group() -> None:
    _, formation = joined_with(Job(servers=0), "", "aaaa")
    assert formation is not None and formation.data == "aaaa"


def test_a_job_without_tables_forms_unless_one_worker_has_some() -> None:
    for tables, formed in ((), True), (TABLES, False):
        job = Job(servers=0, workers=2)
        for index in range(2):
            job.register("worker", index)
        job.join("worker", 0, ())
        state, formation = job.join("worker", 1, tables)
        assert (formation is not None) == formed
        assert formed or "worker 1 has table user, worker 0 has not" in state.message


def test_a_job_is_completed_when_all_workers_left_and_the_summary_is_there() -> None:
    job = Job()
    job.form()
    job.summary()
    assert job.leave("worker", 0).state == "training"
    assert job.leave("worker", 1).state == "completed"
    assert (job.state.exit_code, job.coordinator.status().summary) == (0, {"steps": 7})
    assert job.sink.of("finished") == [("finished", "completed", "", {"steps": 7})]
    assert not job.coordinator.wait_drained(0.0)
    job.leave("server", 0)
    assert job.coordinator.wait_drained(0.0)


def test_a_job_without_a_summary_is_not_completed() -> None:
    job = Job()
    job.form()
    job.leave("worker", 0)
    assert job.leave("worker", 1).message == "all workers are done, but worker 0 reported no summary"
    assert job.state.state == "failed"


@pytest.mark.parametrize(
    ("role", "code", "told"),
    [
        ("worker", 1, "worker 1 (pid 100 on 10.0.0.7) failed (exit code 1): no memory"),
        ("server", 0, "server 0 (pid 100 on 10.0.0.7) left before the job was done: no memory"),
    ],
    ids=["worker fails", "server goes"],
)
def test_a_member_that_leaves_too_early_fails_the_job(role: Role, code: int, told: str) -> None:
    job = Job()
    job.form()
    assert job.leave(role, 1 if role == "worker" else 0, code, "no memory").message == told
    assert (job.state.state, job.state.exit_code) == ("failed", 1)


def test_a_worker_that_leaves_before_the_job_has_formed_fails_it() -> None:
    job = Job()
    job.register("worker", 0)
    assert job.leave("worker", 0).message.endswith("left before the job was done")


def test_a_user_error_of_one_member_is_the_exit_code_and_text_of_the_job() -> None:
    job = Job()
    job.register("worker", 0)
    job.leave("worker", 0, 2, "day_0.tsv row 7 column I3: 'x' is no number")
    error = job.state.error()
    assert isinstance(error, UserError)
    assert str(error) == "day_0.tsv row 7 column I3: 'x' is no number"
    assert job.state.exit_code == 2


def test_the_first_failure_stays() -> None:
    job = Job()
    job.form()
    job.leave("worker", 0, 1, "first")
    job.leave("worker", 1, 2, "second")
    assert "first" in job.state.message and job.state.exit_code == 1
    assert len(job.sink.of("finished")) == 1


def test_the_cause_replaces_a_symptom_that_was_heard_first() -> None:
    job = Job()
    job.form()
    job.leave("worker", 0, 1, "worker 1 closed the connection", symptom=True)
    assert "closed the connection" in job.state.message
    job.leave("server", 0, 1, "also lost it", symptom=True)
    job.coordinator.lost("worker", 1, pid=100, reason="killed by SIGKILL")
    assert job.state.message == (
        "worker 1 (pid 100 on 10.0.0.7) ended: killed by SIGKILL, last seen before its first step"
    )
    first, last = job.sink.of("finished")
    assert first[3] == {"symptom": True}, "a launcher may know the cause"
    assert last[2:] == (job.state.message, None)


def test_a_launchers_news_of_a_death_needs_no_lease() -> None:
    job = Job()
    assert "worker 1 ended before it registered: exit code 3" in (
        job.coordinator.lost("worker", 1, reason="exit code 3").message
    )


@pytest.mark.parametrize("pid", [77, 100], ids=["another process", "it left before"])
def test_a_death_that_is_no_news_changes_nothing(pid: int) -> None:
    job = Job()
    job.form()
    job.summary()
    if pid == 100:
        job.leave("worker", 1)
    job.coordinator.lost("worker", 1, pid=pid, reason="killed by SIGKILL")
    assert job.state.state == "training"


def test_stop_lets_workers_leave_in_order() -> None:
    job = Job()
    job.form()
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


def test_stop_before_anybody_came_ends_the_job_at_once() -> None:
    job = Job()
    assert job.coordinator.stop("changed my mind").message == "stopped before the first step: changed my mind"
    assert job.coordinator.stop("again").message == "stopped before the first step: changed my mind"


def test_stop_does_not_wait_for_a_worker_that_died() -> None:
    job = Job()
    job.form()
    job.coordinator.stop("enough")
    job.leave("worker", 0)
    job.pass_time(16)
    assert job.state.state == "stopped"


def test_stop_does_not_wait_for_ever_for_a_worker_that_is_stuck() -> None:
    job = Job()
    job.form()
    job.coordinator.stop("enough")
    job.pass_time(int(STOP_PATIENCE_S), alive=job.names)
    assert job.state.state == "stopping"
    job.pass_time(1, alive=job.names)
    late = "3 members did not leave in 600 s; there is no checkpoint"
    assert job.state.message == f"stopped before the first step: enough ({late})"


def test_a_stop_with_a_limit_is_over_in_time_and_names_the_last_checkpoint() -> None:
    job = Job()
    job.form()
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
    late = "2 members did not leave in 22 s; the last checkpoint is that of step 100"
    assert job.state.message == f"stopped at step 130: Ctrl-C ({late})"


def test_a_member_in_a_stopping_job_gets_no_formation() -> None:
    job = Job()
    job.register("worker", 0)
    job.coordinator.stop("enough")
    state, formation = job.join("worker", 0)
    assert (state.state, formation) == ("stopping", None)


def test_reports_reach_the_sink_once_and_in_order() -> None:
    job = Job()
    job.form()
    tell = job.coordinator.report
    for sequence, kind, record in [
        (1, "phase", {"phase": "train"}),
        (2, "progress", {"step": 5}),
        (2, "progress", {"step": 5}),
        (3, "eval", {"auc": 0.8}),
    ]:
        tell("worker-0-100", sequence=sequence, kind=kind, record=record)
    tell("worker-1-100", sequence=1, kind="progress", record={"step": 6})
    status = job.coordinator.status()
    assert status.progress["step"] == 5  # worker 0's
    assert status.evaluation["auc"] == 0.8
    assert [call[1]["step"] for call in job.sink.of("progress")] == [5, 6]
    own = [event for event in status.events if event["role"] == "worker"]
    assert [(event["kind"], event["index"]) for event in own] == [("phase", 0), ("eval", 0)]
    numbers = [event["seq"] for event in status.events]
    assert numbers == sorted(set(numbers))


def test_a_report_of_an_unknown_kind_or_a_second_summary_is_refused() -> None:
    job = Job()
    job.form()
    with pytest.raises(ProtocolError, match="reported a 'gossip'; allowed: progress, eval"):
        job.coordinator.report("worker-0-100", sequence=1, kind="gossip", record={})
    with pytest.raises(ProtocolError, match="only worker 0"):
        job.coordinator.report("worker-1-100", sequence=1, kind="summary", record={})


def test_an_unknown_token_is_refused() -> None:
    with pytest.raises(PlaceLost, match="does not know this member"):
        Job().coordinator.heartbeat("somebody")


def test_a_summary_that_cannot_be_written_fails_the_job_with_its_reason() -> None:
    class FullDisk(ListSink):
        def finished(self, status: str, message: str, summary: Record | None) -> None:
            raise OSError("No space left on device")

    job = Job(sink=FullDisk())
    job.form()
    job.summary()
    for index in range(2):
        job.leave("worker", index)
    assert job.state.message == "the run folder cannot be written: No space left on device"
    assert job.state.state == "failed"


def test_status_shows_every_member_with_age_step_and_phase() -> None:
    job = Job()
    job.form()
    job.coordinator.heartbeat("worker-1-100", step=3, phase="train")
    job.now += 4
    members = {(m.role, m.index): m for m in job.coordinator.status().members}
    worker = members["worker", 1]
    assert (worker.step, worker.phase, worker.age_s, worker.condition) == (3, "train", 4.0, "joined")


def test_workers_meet_where_all_have_come_as_far() -> None:
    job = Job(servers=1, workers=2)
    job.form()
    assert job.coordinator.meet("worker-0-100", 1)[1] == (1,)
    assert job.coordinator.meet("worker-1-100", 1)[1] == ()
    assert job.coordinator.meet("worker-1-100", 2)[1] == (0,)
    assert job.coordinator.meet("worker-0-100", 1)[1] == ()  # a repeated call, after the other left it
    assert job.coordinator.meet("worker-0-100", 2)[1] == ()
