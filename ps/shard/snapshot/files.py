"""The format of a snapshot's files: `write_snapshot` and `load_snapshots`. When and in which thread: writer.py.

Rows are in safetensors files, sorted by placement bucket. A part is one table's rows of a range of buckets. So each
of another number of servers reads only the files with its own buckets. `snapshot.json` lists the parts of each file.
"""
# N = rows of a part, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from shardkeep.ps.placement import buckets_of, server_of
from shardkeep.ps.shard.snapshot.index import INDEX, file_name, indexes
from shardkeep.ps.shard.snapshot.part_files import Part, PartFiles
from shardkeep.ps.shard.snapshot.snapshot import Snapshot
from shardkeep.ps.shard.snapshot.spill import Spill
from shardkeep.ps.shard.snapshot.walk import walk
from shardkeep.ps.shard.table.table import Table

FILE_BYTES = 64 << 20
"""The approximate size of a file. A whole file is in memory while it is read."""
PART_BYTES = 8 << 20
"""The approximate size of a part. One part is in memory while a snapshot is written. In addition there are one bit for
each row of every table, and the pre-images (limit in spill.py)."""

Arrays = dict[str, npt.NDArray[Any]]


def write_snapshot(snapshot: Snapshot, checkpoint: Path, *, shard: int) -> list[FileRecord]:
    """Writes a snapshot's rows and slots below `checkpoint`/server-SHARD, then drops it. Returns the files' records.

    Pulls and pushes may continue. Raises OSError, or CheckpointError if the snapshot is dropped before the end."""
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
    index: dict[str, Any] = {
        "tables": [
            {"spec": table.spec.model_dump(mode="json"), "skipped_rows": skipped}
            for table, skipped in zip(snapshot.tables, snapshot.skipped_rows_T, strict=True)
        ],
        "parts": [part.to_json() for part in parts],
    }
    if snapshot.earlier_steps:
        index["earlier_steps"] = snapshot.earlier_steps
    atomic_write(folder / INDEX, json.dumps(index) + "\n")
    return [*written, FileRecord.of(checkpoint, folder / INDEX)]


def _write_rows(
    snapshot: Snapshot, folder: Path, done: Callable[[Path], Future[FileRecord]]
) -> tuple[list[Part], list[Future[FileRecord]]]:
    """Writes the files of rows and passes each to `done`. Returns the parts and the files' records."""
    with contextlib.ExitStack() as opened:
        spill = opened.enter_context(contextlib.closing(Spill(folder)))
        # A dropped snapshot must not touch files that the next one may be writing.
        files = PartFiles(folder, FILE_BYTES, done, before=snapshot.check)
        opened.enter_context(contextlib.closing(files))
        for part in opened.enter_context(contextlib.closing(walk(snapshot, spill, min(PART_BYTES, FILE_BYTES)))):
            files.add(part.table, part.first, part.end, part.columns)
        files.finish()
    return files.parts, files.records


def load_snapshots(tables: Sequence[Table], checkpoint: Checkpoint, *, shard: int, num_shards: int) -> None:
    """Fills empty tables with the rows of a checkpoint that belong to server `shard` of `num_shards`.

    Any number of servers may have written it. Loads the chain's full checkpoint first, then its increments. Raises
    CheckpointError."""
    for link in checkpoint.chain:
        skipped = _load(tables, link, shard, num_shards)
    if shard == 0:  # the count is of the whole job, so one server carries it
        for table, count in zip(tables, skipped.tolist(), strict=True):
            table.skipped_rows = count


def _load(tables: Sequence[Table], checkpoint: Checkpoint, shard: int, num_shards: int) -> npt.NDArray[np.int64]:
    """Loads the rows of one checkpoint of a chain. Returns the count of skipped rows per table at that time."""
    first, end = buckets_of(shard, num_shards)
    skipped = np.zeros(len(tables), dtype=np.int64)
    for record, index in indexes(checkpoint):
        files = {file.path: file for file in checkpoint.below(record.path.rpartition("/")[0])}
        theirs = _matched(index, tables, checkpoint)
        for number, parts in _by_file(index, first, end).items():
            path = files[f"{record.path.rpartition('/')[0]}/{file_name(number)}"].check(checkpoint.folder)
            arrays = read_arrays(path)
            for part in parts:
                ids_N, rows_ND, slots_NS = (arrays[f"{part.table}.{part.first}.{w}"] for w in ("ids", "rows", "slots"))
                mine_N = server_of(ids_N, num_shards) == shard
                tables[theirs[part.table]].load(ids_N[mine_N], rows_ND[mine_N], slots_NS[mine_N])
        for t, entry in enumerate(index["tables"]):
            skipped[theirs[t]] += entry["skipped_rows"]
    return skipped


def _by_file(index: dict[str, Any], first: int, end: int) -> dict[int, list[Part]]:
    """The parts with rows of buckets [first, end), by file number."""
    found: dict[int, list[Part]] = {}
    for part in (Part(*row) for row in index["parts"]):
        if part.first < end and part.end > first:
            found.setdefault(part.file, []).append(part)
    return found


def _matched(index: dict[str, Any], tables: Sequence[Table], checkpoint: Checkpoint) -> list[int]:
    """The job's table for each table of the snapshot. Raises CheckpointError if one is missing or differs."""
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
    """The settings that must match for one table's rows to fit another."""
    first, second = spec.init.parameters
    return f"dim {spec.dim}, optimizer {spec.optimizer.name}, init {spec.init.name} {first:g} {second:g}"


def read_arrays(path: Path) -> Arrays:
    """The arrays of one file of a snapshot. Raises CheckpointError."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
