"""Which rows changed, and increments of them: read after their base they are the state at the mark, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.index import read_index
from shardkeep.ps.checkpoints.row_stream import stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import server_of
from shardkeep.ps.server.snapshot import files as snapshot, walk
from shardkeep.ps.server.snapshot.snapshot import Snapshot
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.marked_tables import (
    IDS,
    SPECS,
    Between,
    checkpointed,
    filled,
    loaded,
    pushed_to_all,
    random_push,
    same,
    state,
)
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
    for begin in (0, 200_000):  # in blocks of 65,536 rows
        ids = np.arange(begin, begin + 10)
        table.apply(ids, np.ones((10, SPECS[4].dim), np.float32), step=0)
        new = np.arange(begin + 10, begin + 100_000)
        table.load(new, np.zeros((new.size, SPECS[4].dim), np.float32), np.zeros((new.size, table.layout.num_slots)))
    bits = np.unpackbits(table.changed.start(), bitorder="little").astype(bool)
    assert bits.size >= table.num_rows == 200_000
    expected = [begin + i for begin in (0, 200_000) for i in range(10)]
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


def rows_in(checkpoint: Checkpoint) -> int:
    """Rows that a checkpoint has itself."""
    indexes = [read_index(path) for path in checkpoint.folder.glob("server-*/snapshot.json")]
    return sum(part[4] for index in indexes for part in index["parts"])


PACKED = [("fp16", "fp32"), ("bf16", "bf16"), ("int8", "fp32"), ("int8", "bf16"), ("fp32", "bf16")]
DECAYING = ["sgd", "rowwise_adagrad", "adam"]
KINDS: dict[str, dict[str, Any]] = {
    **{
        f"{rows}, {state_of}": {"optimizer": "adam", "dtype": rows, "state_dtype": state_of}
        for rows, state_of in PACKED
    },
    **{
        f"all rows decay with {name}": {"optimizer": {"name": name, "weight_decay": 0.05, "weight_decay_on": "table"}}
        for name in DECAYING
    },
}


@every("kind", ["in memory", "spilled", *KINDS])
def test_a_chain_is_the_state_at_its_last_mark_whatever_is_pushed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    specs = (
        [TableSpec(name=name, dim=dim, **KINDS[kind]) for name, dim in (("t", 6), ("u", 3))] if kind in KINDS else SPECS
    )
    monkeypatch.setattr(walk, "LIMIT_BYTES", 10_000 if kind == "spilled" else 24 << 20)
    monkeypatch.setattr(walk, "ROWS_AT_ONCE", 300)
    monkeypatch.setattr(snapshot, "PART_BYTES", 50_000)
    tables, rng, checkpoints, last = filled(specs), np.random.default_rng(1), Checkpoints(tmp_path), None

    def push() -> None:
        parts = random_push(rng, specs, most=100)
        if kind.startswith("all rows"):  # two rows of one table, while all of both change
            parts = {0: (np.array([3, 20_000]), np.ones((2, specs[0].dim), np.float32))}
        tables.apply([gradients(parts)], step=1)

    monkeypatch.setattr(walk, "time", Between(push))
    tables.changed.follow("")
    for number in (1, 2) if kind in KINDS else (1, 2, 3):
        before, digests, skipped = state(tables), tables.digests(), [table.skipped_rows for table in tables]
        last = checkpointed([tables], checkpoints, number, last)
        assert len(last.chain) == number
        (read,) = loaded(specs, last)
        assert same(state(read), before) and not same(state(tables), before)
        assert read.digests() == digests and [table.skipped_rows for table in read] == skipped
        for t, spec in enumerate(specs if kind in KINDS else []):
            columns = [np.concatenate(column) for column in zip(*stream_rows(last, spec.name), strict=True)][:3]
            order = np.argsort(columns[0])
            assert all(np.array_equal(column[order], part) for column, part in zip(columns, before[t], strict=True))
        push()
        tables[0].skipped_rows += 1


@every(("then", "now", "file_bytes"), [(3, 1, 1 << 14), (2, 5, 64 << 20)])
def test_any_number_of_servers_reads_all_rows_and_a_chain_of_increments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: int, now: int, file_bytes: int
) -> None:
    monkeypatch.setattr(snapshot, "FILE_BYTES", file_bytes)
    shards, checkpoints = [Tables(SPECS, seed=7) for _ in range(then)], Checkpoints(tmp_path / "chain")
    for tables in shards:
        tables.changed.follow("")
    pushed_to_all(shards, np.arange(0, 2 * IDS, 2), 0)
    last = checkpointed(shards, checkpoints, 1)
    assert rows_in(last) == IDS * len(SPECS)
    assert len(last.files) == 2 * then if file_bytes > 1 << 14 else len(last.files) > 6 * then
    for step in (2, 3, 4):
        pushed_to_all(shards, np.sort(np.random.default_rng(step).choice(3 * IDS, 50, replace=False)), step)
        if without_base := step == 3 and then > 1:
            shards[1].changed.follow("")
        last = checkpointed(shards, checkpoints, step, last)
        assert (rows_in(last) == 50 * len(SPECS)) == (not without_base)
    chain = loaded(SPECS, checkpoints.load(4), now)
    full = loaded(SPECS, checkpointed(shards, Checkpoints(tmp_path / "full"), 1), now)
    assert all(same(state(a), state(b)) for a, b in zip(chain, full, strict=True))
    for t in range(len(SPECS)):
        assert sum(tables[t].digest() for tables in full) % 2**128 == sum(s[t].digest() for s in shards) % 2**128
        skipped = [sum(tables[t].skipped_rows for tables in each) for each in (chain, full, shards)]
        assert skipped == [4 * then * (t == 0)] * 3
    for s, tables in enumerate(full):
        assert all((server_of(ids_in(table.records, table.num_rows), now) == s).all() for table in tables)


def test_an_increment_without_a_changed_row_is_fine_and_one_keeps_rows_alone_that_changed_before_its_mark(
    tmp_path: Path,
) -> None:
    tables, checkpoints, dim = followed(""), Checkpoints(tmp_path), SPECS[0].dim
    base = checkpointed([tables], checkpoints, 1)
    last = checkpointed([tables], checkpoints, 2, base)
    assert rows_in(last) == 0
    assert same(state(loaded(SPECS, last)[0]), state(tables))
    tables.apply([gradients({0: (np.arange(0, 20, 2), np.ones((10, dim), np.float32))})], step=1)
    mark = tables.snapshot(last.id)
    tables.apply([gradients({0: (np.arange(10, 40, 2), np.ones((15, dim), np.float32))})], step=1)
    assert mark.pre_images(0)[1] == 5
