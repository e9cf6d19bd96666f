"""Rows of a checkpoint, read a part at a time: what `load_snapshots` would give, in the order of placement keys."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.base.hashing_kernels import mix
from shardkeep.ps.checkpoints import row_stream
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.row_stream import RowBlock, count_rows, stream_rows
from shardkeep.ps.placement import BUCKETS, bucket_of, keys_of
from shardkeep.ps.server.snapshot import files as snapshot
from shardkeep.ps.server.snapshot.files import load_snapshots
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.marked_tables import EMPTY, IDS, SPECS, checkpointed, loaded, pushed_to_all
from tests.support.one_table import exported


def chain(folder: Path, *, servers: int = 1, increments: int = 0) -> Checkpoint:
    """A checkpoint of IDS rows in each table and increments of 50 rows, old and new ones, on it."""
    shards = [Tables(SPECS, seed=7) for _ in range(servers)]
    for tables in shards:
        tables.changed.follow("")
    pushed_to_all(shards, np.arange(0, 2 * IDS, 2), 0, without=EMPTY)
    checkpoints = Checkpoints(folder)
    last = checkpointed(shards, checkpoints, 1)
    for step in range(increments):
        some = np.random.default_rng(step).choice(3 * IDS, 50, replace=False)
        pushed_to_all(shards, np.sort(some), step + 1, without=EMPTY)
        last = checkpointed(shards, checkpoints, step + 2, last)
    return last


def joined(blocks: list[RowBlock]) -> RowBlock:
    return RowBlock(*(np.concatenate(columns) for columns in zip(*blocks, strict=True)))


@every(("servers", "increments", "part_bytes"), [(1, 2, 20_000), (3, 2, 8 << 20)])
def test_the_rows_are_those_that_a_server_would_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int, increments: int, part_bytes: int
) -> None:
    monkeypatch.setattr(snapshot, "PART_BYTES", part_bytes)
    monkeypatch.setattr(snapshot, "FILE_BYTES", 8 * part_bytes)
    monkeypatch.setattr(row_stream, "BLOCK_BYTES", part_bytes)
    last = chain(tmp_path, servers=servers, increments=increments)
    (tables,) = loaded(SPECS, last)
    for t, spec in enumerate(SPECS):
        blocks = list(stream_rows(last, spec.name))
        whole, expected = joined(blocks), exported(tables[t])
        order = np.argsort(whole.ids_N)
        assert all(np.array_equal(found[order], part) for found, part in zip(whole[:3], expected, strict=True))
        keys = keys_of(whole.ids_N)
        assert (keys[1:] > keys[:-1]).all()
        assert count_rows(last, spec.name) == expected[0].size
        if part_bytes == 20_000 and spec.dim == 16:
            assert len(blocks) > 5


def test_ranges_of_the_caller_hold_exactly_their_buckets(tmp_path: Path) -> None:
    last = chain(tmp_path, increments=1)
    (whole,) = stream_rows(last, "a", [(0, BUCKETS)])
    buckets = bucket_of(whole.ids_N)
    ranges = [(0, 1), (1, 100), (100, 101), (500, 4000), (4095, BUCKETS)]
    for (first, end), block in zip(ranges, stream_rows(last, "a", ranges), strict=True):
        inside = (buckets >= first) & (buckets < end)
        assert np.array_equal(block.ids_N, whole.ids_N[inside]) and np.array_equal(block.rows_ND, whole.rows_ND[inside])
    every = joined(list(stream_rows(last, "a", [(b, b + 8) for b in range(0, BUCKETS, 8)])))
    assert np.array_equal(every.ids_N, whole.ids_N) and np.array_equal(every.slots_NS, whole.slots_NS)


def test_a_part_is_read_at_most_twice_however_the_ranges_cut_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An increment's first row may be far behind the first bucket that its index names."""
    last, open_file = chain(tmp_path, increments=2), row_stream.safe_open
    opened: Counter[Path] = Counter()

    def counted(path: Path, framework: str) -> Any:
        opened[path] += 1
        return open_file(path, framework=framework)

    monkeypatch.setattr(row_stream, "safe_open", counted)
    assert sum(block.ids_N.size for block in stream_rows(last, "e", [(b, b + 64) for b in range(0, BUCKETS, 64)]))
    assert len(opened) == 3 and max(opened.values()) <= 2


def test_slots_that_nobody_wants_have_no_values_and_an_unknown_table_is_named(tmp_path: Path) -> None:
    last = chain(tmp_path, increments=1)
    for name in ("b", "empty"):
        for block in stream_rows(last, name, slots=False):
            dim = next(spec.dim for spec in SPECS if spec.name == name)
            assert block.rows_ND.shape[1] == dim and block.slots_NS.shape[1] == 0
    with pytest.raises(UserError, match="table users: unknown; the model has a, b, c"):
        stream_rows(last, "users")


def test_keys_are_the_mixed_ids_of_the_kernels() -> None:
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    ids[:4] = 0, -1, 2**63 - 1, -(2**63)
    assert keys_of(ids).tolist() == [int(mix(np.uint64(int(id_) % 2**64))) for id_ in ids.tolist()]
    assert np.array_equal((keys_of(ids) >> np.uint64(52)).astype(np.int64), bucket_of(ids))


@every(("which", "harm"), [("full", "flipped"), ("increment", "flipped"), ("increment", "truncated"), ("full", "gone")])
def test_a_damaged_file_anywhere_in_a_chain_is_named_before_a_server_uses_a_row(
    tmp_path: Path, which: str, harm: str
) -> None:
    last = chain(tmp_path, increments=1)
    path = next(last.chain[0 if which == "full" else 1].folder.glob("server-0/rows-*"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(bytes(content[:100] if harm == "truncated" else content))
    if harm == "gone":
        path.unlink()
    empty = Tables(SPECS, seed=7)
    for read in (lambda: list(stream_rows(last, "e")), lambda: load_snapshots(empty, last, shard=0, num_shards=1)):
        with pytest.raises(CheckpointError, match=f"{path}: (damaged|cannot be read)"):
            read()
    assert not any(table.num_rows for table in empty)
