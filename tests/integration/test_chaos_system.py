"""Faults of the system around a job: a network that is cut or loses packets, a disk that is full or slow. They need
root, strace, and the commands of Linux for namespaces and mounts; part of `make chaos`."""

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

from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.control.grpc.client import fetch_status
from shardkeep.run.folder import RunFolder
from tests.support.chaos import JOB, SHORT_STEPS, completed
from tests.support.cluster import Cluster, Command, within
from tests.support.faults import Fault, play
from tests.support.golden import STEPS
from tests.support.in_namespace import MAIN, inside

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.waits_for_processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip"),
]
IN_TURN = pytest.mark.group("network namespaces")
"""Of the tests with namespaces, whose names are fixed."""
SPACES = {"skA": "10.77.0.1", "skB": "10.77.0.2"}


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


def across(cluster: Cluster, config: dict[str, Any]) -> tuple[Command, Command, Command, str, RunFolder]:
    """A job of one server and one worker with the cable between them, at its first step: coordinator, server, worker,
    the coordinator's address, the run folder."""
    trust = ("--listen", f"{SPACES['skA']}:0", "--insecure-data-plane")
    coordinator, address, folder = cluster.coordinator(config, trust=trust, main=MAIN, env=inside("skA"))
    server = member(cluster, "server", "skA", address)
    worker = member(cluster, "worker", "skB", address)
    within(60, lambda: bool(folder.metrics_path.exists() and '"progress"' in folder.metrics_path.read_text()),
           "no step", lambda: coordinator.running)  # fmt: skip
    return coordinator, server, worker, address, folder


def member(cluster: Cluster, role: str, space: str, address: str) -> Command:
    place = ("--advertise", SPACES[space], "--insecure-data-plane")
    return cluster.role(role, 0, address, *place, main=MAIN, env=inside(space))


@IN_TURN
@pytest.mark.parametrize(("cut_s", "replaced"), [(1.5, False), (9.0, True)])
def test_a_cut_network_is_outlived(cluster: Cluster, spaces: None, cut_s: float, replaced: bool) -> None:
    config: dict[str, Any] = {
        **JOB,
        "servers": 1,
        "workers": 1,
        "train": {**JOB["train"], "max_steps": 400},
        "transport": {"same_host": "sockets"},
        "liveness": {"lease_s": 4.0, "step_timeout_s": 5.0},
        "checkpoint": {"every_steps": "off"},
    }
    coordinator, server, worker, address, folder = across(cluster, config)
    with cut():
        time.sleep(cut_s)
    if replaced:
        refused = worker.end(limit_s=60)
        assert refused.code == 143 and "was declared dead" in refused.err
        worker = member(cluster, "worker", "skB", address)
    assert [command.end(limit_s=200).code for command in (worker, server, coordinator)] == [0, 0, 0]
    summary = folder.summary() or {}
    assert (summary["status"], summary["samples"]) == ("completed", 20_000)
    servers = [p for p in summary["processes"] if p["role"] == "server"]
    assert [p["applied_steps"] for p in servers] == [summary["steps"]]
    assert bool(summary["recoveries"]) == replaced


def dropped(space: str, link: str) -> int:
    """Packets that the shaper of a link has thrown away."""
    told = subprocess.run(["ip", "netns", "exec", space, "tc", "-s", "qdisc", "show", "dev", link],
                          check=True, capture_output=True, text=True).stdout  # fmt: skip
    return int(told.split("dropped ")[1].split(",")[0])


@IN_TURN
def test_packets_that_are_lost_change_no_bit(cluster: Cluster, spaces: None) -> None:
    """A queue of four packets: what does not fit is thrown away, in bursts, and TCP sends it again."""
    config: dict[str, Any] = {
        **JOB,
        "servers": 1,
        "workers": 1,
        "transport": {"same_host": "sockets"},
        "train": {**JOB["train"], "batch_size": 100, "max_steps": SHORT_STEPS},
        "checkpoint": {"every_steps": "off"},
    }
    whole = completed(*cluster.job(config, name="whole"), steps=SHORT_STEPS)
    links = {"skA": "vethA", "skB": "vethB"}
    for space, link in links.items():
        shaper = ("tbf", "rate", "20mbit", "burst", "3000", "limit", "6000")
        run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", link, "root", *shaper)
    coordinator, server, worker, _, folder = across(cluster, config)
    assert [command.end(limit_s=200).code for command in (worker, server, coordinator)] == [0, 0, 0]
    assert sum(dropped(space, link) for space, link in links.items()) > 100
    summary = folder.summary() or {}
    assert summary["state_digest"] == whole["state_digest"] and not summary["recoveries"]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_disk_that_takes_its_time_loses_nothing(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every fsync of every process takes 50 ms, each acknowledged push waits for one, and a server dies on the way."""
    config: dict[str, Any] = {**JOB, "recovery": {"journal": "fsync"}, "train": {**JOB["train"], "max_steps": 100}}
    with Cluster(tmp_path_factory.mktemp("whole")) as another:
        whole = completed(*another.job(config), steps=100)
    calls = "fsync,fdatasync"
    quiet = ("-f", "--seccomp-bpf", "-qq", "-o", "/dev/null")  # stops at no other call of the system
    slow = ("strace", *quiet, "-e", f"trace={calls}", "-e", f"inject={calls}:delay_enter=50000")
    job, folder = cluster.job(config, prefix=slow)
    assert not play(job, folder, [Fault.kill("server 1", at=40)], limit_s=200)
    summary = completed(job, folder, steps=100)
    assert summary["state_digest"] == whole["state_digest"]
    assert summary["step_ms"]["total"] > 50  # the whole run's may be more: the disk of a busy machine is slow itself
    assert len(summary["recoveries"]) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path))
    try:
        yield path
    finally:
        run("umount", "-l", str(path))


def test_a_disk_that_is_full_for_a_while_costs_no_step_and_no_bit(
    cluster: Cluster, small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = {**JOB, "checkpoint": {"every_steps": 30}}  # nearly all steps are left when the disk is filled
    with Cluster(tmp_path_factory.mktemp("whole")) as another:
        whole = completed(*another.job(config))
    folder = RunFolder(small_disk / "run")
    job = cluster.command("train", str(cluster.write(config)), "--run-dir", str(folder.path))
    within(200, lambda: bool(checkpoints(folder)), "no checkpoint", lambda: job.running)
    coordinator = folder.endpoint()
    assert coordinator is not None
    filler = small_disk / "filler"
    for size in (1 << 20, 1 << 12):
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while file.write(bytes(size)):
                pass
    full_at = fetch_status(coordinator).progress["step"]
    assert full_at < STEPS - 50
    within(200, lambda: fetch_status(coordinator).progress["step"] > full_at + 20, "no step", lambda: job.running)
    filler.unlink()
    summary = completed(job, folder)
    assert summary["state_digest"] == whole["state_digest"] and not summary["recoveries"]
    assert any("No space left on device" in text for text in summary["warnings"])


def checkpoints(folder: RunFolder) -> list[int]:
    """The steps of those that are complete."""
    return [step for step, _ in Checkpoints(folder.path / "checkpoints").complete()]
