"""Rows from outside as a snapshot: sorted through temporary files, loaded by any number of servers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shardkeep.base.errors import DataError
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.index import indexes
from shardkeep.ps.checkpoints.row_stream import stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import bucket_of
from shardkeep.ps.server.snapshot import start_rows
from shardkeep.ps.server.snapshot.files import load_snapshots
from shardkeep.ps.server.snapshot.start_rows import StartRows, write_start_rows
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.one_table import exported


def given(ids: np.ndarray, rows: np.ndarray, chunk: int = 97, optimizer: str = "adam") -> StartRows:
    spec = TableSpec(name="t", dim=rows.shape[1], optimizer={"name": optimizer})  # type: ignore[arg-type]
    chunks = [(ids[at : at + chunk], rows[at : at + chunk]) for at in range(0, ids.size, chunk)]
    return StartRows(spec, ids.size, lambda: iter(chunks), "the test")


@every("range_bytes", [500, 32 << 20], ids=["many ranges", "one range"])
@every("servers", [1, 3])
def test_given_rows_are_loaded_by_any_number_of_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int, range_bytes: int
) -> None:
    monkeypatch.setattr(start_rows, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(start_rows, "PART_BYTES", 2000)
    monkeypatch.setattr(start_rows, "FILE_BYTES", 20_000)
    rng = np.random.default_rng(0)
    ids = np.unique(np.concatenate([rng.integers(-(2**63), 2**63 - 1, 3000), [-1, 0, 2**63 - 1]]))
    rows = rng.normal(size=(ids.size, 3)).astype(np.float32)
    order = rng.permutation(ids.size)
    checkpoints = Checkpoints(tmp_path)
    partial = checkpoints.begin(0)
    one = given(ids[order], rows[order])
    start = checkpoints.commit(0, write_start_rows([one], partial, shard=0), {})
    assert sorted(path.suffix for path in start.folder.glob("server-0/*")) == [
        ".json",
        *[".safetensors"] * (len(start.files) - 1),
    ]
    ((_, index),) = indexes(start)
    bounds = [(first, end) for _, _, first, end, _ in index["parts"]]
    assert all(first < end <= later for (first, end), (later, _) in pairwise(bounds)), "a server reads its parts alone"
    found = []
    for shard in range(servers):
        tables = Tables([one.spec], seed=0)
        load_snapshots(tables, start, shard=shard, num_shards=servers)
        found.append(exported(tables[0]))
    together = np.concatenate([ids_N for ids_N, _, _ in found])
    order = np.argsort(together)
    assert np.array_equal(together[order], ids)
    assert np.array_equal(np.concatenate([rows_ND for _, rows_ND, _ in found])[order], rows)
    assert not np.concatenate([slots for _, _, slots in found]).any()


def test_an_id_that_comes_twice_in_different_chunks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_rows, "RANGE_BYTES", 500)
    ids = np.append(np.arange(1000), 7)
    with pytest.raises(DataError, match=r"the test, rows 8 and 1001: both have id 7; allowed: one row an id"):
        write_start_rows([given(ids, np.ones((1001, 2), np.float32))], Checkpoints(tmp_path).begin(0), shard=0)


def test_all_rows_in_one_bucket_are_one_part(tmp_path: Path) -> None:
    many = np.arange(400_000)
    ids = many[bucket_of(many) == 1234]
    checkpoints = Checkpoints(tmp_path)
    files = write_start_rows([given(ids, np.ones((ids.size, 2), np.float32))], checkpoints.begin(0), shard=0)
    start = checkpoints.commit(0, files, {})
    (block,) = stream_rows(start, "t", [(0, 4096)])
    assert ids.size > 50 and np.array_equal(np.sort(block.ids_N), ids)
