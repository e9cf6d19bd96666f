"""A server's journal: appended records survive any end of the process; damage does not look like a crash."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardkeep.base.errors import JournalError
from shardkeep.ps.server.journal.journal import GIVEN_UP, Journal, JournalRecord, RecordKind
from tests.support.cases import every

LIMIT_S = 60.0


def body_of(size: int, step: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(step).integers(0, 256, size, dtype=np.uint8)


def seen(record: JournalRecord) -> tuple[RecordKind, int, int, bytes]:
    return record.entry, record.rank, record.step, record.body.tobytes()


def replayed(folder: Path) -> list[tuple[RecordKind, int, int, bytes]]:
    journal = Journal(folder, sync=False, lock_s=0)
    try:
        return [seen(record) for record in journal.replay()]
    finally:
        journal.close()


def steps(folder: Path) -> list[int]:
    """The steps of the pushes."""
    return [step for entry, _, step, _ in replayed(folder) if entry is RecordKind.PUSH]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.journal"))


def filled(folder: Path, *, num_steps: int = 4, generation: int = 1, size: int = 100) -> Path:
    """One segment of some pushes, left by a process that ended; its path."""
    journal = Journal(folder, sync=False)
    journal.begin(generation, step=0, facts={})
    for step in range(num_steps):
        journal.append(RecordKind.PUSH, rank=0, step=step, body=body_of(size, step))
    journal.close()
    return segments(folder)[-1]


def record_at(folder: Path, path: Path, number: int) -> int:
    """Where the push of that number starts in a file that `filled` made with bodies of 100 bytes."""
    return path.stat().st_size - (4 - number) * (32 + 104)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "server-0" / "journal"


@pytest.fixture
def journal(folder: Path) -> Iterator[Journal]:
    journal = Journal(folder, sync=False)
    yield journal
    journal.close()


@pytest.mark.parametrize("sync", [False, True], ids=["process", "machine"])
def test_records_come_back_in_order_over_generations_and_rolls(folder: Path, sync: bool) -> None:
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
        assert [seen(record) for record in journal.replay()] == expected
        assert journal.size_bytes == sum(path.stat().st_size for path in segments(folder))
        journal.close()
    assert replayed(folder) == expected
    assert [path.name for path in segments(folder)] == [
        f"g{generation:06d}-{number:06d}.journal" for generation in (2, 3, 10) for number in (1, 2, 3)
    ]


def test_a_segment_that_is_full_is_followed_by_another(folder: Path) -> None:
    journal = Journal(folder, sync=False, segment_bytes=1000)
    journal.begin(1, step=0, facts={})
    for step in range(30):
        journal.append(RecordKind.PUSH, rank=0, step=step, body=body_of(300, step))
    journal.close()
    assert len(segments(folder)) == 10
    assert all(path.stat().st_size < 1400 for path in segments(folder))
    assert steps(folder) == list(range(30))


def test_a_body_that_was_read_may_be_changed(folder: Path) -> None:
    filled(folder)
    journal = Journal(folder, sync=False)
    bodies = [record.body for record in journal.replay() if record.entry is RecordKind.PUSH]
    assert all(body.flags.writeable and body.dtype == np.uint8 for body in bodies)
    journal.close()


def test_threads_append_whole_records(journal: Journal, folder: Path) -> None:
    journal.begin(1, step=0, facts={})

    def push(rank: int) -> None:
        for step in range(50):
            journal.append(RecordKind.PUSH, rank=rank, step=step, body=np.full(5000, rank, dtype=np.uint8))
            journal.append(RecordKind.APPLIED, rank=rank, step=step)

    threads = [threading.Thread(target=push, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    journal.close()
    found = replayed(folder)
    for rank in range(4):
        mine = [record for record in found[1:] if record[1] == rank]
        assert mine[::2] == [(RecordKind.PUSH, rank, step, bytes([rank]) * 5000) for step in range(50)]
        assert mine[1::2] == [(RecordKind.APPLIED, rank, step, b"") for step in range(50)]


def test_a_last_record_cut_anywhere_leaves_the_others_and_a_usable_journal(folder: Path) -> None:
    path = filled(folder)
    whole, last = path.read_bytes(), record_at(folder, path, 3)
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        journal = Journal(folder, sync=size % 2 == 0)
        found = [record.step for record in journal.replay() if record.entry is RecordKind.PUSH]
        assert found == [0, 1, 2]
        assert path.stat().st_size == journal.size_bytes == last
        journal.begin(2, step=3, facts={})
        journal.append(RecordKind.PUSH, rank=0, step=3)
        journal.close()
        assert steps(folder) == [0, 1, 2, 3]
        segments(folder)[-1].unlink()


def test_a_segment_cut_before_its_first_record_is_whole_counts_as_never_begun(folder: Path) -> None:
    first = filled(folder, generation=1)
    path = filled(folder, generation=2, num_steps=0)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert steps(folder) == [0, 1, 2, 3]
        assert segments(folder) == [first]


@pytest.mark.parametrize("zeros", [1, 31, 32, 4096, 100_001])
def test_zeros_at_the_end_are_torn(folder: Path, zeros: int) -> None:
    path = filled(folder)
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(zeros))
    assert steps(folder) == [0, 1, 2, 3]
    assert path.read_bytes() == whole


def test_a_last_segment_of_zeros_only_is_torn(folder: Path) -> None:
    first = filled(folder)
    filled(folder, generation=2).write_bytes(bytes(10_000))
    assert steps(folder) == [0, 1, 2, 3]
    assert segments(folder) == [first]


def test_what_an_earlier_life_left_torn_is_cut_even_if_nobody_replays(folder: Path) -> None:
    path = filled(folder)
    path.write_bytes(path.read_bytes()[:-1])
    filled(folder, generation=2, num_steps=1)
    assert steps(folder) == [0, 1, 2, 0]


@every("place", [*range(32), 32, 80, 32 + 99])
def test_a_flipped_byte_is_cut_in_the_last_record_and_refused_in_an_earlier_one(tmp_path: Path, place: int) -> None:
    """Every byte of the header, and of the body the first, one within and the last."""
    path = filled(folder := tmp_path / "journal")
    whole = path.read_bytes()
    for number in (3, 1):
        damaged = bytearray(whole)
        damaged[record_at(folder, path, number) + place] ^= 0x10
        path.write_bytes(damaged)
        if number == 3:
            assert steps(folder) == [0, 1, 2]
            path.write_bytes(whole)
            continue
        offset = record_at(folder, path, 1)
        advice = r"resume the job from its last checkpoint \(shardkeep train --resume\)"
        with pytest.raises(JournalError, match=rf"{path.name}: damaged at byte {offset}; {advice}"):
            replayed(folder)
        assert path.read_bytes() == damaged


def test_a_damaged_record_before_the_last_of_many_is_refused(folder: Path) -> None:
    path = filled(folder, num_steps=20)
    offset = record_at(folder, path, 2)  # of the last four
    damaged = bytearray(path.read_bytes())
    damaged[offset + 50] ^= 0x10
    path.write_bytes(damaged)
    with pytest.raises(JournalError, match=rf"{path.name}: damaged at byte {offset};"):
        replayed(folder)


def test_a_torn_tail_of_an_earlier_segment_is_refused(folder: Path) -> None:
    path = filled(folder)
    filled(folder, generation=2)
    offset = record_at(folder, path, 3)
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(JournalError, match=rf"g000001-000001.journal: damaged at byte {offset};"):
            replayed(folder)
    path.unlink()
    assert steps(folder) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda whole: os.urandom(5000), "damaged at byte 0"),
        (lambda whole: b"#" + whole[1:], "damaged at byte 0"),
        (lambda whole: bytes(40) + whole[40:], "damaged at byte 0"),
        (lambda whole: whole[:33] + bytes([whole[33] ^ 1]) + whole[34:], "damaged at byte 0"),
    ],
    ids=["garbage", "magic", "zeros for a header", "checksum"],
)
def test_a_file_that_is_no_segment_is_refused(folder: Path, damage: Callable[[bytes], bytes], text: str) -> None:
    path = filled(folder)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(JournalError, match=rf"{path.name}: {text}"):
        replayed(folder)
    assert path.read_bytes() == damaged


def test_a_segment_of_another_format_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkeep.ps.server.journal.segments.FORMAT", 7)
    path = filled(folder)
    monkeypatch.undo()
    with pytest.raises(JournalError, match=rf"{path.name}: format 7; this version reads 1; resume the job"):
        replayed(folder)


def test_a_segment_under_the_name_of_another_is_refused(folder: Path) -> None:
    path = filled(folder)
    path.rename(path.with_name("g000002-000001.journal"))
    with pytest.raises(JournalError, match=r"g000002-000001.journal: damaged at byte 0"):
        replayed(folder)


def test_other_files_are_left_alone(folder: Path) -> None:
    filled(folder)
    others = [folder / name for name in ("notes.txt", "g1-1.journal", "g000001-000001.journal.old")]
    for path in others:
        path.write_text("mine")
    assert steps(folder) == [0, 1, 2, 3]
    journal = Journal(folder, sync=False)
    journal.clear()
    journal.close()
    assert [path.read_text() for path in others] == ["mine"] * 3


APPENDING = """
import sys
from pathlib import Path
import numpy as np
from shardkeep.ps.server.journal.journal import Journal, RecordKind

journal = Journal(Path(sys.argv[1]), sync=False, segment_bytes=1 << 20)
journal.begin(1, step=0, facts={})
bodies = [np.full(size, size % 251, dtype=np.uint8) for size in (0, 1, 4097, 300_000)]
for step in range(1_000_000):
    journal.append(RecordKind.PUSH, rank=0, step=step, body=bodies[step % 4])
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
"""


def appending(folder: Path) -> subprocess.Popen[str]:
    """A process that appends for ever and prints every step whose append returned."""
    return subprocess.Popen([sys.executable, "-c", APPENDING, str(folder)], stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> list[int]:
    """The whole lines that a process which was killed has printed."""
    assert process.stdout is not None
    with process.stdout as out:
        printed = out.read()
    process.wait(LIMIT_S)
    return [int(line) for line in printed.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.waits_for_processes
def test_what_was_appended_survives_a_kill_at_any_moment(folder: Path) -> None:
    chance = random.Random(5)
    for _ in range(3):
        process = appending(folder)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n"
            killer = threading.Timer(chance.uniform(0.0, 0.1), process.kill)
            killer.start()
            printed = [0, *ended(process)]
        finally:
            process.kill()
        found = replayed(folder)
        pushes = [(step, body) for entry, _, step, body in found if entry is RecordKind.PUSH]
        assert len(printed) <= len(pushes) <= len(printed) + 1
        assert [step for step, _ in pushes] == list(range(len(pushes)))
        sizes = (0, 1, 4097, 300_000)
        assert all(body == bytes([sizes[step % 4] % 251]) * sizes[step % 4] for step, body in pushes)
        journal = Journal(folder, sync=False)
        journal.clear()
        journal.close()


@pytest.mark.waits_for_processes
def test_a_process_that_may_wake_up_keeps_others_out_until_it_is_dead(folder: Path) -> None:
    process = appending(folder)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(
            JournalError, match=rf"journal: process {process.pid} still holds the lock after 0.1 s; end"
        ):
            Journal(folder, sync=False, lock_s=0.1)
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        journal = Journal(folder, sync=False, lock_s=LIMIT_S)
        assert (folder / "lock").read_text() == f"{os.getpid()}\n"
        journal.close()
    finally:
        process.kill()
        ended(process)


def test_all_segments_and_their_folder_are_brought_to_disk_when_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    journal = Journal(folder, sync=False)
    journal.begin(1, step=0, facts={})
    journal.append(RecordKind.APPLIED, rank=0, step=0)
    journal.roll()
    assert not synced
    journal.to_disk()
    journal.close()
    assert synced == {path.stat().st_ino for path in (folder, *folder.glob("*.journal"))} and len(synced) == 3


def test_closing_frees_the_lock_and_ends_all_writing(folder: Path) -> None:
    first = Journal(folder, sync=False)
    first.begin(1, step=0, facts={})
    first.append(RecordKind.PUSH, rank=0, step=0)
    with pytest.raises(JournalError, match=rf"process {os.getpid()} still holds the lock"):
        Journal(folder, sync=False, lock_s=0)
    first.close()
    first.close()
    second = Journal(folder, sync=False, lock_s=0)
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


def test_the_lock_names_its_holder_only(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "lock").write_text("1234567890123\n")  # of a process that died
    journal = Journal(folder, sync=False, lock_s=0)
    assert (folder / "lock").read_text() == f"{os.getpid()}\n"
    journal.close()


def test_a_folder_without_locks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("shardkeep.base.files.fcntl.flock", none)
    with pytest.raises(JournalError, match=r"lock: cannot be locked \(No locks available\).*use a local disk"):
        Journal(folder, sync=False)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file/journal: cannot be written \(Not a directory\)$"):
        Journal(tmp_path / "file" / "journal", sync=False)


@pytest.mark.parametrize("again", [False, True], ids=["written now", "of an earlier life"])
def test_segments_of_steps_that_are_over_are_forgotten(folder: Path, again: bool) -> None:
    journal = Journal(folder, sync=False)
    journal.begin(1, step=0, facts={"seed": 1})
    for base in (0, 10, 5):  # the third segment's steps are lower than the second's
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
    for step, left in ((1, [1, 11, 6, 2]), (2, [11, 6, 2]), (6, [11, 6, 2]), (7, [11, 2]), (11, [11, 2]), (12, [2])):
        journal.forget_before(step)
        found = list(journal.replay())
        assert [record.step for record in found if record.entry is RecordKind.PUSH] == left
        assert (found[0].entry, found[0].body.tobytes()) == (RecordKind.GENERATION, b'{"seed": 1}')
        assert journal.size_bytes == sum(path.stat().st_size for path in segments(folder))
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
    again.clear()
    again.build_on(7)
    again.close()
    assert Journal(folder, sync=False, lock_s=0).base == 7


def test_the_newest_segment_is_never_forgotten(journal: Journal, folder: Path) -> None:
    journal.begin(1, step=0, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=1)
    journal.forget_before(100)
    journal.append(RecordKind.PUSH, rank=0, step=2)
    journal.roll()
    journal.forget_before(100)
    journal.forget_before(100)
    assert [(record.entry, record.step) for record in journal.replay()] == [(RecordKind.GENERATION, 0)]
    assert [path.name for path in segments(folder)] == ["g000001-000002.journal"]


def test_a_cleared_journal_starts_anew(journal: Journal, folder: Path) -> None:
    journal.begin(5, step=9, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=9)
    journal.clear()
    assert (segments(folder), journal.size_bytes, list(journal.replay())) == ([], 0, [])
    with pytest.raises(JournalError, match="no segment is open"):
        journal.append(RecordKind.PUSH, rank=0, step=0)
    journal.begin(1, step=0, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=0)
    journal.close()
    assert steps(folder) == [0]


def test_a_damaged_journal_takes_nothing_until_it_is_cleared(folder: Path) -> None:
    filled(folder).write_bytes(os.urandom(1000))
    journal = Journal(folder, sync=False)
    with pytest.raises(JournalError, match="damaged at byte 0"):
        journal.begin(2, step=0, facts={})
    journal.clear()
    journal.begin(1, step=0, facts={})
    journal.close()


def test_a_lower_generation_cannot_follow(journal: Journal) -> None:
    journal.begin(3, step=0, facts={})
    with pytest.raises(JournalError, match="holds generation 3; 2 cannot follow it"):
        journal.begin(2, step=0, facts={})
    journal.append(RecordKind.PUSH, rank=0, step=0)


class Quota:
    """A disk on which `left` more bytes fit; takes at most `most` of a write, as the system may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int, most: int = 1 << 30) -> None:
        self.left, self.most, self._writev = left, most, os.writev
        monkeypatch.setattr(os, "writev", self)

    def __call__(self, descriptor: int, parts: list[memoryview]) -> int:
        data = b"".join(parts)[: min(self.left, self.most)]
        if not data:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._writev(descriptor, [data])
        self.left -= written
        return written


WRITES: dict[str, Callable[[Journal], None]] = {
    "append": lambda journal: journal.append(RecordKind.PUSH, rank=0, step=1, body=body_of(100)),
    "roll": Journal.roll,
    "begin": lambda journal: journal.begin(2, step=1, facts={}),
}


@pytest.mark.parametrize("left", [0, 5, 32, 33, 79])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_full_disk_gives_the_journal_up_once_until_a_roll_finds_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left: int, write: Callable[[Journal], None]
) -> None:
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


@pytest.mark.parametrize("number", REFUSED.values(), ids=REFUSED)
def test_a_journal_that_no_file_can_be_made_for_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
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


def test_damage_early_in_a_large_segment_is_found_in_time(folder: Path) -> None:
    journal = Journal(folder, sync=False)
    journal.begin(1, step=0, facts={})
    for step in range(8):
        journal.append(RecordKind.PUSH, rank=0, step=step, body=body_of(4 << 20, step))
    journal.close()
    path = segments(folder)[0]
    start = time.process_time()
    for size in (
        path.stat().st_size,
        path.stat().st_size - 7 * ((4 << 20) + 32),
    ):  # the last one has no other behind it
        with path.open("r+b") as file:
            file.truncate(size)
            file.seek(100)
            file.write(b"\0\1\2\3")
        if size < 8 << 20:
            assert steps(folder) == []
        else:
            with pytest.raises(JournalError, match="damaged at byte"):
                replayed(folder)
    assert time.process_time() - start < 10.0


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
