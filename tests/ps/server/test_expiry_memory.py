"""What a server's memory is after most rows of a table went, and what tables hold while their index shrinks."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import bucket_of, buckets_of
from shardkeep.ps.server.pages import SMALL
from shardkeep.ps.server.table import index
from shardkeep.ps.server.table.initializers.config import InitConfig
from shardkeep.ps.server.table.policies.config import AdmitConfig, EvictConfig
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.marked_tables import checkpointed, loaded
from tests.support.one_table import ids_in
from tests.support.tables import gradients

ROWS, DIM = 600_000, 16


def push(tables: Tables, ids: np.ndarray, *, step: int) -> None:
    dim = tables[0].layout.dim
    tables.apply([gradients({0: (np.sort(ids), np.ones((ids.size, dim), np.float32))})], step=step)


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems may keep memory that they could have back")
@every("counted", [False, True], ids=["rows", "counts of ids without a row"])
def test_the_memory_of_rows_that_went_goes_back_to_the_system(counted: bool) -> None:
    """9 of 10 rows go in a sweep of 64 steps. Their records and their part of the index go, too."""
    evict, admit = EvictConfig(ttl_steps=70, sweep_steps=64), AdmitConfig(min_count=50, window_steps=70)
    policy = {"admit": admit} if counted else {"evict": evict}
    tables = Tables([TableSpec(name="t", dim=DIM, **policy)], seed=3)
    table, rng = tables[1 if counted else 0], np.random.default_rng(3)
    push(tables, np.arange(1000, dtype=np.int64), step=0)
    everything, step = rng.permutation(ROWS), 1
    kept = everything[: ROWS // 10]
    before = rss()
    for part in np.array_split(everything, 30):
        push(tables, part, step=step)
        step += 1
    full, entries = rss() - before, table.index.num_entries
    assert full > 0.9 * table.size_bytes > ROWS * 20, full
    for turn in range(200):
        push(tables, kept[turn % 10 :: 10], step=step)
        step += 1
    assert kept.size <= table.num_rows <= kept.size + 1000
    left = rss() - before
    assert left < 0.25 * full, (left, full)  # a tenth of the rows, and what is kept for the next ones
    assert table.size_bytes < 0.2 * full and table.index.num_entries < entries / 4


IDS = np.arange(20_000, dtype=np.int64)
BUCKET = bucket_of(IDS)


def test_tables_hold_what_they_should_while_their_index_shrinks_and_grows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Waves of thousands of ids against a dict of last pushes, with increments in between, and a server that loads
    them."""
    servers = 2
    monkeypatch.setattr(index, "SHRINK_FROM_BYTES", 3 * SMALL)
    monkeypatch.setattr(index, "MOVE_AT_LEAST", 16)
    spec = TableSpec(name="t", dim=2, init=InitConfig(name="zeros"), evict=EvictConfig(ttl_steps=3, sweep_steps=2))
    shards = [Tables([spec], seed=3, buckets=buckets_of(s, servers)) for s in range(servers)]
    for tables in shards:
        tables.changed.follow("")
    checkpoints, last = Checkpoints(tmp_path), None
    rng, clocks, sizes = np.random.default_rng(5), dict[int, int](), list[int]()
    for step in range(80):
        count = int(rng.choice([2500, 1200])) if step % 16 < 5 else int(rng.integers(1, 60))
        ids = np.sort(rng.choice(IDS, count, replace=False))
        server_of_id = bucket_of(ids) * servers // 4096
        for s, tables in enumerate(shards):
            push(tables, ids[server_of_id == s], step=step)
        clocks |= dict.fromkeys(ids.tolist(), step)
        for id_ in [id_ for id_, clock in clocks.items() if step - clock > 3]:
            if step % 2 * 2048 <= int(BUCKET[id_]) < (step % 2 + 1) * 2048:
                del clocks[id_]
        have = [id_ for tables in shards for id_ in ids_in(tables[0].records, tables[0].num_rows).tolist()]
        assert len(have) == len(clocks) and set(have) == clocks.keys()
        sizes.append(shards[0][0].index.num_entries)
        pulled = gradients({0: (ids[server_of_id == 0], np.empty((int((server_of_id == 0).sum()), 2), np.float32))})
        assert not shards[0].pull(pulled.sections, np.empty_like(pulled.values)).absent_S.any()
        if step % 7 == 3:
            last = checkpointed(shards, checkpoints, step, last, removes=True)
            (read,) = loaded([spec], last, seed=3)
            assert read[0].digest() == sum(tables[0].digest() for tables in shards) % (1 << 128)
    falls = sum(b < a for a, b in pairwise(sizes))
    assert falls > 4 and max(sizes) > 3 * min(sizes[20:])
