"""A server over generations, and one that takes the place of another, from its journal: no push lost, none twice, and
what a damaged journal lacks is stated."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import ProtocolError, TransportError
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.control.records import ResumeRange
from shardkeep.ps.control.recovery import Losses, plan_recovery
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.journal.segments import SEGMENT_HEAD, record_at
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.snapshot.files import load_snapshots
from shardkeep.ps.wire.message import Kind
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.messages import Message, pack, text_of
from tests.support.one_table import exported
from tests.support.services import answer, gradient, make_service, wanted
from tests.support.snapshots import loaded, saved

RANKS = 2


class Server:
    """A server with a journal in a folder; `replaced` is what another process makes of the folder after a kill."""

    def __init__(
        self, folder: Path, mode: str, *, segment_bytes: int = 64 << 20, generation: int = 1, **settings: Any
    ) -> None:
        self.folder, self.mode, self.segment_bytes = folder, mode, segment_bytes
        self.generation = generation
        self.journal = Journal(folder, sync=False, segment_bytes=segment_bytes)
        self.service: ShardService = make_service(mode, num_workers=RANKS, journal=self.journal, **settings)

    def begin(self, step: int, generation: int = 1) -> Self:
        self.generation = generation
        self.service.life.begin(generation, step)
        return self

    def send(self, kind: Kind, step: int, rank: int, *sections: Any) -> Future[Bytes]:
        return self.service.handle(pack(Message(kind, self.generation, rank, step, sections)))

    def push(self, step: int, rank: int, value: float | None = None) -> None:
        found = answer(self.send(Kind.PUSH, step, rank, gradient(0, value=value or 1.0 + 0.1 * step + 0.01 * rank)))
        assert found.kind is Kind.ACK, text_of(found)

    def pull(self, step: int, rank: int) -> Future[Bytes]:
        return self.send(Kind.PULL, step, rank, wanted(0))

    def train(self, first: int, last: int) -> Self:
        """All ranks' steps from `first` to `last`; in sync the last one is applied by the pulls of the next."""
        for step in range(first, last + 1):
            for rank in range(RANKS):
                self.push(step, rank)
            for future in [self.pull(step + 1, rank) for rank in range(RANKS)]:
                answer(future)
        return self

    def replaced(self) -> Self:
        self.journal.close()  # as a kill does
        other = type(self)(self.folder, self.mode, segment_bytes=self.segment_bytes)
        other.service.life.replay(other.journal.replay())
        return other

    @property
    def digest(self) -> dict[str, str]:
        return dict(self.service.report()["digest"])


in_every_mode = every("mode", ["sync", "bounded"])


def undisturbed(tmp_path: Path, mode: str, steps: int) -> dict[str, str]:
    return Server(tmp_path / "undisturbed", mode).begin(0).train(0, steps - 1).digest


@every(("mode", "segment_bytes"), [
    ("sync", 1), ("sync", 64 << 20), ("bounded", 300), ("bounded", 64 << 20), ("async", 700),
])  # fmt: skip
def test_a_replacement_has_all_that_was_acknowledged_and_goes_on_to_the_same_rows(
    tmp_path: Path, mode: str, segment_bytes: int
) -> None:
    """Also where segments roll in the middle of a step."""
    other = Server(tmp_path / "killed", mode, segment_bytes=segment_bytes).begin(0).train(0, 2).replaced()
    assert other.service.life.resume_range[1] == 3
    again = other.begin(3, generation=2).train(3, 5).replaced().begin(6, generation=3).train(6, 9)
    assert len(list((tmp_path / "killed").glob("*.journal"))) > (3 if segment_bytes < 1000 else 0)
    assert again.digest == undisturbed(tmp_path, mode, 10)


def test_pushes_of_a_step_that_is_done_again_count_once(tmp_path: Path) -> None:
    server = Server(tmp_path / "killed", "bounded").begin(0).train(0, 3)
    server.push(4, 0)  # worker 1 died before it pushed step 4
    assert server.service.life.resume_range == (0, 4)
    other = server.replaced()
    assert other.service.life.resume_range == (0, 4)
    other.begin(4, generation=2).train(4, 9)
    assert other.service.report()["duplicates"] == 1
    assert other.digest == undisturbed(tmp_path, "bounded", 10)


def test_in_sync_staged_pushes_come_again_and_a_step_that_all_pushed_is_applied_by_the_next_generation(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path / "killed", "sync").begin(0).train(0, 3)
    server.push(4, 0, value=7.0)
    assert server.service.life.resume_range == (4, 4)
    server.service.life.suspend("generation 1 is over")
    other = server.begin(4, generation=2).replaced().begin(4, generation=3)
    for rank in range(RANKS):
        other.push(4, rank)
    assert other.service.life.resume_range == (4, 5)
    other = other.replaced()
    assert other.service.life.resume_range == (4, 5)
    assert other.begin(5, generation=4).train(5, 9).replaced().digest == undisturbed(tmp_path, "sync", 10)


def test_in_sync_a_generation_cannot_begin_at_a_step_whose_pushes_are_missing(tmp_path: Path) -> None:
    server = Server(tmp_path / "one", "sync", segment_bytes=1).begin(0)
    with pytest.raises(ProtocolError, match="step 7 cannot begin: there are no pushes of workers"):
        server.begin(7, generation=2)
    server = Server(tmp_path / "two", "sync", segment_bytes=1).begin(0).train(0, 3)
    server.push(4, 0)
    with pytest.raises(ProtocolError, match=r"step 5 cannot begin: there are no pushes of workers \[1\] for step 4"):
        server.begin(5, generation=2)


@in_every_mode
def test_a_suspended_service_answers_nobody_until_the_next_generation(tmp_path: Path, mode: str) -> None:
    server = Server(tmp_path / "one", mode).begin(0).train(0, 1)
    waiting = server.pull(9, 0) if mode == "bounded" else None
    server.service.life.suspend("generation 1 is over")
    for future in [server.send(Kind.PUSH, 2, 0, gradient(0)), server.pull(2, 0), *([waiting] if waiting else [])]:
        with pytest.raises(TransportError, match="generation 1 is over"):
            future.result(timeout=90)
    server.begin(2, generation=2)
    late = pack(Message(Kind.PUSH, 1, 0, 2, (gradient(0),)))
    refused = answer(server.service.handle(late))
    assert refused.kind is Kind.ERROR and "is in generation 2, the message is of generation 1" in text_of(refused)
    assert server.train(2, 9).digest == undisturbed(tmp_path, mode, 10)


@in_every_mode
def test_what_a_checkpoint_holds_is_not_done_again(tmp_path: Path, mode: str) -> None:
    server = Server(tmp_path / "killed", mode).begin(0).train(0, 4)
    rows = [exported(table) for table in server.service.tables]
    server.train(5, 6)
    server.journal.close()
    other = Server(tmp_path / "killed", mode)
    base = make_service(mode, num_workers=RANKS, journal=other.journal, start_step=5)  # the checkpoint of step 5
    for table, (ids, weights, slots) in zip(base.tables, rows, strict=True):
        table.load(ids, weights, slots)
    assert base.life.replay(other.journal.replay()) == 2 * RANKS
    other.service = base
    assert other.begin(7, generation=2).train(7, 9).digest == undisturbed(tmp_path, mode, 10)


@in_every_mode
def test_a_replacement_knows_what_changed_since_the_increment_that_it_began_with(tmp_path: Path, mode: str) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    server = Server(tmp_path / "killed", mode, checkpoints=checkpoints)
    server.service.tables.changed.follow("")
    server.begin(0).train(0, 2)
    full = saved(server.service, checkpoints, 3)
    server.train(3, 4)
    increment = saved(server.service, checkpoints, 5, full)
    held = server.journal.size_bytes
    server.train(5, 6)
    server.journal.close()
    other = Server(tmp_path / "killed", mode, checkpoints=checkpoints, start_step=5)
    load_snapshots(other.service.tables, increment, shard=0, num_shards=1)
    other.service.tables.changed.follow(increment.id)
    assert other.service.life.replay(other.journal.replay()) == 2 * RANKS  # the increment cut the journal
    assert held < other.journal.size_bytes
    other.begin(7, generation=1)
    again = saved(other.service, checkpoints, 7, increment)
    assert [link.step for link in again.chain] == [3, 5, 7]
    assert loaded(again).digests() == other.service.tables.digests()
    assert other.train(7, 9).digest == undisturbed(tmp_path, mode, 10)


# ---- journals that a lost machine leaves ----


class OwnRows(Server):
    """Each push has a row of its own, so the rows say which pushes are there."""

    def push(self, step: int, rank: int, value: float | None = None) -> None:
        ids = np.array([RANKS * step + rank], dtype=np.int64)
        assert answer(self.send(Kind.PUSH, step, rank, gradient(0, ids, 1.0 + 0.1 * step))).kind is Kind.ACK

    @property
    def missing(self) -> set[int]:
        """The pushes that are not there, of those before the highest one."""
        ids = set(exported(self.service.tables[0])[0].tolist())
        return set(range(max(ids, default=-1))) - ids

    @property
    def range(self) -> ResumeRange:
        """As of a replacement (`roles/server.py`)."""
        first, last = self.service.life.resume_range
        return ResumeRange(first, last, True, 0, lost_from=None if self.mode == "sync" or not last else last)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], tuple[Path, dict[str, str]]]]:
    """A copy of a journal of three generations, in each of which worker 1 dies before its last push, and the digest of
    an undisturbed job. Nothing is synced."""

    @functools.cache
    def made(mode: str, segment_bytes: int) -> tuple[Path, dict[str, str]]:
        server = OwnRows(tmp_path_factory.mktemp("left"), mode, segment_bytes=segment_bytes)
        for generation, (first, end) in enumerate(pairwise((0, 3, 5, 9)), 1):
            server.begin(first, generation).train(first, end - 1).push(end, 0)
            server.service.life.suspend("it is over")
        server.journal.close()
        return server.folder, OwnRows(tmp_path_factory.mktemp("whole"), mode).begin(0).train(0, 11).digest

    def copied(mode: str, segment_bytes: int) -> tuple[Path, dict[str, str]]:
        folder, digest = made(mode, segment_bytes)
        return Path(shutil.copytree(folder, tmp_path_factory.mktemp("copy"), dirs_exist_ok=True)), digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield copied


def damage(folder: Path, how: str, number: int, share: float) -> None:
    """Changes one file, or the files of one generation."""
    path = (paths := sorted(folder.glob("*.journal")))[number % len(paths)]
    content, at = path.read_bytes(), int(share * path.stat().st_size)
    if how == "generation":
        for other in folder.glob(f"{path.name[:7]}-*.journal"):
            other.unlink()
    elif how == "missing":
        path.unlink()
    elif how == "zeros":
        path.write_bytes(content[:at] + bytes(min(200, len(content) - at)) + content[at + 200 :])
    elif how == "cut":
        path.write_bytes(content[:at])
    else:
        data, ends = np.frombuffer(content, np.uint8), [SEGMENT_HEAD]
        while (record := record_at(data, ends[-1])) is not None:
            ends.append(record[1])
        path.write_bytes(content[: ends[int(share * (len(ends) - 1))]])


KINDS = st.sampled_from(["cut", "records", "zeros", "missing", "generation"])


@examples(200)
@given(
    mode=st.sampled_from(["sync", "bounded", "async"]),
    segment_bytes=st.sampled_from([500, 64 << 20]),
    damages=st.lists(st.tuples(KINDS, st.integers(0, 30), st.floats(0, 1)), min_size=1, max_size=2),
)
@example(mode="bounded", segment_bytes=64 << 20, damages=[("records", 0, 0.5)])  # generation 2 begins beyond it
@example(mode="sync", segment_bytes=1, damages=[("missing", 0, 0.0)])  # of two pushes of a step, one is left
def test_what_a_damaged_journal_lacks_is_stated_or_comes_again(
    left: Callable[[str, int], tuple[Path, dict[str, str]]],
    mode: str,
    segment_bytes: int,
    damages: list[tuple[str, int, float]],
) -> None:
    """Beside a server that lost nothing, and workers that hold the last three steps."""
    folder, digest = left(mode, segment_bytes)
    for each in damages:
        if any(folder.glob("*.journal")):
            damage(folder, *each)
    server = OwnRows(folder, mode).replaced()
    held, rows = server.range, server.digest
    server = server.replaced()
    assert (server.range, server.digest) == (held, rows), "a second restart reads the same"
    workers = {rank: ResumeRange(7, 9, holds=True) for rank in range(RANKS)}
    other = ResumeRange(9 if mode == "sync" else 0, 9, holds=True)
    plan = plan_recovery({0: held, 1: other}, workers, saved=0, reached=9, losses=Losses(), cause="")
    start = plan.start.step
    if plan.start.source < 0:
        assert start == 0 and (mode == "sync" or held.last == 0) and held.last < other.last
        return
    lost = server.service.life.begin(4, start)
    server.generation = 4
    server.train(start, 11)
    stated = range(held.last, start) if 0 in plan.short else range(0)
    missing = server.missing
    assert lost == len(missing) and {push // RANKS for push in missing} <= set(stated) and bool(lost) == bool(stated)
    if not lost:
        assert server.digest == digest
    again = server.replaced()
    assert (again.service.life.resume_range[1], again.digest) == (12, server.digest), "what is lost is lost once"
