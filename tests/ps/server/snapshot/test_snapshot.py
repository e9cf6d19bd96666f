"""Snapshots: what one number of servers wrote, any other number reads back, bit for bit; rows from outside; formats."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import CheckpointError, DataError
from shardkeep.ps.checkpoints import row_stream
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints, FileRecord
from shardkeep.ps.checkpoints.index import indexes
from shardkeep.ps.checkpoints.row_stream import count_rows, stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import buckets_of
from shardkeep.ps.server.snapshot import files as snapshot, start_rows
from shardkeep.ps.server.snapshot.files import load_snapshots
from shardkeep.ps.server.snapshot.start_rows import StartRows, write_start_rows
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.marked_tables import IDS, SPECS, checkpointed, loaded, pushed_to_all
from tests.support.one_table import applied, exported


def saved(folder: Path, servers: int = 1) -> Checkpoint:
    """Of servers with 1500 rows in each table, which skipped 10 rows and one for their number."""
    shards = [Tables(SPECS, seed=7) for _ in range(servers)]
    pushed_to_all(shards, np.arange(0, 2 * IDS, 2), 0)
    for s, tables in enumerate(shards):
        tables[1].skipped_rows = 10 + s
    return checkpointed(shards, Checkpoints(folder), 2)


def test_another_number_of_servers_reads_only_what_holds_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "FILE_BYTES", 1 << 12)
    checkpoint = saved(tmp_path)
    opened: set[Path] = set()
    read = row_stream.safe_open
    monkeypatch.setattr(row_stream, "safe_open", lambda path, framework: opened.add(path) or read(path, framework))
    load_snapshots(Tables(SPECS, seed=7, buckets=buckets_of(1, 4)), checkpoint, shard=1, num_shards=4)
    assert 0 < len(opened) < 0.4 * len(checkpoint.files)


@every(
    ("spec", "text"),
    [
        (TableSpec(name="b", dim=8, optimizer={"name": "adam"}), "table b has dim 4, optimizer adam"),  # type: ignore[arg-type]
        (TableSpec(name="b", dim=4), "the job's has dim 4, optimizer rowwise_adagrad"),
        (TableSpec(name="users", dim=4), "holds table b, which the job has not"),
    ],
)
def test_tables_that_are_not_the_same_are_refused(tmp_path: Path, spec: TableSpec, text: str) -> None:
    tables = [*Tables([SPECS[0], spec, *SPECS[2:]], seed=7)]
    with pytest.raises(CheckpointError, match=text):
        load_snapshots(tables, saved(tmp_path), shard=0, num_shards=1)


def test_a_server_that_loads_alone_has_its_own_counts(tmp_path: Path) -> None:
    """The others keep theirs. Of another number of servers all load, and the first has the counts of all."""
    checkpoint = saved(tmp_path, 3)
    counts = [[[t.skipped_rows for t in tables][:3] for tables in loaded(SPECS, checkpoint, now)] for now in (3, 2)]
    assert counts == [[[1, 10, 0], [1, 11, 0], [1, 12, 0]], [[3, 33, 0], [0, 0, 0]]]


# ---- rows from outside: sorted through temporary files ----


def given(ids: np.ndarray, rows: np.ndarray, chunk: int = 97, optimizer: str = "adam") -> StartRows:
    spec = TableSpec(name="t", dim=rows.shape[1], optimizer={"name": optimizer})  # type: ignore[arg-type]
    chunks = [(ids[at : at + chunk], rows[at : at + chunk]) for at in range(0, ids.size, chunk)]
    return StartRows(spec, ids.size, lambda: iter(chunks), "the test")


@every(("range_bytes", "servers"), [(500, 3), (32 << 20, 1)], ids=["many ranges", "one range"])
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
    ids = np.append(np.arange(1000), 7)  # twice, in different chunks
    with pytest.raises(DataError, match=r"the test, rows 8 and 1001: both have id 7; allowed: one row an id"):
        write_start_rows([given(ids, np.ones((1001, 2), np.float32))], checkpoints.begin(1), shard=0)


# ---- format numbers ----


PLAIN = TableSpec(name="t", dim=2)
KINDS: dict[str, tuple[dict[str, Any], int | None]] = {
    "no policy": ({}, None),
    "evict": ({"evict": {"ttl_steps": 9}}, 2),
    "min_count": ({"admit": {"min_count": 2}}, 2),
}
FIFTY = np.arange(50, dtype=np.int64)


def saved_alone(spec: TableSpec, folder: Path) -> tuple[Checkpoint, list[int]]:
    """A checkpoint of one server, and the digests of its tables."""
    tables, checkpoints = Tables([spec], seed=1), Checkpoints(folder)
    for step in range(2):
        applied(tables[0], FIFTY, np.ones((FIFTY.size, 2), np.float32), step=step)
    return checkpointed([tables], checkpoints, 2), [table.digest() for table in tables]


def changed(checkpoint: Checkpoint, **fields: Any) -> Checkpoint:
    """The checkpoint with other fields in its index; None = without the field."""
    path = checkpoint.folder / "server-0" / "snapshot.json"
    index = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in index.items() if value is not None}))
    files = [FileRecord.of(checkpoint.folder, checkpoint.folder / file.path) for file in checkpoint.files]
    return Checkpoint(checkpoint.folder, checkpoint.step, tuple(files), {}, checkpoint.id)


def loaded_digests(spec: TableSpec, checkpoint: Checkpoint) -> list[int]:
    (tables,) = loaded([spec], checkpoint, seed=1)
    return [table.digest() for table in tables]


@every("name", KINDS)
def test_only_tables_with_policies_have_the_new_format_and_an_index_of_an_old_version_is_read(
    tmp_path: Path, name: str
) -> None:
    """Without a number, and its tables without keys of policies and of precision."""
    more, number = KINDS[name]
    spec = TableSpec(name="t", dim=2, **more)
    removes = name in ("evict", "min_count")  # counts that are forgotten are rows, too
    assert Tables([spec], seed=1).snapshot().removes == removes
    checkpoint, digests = saved_alone(spec, tmp_path)
    index = json.loads((checkpoint.folder / "server-0" / "snapshot.json").read_text())
    assert index.get("format") == number
    old = changed(checkpoint, format=None)
    if not more:
        own = {key: index["tables"][0]["spec"][key] for key in ("name", "dim", "optimizer", "init")}
        old = changed(old, tables=[{"spec": own, "skipped_rows": 0}])
    assert loaded_digests(spec, old) == digests
    assert more or count_rows(old, "t") == FIFTY.size


@every("number", [3, "2", 0])
def test_an_unknown_format_is_refused_in_one_line_that_says_what_to_do(tmp_path: Path, number: object) -> None:
    checkpoint = changed(saved_alone(PLAIN, tmp_path)[0], format=number)
    text = rf"snapshot\.json: format {number!r}; this version reads 1 to 2; use the version of shardkeep .* newer one$"
    for read in (
        lambda: loaded_digests(PLAIN, checkpoint),
        lambda: list(stream_rows(checkpoint, "t")),
        lambda: count_rows(checkpoint, "t"),
    ):
        with pytest.raises(CheckpointError, match=text):
            read()
