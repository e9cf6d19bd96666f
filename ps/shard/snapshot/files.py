"""Snapshots: one server's tables as safetensors files in the order of placement buckets, and back into any number of
servers.

A file holds parts of tables, each a range of buckets, so that another number of servers reads only files that hold
some of its buckets. `snapshot.json` says which part is where. It writes the rows of one instant (snapshot.py).
"""
# N = rows of a part, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoints import Checkpoint, FileRecord
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKETS, server_of
from shardkeep.ps.shard.snapshot.array_file import ArrayFile
from shardkeep.ps.shard.snapshot.snapshot import Snapshot
from shardkeep.ps.shard.snapshot.spill import Spill
from shardkeep.ps.shard.snapshot.walk import walk
from shardkeep.ps.shard.table.table import Table

FILE_BYTES = 64 << 20
"""About the size of a file: what is held in memory while it is read."""
PART_BYTES = 8 << 20
"""About the size of a part: what is held in memory while a snapshot is written, beside 4 bytes for each row of the
largest table, a bit for each row of all, and what spill.py allows for rows that change meanwhile."""
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


def write_snapshot(snapshot: Snapshot, checkpoint: Path, *, shard: int) -> list[FileRecord]:
    """Writes the rows and slots of a snapshot below `checkpoint`/server-SHARD, then drops it; the files' records.

    Pulls and pushes may go on meanwhile. Raises OSError, and CheckpointError when the snapshot is dropped before."""
    folder = checkpoint / f"server-{shard}"
    try:
        folder.mkdir()
        with ThreadPoolExecutor(1, thread_name_prefix="snapshot-sync") as syncing:  # the walk need not wait for a disk
            try:
                parts, records = _write_rows(
                    snapshot, folder, lambda path: syncing.submit(FileRecord.of, checkpoint, path)
                )
            except BaseException:
                syncing.shutdown(wait=False, cancel_futures=True)
                raise
            written = [record.result() for record in records]
    finally:
        snapshot.drop("its snapshot is done")
    index = {
        "tables": [
            {"spec": table.spec.model_dump(mode="json"), "skipped_rows": skipped}
            for table, skipped in zip(snapshot.tables, snapshot.skipped_rows_T, strict=True)
        ],
        "parts": [[p.table, p.file, p.first, p.end, p.rows] for p in parts],
    }
    atomic_write(folder / _INDEX, json.dumps(index) + "\n")
    return [*written, FileRecord.of(checkpoint, folder / _INDEX)]


def _write_rows(
    snapshot: Snapshot, folder: Path, done: Callable[[Path], Future[FileRecord]]
) -> tuple[list[_Part], list[Future[FileRecord]]]:
    """The files of rows, each handed to `done`; which part is where."""
    parts: list[_Part] = []
    records: list[Future[FileRecord]] = []
    file: ArrayFile | None = None
    with contextlib.ExitStack() as opened:
        spill = opened.enter_context(contextlib.closing(Spill(folder)))
        for part in opened.enter_context(contextlib.closing(walk(snapshot, spill, min(PART_BYTES, FILE_BYTES)))):
            if file is None:
                snapshot.check()  # one that was given up must not touch files that another may be writing
                file = opened.enter_context(contextlib.closing(ArrayFile(folder / _file_name(len(records)))))
            columns = part.columns
            for what, array in (("ids", columns.ids_K), ("rows", columns.rows_KD), ("slots", columns.slots_KS)):
                file.add(f"{part.table}.{part.first}.{what}", array)
            parts.append(_Part(part.table, len(records), part.first, part.end, columns.ids_K.size))
            if file.size >= FILE_BYTES or not file.has_room:
                file.finish()
                records.append(done(file.path))
                file = None
        if file is not None:
            file.finish()
            records.append(done(file.path))
    return parts, records


def load_snapshots(tables: Sequence[Table], checkpoint: Checkpoint, *, shard: int, num_shards: int) -> None:
    """Fills empty tables with the rows of a checkpoint that belong to one of `num_shards` servers, however many wrote
    it; what its chain begins with first, then what changed after it. Raises CheckpointError."""
    for link in checkpoint.chain:
        skipped = _load(tables, link, shard, num_shards)
    if shard == 0:  # a count of the job: one server goes on with it
        for table, count in zip(tables, skipped.tolist(), strict=True):
            table.skipped_rows = count


def _load(tables: Sequence[Table], checkpoint: Checkpoint, shard: int, num_shards: int) -> npt.NDArray[np.int64]:
    """Sets the rows that one checkpoint of a chain has itself; the skipped rows of each table until then."""
    first, end = _range_of(shard, num_shards)
    indexes = [file for file in checkpoint.files if file.path.endswith(f"/{_INDEX}")]
    skipped = np.zeros(len(tables), dtype=np.int64)
    for record in indexes:
        files = {file.path: file for file in checkpoint.below(record.path.rpartition("/")[0])}
        index = read_index(record.check(checkpoint.folder))
        theirs = _matched(index, tables, checkpoint)
        for number, parts in _by_file(index, first, end).items():
            path = files[f"{record.path.rpartition('/')[0]}/{_file_name(number)}"].check(checkpoint.folder)
            arrays = read_arrays(path)
            for part in parts:
                ids_N, rows_ND, slots_NS = (arrays[f"{part.table}.{part.first}.{w}"] for w in ("ids", "rows", "slots"))
                mine_N = server_of(ids_N, num_shards) == shard
                tables[theirs[part.table]].load(ids_N[mine_N], rows_ND[mine_N], slots_NS[mine_N])
        for t, entry in enumerate(index["tables"]):
            skipped[theirs[t]] += entry["skipped_rows"]
    return skipped


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


def read_index(path: Path) -> dict[str, Any]:
    """The index of a snapshot: its parts, their tables and rows. Raises CheckpointError."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from error


def read_arrays(path: Path) -> Arrays:
    """The arrays of one file of a snapshot. Raises CheckpointError."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _file_name(number: int) -> str:
    return f"rows-{number:05d}.safetensors"
