"""The supervisor with stand-in roles: small shells that end as the test says, given to it by a starter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from shardkeep import core_plan
from shardkeep.base.errors import JobError, JobStopped, UserError
from shardkeep.base.machine.topology import Topology
from shardkeep.config import JobConfig
from shardkeep.config.affinity import Cores
from shardkeep.launch.processes.children import Child
from shardkeep.launch.processes.role_starts import RoleStarts, of_launcher
from shardkeep.launch.processes.starter import RoleCommand, Starter
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.train_job import TrainJob
from shardkeep.run.folder import RunFolder
from shardkeep.view.screen import Screen

pytestmark = pytest.mark.waits_for_processes
WAITS = "exec sleep 60"
KILLED = "kill -KILL $$"


class Shells(Starter):
    """Starts a shell for each role: `plan` has its script by role, or `role index`; others end at once."""

    def __init__(self, plan: Mapping[str, str]) -> None:
        super().__init__()
        self._plan = plan
        self.started: list[Child] = []
        self.arguments: list[list[str]] = []
        self.cores: list[Cores | None] = []

    def start(self, command: RoleCommand) -> Child:
        script = self._plan.get(f"{command.role} {command.index}", self._plan.get(command.role, "exit 0"))
        with command.log.open("ab") as output:
            process = subprocess.Popen(
                ["sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(command.env),
                start_new_session=True,
            )
        self.started.append(Child(command.role, command.index, process, log=command.log))
        self.arguments.append(list(command.arguments))
        self.cores.append(command.cores)
        return self.started[-1]

    def names(self) -> list[str]:
        return [f"{child.role} {child.index}" for child in self.started]


def job_config(**recovery: float) -> JobConfig:
    return JobConfig.model_validate({"servers": 1, "workers": 2, "recovery": recovery})


def supervised(tmp_path: Path, shells: Shells, config: JobConfig, interrupts: Interrupts | None = None) -> TrainJob:
    folder = RunFolder.create(tmp_path / "run", config)
    screen = Screen(Console(file=StringIO()))
    roles = RoleStarts(config, folder, shells, of_launcher(folder))
    return TrainJob(roles, folder, screen, interrupts or Interrupts())


def assert_nobody_runs(shells: Shells) -> None:
    for child in shells.started:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_a_member_that_is_killed_is_started_again_as_often_as_restarts_says(tmp_path: Path) -> None:
    shells = Shells({"worker 1": KILLED})
    with pytest.raises(JobError, match=r"^worker 1 \(pid \d+\) ended: killed by SIGKILL, before the first step; logs"):
        supervised(tmp_path, shells, job_config(restarts=2)).run()
    assert shells.names() == ["coordinator 0", "worker 0", "worker 1", "server 0", "worker 1", "worker 1"]
    assert f"(pid {shells.started[-1].pid})" in str(RunFolder(tmp_path / "run").summary())
    assert_nobody_runs(shells)


def test_without_restarts_the_first_death_ends_the_job_and_leaves_nobody(tmp_path: Path) -> None:
    shells = Shells({"coordinator": KILLED, "worker": WAITS, "server": WAITS})
    with pytest.raises(JobError, match=r"^coordinator 0 \(pid \d+\) ended: killed by SIGKILL, before the first step"):
        supervised(tmp_path, shells, job_config(restarts=0)).run()
    assert len(shells.started) == 4
    assert_nobody_runs(shells)


def test_wrong_input_that_a_role_finds_is_the_users_error_and_nobody_is_started_again(tmp_path: Path) -> None:
    shells = Shells({"worker 0": "echo 'error: no such column'; exit 2"})
    with pytest.raises(UserError, match=r"^worker 0 \(pid \d+\) ended: exit code 2: no such column, before the first"):
        supervised(tmp_path, shells, job_config(restarts=3)).run()
    assert len(shells.started) == 4


def test_roles_get_the_threads_that_auto_means_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_plan, "read_topology", lambda: Topology({0: [(core,) for core in range(6)]}))
    config = job_config(restarts=0).model_copy(update={"threads": "auto"})
    with pytest.raises(UserError, match="exit code 2: 3 threads"):
        supervised(tmp_path, Shells({"worker": 'echo "error: $OMP_NUM_THREADS threads"; exit 2'}), config).run()


@pytest.mark.parametrize("at_once", [False, True], ids=["before the roles started", "twice"])
def test_an_interrupted_job_is_stopped_and_leaves_nobody(tmp_path: Path, at_once: bool) -> None:
    interrupts = Interrupts()
    interrupts.count, interrupts.at_once = 1 + at_once, at_once
    shells = Shells({"worker": WAITS} if at_once else {})
    with pytest.raises(JobStopped, match=r"^stopped before the first step"):
        supervised(tmp_path, shells, job_config(), interrupts).run()
    assert RunFolder(tmp_path / "run").summary()["status"] == "stopped"  # type: ignore[index]
    assert_nobody_runs(shells)


def test_a_run_folder_that_is_removed_ends_the_job_with_one_line(tmp_path: Path) -> None:
    shells = Shells({"worker 0": f"rm -rf {tmp_path / 'run'}; {KILLED}", "server": WAITS, "worker 1": WAITS})
    with pytest.raises(JobError, match=r"run: the run folder cannot be used any more \(No such file or directory\)"):
        supervised(tmp_path, shells, job_config(restarts=3)).run()
    assert_nobody_runs(shells)


def test_roles_that_all_end_without_a_word_before_the_group_forms_are_a_failed_job(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"^the roles ended without a summary, before the first step; logs: "):
        supervised(tmp_path, Shells({}), job_config(restarts=3)).run()
    assert RunFolder(tmp_path / "run").summary()["status"] == "failed"  # type: ignore[index]
