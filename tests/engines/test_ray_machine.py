"""`shardkeep.ray` where there is no cluster: without ray, and one machine's actor as a plain object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from shardkeep.engines.ray import Machine, Servers
from shardkeep.trust.endpoint import make_token
from tests.support.cluster import gone, within
from tests.support.import_path import IMPORT_PATH

PLACE = ("--rank", "1", "--nodes", "2")
LIMIT_S = 60.0
WITHOUT = """
from tests.support.without_packages import hide
hide(["ray"])
import shardkeep
for call in (
    lambda: shardkeep.ray.train(shardkeep.JobConfig(), run_dir="run", nodes=2),
    lambda: shardkeep.ray.servers([shardkeep.TableSpec(name="item")], num=1, trainers=1, run_dir="run").__enter__(),
):
    try:
        call()
    except shardkeep.errors.MissingPackage as error:
        print(error)
"""

ACTOR = """
import sys, types
util = types.ModuleType("ray.util")
util.get_node_ip_address = lambda: "127.0.0.1"
sys.modules |= {"ray": types.ModuleType("ray"), "ray.util": util}
from shardkeep.engines.ray import Machine
Machine().run("data: {source: synthetic}", *sys.argv[1:], ("--rank", "1", "--nodes", "2"))
"""


@pytest.fixture
def of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the only name of ray that an actor imports."""
    util = types.ModuleType("ray.util")
    util.get_node_ip_address = lambda: "127.0.0.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", util)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def node_of(run: Path, *but: int) -> psutil.Process | None:
    """The process of `shardkeep node` in a run folder, once it waits for its coordinator."""
    return next((each for each in psutil.Process().children() if each.pid not in but and waits(each, run)), None)


def waits(process: psutil.Process, run: Path) -> bool:
    return str(run) in process.cmdline() and bool(process.children()) and (run / "logs").is_dir()


@pytest.mark.slow
def test_without_ray_each_call_is_one_line_with_the_extra(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
    assert done.stdout.splitlines() == ["shardkeep.ray needs ray: pip install 'shardkeep[ray]'"] * 2, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_wrong_input_comes_back_as_exit_code_2_with_its_line(of_ray: None, tmp_path: Path) -> None:
    code, errors, summary = Machine().run("servers: 2\nworkers: 1.5\n", make_token(), str(tmp_path / "run"), PLACE)
    assert code == 2 and summary is None
    assert "workers: 1.5 is not allowed" in errors and "\n" not in errors


def test_only_a_signal_and_143_start_the_node_again(of_ray: None, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    run, found = tmp_path / "run", []
    run.mkdir()
    end = pool.submit(Machine().run, "data: {source: synthetic}\n", make_token(), str(run), PLACE)
    for deed in (signal.SIGKILL, signal.SIGTERM):
        within(LIMIT_S, lambda: node_of(run, *found) is not None, "no node", lambda: not end.done())
        process = node_of(run, *found)
        assert process is not None
        if deed == signal.SIGTERM:  # the next one ends with 0
            (run / "summary.json").write_text(json.dumps({"status": "completed"}))
        process.send_signal(deed)
        found.append(process.pid)
    code, _, summary = end.result(LIMIT_S)
    assert code == 0 and summary == {"status": "completed"}


def test_a_node_ends_with_its_actor(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with subprocess.Popen([sys.executable, "-c", ACTOR, make_token(), str(run)], stderr=subprocess.DEVNULL) as actor:
        of_actor = psutil.Process(actor.pid).children
        within(LIMIT_S, lambda: any(waits(each, run) for each in of_actor()), "no node", lambda: actor.poll() is None)
        left = of_actor(recursive=True)
        actor.kill()
    assert not gone(left, limit_s=LIMIT_S)


def test_the_token_of_servers_is_not_printed() -> None:
    assert "secret" not in repr(Servers(Path("run"), "secret"))
