"""Format numbers of snapshots: which are written, and what older and newer ones are read as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import CheckpointError
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints, FileRecord
from shardkeep.ps.checkpoints.row_stream import count_rows, stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.snapshot.files import load_snapshots, write_snapshot
from shardkeep.ps.server.tables import Tables
from tests.support.cases import every
from tests.support.one_table import applied

PLAIN = TableSpec(name="t", dim=2)
KINDS: dict[str, tuple[dict[str, Any], int | None]] = {
    "no policy": ({}, None),
    "evict": ({"evict": {"ttl_steps": 9}}, 2),
    "min_count": ({"admit": {"min_count": 2}}, 2),
    "probability": ({"admit": {"probability": 0.9}}, 2),
}
IDS = np.arange(50, dtype=np.int64)


def saved(spec: TableSpec, folder: Path) -> tuple[Checkpoint, list[int]]:
    """A checkpoint of one server, and the digests of its tables."""
    tables, checkpoints = Tables([spec], seed=1), Checkpoints(folder)
    for step in range(2):
        applied(tables[0], IDS, np.ones((IDS.size, 2), np.float32), step=step)
    files = write_snapshot(tables.snapshot(), checkpoints.begin(2), shard=0)
    return checkpoints.commit(2, files, {}), [table.digest() for table in tables]


def changed(checkpoint: Checkpoint, **fields: Any) -> Checkpoint:
    """The checkpoint with other fields in its index; None = without the field."""
    path = checkpoint.folder / "server-0" / "snapshot.json"
    index = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in index.items() if value is not None}))
    files = [FileRecord.of(checkpoint.folder, checkpoint.folder / file.path) for file in checkpoint.files]
    return Checkpoint(checkpoint.folder, checkpoint.step, tuple(files), {}, checkpoint.id)


def loaded(spec: TableSpec, checkpoint: Checkpoint) -> list[int]:
    tables = Tables([spec], seed=1)
    load_snapshots(tables, checkpoint, shard=0, num_shards=1)
    return [table.digest() for table in tables]


@every("name", KINDS)
def test_only_tables_with_policies_have_the_new_format(tmp_path: Path, name: str) -> None:
    more, number = KINDS[name]
    checkpoint, _ = saved(TableSpec(name="t", dim=2, **more), tmp_path)
    assert json.loads((checkpoint.folder / "server-0" / "snapshot.json").read_text()).get("format") == number


@every("name", KINDS)
def test_an_index_without_a_number_is_read_as_the_old_format(tmp_path: Path, name: str) -> None:
    spec = TableSpec(name="t", dim=2, **KINDS[name][0])
    checkpoint, digests = saved(spec, tmp_path)
    assert loaded(spec, changed(checkpoint, format=None)) == digests


def test_an_index_that_an_old_version_wrote_is_read(tmp_path: Path) -> None:
    """Its tables have no key of policies and of precision."""
    checkpoint, digests = saved(PLAIN, tmp_path)
    index = json.loads((checkpoint.folder / "server-0" / "snapshot.json").read_text())
    spec = {key: index["tables"][0]["spec"][key] for key in ("name", "dim", "optimizer", "init")}
    old = changed(checkpoint, tables=[{"spec": spec, "skipped_rows": 0}])
    assert loaded(PLAIN, old) == digests and count_rows(old, "t") == IDS.size


@every("number", [3, "2", 0])
def test_an_unknown_format_is_refused_in_one_line_that_says_what_to_do(tmp_path: Path, number: object) -> None:
    checkpoint = changed(saved(PLAIN, tmp_path)[0], format=number)
    text = rf"snapshot\.json: format {number!r}; this version reads 1 to 2; use the version of shardkeep that wrote it"
    with pytest.raises(CheckpointError, match=text) as refused:
        loaded(PLAIN, checkpoint)
    assert "\n" not in str(refused.value)
    with pytest.raises(CheckpointError, match=text):
        list(stream_rows(checkpoint, "t"))
    with pytest.raises(CheckpointError, match=text):
        count_rows(checkpoint, "t")


@every("name", KINDS)
def test_a_server_says_whether_its_increments_may_remove_rows(tmp_path: Path, name: str) -> None:
    spec = TableSpec(name="t", dim=2, **KINDS[name][0])
    snapshot = Tables([spec], seed=1).snapshot()
    assert snapshot.removes == (name in ("evict", "min_count"))  # counts that are forgotten are rows, too
