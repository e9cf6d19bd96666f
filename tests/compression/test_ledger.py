"""The byte ledger: every byte is counted once, by any counter."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shardkeep.compression.ledger import DIRECTIONS, PARTS, Ledger, merge_totals
from tests.support.cases import every

WAYS = {"to_servers": 0, "from_servers": 0, "between_workers": 0}
NOTHING = {"push": {}, "pull": {}, "tower": {}, "read": {}, "control": 0, **WAYS, "total": 0}


def filled(factor: int) -> Ledger:
    ledger = Ledger()
    ledger.add("push", "values", 640 * factor)
    ledger.add("push", "ids", 80 * factor)
    ledger.add("push", "ids", 8 * factor)
    ledger.add("pull", "framing", 64 * factor)
    ledger.add("pull", "values", 300 * factor, answer=True)
    ledger.add("tower", "values", 1000 * factor)
    ledger.add("read", "values", 5 * factor, answer=True)
    ledger.add("read", "metrics", 7 * factor)
    ledger.add("control", "calls", 30 * factor)
    ledger.add("control", "questions", 3 * factor)
    ledger.add("control", "agreements", 2 * factor)
    return ledger


def test_totals_are_the_sums_by_direction_and_part() -> None:
    assert filled(1).totals() == {
        "push": {"ids": 88, "values": 640},
        "pull": {"framing": 64, "values": 300},
        "tower": {"values": 1000},
        "read": {"metrics": 7, "values": 5},
        "control": 35,
        "to_servers": 795,
        "from_servers": 305,
        "between_workers": 1009,
        "total": 2139,
    }
    assert Ledger().totals() == NOTHING


def test_totals_are_a_copy() -> None:
    ledger = filled(1)
    before = ledger.totals()
    before["push"]["ids"] = 0
    assert ledger.totals()["push"]["ids"] == 88


def test_merged_totals_of_workers_equal_one_ledger_of_all() -> None:
    parts = [filled(1).totals(), filled(3).totals(), Ledger().totals()]
    assert merge_totals(parts) == filled(4).totals()
    assert merge_totals([]) == NOTHING
    assert parts[0] == filled(1).totals()


def test_parts_of_one_worker_only_are_kept_in_the_merge() -> None:
    one, other = Ledger(), Ledger()
    one.add("pull", "ids", 1)
    other.add("pull", "values", 2)
    assert merge_totals([one.totals(), other.totals()])["pull"] == {"ids": 1, "values": 2}


class Interrupted(int):
    """A number of bytes that lets another thread run whenever the ledger reads it, so in the middle of its sums."""

    def __new__(cls, num_bytes: int, other: Callable[[], None]) -> Interrupted:
        number = super().__new__(cls, num_bytes)
        number.threads, number.other = [], other
        return number

    threads: list[threading.Thread]
    other: Callable[[], None]

    def __int__(self) -> int:
        self.threads.append(threading.Thread(target=self.other))
        self.threads[-1].start()
        self.threads[-1].join(0.1)  # it ends at once where nothing keeps it out
        return int.__int__(self)

    def over(self) -> int:
        """How many threads ran. Waits for their ends."""
        for thread in self.threads:
            thread.join()
        return len(self.threads)


def test_threads_lose_no_byte() -> None:
    ledger = Ledger()
    number = Interrupted(5, lambda: ledger.add("push", "values", 3))
    ledger.add("push", "values", number)
    others = number.over()
    assert others > 0, "the ledger did not read the number: nothing was tried"
    assert ledger.totals() == {**NOTHING, "push": {"values": 5 + 3 * others}} | dict.fromkeys(
        ("to_servers", "total"), 5 + 3 * others
    )


def test_totals_never_hold_half_of_what_another_thread_adds() -> None:
    ledger, seen = Ledger(), list[tuple[int, int]]()

    def look() -> None:
        totals = ledger.totals()
        seen.append((totals["total"], totals["to_servers"]))

    number = Interrupted(5, look)
    ledger.add("push", "values", number)
    assert number.over() == len(seen) > 0
    assert set(seen) <= {(0, 0), (5, 5)}


@every(("direction", "num_bytes"), [("sideways", 1), ("push", -1)])
def test_what_cannot_be_is_refused(direction: str, num_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"allowed: 0 or more of push, pull, tower, read, control"):
        Ledger().add(direction, "ids", num_bytes)


def test_every_byte_but_the_coordinators_goes_one_way() -> None:
    ledger = Ledger()
    for number, (direction, part) in enumerate((d, p) for d in DIRECTIONS for p in PARTS if p != "calls"):
        ledger.add(direction, part, 1 << number % 40)
    totals = ledger.totals()
    assert sum(totals[way] for way in WAYS) == totals["total"]


def test_a_part_that_is_not_in_the_list_is_refused() -> None:
    with pytest.raises(ValueError, match=r"push: part 'gradients'; allowed: ids, masks, values"):
        Ledger().add("push", "gradients", 1)
