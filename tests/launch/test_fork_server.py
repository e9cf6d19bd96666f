"""The fork server: its children equal those that were started by exec. Real processes, which import no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import ConfigError
from shardkeep.config import launch
from shardkeep.config.launch import LaunchConfig, forks
from shardkeep.launch.processes.children import SHARDKEEP, Child, child_environment, end_all, wait_all
from shardkeep.launch.processes.fork_server import ForkServer, NoFork
from shardkeep.launch.processes.starter import RoleCommand, Starter
from tests.support import role_probe
from tests.support.cases import every
from tests.support.cluster import gone, kill, stalled
from tests.support.forked import started
from tests.support.import_path import IMPORT_PATH

pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]
LIMIT_S = 90.0


@pytest.fixture(autouse=True, scope="module")
def forked_launchers() -> None:
    """Nothing: the fork server here is started by exec, as that of a user."""


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    own = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": IMPORT_PATH, "LAUNCHER": str(os.getpid())}
    return child_environment(inherited | own, threads=3)


def fork_server(*modules: str) -> ForkServer:
    server = ForkServer(environment(), main="tests.support.role_probe:main")
    server.load(modules or ["tests.support.role_probe"])
    return server


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = fork_server("numpy.random", "tests.support.role_probe")
    yield server
    server.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "forked.log"


def forked(server: ForkServer, log: Path, *arguments: str, env: dict[str, str] | None = None, **options: Any) -> Child:
    with log.open("ab") as output:
        process = server.fork(["probe", *arguments], log=output.fileno(), env=env or environment(), **options)
    return Child("probe", 0, process, log=log)


def wait_for_line(log: Path) -> str:
    deadline = Deadline(LIMIT_S)
    while not log.read_text().endswith("\n"):
        deadline.check("the probe")
        time.sleep(0.01)
    return log.read_text().splitlines()[0]


def facts_of(child: Child, log: Path) -> dict[str, Any]:
    """What the probe has found in its process."""
    found: dict[str, Any] = json.loads(wait_for_line(log))
    assert found["own"]["pid"] == child.pid
    return found


def codes_of(children: Sequence[Child]) -> list[int]:
    assert wait_all(children, Deadline(LIMIT_S))
    return [death.code for child in children if (death := child.death())]


def test_a_forked_role_equals_a_spawned_one(server: ForkServer, tmp_path: Path, log: Path) -> None:
    arguments, logs = ("wait", "a path with a space"), [log, tmp_path / "spawned.log"]
    children = [forked(server, log, *arguments)]
    with logs[1].open("ab") as output:
        process = subprocess.Popen(
            [*SHARDKEEP[:2], role_probe.__file__, "probe", *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment(),
            start_new_session=True,
        )  # as `Starter` does it
    children.append(Child("probe", 0, process, log=logs[1]))
    try:
        found = [facts_of(*pair) for pair in zip(children, logs, strict=True)]
    finally:
        end_all(children, grace_s=0.0)
    for facts in found:
        del facts["own"], facts["argv"][0]  # the main's file is another one
    assert found[0] == found[1]
    assert found[0]["leads its session"] and found[0]["child of the launcher"]
    assert found[0]["descriptors"].keys() == {"0", "1", "2"}


def test_a_forked_launcher_forks_roles_without_another_import(server: ForkServer, log: Path) -> None:
    first, second = log.with_name("first.log"), log.with_name("second.log")
    child = forked(server, first, "wait")
    launcher = forked(server, log, "launch", str(second), "wait")
    assert facts_of(launcher, log)["is a fork"]
    one, other = facts_of(child, first), json.loads(wait_for_line(second))
    assert other["child of the launcher"] is False and other["own"]["pid"] not in (child.pid, launcher.pid)
    for facts in (one, other):
        del facts["own"], facts["child of the launcher"]
        facts["descriptors"] = facts["descriptors"].keys()
    assert one == other
    role = psutil.Process(json.loads(second.read_text())["own"]["pid"])
    end_all([child, launcher], grace_s=0.0)
    assert not gone([role], limit_s=LIMIT_S)


def test_a_forked_role_has_its_cores_and_a_random_state_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    logs = [tmp_path / name for name in "01"]
    children = [forked(server, log, "wait", "--index", log.name, cores=(core,)) for log in logs]
    for child in children:
        assert os.getpgid(child.pid) == child.pid  # at once, so that it can be killed at once
    facts = [facts_of(*pair) for pair in zip(children, logs, strict=True)]
    assert [each["cores"] for each in facts] == [[core], [core]]
    assert all(facts[0]["own"][key] != facts[1]["own"][key] for key in ("random", "numpy"))
    end_all(children, grace_s=0.0)


@every(
    ("act", "code"),
    [
        (["return"], 0),
        (["exit", "0"], 0),
        (["exit", "2"], 2),
        (["fail"], 1),
        (["signal", "9"], -signal.SIGKILL),
        (["signal", "15"], -signal.SIGTERM),
        (["signal", "2"], -signal.SIGINT),
    ],
)
def test_the_launcher_sees_how_a_forked_role_ends(
    server: ForkServer, tmp_path: Path, act: list[str], code: int
) -> None:
    log = tmp_path / "forked.log"
    child = forked(server, log, *act)
    assert codes_of([child]) == [code]
    assert ("RuntimeError: the probe fails" in log.read_text()) == (act == ["fail"])
    end_all([child], grace_s=0.0)
    assert not psutil.pid_exists(child.pid)  # no zombie


def test_the_end_of_a_forked_role_is_that_of_its_group(server: ForkServer, log: Path) -> None:
    child = forked(server, log, "grandchild")
    facts_of(child, log)
    deadline = Deadline(LIMIT_S)
    while not (below := psutil.Process(child.pid).children()):
        deadline.check("the grandchild")
    child.kill()
    assert not gone(below, limit_s=LIMIT_S)


def test_roles_outlive_the_fork_server_whose_death_is_reported_once_and_others_are_started_by_exec(
    tmp_path: Path, log: Path
) -> None:
    server, lines = fork_server(), list[str]()
    starter = Starter(server, lines.append)
    assert starter.ready(LIMIT_S)
    first, second = forked(server, log, "wait"), forked(server, log.with_name("2.log"), "wait")
    facts_of(first, log)
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)  # its launcher reads how it ended
    assert first.running and second.running
    first.terminate()
    assert codes_of([first]) == [-signal.SIGTERM]
    children = [
        starter.start(RoleCommand("nobody", index, [], tmp_path / f"{index}.log", environment()))  # a wrong command
        for index in range(2)
    ]
    assert codes_of(children) == [2, 2]
    pid = server.pid
    assert lines == [f"fork server 0 (pid {pid}) ended: killed by SIGKILL; roles are started by exec from now on"]
    end_all([first, second, *children], grace_s=0.0)
    starter.close()


@every(
    ("module", "why"),
    [
        ("tests.support.threaded", "the fork server has 2 threads; only a process with one can be forked"),
        ("tests.absent", "exit code 1: ModuleNotFoundError: No module named 'tests.absent'"),
    ],
)
def test_a_server_that_cannot_fork_says_why(module: str, why: str, tmp_path: Path) -> None:
    with contextlib.closing(fork_server(module)) as server, pytest.raises(NoFork, match=why):
        forked(server, tmp_path / "forked.log", "exit", "0", limit_s=LIMIT_S)


def test_a_role_of_another_environment_is_not_forked(server: ForkServer, log: Path) -> None:
    with pytest.raises(NoFork, match="environment"):
        forked(server, log, env={**environment(), "OMP_NUM_THREADS": "7"})


def test_a_role_that_is_forked_too_late_ends_at_once(log: Path) -> None:
    def logs_of(process: psutil.Process) -> list[str]:
        try:
            return [file.path for file in process.open_files()]
        except psutil.Error:
            return []

    server = fork_server()
    server.ready()
    with stalled(psutil.Process(server.pid)), pytest.raises(NoFork, match="does not answer"):
        forked(server, log, "wait", limit_s=0.1)
    server.load([])
    server.ready()  # it has forked by then
    deadline = Deadline(LIMIT_S)
    while any(str(log) in logs_of(process) for process in psutil.process_iter()):
        deadline.check("the end of the role")
    assert log.read_text() == ""
    server.close()


GPU = r"this machine has a GPU that towers may use \(tower.device: auto\)"


@every(
    ("servers", "device", "platform", "gpus", "why"),
    [
        (2, "cpu", "linux", [], ""),
        (2, "cuda", "linux", [], "tower.device is cuda"),
        (0, "cpu", "linux", [], "with servers: 0"),
        (2, "cpu", "darwin", [], "it needs Linux, and this is darwin"),
        (2, "auto", "linux", [__file__], GPU),
        (2, "auto", "linux", [], ""),
        (2, "cpu", "linux", [__file__], ""),
    ],
)
def test_roles_are_forked_where_it_is_possible_and_wanted(
    servers: int, device: str, platform: str, gpus: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(launch, "GPUS", gpus)

    def chosen(start: Any) -> bool:
        return forks(LaunchConfig(start=start), servers=servers, device=device)

    assert (chosen("auto"), chosen("spawn")) == (not why, False)
    if why:
        with pytest.raises(ConfigError, match=rf"^launch.start: fork_server, but {why}.*; allowed: auto or spawn$"):
            chosen("fork_server")
    else:
        assert chosen("fork_server")


def launch_role() -> None:
    """A launcher: `sys.argv` has the log of its role, and the file that its second fork server makes in an import."""
    server, importing = fork_server(), fork_server("tests.support.endless_import")
    server.ready()
    child = forked(server, Path(sys.argv[1]), "wait")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    print(server.pid, child.pid, importing.pid, flush=True)
    signal.pause()


def test_roles_and_servers_also_one_inside_an_import_end_with_a_launcher_that_is_killed(log: Path) -> None:
    began = str(log.with_name("importing"))
    env = {**os.environ, "IMPORT_BEGAN": began, "PYTHONPATH": IMPORT_PATH}
    launcher = started([str(log), began], env=env, main=f"{__name__}:{launch_role.__name__}")
    assert launcher.stdin is not None and launcher.stdout is not None and launcher.stderr is not None
    with launcher.stdin, launcher.stdout, launcher.stderr:
        processes = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(processes) == 3
        launcher.kill()
        launcher.wait()
    alive = gone(processes, limit_s=LIMIT_S)
    kill(alive)
    assert not alive
