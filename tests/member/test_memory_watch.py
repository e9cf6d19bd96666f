"""A server that nears the end of its memory says so once, and again when that has changed."""

from __future__ import annotations

import mmap
from typing import Any

from shardkeep.base.machine.limits import rss_bytes
from shardkeep.member.memory_watch import AGAIN_S, LOOK_S, MemoryWatch
from shardkeep.records.events import event_of
from shardkeep.view.run_view import RunView

GB = 10**9


class Machine:
    """A server's memory and clock as a test sets them, and what was reported."""

    def __init__(self) -> None:
        self.used, self.now, self.looks = 1 * GB, 0.0, 0
        self.events: list[dict[str, Any]] = []
        self._watch = MemoryWatch(3, self.report, used=self.ram, limit=lambda: 4 * GB, clock=lambda: self.now)

    def ram(self) -> int:
        self.looks += 1
        return self.used

    def report(self, kind: str, record: dict[str, Any]) -> None:
        assert kind == "event"
        self.events.append({**record, "role": "server", "index": 3})

    def after(self, seconds: float, used: float) -> None:
        self.now, self.used = self.now + seconds, int(used * GB)
        self._watch.look()

    def warnings(self) -> list[str]:
        view = RunView()
        view.hear(*map(event_of, self.events))
        return view.memory_warnings


def test_a_server_above_nine_tenths_names_itself_its_bytes_and_what_helps_and_again_after_some_time() -> None:
    machine = Machine()
    machine.after(LOOK_S, 3.5)
    assert not machine.events
    for _ in range(5):
        machine.after(LOOK_S, 3.7)
    (event,) = machine.events
    assert event["text"].startswith("warning: server 3 has 3.7 GB in RAM, 92 % of the limit of 4.0 GB: more servers")
    assert event["memory"] == {"bytes": 3_700_000_000, "limit_bytes": 4 * GB, "near": True}
    assert machine.warnings() == [event["text"]]
    machine.after(AGAIN_S, 3.8)
    assert len(machine.events) == 2
    machine.events.append({"text": "formed", "tables": []})
    assert machine.warnings() == []  # those of an earlier group do not hold


def test_the_warning_ends_when_the_memory_is_free_again() -> None:
    machine = Machine()
    machine.after(LOOK_S, 3.7)
    machine.after(LOOK_S, 3.5)  # between the two bounds: it still holds
    assert len(machine.warnings()) == 1 == len(machine.events)
    machine.after(LOOK_S, 3.3)
    assert len(machine.events) == 2 and machine.warnings() == []
    machine.after(LOOK_S, 3.7)
    assert len(machine.warnings()) == 1


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
