"""Role processes as the launcher sees them. Real processes, because the system is what is tested here."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from shardkeep.base.deadlines import Deadline
from shardkeep.base.logs.json_log import printed_line
from shardkeep.launch.processes.children import Child, Death, child_environment, end_all, last_words, wait_all
from shardkeep.launch.processes.starter import RoleCommand, Starter
from tests.support.cases import every

LIMIT_S = 90.0


def start(role: str, arguments: list[str], folder: Path) -> Child:
    env = child_environment(os.environ, threads=1)
    return Starter().start(RoleCommand(role, 0, arguments, folder / f"{role}-0.log", env))


@pytest.mark.waits_for_processes
def test_children_are_named_by_their_exit_code_with_their_last_words_or_by_their_signal_and_leave_nothing(
    tmp_path: Path,
) -> None:
    wrong = start("coordinator", [str(tmp_path / "absent.yaml")], tmp_path)
    killed = start("worker", ["--coordinator", "127.0.0.1:1", "--index", "0"], tmp_path)
    os.kill(killed.pid, signal.SIGKILL)
    assert wait_all([wrong, killed], Deadline(LIMIT_S))
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
