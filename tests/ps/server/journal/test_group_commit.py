"""Records that wait for one sync: who waits for it, who must not, and what a slow, failing or ending disk leaves."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import JournalError, TransportError
from shardkeep.ps.server.journal.group_commit import GroupCommit
from shardkeep.ps.server.journal.journal import GIVEN_UP, Journal, RecordKind
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.wire.message import Kind
from tests.support.cases import every
from tests.support.journals import LIMIT_S, body_of, replayed, segments
from tests.support.messages import Message, pack, text_of
from tests.support.services import answer, gradient, make_service, wanted

RANKS = 2


class Disk:
    """Syncs files, when it is `free`, unless it is broken. Counts and notes what it does."""

    def __init__(self) -> None:
        self.free, self.broken = threading.Event(), False
        self.free.set()
        self.synced: dict[int, int] = {}  # bytes by inode
        self.syncs = 0
        self.threads: set[int] = set()

    def __call__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        assert self.free.wait(LIMIT_S)
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.synced[os.fstat(descriptor).st_ino] = size
        self.syncs += 1
        self.threads.add(threading.get_ident())


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.free.set()


class Server:
    """A server of two ranks, whose journal is on a disk."""

    def __init__(self, folder: Path, disk: Disk, mode: str) -> None:
        self.folder, self.disk, self.reasons = folder, disk, list[str]()
        self.journal = Journal(folder, sync=True, fdatasync=disk, on_given_up=self.reasons.append)
        self.service: ShardService = make_service(mode, num_workers=RANKS, journal=self.journal)
        self.life = self.service.life
        self.life.begin(1, 0)

    def send(
        self, kind: Kind, step: int, rank: int = 0, *sections: Any, then: Bytes | None = None, value: int = 0
    ) -> Any:
        return self.service.handle(pack(Message(kind, 1, rank, step, sections, value=value)), then)

    def push(self, step: int, rank: int = 0, then: Bytes | None = None) -> Future[Bytes]:
        future: Future[Bytes] = self.send(Kind.PUSH, step, rank, gradient(0), then=then)
        return future

    def pushed(self, step: int) -> list[Future[Bytes]]:
        return [self.push(step, rank) for rank in range(RANKS)]

    def kinds(self) -> list[tuple[RecordKind, int]]:
        self.journal.close()
        return [(entry, step) for entry, _, step, _ in replayed(self.folder)]


@pytest.fixture(params=["sync", "bounded"])
def server(request: pytest.FixtureRequest, folder: Path, disk: Disk) -> Iterator[Server]:
    server = Server(folder, disk, request.param)
    yield server
    disk.free.set()
    server.journal.close()


def acknowledged(*futures: Future[Bytes]) -> bool:
    return all(answer(future).kind is Kind.ACK for future in futures)


def test_a_duplicate_waits_for_the_sync_of_the_first_push_and_is_written_once(server: Server) -> None:
    server.disk.free.clear()
    first, again = server.push(0), server.push(0)
    assert not first.done() and not again.done()
    server.disk.free.set()
    assert acknowledged(first, again, server.push(0))
    assert server.service.report()["duplicates"] == 2
    assert server.kinds().count((RecordKind.PUSH, 0)) == 1


def test_fences_resume_ranges_and_completed_steps_count_durable_pushes_only(server: Server) -> None:
    server.disk.free.clear()
    pushes, fence = server.pushed(0), server.send(Kind.FENCE, 1)
    sync = server.service.applier.gate.stages
    assert server.life.resume_range == (0, 0) and not fence.done()
    if sync:
        refused = answer(server.send(Kind.FENCE, 1, value=1))
        assert "step 1 cannot begin: there are no pushes of workers [0, 1]" in text_of(refused)
    server.disk.free.set()
    assert acknowledged(*pushes, fence) and server.life.resume_range == (0, 1)
    assert acknowledged(server.send(Kind.FENCE, 1, value=1)) and server.life.resume_range[1] == 1


def test_no_answer_and_no_riding_pull_runs_in_the_thread_that_syncs(server: Server) -> None:
    ran, read = set[int](), server.service.tables.pull

    def pull(*args: Any) -> Any:
        ran.add(threading.get_ident())
        return read(*args)

    server.service.tables.pull = pull  # type: ignore[method-assign]
    server.disk.free.clear()
    pulls = [pack(Message(Kind.PULL, 1, rank, 1, (wanted(0),))) for rank in range(RANKS)]
    futures = [server.push(0, rank, then) for rank, then in enumerate(pulls)]
    for future in futures:
        future.add_done_callback(lambda _: ran.add(threading.get_ident()))
    server.disk.free.set()
    assert [answer(future).kind for future in futures] == [Kind.ROWS] * RANKS
    assert ran and not ran & (server.disk.threads - {threading.get_ident()})


def test_in_sync_a_step_costs_one_sync_and_the_record_that_it_is_applied_waits_for_none(
    folder: Path, disk: Disk
) -> None:
    server = Server(folder, disk, "sync")
    for step in range(5):
        disk.syncs = 0
        disk.free.set()
        assert acknowledged(server.push(step, 0)) and acknowledged(server.push(step, 1)) and disk.syncs == RANKS
        disk.free.clear()
        pulls = [server.send(Kind.PULL, step + 1, rank) for rank in range(RANKS)]
        assert all(pull.done() for pull in pulls)
    disk.free.set()
    assert [kind for kind, _ in server.kinds()[1:]] == [RecordKind.PUSH, RecordKind.PUSH, RecordKind.APPLIED] * 5


def test_a_sync_that_fails_gives_the_journal_up_and_answers_everybody(server: Server) -> None:
    server.disk.free.clear()
    pushes = [*server.pushed(0), server.push(0)]
    server.disk.broken = True
    server.disk.free.set()
    assert acknowledged(*pushes) and len(server.reasons) == 1 and "cannot be written (Input/output" in server.reasons[0]
    assert server.journal.base == GIVEN_UP and not segments(server.folder)
    server.disk.broken = False
    server.journal.roll()
    assert acknowledged(server.push(0)) and server.life.resume_range[1] == 1
    for rank in range(RANKS):
        server.send(Kind.PULL, 1, rank)
    assert acknowledged(*server.pushed(1)) and server.kinds().count((RecordKind.PUSH, 1)) == RANKS


ENDS: dict[str, Callable[[Server], None]] = {
    "the service is suspended": lambda server: server.life.suspend("it is over"),
    "another generation begins": lambda server: server.life.begin(2, 1),
    "the journal is closed": lambda server: server.journal.close(),
}


@every(("mode", "end"), [(mode, end) for mode in ("sync", "bounded") for end in ENDS])
def test_what_waits_for_the_disk_is_kept_before_anything_ends(tmp_path: Path, mode: str, end: str) -> None:
    server = Server(tmp_path / "journal", Disk(), mode)
    server.disk.free.clear()
    pushes, suspended = server.pushed(0), end == "the service is suspended"
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(ENDS[end], server)
        for push in pushes if suspended else ():
            with pytest.raises(TransportError, match="it is over"):
                push.result(LIMIT_S)
        assert not ended.done()
        server.disk.free.set()
        ended.result(LIMIT_S)
    assert suspended or acknowledged(*pushes)
    assert server.life.resume_range[1] == 1
    kinds = [kind for kind in server.kinds() if kind[0] is not RecordKind.APPLIED]
    assert kinds[:3] == [(RecordKind.GENERATION, 0), (RecordKind.PUSH, 0), (RecordKind.PUSH, 0)]
    assert kinds[3:] == ([(RecordKind.GENERATION, 1)] if end == "another generation begins" else [])


@every("segment_bytes", [64 << 20, 3000], ids=["one segment", "segments that are full within a group"])
def test_sixty_four_callers_share_syncs_and_are_answered_in_the_order_of_the_file(
    tmp_path: Path, segment_bytes: int
) -> None:
    folder, disk = tmp_path / "journal", Disk()
    journal = Journal(folder, sync=True, segment_bytes=segment_bytes, fdatasync=disk)
    journal.begin(1, step=0, facts={})
    answers: dict[int, list[int]] = {rank: [] for rank in range(64)}
    disk.free.clear()
    futures = []
    for step in range(5):
        for rank, order in answers.items():
            future = journal.append(RecordKind.PUSH, rank=rank, step=step, body=body_of(100, rank))
            future.add_done_callback(lambda _, order=order, step=step: order.append(step))  # type: ignore[misc]
            futures.append(future)
    disk.free.set()
    for future in futures:
        future.result(LIMIT_S)
    files = segments(folder)
    assert disk.synced == {path.stat().st_ino: path.stat().st_size for path in files}
    assert disk.syncs <= 2 * len(files) + 3
    journal.close()
    written = [(rank, step) for kind, rank, step, _ in replayed(folder) if kind is RecordKind.PUSH]
    assert {rank: [step for other, step in written if other == rank] for rank in answers} == answers


def test_a_journal_syncs_from_the_generation_on_that_says_so_and_what_came_before(folder: Path, disk: Disk) -> None:
    journal = Journal(folder, sync=False, fdatasync=disk)
    journal.begin(1, step=0, facts={})
    assert journal.append(RecordKind.PUSH, rank=0, step=0).done() and not disk.synced
    journal.begin(2, step=1, facts={}, sync=True)
    journal.append(RecordKind.PUSH, rank=0, step=1).result(LIMIT_S)
    assert disk.synced == {path.stat().st_ino: path.stat().st_size for path in segments(folder)}
    assert len(disk.synced) == 2
    journal.close()
    with pytest.raises(JournalError, match="the journal is closed"):
        journal.append(RecordKind.PUSH, rank=0, step=2)


def test_a_bug_in_the_thread_that_commits_reaches_all_who_wait() -> None:
    def fail(_: list[int]) -> None:
        raise ValueError("no such item")

    commits = GroupCommit(fail)
    futures = [commits.add(number, lane=number, awaited=number > 0) for number in range(3)]
    commits.close()
    for future in futures:
        with pytest.raises(ValueError, match="no such item"):
            future.result(LIMIT_S)
