"""Addresses of metrics and the page that cannot be served: refused in one line before anything is prepared."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import every
from tests.support.cluster import Cluster, gone, stalled, within
from tests.support.configs import LASTING, TINY
from tests.support.reserved import reserved_address

pytestmark = pytest.mark.waits_for_processes
JOB = {**TINY, "servers": 1, "workers": 1}


def refused(cluster: Cluster, tmp_path: Path, text: str, *command: str, web: dict[str, str], **options: Any) -> None:
    """The command with a config, which it names CONFIG, prints this error alone, and makes nothing."""
    arguments = [str(cluster.write({**JOB, "web": web})) if each == "CONFIG" else each for each in command]
    ended = cluster.command(*arguments, **options).end()
    assert (ended.code, ended.out, ended.err) == (2, "", f"error: {text}\n")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_port_that_is_taken_is_refused_before_anything_is_prepared(cluster: Cluster, tmp_path: Path) -> None:
    place = ("--run-dir", str(tmp_path / "run"))
    with socket.create_server(("127.0.0.1", 0)) as other, reserved_address() as free:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        text = f"cannot listen on {taken}: Address already in use"
        alone = (*place, "--set", "servers=0")
        refused(cluster, tmp_path, f"web.page: {text}", "train", "CONFIG", *alone, web={"page": taken})
        refused(cluster, tmp_path, f"web.metrics: {text}", "train", "CONFIG", *place, web={"metrics": taken})
        refused(cluster, tmp_path, f"web.metrics: {text}", "coordinator", "CONFIG", *place, web={"metrics": taken})
        around = ("with", *place, "--set", f"web.metrics={taken}", "--", sys.executable, "-c", "print('trained')")
        refused(cluster, tmp_path, f"web.metrics: {text}", *around, web={})
        text = f"web.page: cannot listen on {free}: Address already in use"
        refused(cluster, tmp_path, text, "train", "CONFIG", *place, web={"metrics": free, "page": free})


@every(
    ("command", "setting", "package", "otherwise"),
    [
        ("train", "metrics", "prometheus_client", "off"),
        ("config", "metrics", "uvicorn", "off"),
        ("config", "page", "uvicorn", "auto"),
        ("coordinator", "page", "starlette", "auto"),
    ],
)
def test_without_a_package_that_a_setting_needs_the_setting_is_refused(
    cluster: Cluster, tmp_path: Path, command: str, setting: str, package: str, otherwise: str
) -> None:
    text = f"web.{setting}: needs {package}: pip install 'shardkeep[web]'; or {otherwise}"
    where = () if command == "config" else ("--run-dir", str(tmp_path / "run"))
    without: dict[str, Any] = {"main": "tests.support.without_packages:main", "env": {"WITHOUT_PACKAGES": package}}
    refused(cluster, tmp_path, text, command, "CONFIG", *where, web={setting: "127.0.0.1:0"}, **without)


@pytest.mark.chaos
def test_a_resume_waits_for_processes_of_the_start_before_that_still_listen(cluster: Cluster) -> None:
    config = {**LASTING, "servers": 1, "workers": 1, "checkpoint": {"every_steps": 20}}
    with reserved_address() as metrics, reserved_address() as page:
        job, folder = cluster.job({**config, "web": {"metrics": metrics, "page": page}})
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
