"""A server's journal: appended records survive any end of the process; damage does not look like a crash."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from shardkeep.base.errors import JournalError
from shardkeep.ps.server.journal.journal import Journal, RecordKind
from tests.support.cases import every
from tests.support.journals import LIMIT_S, body_of, replayed, seen, segments, steps


@every("sync", [False, True], ids=["process", "machine"])
def test_records_come_back_in_order_over_generations_and_rolls(tmp_path: Path, sync: bool) -> None:
    folder = tmp_path / "journal"
    expected = []
    for generation in (2, 3, 10):
        journal = Journal(folder, sync=sync)
        assert [seen(record) for record in journal.replay()] == expected
        for part in range(3):
            if part == 0:
                journal.begin(generation, step=generation, facts={"members": ["a", "b"]})
            else:
                journal.roll()
            expected.append((RecordKind.GENERATION, 0, generation, b'{"members": ["a", "b"]}'))
            for rank in range(3):
                body = body_of(rank * 1001, rank)
                journal.append(RecordKind.PUSH, rank=rank, step=10 * generation + part, body=body)
                journal.append(RecordKind.APPLIED, rank=rank, step=10 * generation + part)
                expected.append((RecordKind.PUSH, rank, 10 * generation + part, body.tobytes()))
                expected.append((RecordKind.APPLIED, rank, 10 * generation + part, b""))
        journal.to_disk()
        assert [seen(record) for record in journal.replay()] == expected
        assert journal.size_bytes == sum(path.stat().st_size for path in segments(folder))
        journal.close()
    assert replayed(folder) == expected
    assert [path.name for path in segments(folder)] == [
        f"g{generation:06d}-{number:06d}.journal" for generation in (2, 3, 10) for number in (1, 2, 3)
    ]


def test_a_segment_that_is_full_is_followed_by_another_and_bodies_that_were_read_may_be_changed(folder: Path) -> None:
    journal = Journal(folder, sync=False, segment_bytes=1000)
    journal.begin(1, step=0, facts={})
    for step in range(30):
        journal.append(RecordKind.PUSH, rank=0, step=step, body=body_of(300, step))
    bodies = [record.body for record in journal.replay() if record.entry is RecordKind.PUSH]
    journal.close()
    assert len(bodies) == 30 and all(body.flags.writeable and body.dtype == np.uint8 for body in bodies)
    sizes = [path.stat().st_size for path in segments(folder)]
    assert len(sizes) == 10 and max(sizes) < 1400
    assert steps(folder) == list(range(30))


def test_closing_frees_the_lock_which_names_its_holder_only_and_ends_all_writing(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "lock").write_text("1234567890123\n")  # of a process that died
    first = Journal(folder, sync=False, lock_s=0)
    assert (folder / "lock").read_text() == f"{os.getpid()}\n"
    first.begin(1, step=0, facts={})
    first.append(RecordKind.PUSH, rank=0, step=0)
    with pytest.raises(JournalError, match=rf"process {os.getpid()} still holds the lock"):
        Journal(folder, sync=False, lock_s=0)
    release = threading.Timer(0.2, first.close)
    release.start()
    second = Journal(folder, sync=False, lock_s=LIMIT_S)  # waits for it
    release.join()
    first.close()
    for attempt in (
        lambda: first.append(RecordKind.PUSH, rank=0, step=1),
        first.roll,
        first.clear,
        lambda: first.begin(2, step=0, facts={}),
    ):
        with pytest.raises(JournalError, match=r"no segment is open|the journal is closed"):
            attempt()
    second.close()
    assert steps(folder) == [0]


def test_a_folder_without_locks_or_that_cannot_be_made_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("shardkeep.base.files.fcntl.flock", none)
    with pytest.raises(JournalError, match=r"lock: cannot be locked \(No locks available\).*use a local disk"):
        Journal(folder, sync=False)
    (folder / "file").write_text("")
    with pytest.raises(JournalError, match=r"file/journal: cannot be written \(Not a directory\)$"):
        Journal(folder / "file" / "journal", sync=False)


@every("again", [False, True], ids=["written now", "of an earlier life"])
def test_segments_of_steps_that_are_over_are_forgotten(tmp_path: Path, again: bool) -> None:
    folder = tmp_path / "journal"
    journal = Journal(folder, sync=False)
    journal.begin(1, step=0, facts={"seed": 1})
    for base in (0, 10, 5):  # the third segment's steps are lower than the second's, and it goes with it
        journal.append(RecordKind.PUSH, rank=0, step=base + 1)
        journal.append(RecordKind.APPLIED, rank=0, step=base)
        journal.roll()
    journal.append(RecordKind.PUSH, rank=0, step=2)
    if again:
        journal.close()
        journal = Journal(folder, sync=False)
        journal.forget_before(100)
        assert len(segments(folder)) == 4  # nothing is known of them yet
        assert len(list(journal.replay())) == 11
    for step, left in ((1, [1, 11, 6, 2]), (2, [11, 6, 2]), (7, [11, 6, 2]), (11, [11, 6, 2]), (12, [2])):
        journal.forget_before(step)
        found = list(journal.replay())
        assert [record.step for record in found if record.entry is RecordKind.PUSH] == left
        assert (found[0].entry, found[0].body.tobytes()) == (RecordKind.GENERATION, b'{"seed": 1}')
        assert journal.size_bytes == sum(path.stat().st_size for path in segments(folder))
    if not again:
        journal.roll()
        for _ in range(2):  # the newest is never forgotten
            journal.forget_before(100)
        assert [(record.entry, record.step) for record in journal.replay()] == [(RecordKind.GENERATION, 0)]
        assert [path.name for path in segments(folder)] == ["g000001-000005.journal"]
    journal.close()


def test_a_journal_knows_the_checkpoint_that_its_oldest_record_follows(folder: Path) -> None:
    journal = Journal(folder, sync=False)
    journal.begin(1, step=0, facts={})
    assert journal.base == 0
    for step in range(6):
        journal.append(RecordKind.PUSH, rank=0, step=step)
        if step % 2:
            journal.roll()
    journal.forget_before(1)  # the segment has a push of step 1
    assert journal.base == 0
    journal.forget_before(5)
    journal.close()
    again = Journal(folder, sync=False, lock_s=0)
    assert (again.base, [record.step for record in again.replay() if record.entry is RecordKind.PUSH]) == (4, [4, 5])
    (folder / "base").write_text("4\0")
    with pytest.raises(JournalError, match=f"{folder / 'base'}: cannot be read"):
        assert again.base
    again.clear()
    again.build_on(7)
    again.close()
    assert Journal(folder, sync=False, lock_s=0).base == 7


def test_a_lower_generation_cannot_follow_until_the_journal_is_cleared(journal: Journal, folder: Path) -> None:
    journal.begin(3, step=0, facts={})
    with pytest.raises(JournalError, match="holds generation 3; 2 cannot follow it"):
        journal.begin(2, step=0, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=0)
    journal.begin(5, step=9, facts={})
    journal.clear()
    assert (segments(folder), journal.size_bytes, list(journal.replay())) == ([], 0, [])
    with pytest.raises(JournalError, match="no segment is open"):
        journal.append(RecordKind.PUSH, rank=0, step=0)
    journal.begin(1, step=0, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=0)
    journal.close()
    assert steps(folder) == [0]
