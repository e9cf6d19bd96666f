"""Snapshots: one server's tables as safetensors files in the order of placement buckets, and back into any number of
servers.

A file holds parts of tables, each a range of buckets, so that another number of servers reads only files that hold
some of its buckets. `snapshot.json` says which part is where. No rows may change while a snapshot is written.
"""
# N = rows of a part, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoints import Checkpoint, FileRecord
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKETS, bucket_of, server_of
from shardkeep.ps.shard.table import Table

FILE_BYTES = 64 << 20
"""About the size of a file. Beside the tables, one of them is held in memory, and while a snapshot is written some 30
bytes for each row of the largest table."""
_INDEX = "snapshot.json"

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one table whose ids fall into buckets [first, end)."""

    table: int
    file: int
    first: int
    end: int
    rows: int


def write_snapshot(tables: Sequence[Table], checkpoint: Path, *, shard: int) -> list[FileRecord]:
    """Writes all rows and slots below `checkpoint`/server-SHARD; the files' records. Raises OSError."""
    folder = checkpoint / f"server-{shard}"
    folder.mkdir()
    parts: list[_Part] = []
    records: list[FileRecord] = []
    for number, (found, arrays) in enumerate(_files(tables)):
        path = folder / _file_name(number)
        save_file(arrays, path)
        records.append(FileRecord.of(checkpoint, path))
        parts += [_Part(p.table, number, p.first, p.end, p.rows) for p in found]
    index = {
        "tables": [{"spec": t.spec.model_dump(mode="json"), "skipped_rows": t.skipped_rows} for t in tables],
        "parts": [[p.table, p.file, p.first, p.end, p.rows] for p in parts],
    }
    atomic_write(folder / _INDEX, json.dumps(index) + "\n")
    return [*records, FileRecord.of(checkpoint, folder / _INDEX)]


def _files(tables: Sequence[Table]) -> Iterator[tuple[list[_Part], Arrays]]:
    """The parts and arrays of one file after the other."""
    parts: list[_Part] = []
    arrays: Arrays = {}
    size = 0
    for t, table in enumerate(tables):
        for first, end, rows in _parts_of(table):
            parts.append(_Part(t, 0, first, end, rows[0].size))
            for what, array in zip(("ids", "rows", "slots"), rows, strict=True):
                arrays[f"{t}.{first}.{what}"] = array
                size += array.nbytes
            if size >= FILE_BYTES:
                yield parts, arrays
                parts, arrays, size = [], {}, 0
    if parts:
        yield parts, arrays


def _parts_of(table: Table) -> Iterator[tuple[int, int, tuple[Any, Any, Any]]]:
    """(first bucket, end, (ids, rows, slots)) of parts of a table that fit a file, in the order of the buckets."""
    ids_N = table.ids()
    if not ids_N.size:
        return
    buckets_N = bucket_of(ids_N).astype(np.uint16)
    order_N = np.argsort(buckets_N, kind="stable")
    starts = np.searchsorted(buckets_N[order_N], np.arange(BUCKETS + 1))
    del buckets_N
    most = max(1, FILE_BYTES // table.row_bytes)
    first = 0
    while first < BUCKETS:
        end = max(first + 1, int(np.searchsorted(starts, starts[first] + most, side="right")) - 1)
        slots_N = order_N[starts[first] : starts[end]]
        if slots_N.size:
            yield first, end, (ids_N[slots_N], *table.read(slots_N))
        first = end


def load_snapshots(tables: Sequence[Table], checkpoint: Checkpoint, *, shard: int, num_shards: int) -> None:
    """Fills empty tables with the rows of a checkpoint that belong to one of `num_shards` servers, however many wrote
    it. Raises CheckpointError."""
    first, end = _range_of(shard, num_shards)
    indexes = [file for file in checkpoint.files if file.path.endswith(f"/{_INDEX}")]
    skipped = np.zeros(len(tables), dtype=np.int64)
    for record in indexes:
        files = {file.path: file for file in checkpoint.below(record.path.rpartition("/")[0])}
        index = _read_index(record.check(checkpoint.folder))
        theirs = _matched(index, tables, checkpoint)
        for number, parts in _by_file(index, first, end).items():
            path = files[f"{record.path.rpartition('/')[0]}/{_file_name(number)}"].check(checkpoint.folder)
            arrays = _read_arrays(path)
            for part in parts:
                ids_N, rows_ND, slots_NS = (arrays[f"{part.table}.{part.first}.{w}"] for w in ("ids", "rows", "slots"))
                mine_N = server_of(ids_N, num_shards) == shard
                tables[theirs[part.table]].load(ids_N[mine_N], rows_ND[mine_N], slots_NS[mine_N])
        for t, entry in enumerate(index["tables"]):
            skipped[theirs[t]] += entry["skipped_rows"]
    if shard == 0:  # a count of the job: one server goes on with it
        for table, count in zip(tables, skipped.tolist(), strict=True):
            table.skipped_rows = count


def _range_of(shard: int, num_shards: int) -> tuple[int, int]:
    """The buckets of a server (ps/placement.py): those b with b * num_shards // BUCKETS == shard."""
    return -(-shard * BUCKETS // num_shards), -(-(shard + 1) * BUCKETS // num_shards)


def _by_file(index: dict[str, Any], first: int, end: int) -> dict[int, list[_Part]]:
    """The parts that hold some of the buckets [first, end), by the file they lie in."""
    found: dict[int, list[_Part]] = {}
    for part in (_Part(*row) for row in index["parts"]):
        if part.first < end and part.end > first:
            found.setdefault(part.file, []).append(part)
    return found


def _matched(index: dict[str, Any], tables: Sequence[Table], checkpoint: Checkpoint) -> list[int]:
    """The table that each of the snapshot's tables is now. Raises CheckpointError when one is not the same."""
    now = {table.spec.name: t for t, table in enumerate(tables)}
    found = []
    for entry in index["tables"]:
        spec = TableSpec(**entry["spec"])
        t = now.get(spec.name)
        if t is None:
            raise CheckpointError(f"{checkpoint.folder}: holds table {spec.name}, which the job has not")
        mine = tables[t].spec
        if _shape(spec) != _shape(mine):
            raise CheckpointError(
                f"{checkpoint.folder}: table {spec.name} has {_shape(spec)}; the job's has {_shape(mine)}"
            )
        found.append(t)
    return found


def _shape(spec: TableSpec) -> str:
    """What makes rows of one table rows of another."""
    return f"dim {spec.dim}, optimizer {spec.optimizer.name}, init {spec.init.name} {spec.init.scale}"


def _read_index(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from error


def _read_arrays(path: Path) -> Arrays:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _file_name(number: int) -> str:
    return f"rows-{number:05d}.safetensors"
