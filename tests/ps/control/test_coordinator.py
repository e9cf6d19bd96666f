"""The coordinator's decisions, with a clock that the test turns and no sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import (
    ConfigError,
    JobError,
    MemberLost,
    PlaceLost,
    ProtocolError,
    ShardkeepError,
    UserError,
)
from shardkeep.base.machine.limits import Limit
from shardkeep.ps.config import TableSpec
from shardkeep.ps.control.records import Offer, Role
from tests.support.cases import every
from tests.support.control_groups import Groups
from tests.support.control_job import TABLES, Job, formed


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


OLD = r"speaks control protocol 9 \(shardkeep 3.0\).*speaks 5 \(shardkeep 1.0\)"


@every(
    ("role", "index", "more", "kind", "text"),
    [
        ("worker", 2, {}, ConfigError, r"^worker index 2: the job has 2 workers; allowed: 0\.\.1$"),
        ("worker", -1, {}, ConfigError, r"^worker index -1: the job has 2 workers; allowed: 0\.\.1$"),
        ("server", 1, {}, ConfigError, r"^server index 1: the job has 1 servers; allowed: 0\.\.0$"),
        ("chief", 0, {}, ProtocolError, "^unknown role 'chief'; allowed: server, worker$"),
        ("worker", 0, {"protocol": 9, "shardkeep": "3.0"}, ProtocolError, OLD),
        ("worker", 0, {"shardkeep": "0.9"}, ProtocolError, "worker 0 runs shardkeep 0.9, the coordinator "),
        ("worker", 0, {"torch": "0.9"}, ProtocolError, "worker 0 runs torch 0.9, the coordinator "),
    ],
)
def test_who_does_not_fit_is_refused_by_what_does_not(
    role: Role, index: int, more: dict[str, Any], kind: type[ShardkeepError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        Job().register(role, index, **more)


def test_a_place_is_refused_that_is_none_or_a_live_members_or_of_a_job_that_is_over() -> None:
    with pytest.raises(ConfigError, match="allowed: none"):
        Job(servers=0).register("server", 0)

    job = Job()
    for _ in range(2):  # a repeated registration is none
        job.register("worker", 0)
    assert len(job.coordinator.status().members) == 1
    with pytest.raises(UserError, match=r"worker 0 is already in the job \(worker 0 \(pid 100 on 10.0.0.7\)\)"):
        job.register("worker", 0, pid=200)
    job.leave("worker", 0, 1, "it broke")
    with pytest.raises(JobError, match=r"worker 1 comes too late: the job is failed: .*it broke"):
        job.register("worker", 1)


def test_a_member_that_is_silent_for_its_lease_fails_the_job_by_name() -> None:
    job = formed(Job())
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
    job = formed(Job(quota=Limit("cpu", groups.root)))
    groups.write({"all/cpu.stat": "nr_periods 99\nnr_throttled 93"})
    job.pass_time(16, alive=[("server", 0), ("worker", 0)])
    why = f"the cpu limit of 10000 100000 was reached ({groups.path('all')}/cpu.max: raise it, or run fewer processes)"
    assert "sent no heartbeat for 15 s" in job.state.message and job.state.message.endswith(f"; {why}")


def test_a_lost_member_is_told_with_the_step_of_the_job_and_before_its_first() -> None:
    job = formed(Job())
    job.pass_time(1, alive=[("worker", 0), ("worker", 1)], step=40)
    job.coordinator.lost("server", 0, pid=100, reason="killed by SIGKILL")
    assert job.state.message == "server 0 (pid 100 on 10.0.0.7) ended: killed by SIGKILL, the job was at step 40"

    job = Job()
    job.register("server", 0)
    job.pass_time(16)
    assert job.state.message.startswith("server 0 (pid 100 on 10.0.0.7) sent no heartbeat")
    assert job.state.message.endswith("last seen before its first step")


def test_leases_hold_while_the_coordinator_itself_stood_still() -> None:
    job = formed(Job())
    job.now += 600
    job.coordinator.tick()
    job.pass_time(10)
    assert job.state.state == "training"
    job.pass_time(6)
    assert job.state.state == "failed"


def test_a_job_that_does_not_form_in_time_after_the_last_newcomer_names_who_is_missing() -> None:
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


@every(
    ("first", "second", "told"),
    [
        ((), (), ""),
        ((), TABLES, "worker 1 has table user, worker 0 has not"),
        (TABLES, (TABLES[0],), "worker 0 has table item, worker 1 has not"),
        (TABLES, (*TABLES, TableSpec(name="ad")), "worker 1 has table ad, worker 0 has not"),
        (TABLES, TABLES[::-1], "their order is user, item on worker 0 and item, user on worker 1"),
        (TABLES, (TABLES[0], TableSpec(name="item", dim=32)), "item.dim is 16 on worker 0 and 32 on worker 1"),
    ],
)
def test_workers_whose_tables_differ_fail_the_job(
    first: tuple[TableSpec, ...], second: tuple[TableSpec, ...], told: str
) -> None:
    job = Job(servers=0)
    for index in range(2):
        job.register("worker", index)
    job.join("worker", 0, first)
    state, formation = job.join("worker", 1, second)
    assert (formation is None) == bool(told)
    if not told:
        return
    assert state.message == f"the workers' tables differ: {told}; all must read the same config and data"
    assert isinstance(state.error(), JobError)
    assert job.opened == []


def test_a_member_with_another_config_is_refused_as_it_joins_by_the_keys_that_differ() -> None:
    settings = {"seed": 1, "train": {"batch_size": 256, "clip_norm": None}, "tables": {"a.b": {"dim": 4}}}
    other = {"train": {"batch_size": 512, "clip_norm": None}, "seed": 1, "tables": {"a.b": {"dim": 8}}}
    job = Job(settings=settings)
    for role, index in job.names:
        job.register(role, index)
    assert job.coordinator.join("server-0-100", Offer(settings=settings))[0].state == "forming"
    with pytest.raises(UserError, match=r"^worker 0 has another config than the coordinator: ") as caught:
        job.coordinator.join("worker-0-100", Offer(TABLES, settings=other))
    assert all(f"{key} in place of" in str(caught.value) for key in ("train.batch_size=512", "tables.a.b.dim=8"))
    assert "seed" not in str(caught.value)


@every(
    ("first", "second", "forms", "text"),
    [
        ("aaaa-eeee", "bbbb-eeee", False, ""),
        ("aaaa-eeee", "aaaa-ffff", True, "reads other evaluation data (fingerprint ffff)"),
        ("", "aaaa", True, ""),
    ],
)
def test_workers_read_the_same_training_data_and_should_read_the_same_evaluation_data(
    first: str, second: str, forms: bool, text: str
) -> None:
    job = Job(servers=0)
    for index, job.data in enumerate((first, second)):
        job.register("worker", index)
        state, formation = job.join("worker", index)
    texts = [call[1]["text"] for call in job.sink.of("event") if call[1].get("phase") == "data"]
    assert len(texts) == bool(text) and all(f"worker 1 (pid 100 on 10.0.0.7) {text}" in one for one in texts)
    if forms:
        assert formation is not None and formation.data == (first or second)
    else:
        told = "worker 1 (pid 100 on 10.0.0.7) reads other training data (fingerprint bbbb) than "
        told += "worker 0 (pid 100 on 10.0.0.7) reads (fingerprint aaaa); all workers must read the same files"
        assert formation is None and state.exit_code == 2 and state.message.startswith(told)


def test_reports_reach_the_sink_once_and_in_order_and_strange_ones_are_refused() -> None:
    job = formed(Job())
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
    with pytest.raises(ProtocolError, match="reported a 'gossip'; allowed: progress, eval"):
        tell("worker-0-100", sequence=4, kind="gossip", record={})
    with pytest.raises(ProtocolError, match="only worker 0"):
        tell("worker-1-100", sequence=2, kind="summary", record={})
    with pytest.raises(PlaceLost, match="does not know this member"):
        job.coordinator.heartbeat("somebody")


def test_status_shows_every_member_and_workers_meet_where_all_have_come_as_far() -> None:
    job = formed(Job())
    job.coordinator.heartbeat("worker-1-100", step=3, phase="train")
    job.now += 4
    members = {(m.role, m.index): m for m in job.coordinator.status().members}
    worker = members["worker", 1]
    assert (worker.step, worker.phase, worker.age_s, worker.condition) == (3, "train", 4.0, "joined")

    job = formed(Job(servers=1, workers=2))
    assert job.coordinator.meet("worker-0-100", 1)[1] == (1,)
    assert job.coordinator.meet("worker-1-100", 1)[1] == ()
    assert job.coordinator.meet("worker-1-100", 2)[1] == (0,)
    assert job.coordinator.meet("worker-0-100", 1)[1] == ()  # a repeated call, after the other left it
    assert job.coordinator.meet("worker-0-100", 2)[1] == ()
