"""The format of a snapshot's files: `write_snapshot` and `load_snapshots`. When and in which thread: writer.py.

Rows are in safetensors files, sorted by placement bucket. A part is one table's rows of a range of buckets. So each
of another number of servers reads only the files with its own buckets. `snapshot.json` lists the parts of each file.
Weights and optimizer slots are in the precision of their table: F32, F16, U16 for bf16, or I8 with an array of scales.
"""
# N = rows of a part, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoints import Checkpoint, FileRecord
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import buckets_of, server_of
from shardkeep.ps.shard.snapshot.array_file import ArrayFile
from shardkeep.ps.shard.snapshot.index import INDEX, REMOVED, earlier_steps, file_name, format_of, indexes
from shardkeep.ps.shard.snapshot.part_files import Part, PartFiles
from shardkeep.ps.shard.snapshot.snapshot import Snapshot
from shardkeep.ps.shard.snapshot.spill import Spill
from shardkeep.ps.shard.snapshot.walk import walk
from shardkeep.ps.shard.table.pre_image_kernels import NO_IMAGES
from shardkeep.ps.shard.table.stored_rows import StoredRows
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
        written += _write_removed(snapshot, folder, checkpoint)
    finally:
        snapshot.drop("its snapshot is done")
    index: dict[str, Any] = format_of(table.spec for table in snapshot.tables) | {
        "tables": [
            {"spec": table.spec.model_dump(mode="json"), **counts}
            | ({"counts_for": table.counts_for} if table.counts_for else {})
            for table, counts in zip(snapshot.tables, snapshot.counts_T, strict=True)
        ],
        "parts": [part.to_json() for part in parts],
    }
    if any(table.spec.evict is not None for table in snapshot.tables):
        index |= {"full": snapshot.full, "buckets": snapshot.tables[0].buckets}
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
            columns, layout = part.columns, snapshot.tables[part.table].layout
            rows = StoredRows.of_words(columns.ids_K, columns.rows_KD, columns.slots_KS, layout)
            files.add(part.table, part.first, part.end, rows)
        files.finish()
    return files.parts, files.records


def _write_removed(snapshot: Snapshot, folder: Path, checkpoint: Path) -> list[FileRecord]:
    """Writes the ids of rows that were removed since the base of an increment, where there are any."""
    if snapshot.full or not any(ids.size for ids in snapshot.removed_T):
        return []
    with contextlib.closing(ArrayFile(folder / REMOVED)) as file:
        for t, ids in enumerate(snapshot.removed_T):
            if ids.size:
                file.add(str(t), ids)
        file.finish()
    return [FileRecord.of(checkpoint, folder / REMOVED)]


def load_snapshots(tables: Sequence[Table], checkpoint: Checkpoint, *, shard: int, num_shards: int) -> None:
    """Fills empty tables with the rows of a checkpoint that belong to server `shard` of `num_shards`.

    Any number of servers may have written it. Loads the chain's full checkpoint first, then its increments. Raises
    CheckpointError."""
    for link in checkpoint.chain:
        counts = {table.spec.name: Counter[str]() for table in tables}
        _load(tables, link, shard, num_shards, counts)
    for table in tables:
        for name, count in counts[table.spec.name].items():
            setattr(table, name, count)


def _load(
    tables: Sequence[Table], checkpoint: Checkpoint, shard: int, num_shards: int, counts: dict[str, Counter[str]]
) -> None:
    """Loads the rows of one checkpoint of a chain. Adds up the counts of its tables, by name: those of the same server,
    which may be the only one that loads, or, of another number of servers, all of them to the first."""
    clock = checkpoint.step + earlier_steps(checkpoint)
    first, end = buckets_of(shard, num_shards)
    written = indexes(checkpoint)
    as_many = len(written) == num_shards
    for record, index in written:
        folder = record.path.rpartition("/")[0]
        files = {file.path: file for file in checkpoint.below(folder)}
        theirs = _matched(index, tables, checkpoint)
        if checkpoint.base is not None:
            _remove(theirs, index, files.get(f"{folder}/{REMOVED}"), checkpoint.folder)
        for number, parts in _by_file(index, first, end).items():
            arrays = read_arrays(files[f"{folder}/{file_name(number)}"].check(checkpoint.folder))
            for part in parts:
                if (table := theirs[part.table]) is not None:
                    rows = StoredRows.of_arrays(named(arrays, f"{part.table}.{part.first}"))
                    mine_N = server_of(rows.ids_N, num_shards) == shard
                    table.load_stored(rows.taken(mine_N), clock=clock)
        counted = folder == f"server-{shard}" if as_many else shard == 0
        for table, entry in zip(theirs, index["tables"], strict=True):
            if table is not None and counted:
                counts[table.spec.name].update({name: entry[name] for name in table.counts() if name in entry})


def _remove(tables: Sequence[Table | None], index: dict[str, Any], file: FileRecord | None, folder: Path) -> None:
    """Removes the rows that were removed between a checkpoint and the increment on it."""
    if index.get("full"):  # the server did not know which: its part of the increment has all rows
        for table, entry in zip(tables, index["tables"], strict=True):
            if table is not None and entry["spec"].get("evict"):  # as it was then; the job may have other rules now
                first, end = (min(max(bucket, table.buckets[0]), table.buckets[1]) for bucket in index["buckets"])
                table.remove(NO_IMAGES, table.slots_between(*table.hashes(first, end)))
    if file is not None:
        for name, ids_N in read_arrays(file.check(folder)).items():
            if (table := tables[int(name)]) is not None:
                table.remove_ids(ids_N)


def _by_file(index: dict[str, Any], first: int, end: int) -> dict[int, list[Part]]:
    """The parts with rows of buckets [first, end), by file number."""
    found: dict[int, list[Part]] = {}
    for part in (Part(*row) for row in index["parts"]):
        if part.first < end and part.end > first:
            found.setdefault(part.file, []).append(part)
    return found


def _matched(index: dict[str, Any], tables: Sequence[Table], checkpoint: Checkpoint) -> list[Table | None]:
    """The job's table for each table of the snapshot; None for counts that the job does not keep. Raises
    CheckpointError if one is missing or differs."""
    now = {table.spec.name: table for table in tables}
    found: list[Table | None] = []
    for entry in index["tables"]:
        spec = TableSpec(**entry["spec"])
        mine = now.get(spec.name)
        if mine is None and not entry.get("counts_for"):
            raise CheckpointError(f"{checkpoint.folder}: holds table {spec.name}, which the job has not")
        if mine is not None and _shape(spec) != _shape(mine.spec):
            raise CheckpointError(
                f"{checkpoint.folder}: table {spec.name} has {_shape(spec)}; the job's has {_shape(mine.spec)}"
            )
        found.append(mine)
    return found


def _shape(spec: TableSpec) -> str:
    """The settings that must match for one table's rows to fit another."""
    first, second = spec.init.parameters
    return f"dim {spec.dim}, optimizer {spec.optimizer.name}, init {spec.init.name} {first:g} {second:g}"


def named(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays of one part, by what they hold."""
    return {name.rpartition(".")[2]: array for name, array in arrays.items() if name.rpartition(".")[0] == prefix}


def read_arrays(path: Path) -> Arrays:
    """The arrays of one file of a snapshot. Raises CheckpointError."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
