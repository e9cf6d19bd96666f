"""Start rows: rows with which tables begin, of files or of the user's loop, written as a snapshot that servers load.

Their optimizer slots are new. Memory: a file, and one of the bucket ranges that the rows are sorted into first, in
temporary files.
"""
# N = rows of a chunk or range, D = embedding dim, S = optimizer slots of a row, B = buckets

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from shardkeep.base.arrays import Ids, Rows
from shardkeep.base.errors import DataError
from shardkeep.base.files import atomic_write
from shardkeep.ps.checkpoints.folder import FileRecord
from shardkeep.ps.checkpoints.index import INDEX
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKET_BITS, BUCKETS, keys_of
from shardkeep.ps.server.snapshot.files import FILE_BYTES, PART_BYTES
from shardkeep.ps.server.snapshot.part_files import PartFiles
from shardkeep.ps.server.table.layout import RowLayout
from shardkeep.ps.server.table.layout_kernels import FIRST_WEIGHT
from shardkeep.ps.server.table.stored_rows import StoredRows

RANGE_BYTES = 32 << 20
"""The approximate size of a range."""
_MOST_RANGES = 256
"""Each range has an open file."""


@dataclass(frozen=True, slots=True)
class StartRows:
    """Where the first rows of one table come from."""

    spec: TableSpec
    count: int
    """About how many there are."""
    chunks: Callable[[], Iterable[tuple[Ids, Rows]]]
    """Ids (N,) and rows (N, D), in any order."""
    source: str
    """Where they come from, for errors."""
    shown: Callable[[int, int], str] = lambda _row, id_: str(id_)
    """From the number of a row, from 1, and its id to the id as the user wrote it, for errors."""


def write_start_rows(tables: Sequence[StartRows], checkpoint: Path, *, shard: int) -> list[FileRecord]:
    """Writes rows below `checkpoint`/server-SHARD, as one server's snapshot of these tables.

    Any number of servers loads them. Raises DataError if an id is given twice, what `chunks` raises, and OSError."""
    folder = checkpoint / f"server-{shard}"
    folder.mkdir()

    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as syncing:
        files = PartFiles(folder, FILE_BYTES, pool, lambda *file: syncing.submit(FileRecord.of, checkpoint, *file))
        for t, table in enumerate(tables):
            for first, end, rows in _parts(table, folder):
                files.add(t, first, end, rows)
        records = list(files.finish())
    index = {
        "tables": [{"spec": table.spec.model_dump(mode="json"), "skipped_rows": 0} for table in tables],
        "parts": files.parts,
    }
    atomic_write(folder / INDEX, json.dumps(index) + "\n")
    return [*records, FileRecord.of(checkpoint, folder / INDEX)]


def _parts(table: StartRows, folder: Path) -> Iterator[tuple[int, int, StoredRows]]:
    """The rows in parts of buckets [first, end), rounded to the nearest value of their table's precision."""
    layout, slot = RowLayout.of(table.spec), table.spec.optimizer.initial_slot
    size = table.count * RowLayout(layout.dim, layout.num_slots).row_bytes
    count = min(_MOST_RANGES, max(1, -(-size // RANGE_BYTES)))
    for number, (ids_N, rows_ND) in enumerate(_sorted_ranges(table, layout.dim, count, folder)):
        lowest, beyond = (-(-n * BUCKETS // count) for n in (number, number + 1))
        starts_B1 = np.searchsorted(keys_of(ids_N) >> np.uint64(64 - BUCKET_BITS), np.arange(BUCKETS + 1))
        for first, end in ranges_of(starts_B1, max(1, PART_BYTES // layout.row_bytes)):
            part = slice(int(starts_B1[first]), int(starts_B1[end]))
            slots_KS = np.full((part.stop - part.start, layout.num_slots), slot, dtype=np.float32)
            rows = StoredRows.of_floats(ids_N[part], rows_ND[part], slots_KS, layout)
            yield max(first, lowest), min(end, beyond), rows


def ranges_of(starts_B1: Ids, most: int) -> list[tuple[int, int]]:
    """Ranges [first, end) of buckets with at most `most` rows each, or one larger bucket. Omits empty ranges."""
    ranges, first = [], 0
    while first < BUCKETS:
        end = max(first + 1, int(np.searchsorted(starts_B1, starts_B1[first] + most, side="right")) - 1)
        if starts_B1[end] > starts_B1[first]:
            ranges.append((first, end))
        first = end
    return ranges


def _sorted_ranges(table: StartRows, dim: int, count: int, folder: Path) -> Iterator[tuple[Ids, Rows]]:
    """The rows in `count` ranges of buckets, each sorted by key. Range r has the buckets b with b * count // BUCKETS
    == r."""
    width = FIRST_WEIGHT + dim
    with contextlib.ExitStack() as opened:
        files: list[IO[bytes]] = [opened.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(count)]
        for ids_N, rows_ND in table.chunks():
            _append(files, ids_N, rows_ND)
        for file in files:
            file.seek(0)
            records_NW = np.frombuffer(file.read(), dtype=np.float32).reshape(-1, width)
            file.close()
            ids_N = records_NW[:, :FIRST_WEIGHT].copy().view(np.int64).reshape(-1)
            keys_N = keys_of(ids_N)
            order_N = np.argsort(keys_N)
            keys_N, ids_N = keys_N[order_N], ids_N[order_N]
            if (twice := np.flatnonzero(keys_N[1:] == keys_N[:-1])).size:
                raise _named_twice(table, int(ids_N[twice[0]]))
            yield ids_N, records_NW[order_N, FIRST_WEIGHT:]


def _named_twice(table: StartRows, id_: int) -> DataError:
    """The error for an id that comes twice. Reads the rows again to find both."""
    numbers: list[int] = []
    done = 0
    for ids_N, _ in table.chunks():
        numbers += (np.flatnonzero(ids_N == id_) + done + 1).tolist()
        done += ids_N.size
        if len(numbers) > 1:
            break
    rows, shown = " and ".join(map(str, numbers[:2])), table.shown(numbers[0], id_)
    return DataError(f"{table.source}, rows {rows}: both have id {shown}; allowed: one row an id")


def _append(files: Sequence[IO[bytes]], ids_N: Ids, rows_ND: Rows) -> None:
    """Adds records of id and weights to the files of their ranges."""
    records_NW = np.concatenate([ids_N.reshape(-1, 1).view(np.float32), rows_ND], axis=1)
    range_N = ((keys_of(ids_N) >> np.uint64(64 - BUCKET_BITS)) * np.uint64(len(files))) >> np.uint64(BUCKET_BITS)
    order_N = np.argsort(range_N, kind="stable")
    starts = np.searchsorted(range_N[order_N], np.arange(len(files) + 1))
    for file, begin, end in zip(files, starts, starts[1:], strict=False):
        if begin < end:
            file.write(records_NW[order_N[begin:end]].reshape(-1).data)
