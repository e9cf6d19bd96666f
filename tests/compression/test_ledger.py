"""The byte ledger: every byte is counted once, by any counter."""

from __future__ import annotations

import threading

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
    ledger = Ledger()  # every byte but the coordinator's goes one way
    for number, (direction, part) in enumerate((d, p) for d in DIRECTIONS for p in PARTS if p != "calls"):
        ledger.add(direction, part, 1 << number % 40)
    assert sum(ledger.totals()[way] for way in WAYS) == ledger.totals()["total"]


def test_merged_totals_of_workers_equal_one_ledger_of_all_and_totals_are_copies() -> None:
    ledger = filled(1)
    parts = [ledger.totals(), filled(3).totals(), Ledger().totals()]
    assert merge_totals(parts) == filled(4).totals()
    assert merge_totals([]) == NOTHING
    assert parts[0] == filled(1).totals()
    parts[0]["push"]["ids"] = 0
    assert ledger.totals()["push"]["ids"] == 88
    one, other = Ledger(), Ledger()  # what one worker alone has is kept
    one.add("pull", "ids", 1)
    other.add("pull", "values", 2)
    assert merge_totals([one.totals(), other.totals()])["pull"] == {"ids": 1, "values": 2}


def test_threads_lose_no_byte_and_see_no_half_of_what_is_added() -> None:
    ledger, seen, threads = Ledger(), list[tuple[int, int]](), list[threading.Thread]()

    def other() -> None:
        totals = ledger.totals()
        seen.append((totals["total"], totals["to_servers"]))
        ledger.add("push", "values", 3)

    class Interrupted(int):
        """A number of bytes that lets another thread run whenever the ledger reads it, so in the middle of its sums."""

        def __int__(self) -> int:
            threads.append(threading.Thread(target=other))
            threads[-1].start()
            threads[-1].join(0.1)  # it ends at once where nothing keeps it out
            return int.__int__(self)

    ledger.add("push", "values", Interrupted(5))
    for thread in threads:
        thread.join()
    assert seen and all(total == to_servers for total, to_servers in seen)
    assert ledger.totals()["push"] == {"values": 5 + 3 * len(threads)} and ledger.totals()["total"] == 5 + 3 * len(
        threads
    )


@every(("direction", "part", "num_bytes", "text"), [
    ("sideways", "ids", 1, "allowed: 0 or more of push, pull, tower, read, control"),
    ("push", "ids", -1, "allowed: 0 or more of push, pull, tower, read, control"),
    ("push", "gradients", 1, "push: part 'gradients'; allowed: ids, masks, values"),
])  # fmt: skip
def test_what_cannot_be_is_refused(direction: str, part: str, num_bytes: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Ledger().add(direction, part, num_bytes)
