"""Records and the pages that they are in."""

from __future__ import annotations

import gc
import mmap
import sys
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import psutil
import pytest

from shardkeep.ps.config import TableSpec
from shardkeep.ps.server import pages
from shardkeep.ps.server.pages import LARGE, SMALL, Pages
from shardkeep.ps.server.table import layout_kernels
from shardkeep.ps.server.table.descriptor_kernels import record_dtype
from shardkeep.ps.server.table.policies.config import AdmitConfig, EvictConfig
from shardkeep.ps.server.table.records import Records
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.one_table import OneIndex
from tests.support.tables import gradients


def test_a_record_never_moves_and_only_those_written_are_counted() -> None:
    records = Records(20)
    records.reserve(10)
    first = layout_kernels.start_of(records.blocks, 9)
    records.reserve(2_000_000)
    assert layout_kernels.start_of(records.blocks, 9) == first

    with pytest.raises(ValueError, match="width 1: a record has 2 words or more"):
        Records(1)
    records = Records(20)
    records.reserve(50_000)
    assert records.size_bytes(0) == records.addresses.nbytes
    assert records.size_bytes(1) == records.addresses.nbytes + SMALL
    assert 0 <= records.size_bytes(50_000) - 50_000 * 80 <= SMALL + records.addresses.nbytes


def test_records_do_not_overlap_where_blocks_and_regions_meet() -> None:
    records = Records(20)
    records.reserve(1_000_000)
    starts = sorted(layout_kernels.start_of(records.blocks, slot) for slot in range(0, records.capacity, 1 << 10))
    assert all(b - a >= 80 << 10 for a, b in pairwise(starts))
    for block in range(records.capacity >> records.shift):
        layout_kernels.record(records.blocks, (block + 1 << records.shift) - 1)[:] = block  # the last: all is ours
        assert layout_kernels.record(records.blocks, block << records.shift)[0] == 0


@every("page_bytes", [SMALL, LARGE])
def test_pages_are_zeros_and_those_given_back_leave_their_neighbours_alone(page_bytes: int) -> None:
    array = Pages(100_000, np.uint64, page_bytes=page_bytes).array
    assert array.shape == (100_000,) and not array.any() and array.ctypes.data % page_bytes == 0
    array[:] = 1  # all of it can be written

    memory = Pages(10 * SMALL // 8, np.uint64, page_bytes=SMALL)
    memory.array[:] = 7
    per_page, system = SMALL // 8, pages.GIVE_BACK is not None
    kept = memory.array.reshape(10, -1)
    assert memory.give_back(2 * SMALL, 5 * per_page + 3) == (3 * SMALL if system else 0)
    assert (kept[:2] == 7).all() and (kept[5:] == 7).all()
    assert not system or not kept[2:5].any()
    assert memory.give_back(5 * SMALL, 5 * per_page + 3) == 0

    memory.array[:] = 7
    assert memory.give_back_behind(6 * per_page + 1, 8 * per_page + 1) == (2 * SMALL if system else 0)
    assert (kept[:7] == 7).all() and (kept[9:] == 7).all()
    assert not system or not kept[7:9].any()
    assert memory.give_back_behind(0, 6 * per_page + 1) == (7 * SMALL if system else 0)
    assert memory.give_back_behind(0, 0) == 0


@pytest.mark.skipif(pages.GIVE_BACK is None, reason="the system takes no memory back")
def test_records_that_go_little_by_little_leave_no_page_behind() -> None:
    """Of large pages: one that stays at each of many steps would be most of them."""
    records, count = Records(22), 400_000
    records.reserve(400_000)
    for slot in range(0, 400_000, 10):
        layout_kernels.record(records.blocks, slot)[:] = 1.0
    while count > 60_000:
        count -= 3000
        records.give_back(count)
    left = [slot for slot in range(0, 400_000, 10) if layout_kernels.record(records.blocks, slot)[0]]
    assert left[: count // 10] == list(range(0, count, 10))
    assert max(left) < count + (6 << 20) // 88  # what is kept for the next rows, and a page


def test_a_system_that_takes_no_memory_back_or_no_advice_still_has_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "GIVE_BACK", None)
    monkeypatch.setattr(pages, "ADVICE", {SMALL: 9999, LARGE: None})
    with pytest.raises(OSError):
        mmap.mmap(-1, SMALL).madvise(9999)
    memory = Pages(SMALL, np.uint64, page_bytes=SMALL)
    memory.array[:] = 7
    assert memory.give_back(0, SMALL) == 0
    assert (memory.array == 7).all()
    index = OneIndex()
    ids = np.arange(20_000, dtype=np.int64)
    for part in np.array_split(ids, 50):
        index.find_or_add(part)
    assert (index.find(ids) == ids).all()
    assert index.size_bytes >= index.entries.nbytes


# ---- classes of typed fields as records that kernels read and write ----


class Inner:
    first: np.float32
    count: int


class Outer:
    on: bool
    key: np.uint64
    share: float
    inner: Inner


def test_each_field_has_its_type_and_a_kernel_reads_and_writes_those_of_one_record_of_an_array() -> None:
    dtype = record_dtype(Outer)
    kinds = {name: dtype[name] for name in dtype.names or ()}
    assert kinds == {"on": np.bool_, "key": np.uint64, "share": np.float64, "inner": record_dtype(Inner)}
    assert record_dtype(Inner).names == ("first", "count") and record_dtype(Inner)["count"] == np.int64

    @numba.njit([numba.void(numba.from_dtype(dtype), numba.int64)])  # type: ignore[untyped-decorator]
    def add(outer: Any, more: int) -> None:
        outer.inner.count += more
        outer.on = outer.key == np.uint64(2**64 - 1)

    records = np.zeros(3, dtype)
    records["key"][1] = 2**64 - 1
    add(records[1], 5)
    add(records[2], 7)
    assert records["inner"]["count"].tolist() == [0, 5, 7] and records["on"].tolist() == [False, True, False]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems may keep memory that they could have back")
@every("counted", [False, True], ids=["rows", "counts of ids without a row"])
def test_the_memory_of_rows_that_went_goes_back_to_the_system(counted: bool) -> None:
    """9 of 10 rows go in a sweep of 64 steps. Their records and their part of the index go, too."""

    def push(ids: np.ndarray, *, step: int) -> None:
        tables.apply([gradients({0: (np.sort(ids), np.ones((ids.size, 16), np.float32))})], step=step)

    def rss() -> int:
        gc.collect()
        return psutil.Process().memory_info().rss

    evict, admit = EvictConfig(ttl_steps=70, sweep_steps=64), AdmitConfig(min_count=50, window_steps=70)
    policy = {"admit": admit} if counted else {"evict": evict}
    tables = Tables([TableSpec(name="t", dim=16, **policy)], seed=3)
    table, rng = tables[1 if counted else 0], np.random.default_rng(3)
    push(np.arange(1000, dtype=np.int64), step=0)
    everything, step = rng.permutation(600_000), 1
    kept = everything[: 600_000 // 10]
    before = rss()
    for part in np.array_split(everything, 30):
        push(part, step=step)
        step += 1
    full, entries = rss() - before, table.index.num_entries
    assert full > 0.9 * table.size_bytes > 600_000 * 20, full
    for turn in range(200):
        push(kept[turn % 10 :: 10], step=step)
        step += 1
    assert kept.size <= table.num_rows <= kept.size + 1000
    left = rss() - before
    assert left < 0.25 * full, (left, full)  # a tenth of the rows, and what is kept for the next ones
    assert table.size_bytes < 0.2 * full and table.index.num_entries < entries / 4
