"""`shardkeep node` on two machines that are commands here, with the real coordinator and stand-ins for other roles."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from shardkeep import core_plan
from shardkeep.base.errors import UserError
from shardkeep.base.machine.topology import Topology
from shardkeep.config import JobConfig
from shardkeep.launch.machine import Machine
from shardkeep.launch.node import NodeOptions, run_node
from shardkeep.launch.processes.starter import RoleCommand, Starter
from shardkeep.launch.stopping.stop import stop_run
from tests.support.cases import every
from tests.support.cluster import gone, stalled
from tests.support.machines import LOOPBACK, Machines
from tests.support.stand_in import LEASE_S

pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.skipif(sys.platform != "linux", reason="stand-ins are forked"),
]
ENDLESS = {"steps": 1_000_000}
Start = Callable[..., Machines]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Start]:
    config = {"servers": 2, "workers": 3, "liveness": {"lease_s": LEASE_S}}
    with contextlib.ExitStack() as opened:
        yield lambda plan: opened.enter_context(Machines(tmp_path, config, plan))


def options(rank: int, nodes: int, only: str = "") -> NodeOptions:
    return NodeOptions(Path("job.yaml"), Path("run"), Machine(rank, nodes), LOOPBACK, only)


@every("only", ["", "servers", "workers"])
@every("nodes", [1, 2, 3])
def test_machines_share_all_roles_and_one_of_them_leads(nodes: int, only: str) -> None:
    config = JobConfig.model_validate({"servers": 3, "workers": 5})
    each = [options(rank, nodes, only) for rank in range(nodes)]
    servers = [("server", index) for index in range(3)] if only != "workers" else []
    workers = [("worker", index) for index in range(5)] if only != "servers" else []
    assert sorted(role for one in each for role in one.share(config)) == servers + workers
    assert [one.leads for one in each] == [only != "workers"] + [False] * (nodes - 1)


def test_a_machine_without_a_role_ends_with_0_at_once_and_a_job_in_one_process_is_refused(tmp_path: Path) -> None:
    def run(rank: int, nodes: int, servers: int) -> int:
        job = JobConfig.model_validate({"servers": servers, "workers": 1})
        return run_node(job, replace(options(rank, nodes), run=tmp_path), lambda _: contextlib.nullcontext(Starter()))

    assert run(2, 3, 1) == 0
    with pytest.raises(UserError, match="servers: 0 is a job in one process"):
        run(0, 1, 0)


@every(("nodes", "threads"), [(1, 1), (4, 3)])
def test_a_machine_divides_its_cores_among_the_workers_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, threads: int
) -> None:
    class Refuses(Starter):
        def start(self, command: RoleCommand) -> NoReturn:
            raise UserError(f"threads {command.env['OMP_NUM_THREADS']}")

    monkeypatch.setattr(core_plan, "read_topology", lambda: Topology({0: [(core,) for core in range(6)]}))
    job = JobConfig.model_validate({"servers": 8, "workers": 8, "threads": "auto"})
    with pytest.raises(UserError, match=f"^threads {threads}$"):
        run_node(job, replace(options(0, nodes), run=tmp_path / "run"), lambda _: contextlib.nullcontext(Refuses()))


@every("by_program", [False, True])
def test_the_command_that_continues_a_job_has_its_settings_and_its_trust(by_program: bool) -> None:
    own = {"overrides": ("seed=3",), "token_file": Path("/t"), "tls": Path("/tls"), "insecure": True}
    words = replace(options(0, 2), by_program=by_program, **own).coordinator()
    again = "shardkeep node job.yaml --run-dir run --set seed=3 --token-file /t --tls /tls --insecure-data-plane"
    assert words[-2:] == ["--again", again] if not by_program else "--again" not in words


def test_a_killed_coordinator_and_a_machine_that_leaves_are_replaced_and_the_job_completes(machines: Start) -> None:
    job = machines({"hold": 3})
    first, second = job.all()
    members = job.held()
    known, given = job.run.config_path.read_text(), job.config.read_text()
    job.config.write_text("servers: two")
    members["coordinator 0"].kill()
    job.until(lambda: job.run.number() > 1 and job.run.address() is not None, "no other coordinator")
    second.signal(signal.SIGTERM)
    assert second.end().code == 143
    assert not gone([members["server 1"], members["worker 1"]], limit_s=0)
    assert first.running and members["server 0"].is_running() and not job.summary
    job.config.write_text(given.replace("workers: 3", "workers: 9\ntrain: {batch_size: 9}"))
    again = job.start(1)
    unused = "leads until the next start; not used: workers=9 in place of 3, train.batch_size=9 in place of 512"
    again.logged(f"node/1 - {job.run.config_path} {unused}")
    job.until(lambda: bool(job.recoveries()), "no recovery")
    job.go()
    assert job.end([first, again]) == [0, 0]
    assert (job.summary["status"], job.summary["steps"]) == ("completed", 5)
    assert not gone(members.values(), limit_s=90)
    assert all(recovery["lost_steps"] == 0 for recovery in job.summary["recoveries"])
    assert "not used: " in job.run.log_path("coordinator", 0).read_text() and job.run.config_path.read_text() == known


def test_a_config_that_was_changed_in_the_run_folder_ends_the_job_with_2_on_all_machines(machines: Start) -> None:
    job = machines({"hold": 3})
    nodes = job.all()
    members = job.held()
    job.run.config_path.write_text(job.run.config_path.read_text().replace("batch_size: 512", "batch_size: 9"))
    members["coordinator 0"].kill()
    job.until(lambda: job.run.number() > 1 and job.run.address() is not None, "no other coordinator")
    members["worker 1"].kill()
    for ended in [node.end(limit_s=90) for node in nodes]:
        assert (
            ended.code == 2 and "another config than the coordinator: train.batch_size=512 in place of 9" in ended.err
        )


def test_a_job_whose_first_machine_is_to_leave_stops_and_completes_when_all_are_started_again(machines: Start) -> None:
    job = machines({"hold": 3})
    second = job.start(1)
    second.logged("node/1 - waiting for the coordinator")
    nodes = [job.start(0), second]
    members = job.training()
    assert list(members) == ["coordinator 0", "server 0", "server 1", "worker 0", "worker 1", "worker 2"]
    nodes[0].signal(signal.SIGTERM)
    assert job.end(nodes) == [143, 143]
    assert job.summary["status"] == "stopped" and not gone(members.values(), limit_s=0) and not job.recoveries()
    assert job.run.coordinator_command() == ["shardkeep", "node", str(job.config), "--run-dir", str(job.run.path)]
    job.go()
    second = job.start(1)  # sees the summary of the earlier start, and waits
    second.logged("node/1 - waiting for the coordinator")
    assert job.end([job.start(0), second]) == [0, 0]
    assert (job.summary["status"], job.summary["steps"]) == ("completed", 5)
    assert job.end(job.all()) == [0, 0], "started again"
    assert job.summary["status"] == "completed"
    job.config.write_text(job.config.read_text().replace("workers: 3", "workers: 4"))
    assert job.end(job.all()) == [2, 2] and job.summary["status"] == "completed"


@pytest.mark.slow
def test_a_job_that_lost_a_machine_is_left_as_it_is_by_the_first_and_taken_over(machines: Start) -> None:
    job = machines({"hold": 3})
    first, second = job.all()
    members = job.training()
    for process in (second.process, members["server 1"], members["worker 1"]):
        process.kill()
    job.end_lease("server 1", "worker 1")
    job.until(lambda: job.run.take_over()["state"]["state"] == "recovering", "the loss is not seen")
    first.signal(signal.SIGTERM)  # as an engine does that starts a whole job again
    assert first.end().code == 143
    assert not job.summary and job.run.take_over()["state"]["state"] == "recovering"
    job.go()
    assert job.end(job.all()) == [0, 0]
    assert (job.summary["steps"], len(job.summary["starts"])) == (5, 1)


@pytest.mark.slow
def test_a_machine_whose_roles_were_declared_dead_starts_them_again(machines: Start) -> None:
    job = machines({"hold": 3})
    nodes = job.all()
    members = job.held()
    with contextlib.ExitStack() as standing:
        for process in (nodes[1].process, members["server 1"], members["worker 1"]):
            standing.enter_context(stalled(process))
        job.end_lease("server 1", "worker 1")
        job.until(lambda: job.run.take_over()["state"]["state"] == "recovering", "the loss is not seen")
        members["coordinator 0"].kill()
        job.until(lambda: job.run.number() > 1 and job.run.address() is not None, "no other coordinator")
    job.until(lambda: bool(job.recoveries()), "no recovery")
    job.go()
    assert job.end(nodes) == [0, 0]
    assert all(recovery["lost_steps"] == 0 for recovery in job.summary["recoveries"])


def test_a_job_that_a_person_stops_ends_with_0_on_all_machines(machines: Start) -> None:
    job = machines(ENDLESS)
    nodes = job.all()
    job.training()
    stop_run(job.run.path, timeout_s=90)
    assert job.end(nodes) == [0, 0]
    assert job.summary["status"] == "stopped"


def test_a_job_that_fails_ends_with_its_code_and_its_words_on_all_machines(machines: Start) -> None:
    endings = [node.end(limit_s=90) for node in machines({**ENDLESS, "worker 1": {"at": 3, "do": 2}}).all()]
    assert [ended.code for ended in endings] == [2, 2]
    for ended in endings:
        assert [line for line in ended.err.splitlines() if line.startswith("error: ") and "no such column" in line]


def test_a_machine_without_a_coordinator_waits_and_leaves_when_it_is_told_to(machines: Start) -> None:
    job = machines({})
    second = job.start(1)
    second.logged("node/1 - waiting for the coordinator")
    second.signal(signal.SIGTERM)
    assert second.end().code == 143
    assert not job.run.member_list()
