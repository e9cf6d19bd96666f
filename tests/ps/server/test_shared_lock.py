"""A lock that threads share to read: together, never beside one that changes, and that one gets its turn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Gradients, SectionIds
from shardkeep.ps.server.table import table_kernels
from shardkeep.ps.server.tables import SharedLock, Tables

LIMIT_S = 60.0


def test_two_pulls_of_a_table_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, pull, both = Tables([TableSpec(name="t", dim=2)], seed=1), table_kernels.pull, threading.Barrier(2)
    sections = SectionIds(np.array([0]), np.array([0, 3]), np.arange(3))
    tables.apply([Gradients(sections, np.ones(6, np.float32))], step=0)

    def met(*args: Any) -> None:
        both.wait(LIMIT_S)
        pull(*args)

    monkeypatch.setattr(table_kernels, "pull", met)
    rows = [np.empty(6, np.float32) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda values: tables.pull(sections, values), rows))
    assert rows[0].tobytes() == rows[1].tobytes()


def test_one_that_changes_is_alone_and_gets_its_turn_among_readers_that_always_overlap() -> None:
    lock, entered, moved, done = SharedLock(), [0, 0, 0], threading.Condition(), threading.Event()

    def read_once(me: int, other: int) -> None:
        lock.share()
        before = list(entered)
        entered[me] += 1
        with moved:
            moved.notify_all()
            moved.wait_for(lambda: entered[other] > before[other] or done.is_set(), 0.02)
        assert entered[2] == before[2]
        lock.unshare()

    def read(me: int, other: int) -> None:
        while not done.is_set():
            read_once(me, other)

    def change() -> None:
        for _ in range(5):
            with lock:
                before = list(entered)
                entered[2] += 1
                assert entered[:2] == before[:2]

    with ThreadPoolExecutor(4) as threads:
        readers, changing = [threads.submit(read, *each) for each in ((0, 1), (1, 0))], threads.submit(change)
        try:
            changing.result(LIMIT_S)
        finally:
            done.set()
        assert entered[2] == 5 and not any(each.exception() for each in readers)
