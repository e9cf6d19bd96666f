"""Role processes as the launcher sees them. Real processes, because the system is what is tested here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardkeep.base.deadlines import Deadline
from shardkeep.base.logs.json_log import printed_line
from shardkeep.launch.processes.children import (
    Child,
    Death,
    child_environment,
    end_all,
    last_words,
    wait_all,
)
from shardkeep.launch.processes.starter import RoleCommand, Starter
from tests.support.cases import every
from tests.support.cluster import gone, kill

LIMIT_S = 90.0


def start(role: str, arguments: list[str], tmp_path: Path) -> Child:
    env = child_environment(os.environ, threads=1)
    return Starter().start(RoleCommand(role, 0, arguments, tmp_path / f"{role}-0.log", env))


@pytest.mark.waits_for_processes
def test_a_child_with_wrong_input_ends_with_code_2_and_its_last_words(tmp_path: Path) -> None:
    child = start("coordinator", [str(tmp_path / "absent.yaml")], tmp_path)
    assert wait_all([child], Deadline(LIMIT_S))
    death = child.death()
    child.kill()
    assert death is not None
    assert (death.role, death.index, death.pid, death.code) == ("coordinator", 0, child.pid, 2)
    assert death.last_words == f"{tmp_path}/absent.yaml: cannot be read (No such file or directory)"


@pytest.mark.waits_for_processes
def test_killed_children_are_named_by_their_signal_and_leave_nothing(tmp_path: Path) -> None:
    child = start("worker", ["--coordinator", "127.0.0.1:1", "--index", "0"], tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    assert wait_all([child], Deadline(LIMIT_S))
    death = child.death()
    assert death is not None
    assert death.text() == f"worker 0 (pid {child.pid}) ended: killed by SIGKILL"
    assert end_all([child], grace_s=1.0) == []
    assert not psutil.pid_exists(child.pid)


LAUNCHER = """
import sys, time
from pathlib import Path
from tests.launch.test_children import start
folder = Path(sys.argv[1])
(folder / "job.yaml").write_text("seed: 1")
child = start("coordinator", [str(folder / "job.yaml"), "--run-dir", str(folder / "run")], folder)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.waits_for_processes
def test_a_child_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    alive = gone([child], limit_s=LIMIT_S)
    kill(alive)
    assert not alive
    assert "the launcher is gone" in (tmp_path / "coordinator-0.log").read_text()


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


def test_a_death_says_how() -> None:
    assert Death("server", 1, 7, -9, "").text() == "server 1 (pid 7) ended: killed by SIGKILL"
    assert Death("server", 1, 7, 143, "bye").text() == "server 1 (pid 7) ended: left on SIGTERM"
    assert Death("server", 1, 7, 130, "").text() == "server 1 (pid 7) ended: left on SIGINT"
    assert Death("server", 1, 7, 1, "out of memory").text() == "server 1 (pid 7) ended: exit code 1: out of memory"


def test_children_get_fixed_threads_and_the_import_path_of_the_user_as_it_is() -> None:
    env = child_environment({"PYTHONPATH": "mine", "HOME": "h"}, threads=3)
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert env["GRPC_ENABLE_FORK_SUPPORT"] == "0"
    assert env["PYTHONPATH"] == "mine" and env["HOME"] == "h"
    assert "PYTHONPATH" not in child_environment({}, threads=3)
