"""A server that nears the end of its memory says so once, and again when that has changed."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkeep.base.machine.memory_limit import limit_bytes, rss_bytes
from shardkeep.cli.status_text import memory_warnings
from shardkeep.roles.memory_watch import AGAIN_S, LOOK_S, MemoryWatch

GB = 10**9


class Machine:
    """A server's memory and clock as a test sets them, and what was reported."""

    def __init__(self) -> None:
        self.used, self.now = 1 * GB, 0.0
        self.events: list[dict[str, Any]] = []
        self.looks = 0
        self.watch = MemoryWatch(3, self.report, used=self.ram, limit=lambda: 4 * GB, clock=lambda: self.now)

    def ram(self) -> int:
        self.looks += 1
        return self.used

    def report(self, kind: str, record: dict[str, Any]) -> None:
        assert kind == "event"
        self.events.append({**record, "role": "server", "index": 3})

    def after(self, seconds: float, used: float) -> None:
        self.now, self.used = self.now + seconds, int(used * GB)
        self.watch.look()


def test_a_server_above_nine_tenths_names_itself_its_bytes_and_what_helps() -> None:
    machine = Machine()
    machine.after(LOOK_S, 3.5)
    assert not machine.events
    for _ in range(5):
        machine.after(LOOK_S, 3.7)
    (event,) = machine.events
    assert event["text"].startswith("warning: server 3 has 3.7 GB in RAM, 92 % of the limit of 4.0 GB: more servers")
    assert event["memory"] == {"bytes": 3_700_000_000, "limit_bytes": 4 * GB, "near": True}
    assert memory_warnings(machine.events) == [event["text"]]
    machine.after(AGAIN_S, 3.8)
    assert len(machine.events) == 2


def test_the_warning_ends_when_the_memory_is_free_again() -> None:
    machine = Machine()
    machine.after(LOOK_S, 3.7)
    machine.after(LOOK_S, 3.5)  # between the two bounds: it still holds
    assert len(memory_warnings(machine.events)) == 1 == len(machine.events)
    machine.after(LOOK_S, 3.3)
    assert len(machine.events) == 2 and memory_warnings(machine.events) == []
    machine.after(LOOK_S, 3.7)
    assert len(memory_warnings(machine.events)) == 1


def test_a_warning_of_an_earlier_group_does_not_hold() -> None:
    machine = Machine()
    machine.after(LOOK_S, 3.7)
    assert memory_warnings([*machine.events, {"text": "formed", "tables": []}]) == []


def test_the_memory_is_not_looked_at_more_often_than_needed() -> None:
    machine = Machine()
    for _ in range(1000):
        machine.after(LOOK_S / 100, 1.0)
    assert 9 <= machine.looks <= 11


def test_memory_in_use_is_that_of_this_process() -> None:
    before = rss_bytes()
    block = mmap.mmap(-1, 40_000_000)  # an allocator might have free memory for an array
    block.write(b"1" * len(block))
    assert 15_000_000 < rss_bytes() - before < 200_000_000
    block.close()


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/", {"memory.max": "5000000\n"}, 5_000_000),
        ("0::/a/b", {"a/memory.max": "7000000\n", "a/b/memory.max": "max\n"}, 7_000_000),
        ("0::/a/b", {"memory.max": "6000000\n", "a/b/memory.max": "9000000\n"}, 6_000_000),
        ("4:cpu,memory:/x", {"memory/x/memory.limit_in_bytes": "8000000\n"}, 8_000_000),
        ("4:cpu:/x\n0::/x", {"x/memory.max": "max\n"}, None),
        ("garbage\n0::", {"memory.max": "no number\n"}, None),
    ],
    ids=["a container", "a group around", "the least", "version 1", "no limit", "garbage"],
)
def test_the_limit_is_the_least_of_the_control_groups_and_the_machine(
    tmp_path: Path, lines: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "cgroup").write_text(lines + "\n")
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    whole = int(psutil.virtual_memory().total)
    assert limit_bytes(tmp_path, tmp_path / "groups") == (whole if limit is None else limit)
