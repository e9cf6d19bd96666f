"""Faults of the system around a job: a network that is cut, a disk that is full. They need root, and the commands of
Linux for namespaces and mounts; part of `make chaos`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_chaos import JOB
from tests.support.cluster import Cluster, within

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip"),
]
SPACES = {"skA": "10.77.0.1", "skB": "10.77.0.2"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def spaces() -> Iterator[None]:
    """Two network namespaces with a cable between them."""
    for name in SPACES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    try:
        for name in SPACES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "vethA", "netns", "skA", "type", "veth", "peer", "name", "vethB", "netns", "skB")
        for (name, address), link in zip(SPACES.items(), ("vethA", "vethB"), strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in SPACES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def cut() -> Iterator[None]:
    run("ip", "-n", "skA", "link", "set", "vethA", "down")
    try:
        yield
    finally:
        run("ip", "-n", "skA", "link", "set", "vethA", "up")


@pytest.mark.parametrize(("cut_s", "replaced"), [(1.5, False), (9.0, True)])
def test_a_cut_network_is_outlived(cluster: Cluster, spaces: None, cut_s: float, replaced: bool) -> None:
    config: dict[str, Any] = {
        **JOB,
        "servers": 1,
        "workers": 1,
        "train": {**JOB["train"], "epochs": 5},
        "transport": {"same_host": "sockets"},
        "liveness": {"lease_s": 4.0, "step_timeout_s": 5.0},
        "checkpoint": {"every_steps": 0},
    }
    near, far = (("ip", "netns", "exec", name) for name in SPACES)
    coordinator, address, folder = cluster.coordinator(
        config, trust=("--listen", f"{SPACES['skA']}:0", "--insecure-data-plane"), prefix=near
    )

    def member(role: str, prefix: tuple[str, ...], space: str) -> Any:
        return cluster.role(role, 0, address, "--advertise", SPACES[space], "--insecure-data-plane", prefix=prefix)

    server, worker = member("server", near, "skA"), member("worker", far, "skB")
    within(60, lambda: bool(folder.metrics_path.exists() and '"progress"' in folder.metrics_path.read_text()),
           "no step", lambda: coordinator.running)  # fmt: skip
    with cut():
        time.sleep(cut_s)
    if replaced:
        refused = worker.end(limit_s=60)
        assert refused.code == 1 and "was taken for dead" in refused.err
        worker = member("worker", far, "skB")
    assert [command.end(limit_s=200).code for command in (worker, server, coordinator)] == [0, 0, 0]
    summary = folder.summary() or {}
    assert (summary["status"], summary["samples"]) == ("completed", 200_000)
    servers = [p for p in summary["processes"] if p["role"] == "server"]
    assert [p["applied_steps"] for p in servers] == [summary["steps"]]
    assert bool(summary["recoveries"]) == replaced


def test_a_full_disk_ends_the_job_in_one_line_and_keeps_what_is_there(cluster: Cluster, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small))
    try:
        config = {**JOB, "train": {**JOB["train"], "epochs": 50}, "checkpoint": {"every_steps": 0}}
        path = cluster.write(config, "full")
        ended = cluster.command("train", str(path), "--run-dir", str(small / "run")).end(limit_s=200)
        assert ended.code == 1 and ended.err.count("\n") == 1, ended.err
        assert "No space left on device" in ended.err
    finally:
        run("umount", "-l", str(small))
