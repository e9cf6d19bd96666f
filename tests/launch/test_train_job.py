"""Role processes as the launcher sees them, and the supervisor with shells as roles, which end as the test says."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from shardkeep import core_plan
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, JobStopped, UserError
from shardkeep.base.logs.json_log import printed_line
from shardkeep.base.machine.topology import Topology
from shardkeep.config import JobConfig
from shardkeep.launch.processes.children import Child, Death, child_environment, end_all, last_words, wait_all
from shardkeep.launch.processes.role_starts import RoleStarts, of_launcher
from shardkeep.launch.processes.starter import RoleCommand, Starter
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.launch.train_job import TrainJob
from shardkeep.run.folder import RunFolder
from shardkeep.view.screen import Screen
from tests.support.cases import every

pytestmark = pytest.mark.waits_for_processes


def test_children_are_named_by_their_exit_code_with_their_last_words_or_by_their_signal_and_leave_nothing(
    tmp_path: Path,
) -> None:
    env = child_environment(os.environ, threads=1)
    arguments = {"coordinator": [f"{tmp_path}/absent.yaml"], "worker": ["--coordinator", "127.0.0.1:1", "--index", "0"]}
    commands = [RoleCommand(role, 0, words, tmp_path / f"{role}.log", env) for role, words in arguments.items()]
    wrong, killed = map(Starter().start, commands)
    os.kill(killed.pid, signal.SIGKILL)
    assert wait_all([wrong, killed], Deadline(90.0))
    why = f"{tmp_path}/absent.yaml: cannot be read (No such file or directory)"
    assert wrong.death() == Death("coordinator", 0, wrong.pid, 2, why)
    death = killed.death()
    assert death is not None and death.text() == f"worker 0 (pid {killed.pid}) ended: killed by SIGKILL"
    assert end_all([wrong, killed], grace_s=1.0) == []
    assert not psutil.pid_exists(killed.pid)


OBJECTS = "".join(printed_line("worker", 0, text) + "\n" for text in ("error: data.path: no such file", "bye"))


@every(
    ("log", "expected"),
    [
        ("worker/0 - start\nerror: no such column\nbye\n", "no such column"),
        ("Traceback\n  File x\nValueError: bad\n\n", "ValueError: bad"),
        (OBJECTS, "data.path: no such file"),
        ("", ""),
    ],
)
def test_the_last_words_of_a_log_are_its_error_or_its_last_line(tmp_path: Path, log: str, expected: str) -> None:
    (tmp_path / "log").write_text(log)
    assert last_words(tmp_path / "log") == expected


@every(
    ("code", "words", "how"),
    [
        (-9, "", "killed by SIGKILL"),
        (143, "bye", "left on SIGTERM"),
        (130, "", "left on SIGINT"),
        (1, "out of memory", "exit code 1: out of memory"),
    ],
)
def test_a_death_says_how(code: int, words: str, how: str) -> None:
    assert Death("server", 1, 7, code, words).text() == f"server 1 (pid 7) ended: {how}"


def test_children_get_fixed_threads_and_the_import_path_of_the_user_as_it_is() -> None:
    env = child_environment({"PYTHONPATH": "mine", "HOME": "h"}, threads=3)
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert env["GRPC_ENABLE_FORK_SUPPORT"] == "0"
    assert env["PYTHONPATH"] == "mine" and env["HOME"] == "h"
    assert "PYTHONPATH" not in child_environment({}, threads=3)


# ---- the supervisor ----

WAITS = "exec sleep 60"
KILLED = "kill -KILL $$"


class Shells(Starter):
    """Starts a shell for each role: `plan` has its script by role, or `role index`; others end at once."""

    def __init__(self, plan: Mapping[str, str]) -> None:
        super().__init__()
        self._plan = plan
        self.started: list[Child] = []

    def start(self, command: RoleCommand) -> Child:
        script = self._plan.get(f"{command.role} {command.index}", self._plan.get(command.role, "exit 0"))
        with command.log.open("ab") as output:
            process = subprocess.Popen(
                ["sh", "-c", script, "sh", *command.arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(command.env),
                start_new_session=True,
            )
        self.started.append(Child(command.role, command.index, process, log=command.log))
        return self.started[-1]


def fails(
    folder: Path,
    kind: type[Exception],
    text: str,
    plan: Mapping[str, str],
    *,
    interrupts: Interrupts | None = None,
    threads: int | str = 1,
    code_folder: Path | None = None,
    **recovery: float,
) -> None:
    """The job ends with this error, and leaves nobody."""
    config = JobConfig.model_validate({"servers": 1, "workers": 2, "threads": threads, "recovery": recovery})
    run, shells = RunFolder.create(folder / "run", config), Shells(plan)
    roles = RoleStarts(config, run, shells, of_launcher(run), code_folder=code_folder)
    with pytest.raises(kind, match=text):
        TrainJob(roles, run, Screen(Console(file=StringIO())), interrupts or Interrupts()).run()
    for child in shells.started:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
    if run.path.exists():
        assert (run.summary() or {})["status"] == ("stopped" if kind is JobStopped else "failed")


def test_roles_get_the_threads_that_auto_means_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_plan, "read_topology", lambda: Topology({0: [(core,) for core in range(6)]}))
    plan = {"worker": 'echo "error: $OMP_NUM_THREADS threads"; exit 2'}
    fails(tmp_path, UserError, "exit code 2: 3 threads", plan, threads="auto", restarts=0)


@every("role", ["server", "worker"])
def test_servers_and_workers_get_the_folder_of_the_users_modules(tmp_path: Path, role: str) -> None:
    plan = {role: 'case "$*" in *"--code /mine"*) echo "error: has it"; exit 2;; esac'}
    fails(tmp_path, UserError, f"{role} 0 .* exit code 2: has it", plan, code_folder=Path("/mine"), restarts=0)


@every("at_once", [False, True], ids=["before the roles started", "twice"])
def test_an_interrupted_job_is_stopped_and_leaves_nobody(tmp_path: Path, at_once: bool) -> None:
    interrupts = Interrupts()
    interrupts.count, interrupts.at_once = 1 + at_once, at_once
    plan = {"worker": WAITS} if at_once else {}
    fails(tmp_path, JobStopped, r"^stopped before the first step", plan, interrupts=interrupts)


def test_a_run_folder_that_is_removed_ends_the_job_with_one_line(tmp_path: Path) -> None:
    plan = {"worker 0": f"rm -rf {tmp_path / 'run'}; {KILLED}", "server": WAITS, "worker 1": WAITS}
    text = r"run: the run folder cannot be used any more \(No such file or directory\)"
    fails(tmp_path, JobError, text, plan, restarts=3)


def test_roles_that_all_end_without_a_word_before_the_group_forms_are_a_failed_job(tmp_path: Path) -> None:
    fails(tmp_path, JobError, r"^the roles ended without a summary, before the first step; logs: ", {}, restarts=3)
