"""Reading what a machine has to compute on, from recorded machines. Its use: tests/config/test_core_plan.py."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from shardkeep.base.machine.control_groups import cpu_quota
from shardkeep.base.machine.topology import Cores, numbers_of, read_topology, shown, usable_cores
from shardkeep.base.machine.versions import commit, machine
from tests.support.cases import every
from tests.support.control_groups import Groups
from tests.support.machine_trees import CONTAINER, LAPTOP, NOTHING, OLD_CONTAINER, SERVER, VM, Recorded

SOCKETS = {node: [(core, core + 16) for core in range(8 * node, 8 * node + 8)] for node in (0, 1)}
APART = {0: [(core,) for core in range(8)]}
V1 = {"cpu": ("/", "cpu,cpuacct"), "set": ("/", "cpuset")}
V2 = {"all": ("/", "")}


@every(
    ("machine", "nodes", "quota", "whole", "gpus"),
    [
        (LAPTOP, {0: [(0, 1), (2, 3), (4, 5), (6, 7)]}, None, None, ()),
        (SERVER, SOCKETS, None, None, (1, 0)),
        (CONTAINER, APART, 1.5, 1, ()),
        (OLD_CONTAINER, APART, 1.5, 1, ()),
        (VM, {0: [(0,), (1,), (2,), (3,)]}, None, None, (-1,)),
        (NOTHING, {0: [(0,)]}, None, None, ()),
    ],
    ids=["laptop", "two-sockets", "container", "old-container", "vm", "nothing"],
)
def test_a_recorded_machine_is_read_as_it_is(
    tmp_path: Path,
    machine: Recorded,
    nodes: dict[int, list[Cores]],
    quota: float | None,
    whole: int | None,
    gpus: tuple[int, ...],
) -> None:
    found = read_topology(machine.write(tmp_path))
    assert (found.nodes, found.gpu_nodes, found.quota_cores) == (nodes, gpus, whole)
    assert (found.quota and found.quota.cores) == quota
    assert found.cores == usable_cores(tmp_path)


def test_shared_caches_siblings_that_may_not_be_used_and_large_quotas_are_heeded(tmp_path: Path) -> None:
    caches = replace(SERVER, l3=["0,2,4,6,16,18,20,22", "1,3,5,7,17,19,21,23"]).write(tmp_path / "caches")
    assert [siblings[0] for siblings in read_topology(caches).nodes[0]] == [0, 2, 4, 6, 1, 3, 5, 7]
    some = replace(SERVER, allowed="4,18-20,24").write(tmp_path / "some")
    assert read_topology(some).nodes == {0: [(4, 20), (18,), (19,)], 1: [(24,)]}
    whole = replace(CONTAINER, groups={"all/cpu.max": "800000 100000"}).write(tmp_path / "whole")
    assert read_topology(whole).quota_cores is None, "a quota of all cores limits nothing"


@every(
    ("changes", "cores"),
    [
        ({"allowed": "2-3,6"}, (2, 3, 6)),
        ({"online": "0-4"}, (0, 1, 2, 3, 4)),
        ({"allowed": "", "groups": {"all/user.slice/cpuset.cpus.effective": "1,5"}}, (1, 5)),
        ({"allowed": "", "groups": {"all/cpuset.cpus.effective": "4-6"}}, (4, 5, 6)),
        ({"allowed": "", "lines": "2:cpuset:/x", "mounts": V1, "groups": {"set/x/cpuset.cpus": "2-3"}}, (2, 3)),
        (
            {
                "lines": "2:cpuset:/x",
                "mounts": V1,
                "groups": {"set/x/cpuset.cpus": "0-3", "set/x/cpuset.effective_cpus": "3"},
            },
            (3,),
        ),
        ({"allowed": "0-1", "groups": {"all/user.slice/cpuset.cpus.effective": "6-7"}}, (0, 1)),
        ({"allowed": "many", "online": "-1", "groups": {}}, (0,)),
    ],
    ids=["affinity", "offline", "v2", "v2-around", "v1", "v1-effective", "of-another-group", "nonsense"],
)  # fmt: skip
def test_affinity_cpusets_and_what_is_online_say_which_cores_are_usable(
    tmp_path: Path, changes: dict[str, object], cores: Cores
) -> None:
    assert usable_cores(replace(LAPTOP, **changes).write(tmp_path)) == cores


@every(
    ("lines", "mounts", "files", "quota"),
    [
        ("0::/a/b", V2, {"all/a/cpu.max": "250000 100000", "all/a/b/cpu.max": "400000 100000"}, (2.5, "all/a/cpu.max")),
        ("0::/a", V2, {"all/a/cpu.max": "50000 100000"}, (0.5, "all/a/cpu.max")),
        ("0::/a", V2, {"all/a/cpu.max": "max 100000"}, None),
        ("0::/a", V2, {"all/a/cpu.max": "1 0"}, None),
        ("1:cpu,cpuacct:/a", V1, {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        (
            "1:cpu,cpuacct:/a\n0::/",
            V1 | V2,
            {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "200000", "all/cpu.max": "1 100000"},
            (1.5, "cpu/cpu.cfs_quota_us"),
        ),
        ("1:cpu,cpuacct:/a", V1, {"cpu/a/cpu.cfs_quota_us": "300000"}, None),
    ],
    ids=["the least", "below one", "max", "nonsense", "v1 none", "v1", "v1 without a period"],
)  # fmt: skip
def test_the_quota_is_the_least_of_the_control_groups(
    tmp_path: Path,
    lines: str,
    mounts: dict[str, tuple[str, str]],
    files: dict[str, str],
    quota: tuple[float, str] | None,
) -> None:
    groups = Groups(tmp_path, lines, mounts)
    groups.write(files)
    assert cpu_quota(tmp_path) == (None if quota is None else (quota[0], groups.path(quota[1])))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs a system that tells a process's cores")
def test_the_cores_of_this_process_are_those_of_the_system() -> None:
    assert set(usable_cores()) == os.sched_getaffinity(0)
    assert read_topology().cores == usable_cores()


@every(
    ("text", "numbers"),
    [("0-3,6", {0, 1, 2, 3, 6}), ("7\n", {7}), ("", set()), ("\n", set()), ("0-", set()), ("a-b", set())],
)
def test_a_list_of_the_kernel_is_read_or_tells_nothing(text: str, numbers: set[int]) -> None:
    assert numbers_of(text) == numbers
    assert numbers_of(shown([3, 0, 1, 2, 6])) == {0, 1, 2, 3, 6} and shown([3, 0, 1, 2, 6]) == "0-3,6"


# ---- what a summary states of the code and the machine ----


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *names, "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_checkout_which_holds_the_code(tmp_path: Path) -> None:
    code, installed = tmp_path / "package" / "base", tmp_path / ".venv" / "base"
    for folder in (code, installed):
        folder.mkdir(parents=True)
        (folder / "versions.py").touch()
    assert commit(code) is None  # no checkout at all
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-q", "-m", "Add it")
    head = git(tmp_path, "rev-parse", "HEAD")
    commit.cache_clear()
    assert commit(code) == head
    (code / "versions.py").write_text("changed = True\n")
    commit.cache_clear()
    assert commit(code) == f"{head}-dirty"
    assert commit(installed) is None  # an installed package inside somebody's repository


def test_a_machine_has_a_processor_with_a_name_and_cores() -> None:
    found = machine()
    assert str(found["processor"]).strip() and int(found["cores"]) >= 1
