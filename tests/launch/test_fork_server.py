"""The fork server: its children equal those that were started by exec. Real processes, which import no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from tests.support.import_path import IMPORT_PATH

pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]
LIMIT_S = 90.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def forked_launchers() -> None:
    """Nothing: the fork server here is started by exec, as that of a user."""


def environment(threads: int = 1) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    each_role_sets = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    base = {**inherited, **each_role_sets, "PYTHONPATH": IMPORT_PATH, "LAUNCHER": str(os.getpid())}
    return child_environment(base, threads=threads)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    started = fork_server(modules=["numpy.random", "tests.support.role_probe"])
    yield started
    started.close()


def fork_server(threads: int = 1, modules: Sequence[str] = ("tests.support.role_probe",)) -> ForkServer:
    started = ForkServer(environment(threads), main="tests.support.role_probe:main")
    started.load(modules)
    return started


def forked(server: ForkServer, log: Path, *arguments: str, threads: int = 1, **options: Any) -> Child:
    with log.open("ab") as output:
        process = server.fork(["probe", *arguments], log=output.fileno(), env=environment(threads), **options)
    return Child("probe", 0, process, log=log)


def spawned(log: Path, *arguments: str, threads: int = 1) -> Child:
    """The same by exec, as `Starter` does it."""
    command = [*SHARDKEEP[:2], role_probe.__file__, "probe", *arguments]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment(threads),
            start_new_session=True,
        )  # fmt: skip
    return Child("probe", 0, process, log=log)


def facts_of(child: Child, log: Path) -> dict[str, Any]:
    """What the probe has found in its process."""
    deadline = Deadline(LIMIT_S)
    while not log.read_text().endswith("\n"):
        deadline.check("the probe")
        time.sleep(0.01)
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[0])
    assert found["own"]["pid"] == child.pid
    return found


def end(*children: Child) -> None:
    end_all(children, grace_s=0.0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "forked.log"


def test_a_forked_role_equals_a_spawned_one(tmp_path: Path, log: Path) -> None:
    threads = 3
    server = fork_server(threads, ["numpy.random", "tests.support.role_probe"])
    children = [
        forked(server, log, "wait", "a path with a space", threads=threads),
        spawned(tmp_path / "spawned.log", "wait", "a path with a space", threads=threads),
    ]
    try:
        found = [facts_of(child, path) for child, path in zip(children, (log, tmp_path / "spawned.log"), strict=True)]
    finally:
        end(*children)
        server.close()
    for facts in found:
        del facts["own"], facts["argv"][0], facts["cmdline"][2]  # the main's file is another one
    assert found[0] == found[1]
    assert found[0]["leads its session"] and found[0]["child of the launcher"]
    assert found[0]["descriptors"].keys() == {"0", "1", "2"}


def test_the_command_line_of_a_forked_role_is_that_of_its_role(server: ForkServer, log: Path) -> None:
    child = forked(server, log, "wait", "--index", "0")
    assert os.getpgid(child.pid) == child.pid  # at once, so that it can be killed at once
    facts_of(child, log)
    assert psutil.Process(child.pid).cmdline() == [*SHARDKEEP, "probe", "wait", "--index", "0"]
    end(child)


def test_forked_roles_have_random_states_of_their_own(server: ForkServer, tmp_path: Path) -> None:
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    children = [forked(server, log, "exit", "0") for log in logs]
    own = [facts_of(child, log)["own"] for child, log in zip(children, logs, strict=True)]
    assert own[0]["random"] != own[1]["random"]
    assert own[0]["numpy"] != own[1]["numpy"]
    end(*children)


def test_a_forked_role_runs_on_its_cores(server: ForkServer, log: Path) -> None:
    core = max(os.sched_getaffinity(0))
    child = forked(server, log, "exit", "0", cores=(core,))
    assert facts_of(child, log)["cores"] == [core]
    end(child)


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
    assert wait_all([child], Deadline(LIMIT_S))
    death = child.death()
    assert death is not None and death.code == code
    assert ("RuntimeError: the probe fails" in log.read_text()) == (act == ["fail"])
    end(child)
    assert not psutil.pid_exists(child.pid)  # no zombie


def test_the_end_of_a_forked_role_is_that_of_its_group(server: ForkServer, log: Path) -> None:
    child = forked(server, log, "grandchild")
    facts_of(child, log)
    deadline = Deadline(LIMIT_S)
    while not (below := psutil.Process(child.pid).children()):
        deadline.check("the grandchild")
    child.kill()
    assert not gone(below, limit_s=LIMIT_S)


def test_two_threads_may_fork_roles_at_once(server: ForkServer, tmp_path: Path) -> None:
    """As those that call `shardkeep.train`, each with its own fork server."""
    other = fork_server()

    def codes(number: int) -> list[int]:
        mine, log = (server, other)[number], tmp_path / f"{number}.log"
        children = [forked(mine, log, "exit", "3") for _ in range(5)]
        assert wait_all(children, Deadline(LIMIT_S))
        found = [death.code for child in children if (death := child.death())]
        end(*children)
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(codes, range(2))) == [[3] * 5] * 2
    other.close()


def test_roles_outlive_the_fork_server_whose_death_is_reported_once_and_others_are_started_by_exec(
    tmp_path: Path, log: Path
) -> None:
    server, said = fork_server(), list[str]()
    starter = Starter(server, said.append)
    assert starter.ready(LIMIT_S)
    first, second = forked(server, log, "wait"), forked(server, log.with_name("2.log"), "wait")
    facts_of(first, log)
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)  # its launcher reads how it ended
    assert first.running and second.running
    first.terminate()
    assert wait_all([first], Deadline(LIMIT_S))
    death = first.death()
    assert death is not None and death.code == -signal.SIGTERM
    children = [
        starter.start(RoleCommand("nobody", index, [], tmp_path / f"{index}.log", environment()))  # a wrong command
        for index in range(2)
    ]
    assert wait_all(children, Deadline(LIMIT_S))
    assert [death.code for child in children if (death := child.death())] == [2, 2]
    pid = server.pid
    assert said == [f"fork server 0 (pid {pid}) ended: killed by SIGKILL; roles are started by exec from now on"]
    end(first, second, *children)
    starter.close()


@every(
    ("module", "why"),
    [
        ("tests.support.threaded", "the fork server has 2 threads; only a process with one can be forked"),
        ("tests.absent", "exit code 1: ModuleNotFoundError: No module named 'tests.absent'"),
    ],
)
def test_a_server_that_cannot_fork_says_why(module: str, why: str, tmp_path: Path) -> None:
    server = fork_server(modules=[module])
    with pytest.raises(NoFork, match=why):
        forked(server, tmp_path / "forked.log", "exit", "0")
    server.close()


def test_a_role_of_another_environment_is_not_forked(server: ForkServer, log: Path) -> None:
    with pytest.raises(NoFork, match="environment"), log.open("ab") as output:
        server.fork([], log=output.fileno(), env={**environment(), "OMP_NUM_THREADS": "7"})


def test_a_role_that_is_forked_too_late_ends_at_once(log: Path) -> None:
    server = fork_server()
    server.ready()
    process = psutil.Process(server.pid)
    with stalled(process), pytest.raises(NoFork, match="does not answer"):
        forked(server, log, "wait", limit_s=0.1)
    server.load([])
    server.ready()  # it has forked by then
    deadline = Deadline(LIMIT_S)
    while any(str(log) in [file.path for file in files_of(other)] for other in psutil.process_iter()):
        deadline.check("the end of the role")
    assert log.read_text() == ""
    server.close()


def files_of(process: psutil.Process) -> list[Any]:
    try:
        return process.open_files()
    except psutil.Error:
        return []


@every(
    ("start", "servers", "device", "chosen"),
    [
        ("auto", 2, "cpu", True),
        ("spawn", 2, "cpu", False),
        ("fork_server", 2, "cpu", True),
        ("auto", 2, "cuda", False),
        ("auto", 0, "cpu", False),
    ],
)
def test_roles_are_forked_where_it_is_possible_and_wanted(start: Any, servers: int, device: str, chosen: bool) -> None:
    assert forks(LaunchConfig(start=start), servers=servers, device=device) == chosen


@every(("servers", "device"), [(2, "cuda"), (0, "cpu")])
def test_a_fork_server_where_none_is_possible_is_an_error(servers: int, device: str) -> None:
    with pytest.raises(ConfigError, match=r"launch.start: fork_server, but .*; allowed: auto or spawn"):
        forks(LaunchConfig(start="fork_server"), servers=servers, device=device)


@every(
    ("platform", "device", "gpus", "why"),
    [
        ("darwin", "cpu", [], "it needs Linux, and this is darwin"),
        ("linux", "auto", [__file__], r"this machine has a GPU that towers may use \(tower.device: auto\)"),
    ],
)
def test_a_machine_that_cannot_fork_roles_spawns_them_or_says_why(
    platform: str, device: str, gpus: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(launch, "GPUS", gpus)
    assert not forks(LaunchConfig(start="auto"), servers=2, device=device)
    with pytest.raises(ConfigError, match=rf"^launch.start: fork_server, but {why}; allowed: auto or spawn$"):
        forks(LaunchConfig(start="fork_server"), servers=2, device=device)


LAUNCHER = """
import sys, time
from pathlib import Path
from tests.launch.test_fork_server import fork_server, forked
server, importing = fork_server(), fork_server(modules=["tests.support.endless_import"])
server.ready()
child = forked(server, Path(sys.argv[1]), "wait")
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
print(server.pid, child.pid, importing.pid, flush=True)
time.sleep(600)
"""


def test_roles_and_servers_also_one_inside_an_import_end_with_a_launcher_that_is_killed(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPORT_BEGAN", str(log.with_name("importing")))
    command = [sys.executable, "-c", LAUNCHER, str(log), os.environ["IMPORT_BEGAN"]]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert launcher.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
    assert len(processes) == 3
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    alive = gone(processes, limit_s=LIMIT_S)
    kill(alive)
    assert not alive
