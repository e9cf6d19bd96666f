"""Whole files, locks and deadlines."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import CheckpointError, DeadlineExceeded
from shardkeep.base.files import atomic_write, file_lock, fill, replacing, use_newest
from tests.support.cases import every


def test_an_atomic_write_replaces_the_file_or_keeps_the_old_one_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    atomic_write(tmp_path / "a.json", "old")
    atomic_write(tmp_path / "a.json", b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardkeep.base.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        atomic_write(tmp_path / "a.json", "newer")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_a_lock_lets_one_in_at_a_time_and_tells_who_waits(tmp_path: Path) -> None:
    waiting, entered = threading.Event(), threading.Event()

    def second() -> None:
        with file_lock(tmp_path / "lock", waiting=waiting.set):
            entered.set()

    thread = threading.Thread(target=second)
    with file_lock(tmp_path / "lock"):
        thread.start()
        assert waiting.wait(90)
        assert not entered.is_set()
    thread.join(90)
    assert entered.is_set()


def test_a_deadline_names_what_was_waited_for_and_how_long() -> None:
    now = [0.0]
    deadline = Deadline(2.0, clock=lambda: now[0])
    deadline.check("nothing yet")
    now[0] = 1.5
    assert deadline.remaining_s == 0.5
    now[0] = 2.5
    assert deadline.over
    assert deadline.remaining_s == 0.0
    with pytest.raises(DeadlineExceeded, match=r"waited 2\.5 s for server 1 \(limit 2 s\)"):
        deadline.check("server 1")


@every(("size", "call"), [(0, True), (1, False), (3 << 20, True), (3 << 20, False)])
def test_a_file_gets_its_size_without_holes(tmp_path: Path, monkeypatch: Any, size: int, call: bool) -> None:
    if not call:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    path = tmp_path / "filled"
    with path.open("wb") as file:
        if size:
            fill(file.fileno(), size)
    assert path.stat().st_size == size and not any(path.read_bytes())
    assert path.stat().st_blocks * 512 >= size


def test_files_take_their_names_together_or_stay_as_they_were(tmp_path: Path) -> None:
    old = [tmp_path / "a", tmp_path / "b"]
    for path in old:
        path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(old) as new:
        new[0].write_text("new")
        raise ZeroDivisionError
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["old", "old"]
    with replacing(old) as new:
        for path in new:
            path.write_text("new")
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["new", "new"]


def test_what_is_replaced_while_it_is_read_is_read_again_at_most_five_times() -> None:
    reads: list[str] = []

    def use(name: str, damaged: str) -> int:
        reads.append(name)
        if name in damaged:
            raise CheckpointError(f"{name} is damaged")
        return len(name)

    names = iter(["old", "new", "new"])
    assert use_newest(lambda: next(names), lambda name: use(name, "old")) == ("new", 3)
    with pytest.raises(CheckpointError, match="old is damaged"):
        use_newest(lambda: "old", lambda name: use(name, "old"))
    numbers = map(str, itertools.count())
    with pytest.raises(CheckpointError, match="8 is damaged"):
        use_newest(lambda: next(numbers), lambda name: use(name, "012345678"))
    assert reads == ["old", "new", "old", "0", "2", "4", "6", "8"]
