"""Faults of the system around a job: a network that is cut or loses packets, a disk that is full or slow. They need
root, strace, and the commands of Linux for namespaces and mounts. CI fills a disk, `make chaos` does the rest."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.control.grpc.client import fetch_status
from shardkeep.run.folder import RunFolder
from tests.support.chaos import JOB, completed
from tests.support.cluster import Cluster, Command, within
from tests.support.golden import STEPS
from tests.support.hurt import MAIN as HURT, Hurt, environment, missed, pid_of
from tests.support.in_namespace import MAIN, inside

pytestmark = [
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


@pytest.mark.chaos
@IN_TURN
@pytest.mark.parametrize("replaced", [False, True], ids=["for a moment", "until the worker counts as dead"])
def test_a_cut_network_is_outlived(cluster: Cluster, spaces: None, replaced: bool) -> None:
    config: dict[str, Any] = {
        **JOB,
        "servers": 1,
        "workers": 1,
        "transport": {"same_host": "sockets"},
        "liveness": {"lease_s": 20.0, "step_timeout_s": 10.0},
        "checkpoint": {"every_steps": "off"},
    }
    coordinator, server, worker, address, folder = across(cluster, config)
    with cut():
        if replaced:
            silent = "sent no heartbeat for 20 s"
            within(200, lambda: silent in folder.metrics_path.read_text(), "not dead", lambda: coordinator.running)
        else:
            time.sleep(1.5)
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


@pytest.mark.chaos
@IN_TURN
def test_packets_that_are_lost_change_no_bit(cluster: Cluster, spaces: None) -> None:
    """A queue of four packets: what does not fit is thrown away, in bursts, and TCP sends it again."""
    config: dict[str, Any] = {
        **JOB,
        "servers": 1,
        "workers": 1,
        "transport": {"same_host": "sockets"},
        "train": {**JOB["train"], "batch_size": 100},
        "checkpoint": {"every_steps": "off"},
    }
    whole = completed(*cluster.job(config, name="whole"))
    links = {"skA": "vethA", "skB": "vethB"}
    for space, link in links.items():
        shaper = ("tbf", "rate", "20mbit", "burst", "3000", "limit", "6000")
        run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", link, "root", *shaper)
    coordinator, server, worker, _, folder = across(cluster, config)
    assert [command.end(limit_s=200).code for command in (worker, server, coordinator)] == [0, 0, 0]
    assert sum(dropped(space, link) for space, link in links.items()) > 100
    summary = folder.summary() or {}
    assert summary["state_digest"] == whole["state_digest"] and not summary["recoveries"]


@pytest.mark.chaos
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_disk_that_takes_its_time_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Every fsync of every process takes 50 ms, each acknowledged push waits for one, and a server dies on the way."""
    config: dict[str, Any] = {**JOB, "recovery": {"journal": "fsync"}, "train": {**JOB["train"], "max_steps": 100}}
    whole = completed(*cluster.job(config, name="whole"), steps=100)
    calls = "fsync,fdatasync"
    quiet = ("-f", "--seccomp-bpf", "-qq", "-o", "/dev/null")  # stops at no other call of the system
    slow = ("strace", *quiet, "-e", f"trace={calls}", "-e", f"inject={calls}:delay_enter=50000")
    hurts = [Hurt("server 1", "push received", 80)]
    job, folder = cluster.job(config, prefix=slow, env=environment(tmp_path, hurts), main=HURT)
    summary = completed(job, folder, steps=100)
    assert not missed(tmp_path, hurts)
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


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_no_step_and_no_bit(
    cluster: Cluster, small_disk: Path, tmp_path: Path
) -> None:
    """It is filled while a worker is stopped at step 60, and has room again two checkpoints later."""
    config = {**JOB, "checkpoint": {"every_steps": 20}, "train": {**JOB["train"], "epochs": 2}}
    whole = completed(*cluster.job(config, name="whole"), steps=2 * STEPS)
    folder = RunFolder(small_disk / "run")
    stall = Hurt("worker 1", "pushing", 120, "SIGSTOP", silent=False)
    place = (str(cluster.write(config)), "--run-dir", str(folder.path))
    job = cluster.command("train", *place, env=environment(tmp_path, [stall]), main=HURT)
    within(200, lambda: not missed(tmp_path, [stall]), "not stopped", lambda: job.running)
    within(200, lambda: bool(checkpoints(folder)), "no checkpoint", lambda: job.running)
    filler = small_disk / "filler"
    for size in (1 << 20, 1 << 12):
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while file.write(bytes(size)):
                pass
    os.kill(pid_of(tmp_path, "worker 1"), signal.SIGCONT)
    coordinator = folder.endpoint()
    assert coordinator is not None
    within(200, lambda: fetch_status(coordinator).progress["step"] > 110, "no step", lambda: job.running)
    filler.unlink()
    summary = completed(job, folder, steps=2 * STEPS)
    assert summary["state_digest"] == whole["state_digest"] and not summary["recoveries"]
    assert any("No space left on device" in text for text in summary["warnings"])


def checkpoints(folder: RunFolder) -> list[int]:
    """The steps of those that are complete."""
    return [step for step, _ in Checkpoints(folder.path / "checkpoints").complete()]
