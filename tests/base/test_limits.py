"""The limits of control groups of both versions, and the deaths that they cause, on files of the test."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from shardkeep.base.errors import UserError
from shardkeep.base.machine.limits import RECENT_S, Limit, limit_bytes, limit_met, rss_bytes
from shardkeep.base.machine.memory import memory_errors
from tests.support.cases import every
from tests.support.control_groups import Groups

ONE = {"all": ("/", "")}
V1 = {"memory": ("/", "memory"), "pids": ("/", "pids"), "cpu": ("/", "cpu,cpuacct")}


@every(
    ("lines", "mounts", "files", "limit"),
    [
        ("0::/", ONE, {"all/memory.max": "5000000"}, 5_000_000),
        ("0::/a/b", ONE, {"all/a/memory.max": "7000000", "all/a/b/memory.max": "max"}, 7_000_000),
        ("0::/a/b", ONE, {"all/memory.max": "6000000", "all/a/b/memory.max": "9000000"}, 6_000_000),
        ("4:cpu,memory:/x\n0::/", {"m": ("/", "memory,cpu")}, {"m/x/memory.limit_in_bytes": "8000000"}, 8_000_000),
        ("4:memory:/docker/1", {"m": ("/docker/1", "memory")}, {"m/memory.limit_in_bytes": "4000000"}, 4_000_000),
        ("0::/pod/1/in", {"all": ("/pod/1", "")}, {"all/in/memory.max": "3000000"}, 3_000_000),
        ("0::/../2", ONE, {"all/memory.max": "2000000", "2/memory.max": "1000000"}, 2_000_000),
        ("0::/", {"a b": ("/", "")}, {"a b/memory.max": "2000000"}, 2_000_000),
        ("4:cpu:/x\n0::/x", ONE, {"all/x/memory.max": "max"}, None),
        ("garbage\n0::", ONE, {"all/memory.max": "no number"}, None),
        ("", {}, {}, None),
    ],

)  # fmt: skip
def test_the_limit_is_the_least_of_the_control_groups_and_the_machine(
    tmp_path: Path, lines: str, mounts: dict[str, tuple[str, str]], files: dict[str, str], limit: int | None
) -> None:
    groups = Groups(tmp_path, lines, mounts)
    groups.write(files)
    whole = int(psutil.virtual_memory().total)
    assert limit_bytes(groups.root) == (whole if limit is None else limit)


@every(("version", "limited"), [(1, "/pod/x"), (1, "/pod"), (2, "/pod/x"), (2, "/pod")])
def test_a_process_that_the_memory_limit_killed_is_told_from_one_that_a_person_killed(
    tmp_path: Path, version: int, limited: str
) -> None:
    """The limit is of the process's own group, or of the one around it."""
    top = "all" if version == 2 else "memory"
    own, place = f"{top}/pod/x", f"{top}{limited}"
    groups = Groups(tmp_path, "0::/pod/x" if version == 2 else "4:memory:/pod/x\n0::/", ONE if version == 2 else V1)

    def state(killed: int, full: int) -> None:
        if version == 2:
            events = f"low 0\nhigh 0\nmax {9 * full}\noom %d\noom_kill {killed}\noom_group_kill 0"
            counts = {f"{own}/memory.events": events % 0} | {f"{place}/memory.events": events % full}
            groups.write({f"{place}/memory.max": "520000000"} | counts)
        else:
            control = f"oom_kill_disable 0\nunder_oom 0\noom_kill {killed}"
            counts = {f"{own}/memory.oom_control": control, f"{place}/memory.failcnt": str(full)}
            groups.write({f"{place}/memory.limit_in_bytes": "520000000"} | counts)

    state(killed=3, full=8)
    limits = [Limit("memory", groups.root), Limit("pids", groups.root)]
    assert limit_met(limits, killed=True) == "", "before this process began"
    state(killed=5, full=9)
    file = groups.path(f"{place}/memory.{'max' if version == 2 else 'limit_in_bytes'}")
    expected = f"the memory limit of 520.0 MB was reached ({file}: "
    assert limit_met(limits, killed=False).startswith(expected), "it lost a process of its own"
    assert [limit_met(limits, killed=True).startswith(expected) for _ in range(3)] == [True, True, False]


def test_a_kill_by_the_machines_own_shortage_names_the_machine(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/x", ONE)
    groups.write({"all/x/memory.max": "900000000", "all/x/memory.events": "oom 0\noom_kill 0"})
    limits = [Limit("memory", groups.root), Limit("pids", groups.root)]
    groups.write({"all/x/memory.events": "oom 0\noom_kill 1"})
    assert limit_met(limits, killed=True) == "the machine ran out of memory"


def test_an_old_kill_is_not_the_cause_of_a_later_death(tmp_path: Path) -> None:
    now = 0.0
    groups = Groups(tmp_path, "0::/", ONE)
    groups.write({"all/memory.events": "oom 0\noom_kill 0"})
    limits = [Limit("memory", groups.root, clock=lambda: now)]
    groups.write({"all/memory.events": "oom 0\noom_kill 1"})
    limits[0].look()
    now = RECENT_S + 1
    assert limit_met(limits, killed=True) == ""


@every("version", [1, 2])
def test_the_limit_of_processes_is_named(tmp_path: Path, version: int) -> None:
    top = "all" if version == 2 else "pids"
    groups = Groups(tmp_path, "0::/x" if version == 2 else "8:pids:/x\n4:memory:/x", ONE if version == 2 else V1)
    groups.write({f"{top}/x/pids.max": "100", f"{top}/x/pids.events": "max 2"})
    limits = [Limit("memory", groups.root), Limit("pids", groups.root)]
    assert limit_met(limits, killed=False) == ""
    groups.write({f"{top}/x/pids.events": "max 3"})
    expected = f"the pids limit of 100 was reached ({groups.path(top)}/x/pids.max: "
    assert limit_met(limits, killed=False).startswith(expected)


@every("version", [1, 2])
def test_a_cpu_quota_that_held_processes_up_of_late_is_named(tmp_path: Path, version: int) -> None:
    top, name = ("all", "cpu.max") if version == 2 else ("cpu", "cpu.cfs_quota_us")
    groups = Groups(tmp_path, "0::/x" if version == 2 else "1:cpu,cpuacct:/x", ONE if version == 2 else V1)
    groups.write({f"{top}/x/{name}": "25000", f"{top}/x/cpu.stat": "nr_periods 100\nnr_throttled 90"})
    quota = Limit("cpu", groups.root)
    quota.look()
    assert not quota.recent and not quota.text()
    groups.write({f"{top}/x/cpu.stat": "nr_periods 200\nnr_throttled 93"})
    quota.look()
    assert quota.recent == 3
    assert quota.text().startswith(f"the cpu limit of 25000 was reached ({groups.path(top)}/x/{name}: ")


def test_memory_in_use_is_that_of_this_process() -> None:
    before = rss_bytes()
    block = mmap.mmap(-1, 40_000_000)  # an allocator might have free memory for an array
    block.write(b"1" * len(block))
    assert 15_000_000 < rss_bytes() - before < 200_000_000
    block.close()


# ---- memory that is needed again and again, or not given ----


PROGRAM = """
import resource, sys
import numpy as np
from shardkeep.base.machine.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for size in map(int, sys.argv[2:]):
    for step in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        buffers = [np.ones(size, np.float32) for _ in range(20_000_000 // size)]
        del buffers
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_buffers_of_later_steps_are_those_of_earlier_ones() -> None:
    """The second size is above glibc's own limit, and gets large pages."""
    kept, plain = (_faults(how, "500000", "10000000") for how in ("kept", "as it is"))
    assert plain[0] > 5_000 and plain[1] > 100  # 80 MB, page by page: else this test shows nothing
    assert max(kept) < 50


def _faults(*how: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *how], capture_output=True, text=True, check=True)
    return list(map(int, done.stdout.split()))


HOLES = """
import ctypes, re
from shardkeep.base.machine.allocator import give_back_freed_memory, keep_freed_memory
def anonymous_mb():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1e3
assert keep_freed_memory()
blocks = [(bytearray(b"x") * 1_000_000, bytearray(b"x") * 100_000) for _ in range(200)]
blocks = [small for _, small in blocks]
holes = anonymous_mb()
assert give_back_freed_memory()
print(holes - anonymous_mb())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_memory_between_blocks_in_use_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 150.0  # MB of 200


# ---- memory that the system does not give ----


def test_an_allocation_that_fails_says_how_much_was_asked_and_other_errors_stay_what_they_are() -> None:
    with pytest.raises(UserError, match=r"^out of memory: 4,000,000\.0 GB asked at once by us$"), memory_errors("us"):
        torch.empty(10**15, dtype=torch.float32)
    with pytest.raises(UserError, match=r"^out of memory: 3\.55 PiB asked at once by us$"), memory_errors("us"):
        np.empty(10**15, np.float32)
    for error in (RuntimeError("a shape"), ValueError("a value")):
        with pytest.raises(type(error), match=r"^a ") as caught, memory_errors("us"):
            raise error
        assert not isinstance(caught.value, UserError)
