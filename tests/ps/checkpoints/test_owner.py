"""Two jobs and one folder of checkpoints: on one host, on two, with locks and without."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardkeep.base.errors import CheckpointError, ConfigError
from shardkeep.ps.checkpoints.owner import Hold, Owner, last_owner, owner_here
from tests.support.cases import every

LONG_S = 60.0
FOR_EVER_S = 1000.0
"""Above the time limit of a test: nobody waits for it."""


def held(folder: Path, job: str, *, watch_s: float = 0.1, beat_s: float = LONG_S) -> Hold:
    return Hold(folder, owner_here(job, f"/runs/{job}"), watch_s=watch_s, beat_s=beat_s)


def elsewhere(folder: Path, **facts: object) -> Owner:
    """An owner on another host, whose locks are not seen here."""
    owner = replace(owner_here("first", "/runs/first"), host="far", kernel="other", **facts)  # type: ignore[arg-type]
    (folder / "owner-000004.json").write_text(json.dumps(asdict(owner)))
    return owner


def without_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


HOLD = """
import sys, time
from pathlib import Path
from shardkeep.ps.checkpoints.owner import Hold, owner_here
hold = Hold(Path(sys.argv[1]), owner_here("first", "/runs/first"))
print("held", flush=True)
time.sleep(60)
"""


def test_the_second_of_two_jobs_is_refused_with_the_first_ones_name_until_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            told = (
                rf"{tmp_path} belongs to another job that runs \(run folder /runs/first, process {process.pid} on .*\)"
            )
            with pytest.raises(ConfigError, match=rf"{told}; allow"):
                held(tmp_path, "second", watch_s=FOR_EVER_S)
        finally:
            process.kill()
    hold, owner = held(tmp_path, "second", watch_s=FOR_EVER_S), last_owner(tmp_path)
    assert owner is not None and (owner.run, owner.pid) == ("/runs/second", os.getpid())
    hold.check()


@every(("facts", "watch_s"), [({"over": True}, LONG_S), ({}, 0.1)], ids=["it ended", "its counter stands still"])
def test_a_job_on_another_host_that_is_over_blocks_nobody(
    tmp_path: Path, facts: dict[str, object], watch_s: float
) -> None:
    elsewhere(tmp_path, **facts)
    held(tmp_path, "second", watch_s=watch_s).check()
    assert [path.name for path in tmp_path.glob("owner-*")] == ["owner-000005.json"]


def test_a_job_on_another_host_whose_counter_grows_keeps_the_folder(tmp_path: Path) -> None:
    ended = threading.Event()
    elsewhere(tmp_path)

    def beat() -> None:
        number = 0
        while not ended.wait(0.01):
            number += 1
            elsewhere(tmp_path, beat=number)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match=r"run folder /runs/first, process \d+ on far"):
            held(tmp_path, "second", watch_s=LONG_S)
    finally:
        ended.set()
        thread.join()


def test_without_locks_the_counter_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    first = held(tmp_path, "first", beat_s=0.01)
    with pytest.raises(ConfigError, match="belongs to another job that runs"):
        held(tmp_path, "second", watch_s=LONG_S)
    first.release()
    held(tmp_path, "second", watch_s=LONG_S).check()


@every("locks", [True, False], ids=["with locks", "without locks"])
def test_of_many_jobs_that_start_at_the_same_time_one_gets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    elsewhere(tmp_path)  # dead: all of them wait for its counter and then take its place
    together = threading.Barrier(8)

    def start(number: int) -> Hold | ConfigError:
        together.wait()
        try:
            return held(tmp_path, f"job-{number}", watch_s=0.5, beat_s=0.02)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(start, range(8)))
    winners = [hold for hold in found if isinstance(hold, Hold)]
    assert len(winners) == 1
    winners[0].check()


def test_a_folder_that_was_given_back_stays_so_while_the_counter_grows(tmp_path: Path) -> None:
    before = threading.enumerate()
    folders = [tmp_path / str(number) for number in range(20)]
    for folder in folders:
        held(folder, "first", beat_s=0.0).release()
    for thread in set(threading.enumerate()) - set(before):
        thread.join(90)
    assert [owner.over for folder in folders if (owner := last_owner(folder)) is not None] == [True] * 20


def test_a_lock_that_another_user_of_the_group_made_still_keeps_two_jobs_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock").touch()
    real = os.open

    def refuse(path: Path, flags: int, *more: int) -> int:
        if Path(path).name == ".lock" and flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    held(tmp_path, "first").check()
    owner = last_owner(tmp_path)
    assert owner is not None and owner.locked
    with pytest.raises(ConfigError, match="belongs to another job that runs"):
        held(tmp_path, "second")


def test_the_replacement_of_a_process_takes_the_folder_and_one_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    zombie = held(tmp_path, "job")
    held(tmp_path, "job", watch_s=LONG_S).check()
    with pytest.raises(CheckpointError, match="was taken by another process"):
        zombie.check()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoints: cannot be written \(Not a directory\)"):
        held(tmp_path / "file" / "checkpoints", "first")


@every("by_another", [False, True])
def test_a_deleted_folder_is_taken_again_and_not_written_to_once_another_job_has_it(
    tmp_path: Path, by_another: bool
) -> None:
    folder = tmp_path / "checkpoints"
    first = held(folder, "first")
    shutil.rmtree(folder)
    if by_another:
        held(folder, "second")
        with pytest.raises(CheckpointError, match="run folder /runs/second"):
            first.check()
    else:
        first.check()
        with pytest.raises(ConfigError, match="belongs to another job"):
            held(folder, "second", watch_s=LONG_S)
