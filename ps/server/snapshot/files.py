"""The format of a snapshot's files: `write_snapshot` and `load_snapshots`. When and in which thread: writer.py.

Rows are in safetensors files, sorted by placement bucket. A part is one table's rows of a range of buckets. So each
of another number of servers reads only the files with its own buckets. `snapshot.json` lists the parts of each file.
Weights and optimizer slots are in the precision of their table: F32, F16, U16 for bf16, or I8 with an array of scales.
"""
# N = rows of a part, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoints.folder import Checkpoint, FileRecord
from shardkeep.ps.checkpoints.index import INDEX, POLICY_COUNTS, REMOVED, Indexes, format_of
from shardkeep.ps.checkpoints.row_stream import Chain, stored_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import buckets_of
from shardkeep.ps.server.snapshot.part_files import ArrayFile, FilePart, PartFiles
from shardkeep.ps.server.snapshot.snapshot import Snapshot
from shardkeep.ps.server.snapshot.walk import Spill, walk
from shardkeep.ps.server.table.stored_rows import StoredRows
from shardkeep.ps.server.table.table import Table

FILE_BYTES = 64 << 20
"""The approximate size of a file. """
PART_BYTES = 8 << 20
"""The approximate size of a part. While a snapshot is written, a file for each thread and one more are in memory, and a
part for each thread. In addition there are one bit for each row of every table, and the pre-images (limit in walk.py).
"""
MAX_WRITERS = 4
CORES_PER_WRITER = 4
"""While a job trains, one of so many cores goes to a snapshot: fewer would slow steps down."""


def write_snapshot(
    snapshot: Snapshot,
    checkpoint: Path,
    *,
    shard: int,
    threads: int = 1,
    moved: Callable[[int], None] = lambda _rows: None,
) -> list[FileRecord]:
    """Writes a snapshot's rows and slots below `checkpoint`/server-SHARD, then drops it. Returns the files' records.

    Pulls and pushes may continue. The files do not depend on the number of threads. `moved`: called with the rows of
    each part, and with 1 for each file on disk. Raises OSError, or CheckpointError if the snapshot is dropped before
    the end; no thread is left then."""
    folder = checkpoint / f"server-{shard}"
    try:
        folder.mkdir()
        with (
            ThreadPoolExecutor(1, thread_name_prefix="snapshot-sync") as syncing,  # others need not wait for a disk
            ThreadPoolExecutor(threads, thread_name_prefix="snapshot-rows") as pool,
        ):
            try:
                parts, written = _write_rows(
                    snapshot,
                    folder,
                    pool,
                    threads,
                    lambda path, found: syncing.submit(FileRecord.of, checkpoint, path, found),
                    moved,
                )
            except BaseException:
                snapshot.drop("its snapshot failed")  # other threads stop at their next rows
                pool.shutdown(wait=True, cancel_futures=True)
                syncing.shutdown(wait=False, cancel_futures=True)
                raise
        written += write_removed(snapshot, folder, checkpoint)
    finally:
        snapshot.drop("its snapshot is done")
    atomic_write(folder / INDEX, json.dumps(_index_of(snapshot, parts)) + "\n")
    return [*written, FileRecord.of(checkpoint, folder / INDEX)]


def _index_of(snapshot: Snapshot, parts: Sequence[FilePart]) -> dict[str, Any]:
    """What a snapshot's index says of its tables and parts."""
    index: dict[str, Any] = format_of(table.spec for table in snapshot.tables) | {
        "tables": [
            {"spec": table.spec.model_dump(mode="json"), **counts}
            | ({"counts_for": table.counts_for} if table.counts_for else {})
            for table, counts in zip(snapshot.tables, snapshot.counts_T, strict=True)
        ],
        "parts": parts,
    }
    if any(table.spec.evict is not None for table in snapshot.tables):
        index |= {"full": snapshot.full, "buckets": snapshot.tables[0].index.buckets}
    if snapshot.earlier_steps:
        index["earlier_steps"] = snapshot.earlier_steps
    return index


def _write_rows(
    snapshot: Snapshot,
    folder: Path,
    pool: Executor,
    threads: int,
    done: Callable[[Path, str], Future[FileRecord]],
    moved: Callable[[int], None],
) -> tuple[list[FilePart], list[FileRecord]]:
    """Writes the files of rows and passes each to `done`. Returns the parts and the files' records."""
    # A dropped snapshot must not touch files that the next one may be writing.
    files = PartFiles(folder, FILE_BYTES, pool, done, before=snapshot.check)
    with contextlib.closing(Spill(folder)) as spill:
        for part in walk(snapshot, spill, min(PART_BYTES, FILE_BYTES), pool, threads, files.written):
            columns, layout = part.columns, snapshot.tables[part.table].layout
            rows = StoredRows.of_words(columns.ids_K, columns.rows_KD, columns.slots_KS, layout)
            if rows.ids_N.size:
                files.add(part.table, part.first, part.end, rows, part.room)
                moved(rows.ids_N.size)
        records = []
        for record in files.finish():
            records.append(record)
            moved(1)
    return files.parts, records


def write_removed(snapshot: Snapshot, folder: Path, checkpoint: Path) -> list[FileRecord]:
    """Writes the ids of rows that were removed since the base of an increment, where there are any."""
    if snapshot.full or not any(ids.size for ids in snapshot.removed_T):
        return []
    with contextlib.closing(ArrayFile(folder / REMOVED)) as file:
        for t, ids in enumerate(snapshot.removed_T):
            if ids.size:
                file.add(str(t), ids)
        file.finish()
    return [FileRecord.of(checkpoint, folder / REMOVED)]


def load_snapshots(
    tables: Sequence[Table],
    checkpoint: Checkpoint,
    *,
    shard: int,
    num_shards: int,
    moved: Callable[[int], None] = lambda _rows: None,
) -> None:
    """Fills empty tables with the rows of a checkpoint that belong to server `shard` of `num_shards`.

    Any number of servers may have written it. `moved`: called with the number of some rows. Raises CheckpointError."""
    chain = Chain(checkpoint)
    for link, written in chain.links:
        for _, index in written:
            _check_same(tables, index, link)
    counts = _counts(chain.links[-1][1], shard, num_shards)
    for table in tables:
        counters, buckets = bool(table.layout.num_counters), buckets_of(shard, num_shards)
        if len(chain.links) == 1:  # else the same rows may come again
            table.index.make_room(chain.parts(table.spec.name).rows_of(buckets), reserve=True)
        for rows in stored_rows(chain, table.spec.name, buckets, counters=counters):
            table.load_stored(rows)
            moved(rows.ids_N.size)
        table.continue_counts(counts[table.spec.name])


def _counts(written: Indexes, shard: int, num_shards: int) -> dict[str, Counter[str]]:
    """The counts of tables, by name: those of the same server, which may be the only one that loads, or, of another
    number of servers, all of them to the first."""
    by_table, as_many = defaultdict[str, Counter[str]](Counter), len(written) == num_shards
    for record, index in written:
        if record.path.startswith(f"server-{shard}/") if as_many else shard == 0:
            for entry in index["tables"]:
                counts = {name: entry.get(name, 0) for name in ("skipped_rows", *POLICY_COUNTS)}
                by_table[entry["spec"]["name"]].update(counts)
    return by_table


def _check_same(tables: Sequence[Table], index: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if a table of a checkpoint is missing or differs; counts may be dropped."""
    now = {table.spec.name: table.spec for table in tables}
    for entry in index["tables"]:
        spec = TableSpec.of_record(entry["spec"])
        own = now.get(spec.name)
        if (
            own is None and not entry.get("counts_for") and not checkpoint.facts.get("from")
        ):  # rows of a column that is gone
            raise CheckpointError(f"{checkpoint.folder}: holds table {spec.name}, which the job has not")
        if own is not None and _shape(spec) != _shape(own):
            raise CheckpointError(
                f"{checkpoint.folder}: table {spec.name} has {_shape(spec)}; the job's has {_shape(own)}"
            )


def _shape(spec: TableSpec) -> str:
    """The settings that must match for one table's rows to fit another."""
    first, second = spec.init.parameters
    return f"dim {spec.dim}, optimizer {spec.optimizer.name}, init {spec.init.name} {first:g} {second:g}"
