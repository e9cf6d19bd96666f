"""Damage of a journal: torn ends are cut, and anything else is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkeep.base.errors import JournalError
from shardkeep.ps.server.journal.journal import Journal, RecordKind
from tests.support.cases import every
from tests.support.journals import filled, replayed, segments, steps


def record_at(folder: Path, path: Path, number: int) -> int:
    """Where the push of that number starts in a file that `filled` made with bodies of 100 bytes."""
    return path.stat().st_size - (4 - number) * (32 + 104)


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


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


@every("zeros", [1, 31, 32, 4096, 100_001])
def test_zeros_at_the_end_and_a_last_segment_of_zeros_only_are_torn(tmp_path: Path, zeros: int) -> None:
    path = filled(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(zeros))
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert path.read_bytes() == whole
    filled(tmp_path, generation=2).write_bytes(bytes(zeros))
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert segments(tmp_path) == [path]


@every("place", [*range(32), 32, 80, 32 + 99])
def test_a_flipped_byte_is_cut_in_the_last_record_and_refused_in_an_earlier_one(tmp_path: Path, place: int) -> None:
    """Every byte of the header, and of the body the first, one within and the last."""
    path = filled(folder := tmp_path / "journal")
    whole = path.read_bytes()
    for number in (3, 1):
        damaged = flipped(whole, record_at(folder, path, number) + place)
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
    segments(folder)[0].write_bytes(segments(folder)[0].read_bytes()[:-1])
    filled(folder, generation=3, num_steps=1)  # cuts what an earlier life left torn, though nobody replays
    assert steps(folder) == [0, 1, 2, 0]


def other_format(path: Path) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkeep.ps.server.journal.segments.FORMAT", 7)
        return filled(path.with_name("other")).read_bytes()


@every(
    ("damaged", "text"),
    [
        (lambda _: os.urandom(5000), "damaged at byte 0"),
        (lambda path: b"#" + path.read_bytes()[1:], "damaged at byte 0"),
        (lambda path: bytes(40) + path.read_bytes()[40:], "damaged at byte 0"),
        (lambda path: flipped(path.read_bytes(), 33), "damaged at byte 0"),
        (lambda path: filled(path.with_name("other"), generation=2).read_bytes(), "damaged at byte 0"),
        (other_format, "format 7; this version reads 1; resume the job"),
    ],
)
def test_a_file_that_is_no_segment_is_refused(tmp_path: Path, damaged: Callable[[Path], bytes], text: str) -> None:
    path = filled(tmp_path)
    content = damaged(path)
    path.write_bytes(content)
    with pytest.raises(JournalError, match=rf"{path.name}: {text}"):
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
            with pytest.raises(JournalError, match="damaged at byte"):
                replayed(folder)
        else:
            assert steps(folder) == []
    assert time.process_time() - start < 10.0
