"""Marks: a snapshot holds the rows of one instant, for any pushes while it is written."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from shardkeep.base.errors import CheckpointError
from shardkeep.ps.checkpoints.folder import Checkpoints, FileRecord
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import Gradients
from shardkeep.ps.placement import bucket_of
from shardkeep.ps.server.snapshot import files as snapshot, walk
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
from shardkeep.ps.server.snapshot.part_files import ArrayFile
from shardkeep.ps.server.snapshot.snapshot import Snapshot
from shardkeep.ps.server.snapshot.walk import Spill, bucket_order
from shardkeep.ps.server.table.records import Records
from shardkeep.ps.server.table.row_kernels import write_words
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.marked_tables import EMPTY, ONE_ROW, SPECS, Between, State, filled, random_push, same, state
from tests.support.one_table import applied
from tests.support.tables import gradients, sections


def read_back(mark: Snapshot, folder: Path, threads: int = 1) -> Tables:
    """What a snapshot of `mark`, written now, fills empty tables with."""
    checkpoints = Checkpoints(folder)
    files = write_snapshot(mark, checkpoints.begin(1), shard=0, threads=threads)
    read = Tables(SPECS, seed=7)
    load_snapshots(read, checkpoints.commit(1, files, {}), shard=0, num_shards=1)
    return read


def test_an_array_that_is_written_in_parts_reads_as_one(tmp_path: Path) -> None:
    rows, other = np.arange(21, dtype=np.float32).reshape(7, 3), np.arange(5, dtype=np.int64)
    file = ArrayFile(tmp_path / "arrays")
    file.add("first", other)
    for part in np.split(rows, [2, 2, 6]):
        file.extend("rows", part)
    file.add("last", other)
    file.finish()
    assert {name: array.tolist() for name, array in load_file(file.path).items()} == {
        "first": other.tolist(), "rows": rows.tolist(), "last": other.tolist()
    }  # fmt: skip


@every("threads", [1, 2, 4])
def test_the_files_are_the_same_for_any_number_of_threads_with_the_checksums_of_what_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(snapshot, "PART_BYTES", 8_000)
    monkeypatch.setattr(snapshot, "FILE_BYTES", 50_000)
    tables, one = filled(), Checkpoints(tmp_path).begin(1)
    expected = write_snapshot(tables.snapshot(), one, shard=0)
    files = write_snapshot(tables.snapshot(), Checkpoints(tmp_path / "more").begin(1), shard=0, threads=threads)
    assert files == expected == [FileRecord.of(one, one / file.path) for file in expected] and len(files) > 5


@every(
    ("kept_bytes", "found"),
    [(24 << 20, True), (10_000, False)],
    ids=["in memory, slots of the pull", "spilled, ids looked up"],
)
def test_a_snapshot_is_the_state_at_the_mark_whatever_is_pushed_between_any_two_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, found: bool
) -> None:
    tables, rng = filled(), np.random.default_rng(1)
    before, skipped = state(tables), [table.skipped_rows for table in tables]
    bad = gradients({0: (np.array([2]), np.full((1, SPECS[0].dim), np.nan, np.float32))})

    def pushed() -> None:
        push = gradients(random_push(rng))
        if found:
            values = np.empty_like(push.values)
            push = Gradients(push.sections, push.values, tables.pull(push.sections, values))
        tables.apply([push, gradients(random_push(rng, most=30))] if not found else [push], step=1)
        tables.apply([bad], step=1)

    monkeypatch.setattr(snapshot, "PART_BYTES", 20_000)
    monkeypatch.setattr(walk, "LIMIT_BYTES", kept_bytes)
    monkeypatch.setattr(walk, "ROWS_AT_ONCE", 200)
    monkeypatch.setattr(walk, "time", Between(pushed))
    mark = tables.snapshot()
    pushed()
    read = read_back(mark, tmp_path)
    assert same(state(read), before)
    assert [table.skipped_rows for table in read] == skipped
    assert not any(np.array_equal(now[1], then[1]) for now, then in zip(state(tables), before, strict=True))
    assert tables[0].num_rows > read[0].num_rows and tables[EMPTY].num_rows and not read[EMPTY].num_rows


@every("writers", [1, 3])
def test_a_snapshot_is_the_state_at_the_mark_while_threads_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: int
) -> None:
    tables = filled()
    before = state(tables)
    monkeypatch.setattr(snapshot, "FILE_BYTES", 50_000)
    monkeypatch.setattr(walk, "LIMIT_BYTES", 50_000)
    monkeypatch.setattr(walk, "ROWS_AT_ONCE", 64)
    mark, over, counts = tables.snapshot(), threading.Event(), [0, 0, 0]
    all_push = threading.Event()
    monkeypatch.setattr(walk, "time", Between(lambda: all_push.wait(90)))

    def push(i: int) -> None:
        rng = np.random.default_rng(i)
        while not over.is_set():
            tables.apply([gradients(random_push(rng, most=100))], step=1)
            counts[i] += 1
            if min(counts) > 1:
                all_push.set()

    threads = [threading.Thread(target=push, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        read = read_back(mark, tmp_path, writers)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert min(counts) > 1
    assert same(state(read), before)
    assert not same(state(tables), before)


def test_a_row_is_kept_though_the_pull_of_its_push_did_not_find_it(tmp_path: Path) -> None:
    tables = Tables(SPECS, seed=7)
    wanted = sections({0: np.array([5])})
    pulled = tables.pull(wanted, np.empty(SPECS[0].dim, np.float32))  # before another worker's push makes the row
    ones = np.ones(SPECS[0].dim, np.float32)
    tables.apply([Gradients(wanted, ones)], step=0)
    before, mark = state(tables), tables.snapshot()
    tables.apply([Gradients(wanted, ones, pulled)], step=0)
    assert same(state(read_back(mark, tmp_path)), before)


def test_each_mark_has_its_own_instant_and_drops_the_one_before_it(tmp_path: Path) -> None:
    tables, rng = filled(), np.random.default_rng(2)

    def marked() -> tuple[State, Snapshot]:
        before, mark = state(tables), tables.snapshot()
        tables.apply([gradients(random_push(rng))], step=1)
        return before, mark

    before, mark = marked()
    assert same(state(read_back(mark, tmp_path / "0")), before)
    _, first = marked()
    before, second = marked()
    with pytest.raises(CheckpointError, match="another snapshot came"):
        read_back(first, tmp_path / "first")
    assert same(state(read_back(second, tmp_path / "second")), before)


@every(("at", "threads"), [(0, 1), (3, 1), (3, 4)], ids=["first part", "later part", "several threads"])
def test_a_snapshot_that_fails_gives_its_memory_back_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, threads: int
) -> None:
    monkeypatch.setattr(snapshot, "FILE_BYTES", 10_000)
    others = set(threading.enumerate())
    tables, rng = filled(), np.random.default_rng(4)
    add, calls = ArrayFile.add, [0]

    def full(self: Any, name: str, array: np.ndarray) -> None:
        calls[0] += 1
        if calls[0] > 3 * at:
            raise OSError(28, "No space left on device")
        add(self, name, array)

    monkeypatch.setattr(ArrayFile, "add", full)
    mark = tables.snapshot()
    tables.apply([gradients(random_push(rng))], step=1)
    assert mark.pre_image_bytes().sum() > 0
    with pytest.raises(OSError, match="No space left"):
        read_back(mark, tmp_path, threads)
    assert set(threading.enumerate()) <= others
    assert not any(table.pre_images for table in tables) and mark.released
    tables.apply([gradients(random_push(rng))], step=1)
    assert mark.pre_image_bytes().sum() == 0


def test_a_walk_goes_by_bucket_and_nothing_is_kept_of_a_table_that_is_written(tmp_path: Path) -> None:
    tables, rng = filled(), np.random.default_rng(5)
    mark = tables.snapshot()
    with contextlib.closing(Spill(tmp_path)) as held, ThreadPoolExecutor(2) as pool:
        parts = walk.walk(mark, held, 1 << 20, pool, 2, [])
        released = [part.table for part in parts if not any(table.pre_images for table in tables[: part.table])]
    assert released == [0, 1, 2, 3, 4, 5, ONE_ROW]
    tables.apply([gradients(random_push(rng))], step=1)
    assert mark.pre_image_bytes().sum() == 0

    # slots are ordered by bucket
    records = Records(4)
    records.reserve(2000)
    ids = rng.integers(-(2**63), 2**63 - 1, 2000)
    write_words(records.blocks, np.arange(2000), 0, ids.view(np.float32).reshape(-1, 2))
    order, starts = bucket_order(records, 2000)
    assert np.array_equal(order.array, np.argsort(bucket_of(ids), kind="stable"))
    assert np.array_equal(starts, np.searchsorted(np.sort(bucket_of(ids)), np.arange(4097)))


def test_many_small_tables_take_several_files(tmp_path: Path) -> None:
    specs = [TableSpec(name=f"t{t}", dim=1, optimizer={"name": "sgd"}) for t in range(200)]  # type: ignore[arg-type]
    tables, checkpoints = Tables(specs, seed=7), Checkpoints(tmp_path)
    for t in range(200):
        applied(tables[t], np.array([t]), np.ones((1, 1), np.float32), step=0)
    files = write_snapshot(tables.snapshot(), checkpoints.begin(1), shard=0)
    assert [file.path for file in files] == [f"server-0/rows-{i:05d}.safetensors" for i in range(5)] + [
        "server-0/snapshot.json"
    ]
    read = Tables(specs, seed=7)
    load_snapshots(read, checkpoints.commit(1, files, {}), shard=0, num_shards=1)
    assert read.digests() == tables.digests()
