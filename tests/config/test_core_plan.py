"""The setting of cores, and the threads and cores of a job's processes on recorded machines.

How machines are read: tests/base/test_topology.py. Pinned jobs of processes: tests/launch/test_supervised_stops.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep import core_plan
from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.topology import Topology, read_topology, shown
from shardkeep.config import JobConfig, parse_config
from shardkeep.core_plan import (
    choose,
    describe,
    machine_text,
    over_quota,
    share_of,
    start_lines,
    threads_of_role,
    worker_threads,
)
from tests.support.cases import every
from tests.support.cluster import Cluster
from tests.support.configs import TINY
from tests.support.machine_trees import CONTAINER, LAPTOP, NOTHING, OLD_CONTAINER, SERVER, VM, Recorded

SHARED = "{} threads of workers share a quota of 1.5 cores (GROUP/{}); allowed: {}"


def job(
    servers: int, workers: int, threads: int | str = 1, *, device: str = "cpu", affinity: Any = "auto"
) -> JobConfig:
    settings = {"servers": servers, "workers": workers, "threads": threads, "tower": {"device": device}}
    return JobConfig.model_validate(settings | {"launch": {"affinity": affinity}})


def flat(*cores: int) -> Topology:
    """A machine of one node, each core of which is a physical one."""
    return Topology({0: [(core,) for core in cores]})


@every(
    ("cores", "asked", "expected"),
    [
        ([0, 1], job(1, 1), "worker 0 on core 0; server 0 on core 1"),
        ([0, 1], job(2, 2), "worker 0 on core 0; worker 1 on core 1"),
        ([0, 1], job(1, 4), "worker 0 on core 0; worker 1 on core 1; worker 2 on core 0; worker 3 on core 1"),
        ([4, 5, 6, 9], job(1, 1, 2), "worker 0 on cores 4-6; server 0 on core 9"),
        (range(4), job(1, 2), "worker 0 on cores 0-1; worker 1 on core 2; server 0 on core 3"),
        ([0, 1], job(0, 1), "nobody is pinned"),
        ([0], job(1, 1, 4), "worker 0 on core 0"),
    ],
)
def test_auto_gives_cores_of_their_own_where_they_suffice_else_pins_workers(
    cores: list[int], asked: JobConfig, expected: str
) -> None:
    assert describe(choose(asked, flat(*cores))) == expected


@every(
    ("machine", "asked", "workers", "servers"),
    [
        (LAPTOP, job(1, 1), ["0-3"], ["4-7"]),
        (LAPTOP, job(2, 2), ["0-1", "2-3"], ["4-5", "6-7"]),
        (LAPTOP, job(2, 4), ["0-1", "2-3", "4-5", "6-7"], []),
        (LAPTOP, job(2, 2, "auto"), ["0-3", "4-7"], []),
        (LAPTOP, job(1, 1, 6), ["0-4,6"], []),
        (SERVER, job(2, 2, "auto"), ["0-6,16-22", "8-14,24-30"], ["7,23", "15,31"]),
        (SERVER, job(1, 2, 8), ["0-7,16-23", "8-15,24-31"], ["0-7,16-23"]),
        (SERVER, job(3, 2, 4), ["0-4,16-20", "8-13,24-29"], ["5-6,21-22", "14-15,30-31", "7,23"]),
        (SERVER, job(1, 1, 4), ["0-5,16-21"], ["6-7,22-23"]),
        (SERVER, job(0, 1), ["0-7,16-23"], []),
        (SERVER, job(1, 1, 20), ["0-19"], []),
        (VM, job(2, 2, "auto"), ["0-1", "2-3"], []),
        (VM, job(1, 1), ["0-1"], ["2-3"]),
        (CONTAINER, job(1, 1), [], []),
        (OLD_CONTAINER, job(1, 1), [], []),
        (NOTHING, job(1, 1), ["0"], []),
    ],
)
def test_auto_pins_workers_within_a_node_with_servers_beside_them_and_siblings_last(
    tmp_path: Path, machine: Recorded, asked: JobConfig, workers: list[str], servers: list[str]
) -> None:
    pins = choose(asked, read_topology(machine.write(tmp_path)))
    expected = {("worker", index): cores for index, cores in enumerate(workers)}
    expected |= {("server", index): cores for index, cores in enumerate(servers)}
    assert {role: shown(cores) for role, cores in pins.items()} == expected


@every(
    ("gpus", "device", "first"),
    [
        ((1, 0), "cuda", 8),
        ((1, 0), "auto", 8),
        ((1, 0), "cpu", 0),
        ((1,), "auto", 0),
        ((1,), "cuda", 8),
        ((-1, -1), "cuda", 0),
        ((), "cuda", 0),
    ],
)
def test_a_worker_that_trains_on_a_gpu_is_on_its_node(
    tmp_path: Path, gpus: tuple[int, ...], device: str, first: int
) -> None:
    machine = replace(SERVER, gpus={f"0000:{number}0:00.0": node for number, node in enumerate(gpus)})
    pins = choose(job(2, 2, device=device), read_topology(machine.write(tmp_path)))
    assert pins["worker", 0][0] == first and pins["server", 0][0] // 8 == first // 8


@every(
    ("machine", "asked", "threads"),
    [
        (LAPTOP, job(2, 2, "auto"), 2),
        (LAPTOP, job(1, 1, "auto"), 4),
        (LAPTOP, job(2, 8, "auto"), 1),
        (SERVER, job(2, 2, "auto"), 7),
        (SERVER, job(4, 1, "auto"), 7),
        (SERVER, job(1, 4, "auto"), 3),
        (SERVER, job(0, 1, "auto"), 8),
        (SERVER, job(1, 1, 48), 48),
        (CONTAINER, job(1, 1, "auto"), 1),
        (OLD_CONTAINER, job(1, 1, "auto"), 1),
        (replace(CONTAINER, groups={"all/cpu.max": "650000 100000"}), job(1, 2, "auto"), 3),
        (VM, job(1, 2, "auto"), 2),
        (NOTHING, job(1, 2, "auto"), 1),
        (LAPTOP, job(1, 2, "auto", affinity={"workers": [[0, 1, 2], [4, 5, 6, 7]]}), 2),
        (LAPTOP, job(1, 2, "auto", affinity={"workers": [[0, 2, 4, 6]]}), 2),
        (LAPTOP, job(1, 1, "auto", affinity={"workers": [[0, 1]]}), 1),
        (VM, job(1, 2, "auto", affinity={"workers": [[0, 1, 2, 3], [0, 1, 2, 3]]}), 2),
    ],
)
def test_auto_divides_the_physical_cores_of_a_node_by_its_workers(
    tmp_path: Path, machine: Recorded, asked: JobConfig, threads: int
) -> None:
    assert worker_threads(asked, read_topology(machine.write(tmp_path))) == threads


def test_one_of_several_machines_divides_its_cores_by_its_share_of_the_job(tmp_path: Path) -> None:
    server = read_topology(SERVER.write(tmp_path))
    whole = job(8, 8, "auto")
    assert worker_threads(whole, server) == 1
    assert worker_threads(share_of(whole, servers=2, workers=2), server) == 7
    assert worker_threads(share_of(whole, servers=8, workers=0), server) == 7


@every(
    ("threads", "environment", "expected"),
    [(3, "5", 3), ("auto", "5", 5), ("auto", None, 2), ("auto", "", 2)],
    ids=["a-number", "its-launcher", "by-hand", "by-hand-empty"],
)
def test_a_worker_takes_its_threads_from_its_launcher(
    monkeypatch: pytest.MonkeyPatch, threads: int | str, environment: str | None, expected: int
) -> None:
    monkeypatch.setattr(core_plan, "read_topology", lambda: flat(3, 4))
    variables = {} if environment is None else {"OMP_NUM_THREADS": environment}
    assert threads_of_role(job(2, 7, threads, affinity="none"), variables) == expected


@every(
    ("machine", "asked", "line"),
    [
        (CONTAINER, job(2, 2), SHARED.format(2, "cpu.max", "fewer workers")),
        (
            OLD_CONTAINER,
            job(2, 2, 3),
            SHARED.format(6, "cpu.cfs_quota_us", "fewer workers, or threads: auto"),
        ),
        (CONTAINER, job(1, 3, "auto"), SHARED.format(3, "cpu.max", "fewer workers")),
        (CONTAINER, job(4, 1), ""),
        (LAPTOP, job(4, 40), ""),
    ],
)  # fmt: skip
def test_more_threads_than_the_quota_has_cores_are_a_warning_of_one_line(
    tmp_path: Path, machine: Recorded, asked: JobConfig, line: str
) -> None:
    warning = over_quota(asked, read_topology(machine.write(tmp_path)))
    assert warning == line.replace("GROUP", str(tmp_path / "groups" / ("all" if machine is CONTAINER else "cpu")))


@every(
    ("machine", "text"),
    [
        (LAPTOP, "4 cores with 8 hardware threads"),
        (SERVER, "16 cores with 32 hardware threads, 2 NUMA nodes"),
        (CONTAINER, "8 cores, a quota of 1.5"),
        (NOTHING, "1 core"),
    ],
)
def test_the_start_names_what_threads_were_chosen_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Recorded, text: str
) -> None:
    topology = read_topology(machine.write(tmp_path))
    assert machine_text(topology) == text
    monkeypatch.setattr(core_plan, "read_topology", lambda: topology)
    lines = dict(start_lines(job(1, 1, "auto", affinity="none")))
    assert list(lines) == ["threads"] and lines["threads"].endswith(f" for each worker, of {text}")
    assert list(start_lines(job(1, 1, affinity="none"))) == [], "nobody asked"


def test_the_start_says_why_a_quota_pins_nobody_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = read_topology(CONTAINER.write(tmp_path))
    monkeypatch.setattr(core_plan, "read_topology", lambda: topology)
    lines = dict(start_lines(job(2, 2)))
    assert lines["affinity"] == "nobody is pinned (a quota is time on all cores)"
    assert lines["warning"].startswith("2 threads of workers share a quota of 1.5 cores ")


def test_a_platform_that_pins_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.setattr(core_plan.sys, "platform", "darwin")
    with pytest.raises(ConfigError) as caught:
        choose(job(1, 1))
    assert str(caught.value) == "launch.affinity: darwin cannot pin a process to cores; allowed: none"
    assert choose(job(1, 1, affinity="none")) == {}


@every("value", ["none", "auto", "{workers: [[0], [1]], servers: [[1, 0]]}"])
def test_an_affinity_is_set_on_the_command_line_and_reads_back_equal(value: str) -> None:
    config = parse_config("", [f"launch.affinity={value}"])
    assert parse_config(config.to_yaml()) == config
    assert config.launch.affinity.wanted == (value != "none") and not JobConfig().launch.affinity.wanted


def test_lists_are_used_in_turn_and_a_core_that_is_not_there_is_named() -> None:
    pins = choose(job(2, 3, affinity={"workers": [[1, 0], [2]]}), flat(0, 1, 2, 3))
    assert pins == {("worker", 0): (0, 1), ("worker", 1): (2,), ("worker", 2): (0, 1)}
    assert describe(pins) == "worker 0 on cores 0-1; worker 1 on core 2; worker 2 on cores 0-1"
    with pytest.raises(ConfigError) as caught:
        choose(job(2, 2, affinity={"workers": [[0], [3]]}), flat(0, 1, 2, 5))
    assert str(caught.value) == "launch.affinity.workers: there is no core 3 to use; allowed: 0-2,5"


# ---- cores that a person names ----


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores and a system that pins processes to them")


@two_cores
@pytest.mark.waits_for_processes
def test_an_affinity_that_cannot_be_or_that_nobody_would_apply_is_refused(cluster: Cluster) -> None:
    job, folder = cluster.job(TINY, "--set", "launch.affinity={workers: [[4000]]}")
    ended = job.end()
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: launch.affinity.workers: there is no core 4000 to use; allowed: ")
    assert not folder.config_path.exists()
    by_hand = cluster.command("coordinator", str(cluster.write({**TINY, "launch": {"affinity": "auto"}}))).end()
    text = "only `shardkeep train` pins processes; allowed here: none (roles by hand: taskset)"
    assert (by_hand.code, by_hand.err) == (2, f"error: launch.affinity: {text}\n")


@two_cores
def test_a_job_in_this_process_is_pinned_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pinned = {"servers": 0, "workers": 1, "threads": "auto", "launch": {"affinity": {"workers": [[CORES[1]]]}}}
    config = shardkeep.JobConfig.model_validate({**TINY, **pinned})
    summary = shardkeep.train(config, run_dir=tmp_path / "run").to_dict()
    said = capsys.readouterr().out
    assert f"worker 0 on core {CORES[1]}" in said and "threads   1 for each worker, of " in said
    assert [p["cores"] for p in summary["processes"]] == [str(CORES[1])]
    assert os.sched_getaffinity(0) == set(CORES)
