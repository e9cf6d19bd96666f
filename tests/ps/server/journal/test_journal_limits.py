"""Limits of a journal: full disks, quotas, broken files, its own size, and how much of its files stays in memory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.ps.server.journal import segments as segment_files
from shardkeep.ps.server.journal.journal import GIVEN_UP, Journal, RecordKind
from shardkeep.ps.server.journal.segments import WriteBehind
from tests.support.cases import every
from tests.support.journals import body_of, replayed, segments, steps

WRITEV = os.writev


class Quota:
    """A disk on which `left` more bytes fit; takes at most `most` of a write, as the system may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int, most: int = 1 << 30) -> None:
        self.left, self.most = left, most
        monkeypatch.setattr(os, "writev", self)

    def __call__(self, descriptor: int, parts: list[memoryview]) -> int:
        data = b"".join(parts)[: min(self.left, self.most)]
        if not data:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = WRITEV(descriptor, [data])
        self.left -= written
        return written


WRITES: dict[str, Callable[[Journal], None]] = {
    "append": lambda journal: journal.append(RecordKind.PUSH, rank=0, step=1, body=body_of(100)),
    "roll": Journal.roll,
    "begin": lambda journal: journal.begin(2, step=1, facts={}),
}


@every("left", [0, 5, 32, 33, 79])
@every("write", WRITES.values(), ids=WRITES)
def test_a_full_disk_gives_the_journal_up_once_until_a_roll_finds_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, write: Callable[[Journal], None]
) -> None:
    folder = tmp_path / "journal"
    told: list[str] = []
    journal = Journal(folder, sync=False, on_given_up=told.append)
    journal.begin(1, step=0, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=0, body=body_of(100))
    quota = Quota(monkeypatch, left)
    write(journal)
    journal.append(RecordKind.PUSH, rank=0, step=2)
    journal.begin(2, step=3, facts={})
    quota.left = 5
    journal.roll()
    assert len(told) == 1 and "cannot be written (No space left on device)" in told[0]
    assert segments(folder) == [] and journal.size_bytes == 0 and journal.base == GIVEN_UP
    quota.left = 1 << 20
    journal.roll()
    journal.append(RecordKind.PUSH, rank=0, step=7)
    journal.forget_before(7)
    assert journal.base == 7 and len(told) == 1
    journal.close()
    assert steps(folder) == [7]


@every("number", [errno.EIO, errno.EFBIG])
def test_a_journal_that_no_file_can_be_made_for_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder = tmp_path / "journal"
    told: list[str] = []
    journal = Journal(folder, sync=True, on_given_up=told.append)
    journal.begin(1, step=0, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=0)

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        for call in ("writev", "fdatasync", "fsync", "open", "unlink", "rename"):
            patch.setattr(os, call, refused)
        for step in range(1, 4):
            journal.append(RecordKind.PUSH, rank=0, step=step)
            journal.forget_before(step)
            journal.roll()
            journal.build_on(step)
            journal.begin(2, step=step, facts={})
    assert len(told) == 1 and os.strerror(number) in told[0]
    journal.roll()
    journal.append(RecordKind.PUSH, rank=0, step=9)
    assert journal.base == GIVEN_UP  # what is before lacks pushes
    journal.close()
    assert steps(folder)[-1] == 9


def test_writes_that_the_system_takes_in_pieces_are_whole(
    journal: Journal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Quota(monkeypatch, 1 << 30, most=7)
    journal.begin(1, step=0, facts={"a": 1})
    for size in range(40):
        journal.append(RecordKind.PUSH, rank=0, step=size, body=body_of(size, size))
    journal.close()
    assert [body for *_, body in replayed(folder)[1:]] == [body_of(size, size).tobytes() for size in range(40)]


def test_a_journal_above_its_limit_is_given_up_and_takes_no_more(tmp_path: Path) -> None:
    told: list[str] = []
    journal = Journal(tmp_path, sync=False, segment_bytes=4000, limit_bytes=20_000, on_given_up=told.append)
    journal.begin(1, step=0, facts={})
    for step in range(40):
        journal.append(RecordKind.PUSH, rank=0, step=step, body=body_of(1000, step))
    assert len(told) == 1 and told[0].endswith(" kB (recovery.max_journal_bytes)")
    assert journal.base == GIVEN_UP and journal.size_bytes == 0 and not segments(tmp_path)
    journal.begin(2, step=40, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=40, body=body_of(1000))
    assert journal.size_bytes < 1000
    journal.clear()  # the job begins again
    journal.begin(3, step=0, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=0, body=body_of(1000))
    journal.close()
    assert steps(tmp_path) == [0] and len(told) == 1


# ---- write-behind: which parts of a growing file stay in memory ----


KIB, MIB = 1 << 10, 1 << 20


def test_a_chunk_is_told_when_it_is_there_and_again_when_enough_has_come_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(segment_files, "let_go", lambda path, start, size: told.append((path.name, start, size)))
    behind = WriteBehind(chunk_bytes=100, kept_bytes=250)
    for before, size in ((0, 90), (90, 210), (210, 299), (299, 310)):
        behind.grew(tmp_path / "a", before, size)
    behind.ended(tmp_path / "a", 330)
    behind.grew(tmp_path / "b", 0, 700)  # more at once than is kept
    behind.grew(tmp_path / "b", 700, 800)
    behind.ended(tmp_path / "c", 99)  # too little to be worth a word
    behind.close(None)
    assert told == [
        ("a", 0, 200), ("a", 200, 100), ("a", 0, 200), ("a", 300, 30), ("b", 0, 700), ("a", 200, 100), ("a", 300, 30),
        ("b", 700, 100), ("b", 0, 700),
    ]  # fmt: skip


def test_without_another_thread_pages_stay_and_the_journal_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    journal = Journal(tmp_path, sync=False, segment_bytes=6 * MIB)
    journal.begin(1, step=0, facts={})
    monkeypatch.setattr(threading.Thread, "start", start)
    for step in range(14):
        journal.append(RecordKind.PUSH, rank=0, step=step, body=np.full(MIB, step, np.uint8))
    journal.close()
    monkeypatch.undo()
    assert steps(tmp_path) == list(range(14))


@every("hints", [True, False], ids=["hints", "a system without such hints"])
def test_a_file_that_was_deleted_or_never_was_fails_nobody(tmp_path: Path, hints: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not hints:
            patch.delattr(os, "posix_fadvise", raising=False)
        behind, path = WriteBehind(chunk_bytes=64 * KIB, kept_bytes=0), tmp_path / "log"
        for _ in range(2):
            path.write_bytes(bytes(100 * KIB))
            behind.grew(path, 0, 100 * KIB)
            behind.grew(tmp_path / "none" / "log", 0, MIB)
            path.unlink()
            behind.grew(path, 100 * KIB, 200 * KIB)
        behind.close(None)
        assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="only Linux drops pages on request")
def test_a_journal_out_of_memory_is_read_again_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    real = os.posix_fadvise

    def advise(descriptor: int, at: int, size: int, how: int) -> None:
        told.append(size)
        real(descriptor, at, size, how)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    bodies = [body_of(MIB, step) for step in range(60)]
    journal = Journal(tmp_path, sync=False, segment_bytes=24 * MIB)
    journal.begin(1, step=0, facts={})
    for step, body in enumerate(bodies):
        journal.append(RecordKind.PUSH, rank=0, step=step, body=body)
    journal.close()
    again = Journal(tmp_path, sync=False)
    found = [record.body for record in again.replay() if record.entry is RecordKind.PUSH]
    again.close()
    assert len(found) == len(bodies) and all(map(np.array_equal, found, bodies))
    assert sum(told) > 85 * MIB  # each part is advised once when it is written, those before the last 32 MiB again
