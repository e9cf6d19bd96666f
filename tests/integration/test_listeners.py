"""Addresses of metrics and the page that cannot be served: refused in one line before anything is prepared."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import every
from tests.support.cluster import Cluster, Ended, gone, stalled, within
from tests.support.configs import LASTING, TINY
from tests.support.reserved import reserved_address

pytestmark = pytest.mark.waits_for_processes
JOB = {**TINY, "servers": 1, "workers": 1}


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def taken() -> Iterator[str]:
    """An address where somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


def listening(setting: str, address: str, **job: Any) -> dict[str, Any]:
    section, key = setting.split(".")
    return {**JOB, section: {key: address}, **job}


def refused(ended: Ended, tmp_path: Path, text: str) -> None:
    """The command has printed this error alone, and has made nothing."""
    assert (ended.code, ended.out, ended.err) == (2, "", f"error: {text}\n")
    assert not (tmp_path / "run" / "config.yaml").exists()


@every(("setting", "servers"), [("web.metrics", 1), ("web.page", 0)])
def test_train_refuses_a_port_that_is_taken_before_it_prepares_data(
    cluster: Cluster, tmp_path: Path, taken: str, setting: str, servers: int
) -> None:
    path, place = str(cluster.write(listening(setting, taken, servers=servers))), str(tmp_path / "run")
    ended = cluster.command("train", path, "--run-dir", place).end()
    refused(ended, tmp_path, f"{setting}: cannot listen on {taken}: Address already in use")


def test_a_coordinator_by_hand_refuses_a_port_that_is_taken_before_it_makes_a_folder(
    cluster: Cluster, tmp_path: Path, taken: str
) -> None:
    setting = "web.metrics"
    path = str(cluster.write(listening(setting, taken)))
    ended = cluster.command("coordinator", path, "--run-dir", str(tmp_path / "run")).end()
    refused(ended, tmp_path, f"{setting}: cannot listen on {taken}: Address already in use")


def test_servers_around_a_command_do_not_start_where_a_port_is_taken(
    cluster: Cluster, tmp_path: Path, taken: str
) -> None:
    options = ("--run-dir", str(tmp_path / "run"), "--set", f"web.metrics={taken}")
    ended = cluster.command("with", *options, "--", sys.executable, "-c", "print('trained')").end()
    refused(ended, tmp_path, f"web.metrics: cannot listen on {taken}: Address already in use")


def test_one_port_for_metrics_and_the_page_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with reserved_address() as free:
        job, _ = cluster.job({**JOB, "web": {"metrics": free, "page": free}})
        refused(job.end(), tmp_path, f"web.page: cannot listen on {free}: Address already in use")


@every(
    ("command", "setting", "package", "text"),
    [
        ("config", "web.metrics", "prometheus_client", "web.metrics: needs prometheus_client: {install}; or off"),
        ("train", "web.metrics", "prometheus_client", "web.metrics: needs prometheus_client: {install}; or off"),
        ("config", "web.metrics", "uvicorn", "web.metrics: needs uvicorn: {install}; or off"),
        ("config", "web.page", "uvicorn", "web.page: needs uvicorn: {install}; or auto"),
        ("coordinator", "web.page", "starlette", "web.page: needs starlette: {install}; or auto"),
    ],
)
def test_without_a_package_that_a_setting_needs_the_setting_is_refused(
    cluster: Cluster, tmp_path: Path, command: str, setting: str, package: str, text: str
) -> None:
    path = str(cluster.write(listening(setting, "127.0.0.1:0")))
    where = () if command == "config" else ("--run-dir", str(tmp_path / "run"))
    without: dict[str, Any] = {"main": "tests.support.without_packages:main", "env": {"WITHOUT_PACKAGES": package}}
    ended = cluster.command(command, path, *where, **without).end()
    refused(ended, tmp_path, text.format(install="pip install 'shardkeep[web]'"))


def test_the_config_of_a_job_without_these_settings_needs_none_of_the_packages(cluster: Cluster) -> None:
    without = {"WITHOUT_PACKAGES": "prometheus_client,starlette,uvicorn,httptools"}
    path = str(cluster.write(JOB))
    ended = cluster.command("config", path, main="tests.support.without_packages:main", env=without).end()
    assert ended.code == 0 and "page: auto" in ended.out, ended.err


@pytest.mark.chaos
def test_a_resume_waits_for_processes_of_the_start_before_that_still_listen(
    cluster: Cluster, held: contextlib.ExitStack
) -> None:
    config = {**LASTING, "servers": 1, "workers": 1, "checkpoint": {"every_steps": 20}}
    web = {name: held.enter_context(reserved_address()) for name in ("metrics", "page")}
    job, folder = cluster.job({**config, "web": web})
    members = cluster.training(folder)
    within(60, lambda: any((folder.path / "checkpoints").glob("step-*/manifest.json")), "none", lambda: job.running)
    with stalled(members["coordinator 0"]):  # it would end with its launcher
        job.signal(signal.SIGKILL)
        ended = cluster.command("train", "--resume", str(folder.path)).end()
    text = f"process {members['coordinator 0'].pid} of this run is still there; end it first"
    assert (ended.code, ended.err) == (2, f"error: --resume {folder.path}: {text}\n")
    assert not gone(members.values(), limit_s=60)
    again = cluster.command("train", "--resume", str(folder.path))
    again.line("page", limit_s=100)
    assert cluster.command("stop", str(folder.path)).end().code == 0
    assert again.end().code == 1
