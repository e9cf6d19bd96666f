"""Damage of a journal: what is whole up to it is read, and the rest is cut off."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import JournalError
from shardkeep.ps.server.journal.journal import Journal, JournalEnd, RecordKind
from tests.support.cases import every
from tests.support.journals import body_of, filled, replayed, segments, steps


def record_at(folder: Path, path: Path, number: int) -> int:
    """Where the push of that number starts in a file that `filled` made with bodies of 100 bytes."""
    return path.stat().st_size - (4 - number) * (32 + 104)


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


def cut(folder: Path) -> tuple[list[int], JournalEnd | None]:
    """The steps of the pushes that are left and where they end: another process reads the same, and can go on."""
    journal = Journal(folder, sync=False, lock_s=0)
    found = [record.step for record in journal.replay() if record.entry is RecordKind.PUSH]
    journal.close()
    assert steps(folder) == found
    return found, journal.end


def test_a_last_record_cut_anywhere_leaves_the_others_and_a_usable_journal(folder: Path) -> None:
    path = filled(folder)
    whole, last = path.read_bytes(), record_at(folder, path, 3)
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        assert cut(folder) == ([0, 1, 2], JournalEnd(path, last))
        assert path.stat().st_size == last
    filled(folder, generation=2, num_steps=1)
    assert steps(folder) == [0, 1, 2, 0]


@every("place", [*range(32), 32, 80, 32 + 99])
@every(("number", "dropped"), [(3, -1), (1, 3)], ids=["the last record", "an earlier one"])
def test_a_log_ends_where_a_byte_is_flipped(tmp_path: Path, place: int, number: int, dropped: int) -> None:
    """Every byte of the header, and of the body the first, one within and the last."""
    path = filled(folder := tmp_path / "journal")
    offset = record_at(folder, path, number)
    path.write_bytes(flipped(path.read_bytes(), offset + place))
    assert cut(folder) == (list(range(number)), JournalEnd(path, offset, dropped))
    assert path.stat().st_size == offset


def other_format(path: Path) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkeep.ps.server.journal.segments.FORMAT", 7)
        return filled(path.with_name("other")).read_bytes()


@every(
    ("number", "damage", "left", "place"),
    [
        (1, lambda content: content[:-1], 3, (1, 216)),
        (1, lambda content: content[:-136] + bytes(136), 3, (1, 216)),
        (1, lambda content: content + bytes(4096), 4, (1, 352)),
        (1, None, 2, (0, 352)),
        (1, lambda _: b"", 2, (1, 0)),
        (1, lambda _: os.urandom(5000), 2, (1, 0)),
        (1, lambda content: bytes(40) + content[40:], 2, (1, 0)),
        (1, lambda content: flipped(content, 33), 2, (1, 0)),
        (1, lambda content: content.replace(b"\2", b"\3", 1), 2, (1, 0)),
        (2, lambda _: b"", 4, (2, 0)),
        (2, lambda content: content[:79], 4, (2, 40)),
        (3, None, 7, (4, 216)),
    ],
    ids=["short", "zeros", "longer", "none", "empty", "noise", "no head", "head", "name", "later", "torn", "a gap"],
)
def test_a_log_ends_where_an_earlier_segment_does(
    tmp_path: Path, number: int, damage: Callable[[bytes], bytes] | None, left: int, place: tuple[int, int]
) -> None:
    """A generation may be missing, as far as the log knows: a server is not in each."""
    journal = Journal(folder := tmp_path / "journal", sync=False, segment_bytes=300)
    journal.begin(1, step=0, facts={})
    for step in range(6):
        journal.append(RecordKind.PUSH, rank=0, step=step, body=body_of(100, step))
    journal.close()
    filled(folder, generation=2, num_steps=2)
    filled(folder, generation=4, num_steps=1)
    paths, whole = segments(folder), steps(folder)
    if damage is None:
        paths[number].unlink()
    else:
        paths[number].write_bytes(damage(paths[number].read_bytes()))
    found, end = cut(folder)
    assert found == [*whole[:6], *whole[8:]][:left] if left == 7 else found == whole[:left]
    assert end is not None and (end.path, end.byte, end.dropped < 0) == (paths[place[0]], place[1], left == 7)
    filled(folder, generation=5, num_steps=1)
    assert steps(folder) == [*found, 0]


class LostBytes(io.FileIO):
    at = 0  # the disk has lost the bytes from here on

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[: self.at - self.tell()]) or self.truncate()

    def truncate(self, size: int | None = None) -> int:
        raise OSError(errno.EIO, "Input/output error")


@every(("end", "left", "cuts"), [(0, [], True), (80, [], True), (352, [0, 1], True), (352, [0, 1], False)])
def test_a_log_ends_where_the_disk_has_lost_bytes_and_is_given_up_if_that_cannot_be_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int, left: list[int], cuts: bool
) -> None:
    path, given_up, opened = filled(folder := tmp_path / "journal"), list[str](), Path.open
    filled(folder, generation=2)

    def lost(self: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if self != path or (mode == "r+b" and cuts):
            return opened(self, mode, *more, **options)
        (file := LostBytes(self, mode)).at = end + 7 * (end != 80)  # within a record, or between two
        return file

    monkeypatch.setattr(Path, "open", lost)
    journal = Journal(folder, sync=False, on_given_up=given_up.append)
    assert [record.step for record in journal.replay() if record.entry is RecordKind.PUSH] == left
    assert (journal.end, bool(given_up)) == (JournalEnd(path, end, 3), not cuts)
    journal.begin(3, step=len(left), facts={})
    journal.close()
    monkeypatch.undo()
    assert steps(folder) == (left if cuts else [])


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_bytes(content := other_format(path))
    with pytest.raises(JournalError, match=rf"{path.name}: format 7; this version reads 2; resume the job"):
        replayed(tmp_path)
    assert path.read_bytes() == content


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


def test_damage_early_in_a_large_segment_is_found_in_time(folder: Path) -> None:
    path, start = filled(folder, num_steps=8, size=4 << 20), time.process_time()
    whole, record = path.stat().st_size, (4 << 20) + 32
    for size in (whole, whole - 7 * record):  # the last one has no other behind it
        with path.open("r+b") as file:
            file.truncate(size)
            file.seek(100)
            file.write(b"\0\1\2\3")
        if size == whole:
            content = path.read_bytes()
            assert cut(folder) == ([], JournalEnd(path, 80, 7))
            path.write_bytes(content)
        else:
            assert steps(folder) == []
    assert time.process_time() - start < 10.0
