"""Limits of a journal: full disks, quotas, broken files, and its own size."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkeep.ps.server.journal.journal import GIVEN_UP, Journal, RecordKind
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


REFUSED = {"full": errno.ENOSPC, "quota": errno.EDQUOT, "broken": errno.EIO, "read-only": errno.EROFS}


@every("number", REFUSED.values(), ids=REFUSED)
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


def test_a_limit_of_the_system_on_the_size_of_files_is_like_a_full_disk(folder: Path) -> None:
    told: list[str] = []
    journal = Journal(folder, sync=False, on_given_up=told.append)
    journal.begin(1, step=0, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=0, body=body_of(1000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        journal.append(RecordKind.PUSH, rank=0, step=1, body=body_of(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(told) == 1 and "cannot be written (File too large)" in told[0]
    journal.roll()
    journal.append(RecordKind.PUSH, rank=0, step=2)
    journal.close()
    assert steps(folder) == [2]


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
