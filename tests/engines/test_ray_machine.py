"""`shardkeep.ray` where there is no cluster: without ray, and one machine's actor in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path

import psutil
import pytest

import shardkeep
from shardkeep.base.errors import MissingPackage
from shardkeep.engines.ray import Servers
from shardkeep.trust.endpoint import make_token
from tests.support.cluster import Cluster, Command, gone, within
from tests.support.ray_actor import MAIN

WAITS = "data: {source: synthetic}\n"
"""A job whose node of rank 1 waits for its coordinator."""
LIMIT_S = 60.0


def actor_of(cluster: Cluster, config: str, run: Path) -> Command:
    run.mkdir()
    temporary = run.with_name("temporary")
    temporary.mkdir()
    return cluster.command(config, make_token(), str(run), main=MAIN, env={"TMPDIR": str(temporary)})


def node_of(actor: Command, run: Path, *but: int) -> psutil.Process:
    """The process of `shardkeep node` of an actor, once it waits for its coordinator."""

    def nodes() -> list[psutil.Process]:
        found = [each for each in psutil.Process(actor.pid).children() if each.pid not in but]
        return [each for each in found if each.children() and (run / "logs").is_dir()]

    within(LIMIT_S, lambda: bool(nodes()), "no node", lambda: actor.running)
    return nodes()[0]


def test_without_ray_each_call_is_one_line_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else find(name))
    monkeypatch.chdir(tmp_path)
    calls = (
        lambda: shardkeep.ray.train(shardkeep.JobConfig(), run_dir="run", nodes=2),
        lambda: shardkeep.ray.servers([shardkeep.TableSpec(name="item")], num=1, trainers=1, run_dir="run").__enter__(),
    )
    for call in calls:
        with pytest.raises(MissingPackage) as refused:
            call()
        assert str(refused.value) == "shardkeep.ray needs ray: pip install 'shardkeep[ray]'"
    assert not list(tmp_path.iterdir())


@pytest.mark.waits_for_processes
def test_a_wrong_input_comes_back_as_exit_code_2_with_its_line(cluster: Cluster, tmp_path: Path) -> None:
    actor = actor_of(cluster, "servers: 2\nworkers: 1.5\n", tmp_path / "run")
    code, errors, summary = json.loads(actor.line("["))
    assert code == 2 and summary is None
    assert "workers: 1.5 is not allowed" in errors and "\n" not in errors


@pytest.mark.waits_for_processes
def test_only_a_signal_and_143_start_the_node_again(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    actor = actor_of(cluster, WAITS, run)
    left = node_of(actor, run)
    left.terminate()  # it ends with 143
    killed = node_of(actor, run, left.pid)
    (run / "summary.json").write_text(json.dumps({"status": "completed"}))
    killed.kill()  # the next one ends with 0
    code, _, summary = json.loads(actor.line("["))
    assert code == 0 and summary == {"status": "completed"}


@pytest.mark.waits_for_processes
def test_a_node_ends_with_its_actor(cluster: Cluster, tmp_path: Path) -> None:
    actor = actor_of(cluster, WAITS, tmp_path / "run")
    node = node_of(actor, tmp_path / "run")
    left = [node, *node.children(recursive=True)]
    actor.signal(signal.SIGKILL)
    assert not gone(left, limit_s=LIMIT_S)


def test_the_token_of_servers_is_not_printed() -> None:
    assert "secret" not in repr(Servers(Path("run"), "secret"))
