"""Which rows changed, and increments of them: read after their base they are the state at the mark, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardkeep.base.errors import CheckpointError
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.index import read_index
from shardkeep.ps.placement import server_of
from shardkeep.ps.server.snapshot import files as snapshot, walk
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
from shardkeep.ps.server.snapshot.snapshot import Snapshot
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.marked_tables import IDS, SPECS, Between, filled, loaded, random_push, same, state
from tests.support.one_table import OneTable, ids_in
from tests.support.tables import ByTable, gradients

Noted = list[set[int]]


def noted(mark: Snapshot) -> Noted:
    """Ids of the rows that a mark is of, table by table."""
    found = []
    for table, chosen in zip(mark.tables, mark.chosen_T, strict=True):
        bits = np.unpackbits(chosen, bitorder="little")[: table.num_rows].astype(bool)
        found.append(set(ids_in(table.records, table.num_rows)[bits].tolist()))
    return found


def ids_of(*pushes: ByTable) -> Noted:
    return [set().union(*(push[t][0].tolist() for push in pushes if t in push)) for t in range(len(SPECS))]


def followed(base: str = "base") -> Tables:
    tables = filled()
    tables.changed.follow(base)
    return tables


def pushed(tables: Tables, seed: int, count: int = 3) -> list[ByTable]:
    rng = np.random.default_rng(seed)
    pushes = [random_push(rng, most=60) for _ in range(count)]
    for push in pushes:
        tables.apply([gradients(push)], step=1)
    return pushes


# ---- the bits ----


def test_the_rows_of_every_push_are_noted_until_a_checkpoint_with_them_is_complete() -> None:
    tables = followed()
    pushes = pushed(tables, 1)
    bad = (np.array([2, 4]), np.full((2, SPECS[0].dim), np.nan, np.float32))
    tables.apply([gradients({0: bad})], step=1)
    mark = tables.snapshot("base")
    assert not mark.full
    assert noted(mark) == ids_of(*pushes)

    tables = followed()
    first = pushed(tables, 1)
    tables.snapshot("base")
    second = pushed(tables, 2)
    assert noted(tables.snapshot("base")) == ids_of(*first, *second)  # nobody said that the one before is complete
    third = pushed(tables, 3)
    assert noted(tables.snapshot("base")) == ids_of(*first, *second, *third)
    tables.changed.complete("next")
    fourth = pushed(tables, 4)
    assert tables.snapshot("base").full
    assert noted(tables.snapshot("next")) == ids_of(*fourth)


def test_bits_stay_when_a_table_grows() -> None:
    table = OneTable(SPECS[4], seed=7)
    table.changed.start()
    for begin in (0, 200_000, 400_000):  # in blocks of 65,536 rows
        ids = np.arange(begin, begin + 10)
        table.apply(ids, np.ones((10, SPECS[4].dim), np.float32), step=0)
        new = np.arange(begin + 10, begin + 150_000)
        table.load(new, np.zeros((new.size, SPECS[4].dim), np.float32), np.zeros((new.size, table.layout.num_slots)))
    bits = np.unpackbits(table.changed.start(), bitorder="little").astype(bool)
    assert bits.size >= table.num_rows == 450_000
    expected = [begin + i for begin in (0, 200_000, 400_000) for i in range(10)]
    assert ids_in(table.records, table.num_rows)[bits[: table.num_rows]].tolist() == expected


@every("base", ["", "another"])
def test_a_mark_since_a_checkpoint_that_the_tables_do_not_know_is_of_all_rows(base: str) -> None:
    tables, never = followed(""), filled()
    for each in (tables, never):
        mark = each.snapshot(base)
        assert mark.full and all(not chosen.size for chosen in mark.chosen_T)
    never.changed.complete("base")
    assert never.snapshot("base").full


# ---- increments ----


class Job:
    """Servers that write one checkpoint after another into a folder."""

    def __init__(self, folder: Path, shards: list[Tables]) -> None:
        self.checkpoints, self.shards = Checkpoints(folder), shards
        self.last: Checkpoint | None = None
        for tables in shards:
            tables.changed.follow("")

    def saved(self, *, full: tuple[int, ...] = ()) -> Checkpoint:
        """An increment on the last one, where there is one; `full`: shards that know no base."""
        base = self.last
        step = 1 if base is None else base.step + 1
        partial = self.checkpoints.begin(step)
        asked = ["" if base is None or s in full else base.id for s in range(len(self.shards))]
        marks = [tables.snapshot(id) for tables, id in zip(self.shards, asked, strict=True)]
        files = [file for s, mark in enumerate(marks) for file in write_snapshot(mark, partial, shard=s)]
        self.last = self.checkpoints.commit(step, files, {}, base=base)
        for tables in self.shards:
            tables.changed.complete(self.last.id)
        return self.last

    def loaded(self, num_shards: int = 1) -> list[Tables]:
        assert self.last is not None
        return loaded(SPECS, self.checkpoints.load(self.last.step), num_shards)


def rows_in(checkpoint: Checkpoint) -> int:
    """Rows that a checkpoint has itself."""
    indexes = [read_index(path) for path in checkpoint.folder.glob("server-*/snapshot.json")]
    return sum(part[4] for index in indexes for part in index["parts"])


@every("kept_bytes", [24 << 20, 10_000], ids=["in memory", "spilled"])
def test_a_chain_is_the_state_at_its_last_mark_whatever_is_pushed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setattr(walk, "LIMIT_BYTES", kept_bytes)
    monkeypatch.setattr(walk, "ROWS_AT_ONCE", 300)
    monkeypatch.setattr(snapshot, "PART_BYTES", 50_000)
    tables, rng = filled(), np.random.default_rng(1)
    job = Job(tmp_path, [tables])
    monkeypatch.setattr(walk, "time", Between(lambda: tables.apply([gradients(random_push(rng, most=100))], step=1)))
    for _ in range(3):
        before, skipped = state(tables), [table.skipped_rows for table in tables]
        kept = job.saved()
        read = job.loaded()[0]
        assert same(state(read), before) and not same(state(tables), before)
        assert [table.skipped_rows for table in read] == skipped
        pushed(tables, kept.step, count=1)
        tables[0].skipped_rows += 1
    assert [len(link.chain) for link in kept.chain] == [1, 2, 3]


def shards_of(count: int) -> list[Tables]:
    shards = [Tables(SPECS, seed=7) for _ in range(count)]
    step_of(shards, np.arange(0, 2 * IDS, 2), 0)
    return shards


def step_of(shards: list[Tables], ids: np.ndarray, step: int) -> None:
    """A push of the same ids to all tables, each server its rows."""
    for s, tables in enumerate(shards):
        mine = ids[server_of(ids, len(shards)) == s]
        rng = np.random.default_rng(step)
        parts = {t: (mine, rng.normal(size=(mine.size, spec.dim)).astype(np.float32)) for t, spec in enumerate(SPECS)}
        tables.apply([gradients(parts)], step=step)
        tables[0].skipped_rows += 1


@every(("then", "now"), [(2, 2), (3, 1), (1, 3)])
def test_any_number_of_servers_reads_a_chain_as_it_reads_all_rows(tmp_path: Path, then: int, now: int) -> None:
    shards = shards_of(then)
    job = Job(tmp_path / "chain", shards)
    whole = job.saved()
    for step in (1, 2, 3):
        ids = np.random.default_rng(step).choice(3 * IDS, 50, replace=False)
        step_of(shards, np.sort(ids), step)
        anew = (1,) if step == 2 and then > 1 else ()  # a server that knows no base
        increment = job.saved(full=anew)
        assert (rows_in(increment) == 50 * len(SPECS)) == (not anew)
    all_rows = Job(tmp_path / "full", shards)
    all_rows.saved()
    chain, full = job.loaded(now), all_rows.loaded(now)
    assert all(same(state(a), state(b)) for a, b in zip(chain, full, strict=True))
    assert [t.skipped_rows for tables in chain for t in tables] == [t.skipped_rows for tables in full for t in tables]
    assert rows_in(whole) == IDS * len(SPECS)


def test_an_increment_without_a_changed_row_is_fine(tmp_path: Path) -> None:
    tables = filled()
    job = Job(tmp_path, [tables])
    job.saved()
    assert rows_in(job.saved()) == 0
    assert same(state(job.loaded()[0]), state(tables))


def test_rows_that_did_not_change_before_the_mark_are_not_kept_after_it(tmp_path: Path) -> None:
    tables = followed()
    ids, dim = np.arange(0, 20, 2), SPECS[0].dim
    tables.apply([gradients({0: (ids, np.ones((10, dim), np.float32))})], step=1)
    mark = tables.snapshot("base")
    tables.apply([gradients({0: (np.arange(10, 40, 2), np.ones((15, dim), np.float32))})], step=1)
    assert mark.pre_images(0)[1] == 5


@every("damaged", ["full", "increment"])
def test_a_damaged_file_anywhere_in_a_chain_is_found_before_a_row_is_used(tmp_path: Path, damaged: str) -> None:
    tables = filled()
    job = Job(tmp_path, [tables])
    whole = job.saved()
    pushed(tables, 1)
    increment = job.saved()
    path = next((whole if damaged == "full" else increment).folder.glob("server-0/rows-*"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(bytes(content))
    empty = Tables(SPECS, seed=7)
    with pytest.raises(CheckpointError, match=f"{path}: damaged: its checksum is wrong"):
        load_snapshots(empty, increment, shard=0, num_shards=1)
    assert not any(table.num_rows for table in empty)
