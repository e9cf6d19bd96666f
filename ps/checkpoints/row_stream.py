"""Row stream: the rows of one table of a checkpoint, one range of buckets after another. Never holds the whole table.

Resolves the chain of a checkpoint: a row of a later increment replaces the row of an earlier checkpoint, and rows that
an increment says were removed are left out. Servers read rows as they are stored, all others as float32.
"""
# N = rows of a block, P = rows of a part, D = embedding dim, S = optimizer slots of a row, B = buckets

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from shardkeep.base.arrays import Ids, Rows, UInt32s
from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.base.machine.in_order import in_order
from shardkeep.ps.checkpoints.folder import Checkpoint, FileRecord
from shardkeep.ps.checkpoints.index import REMOVED, Indexes, file_name, indexes
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKET_BITS, BUCKETS, bucket_of, keys_of
from shardkeep.ps.server.table.layout import COUNTERS
from shardkeep.ps.server.table.stored_rows import ONE_PUSH, StoredRows

_WEIGHTS = ("rows", "scales")
BLOCK_BYTES = 8 << 20
"""The approximate size of a block, if the caller names no ranges."""

Keys = npt.NDArray[np.uint64]
BucketRange = tuple[int, int]
"""Buckets [first, end)."""


class RowBlock(NamedTuple):
    """All rows of one table whose ids fall into one range of buckets, as float32. Ids are unique; their keys rise."""

    ids_N: Ids
    rows_ND: Rows
    slots_NS: Rows
    """Optimizer slots; S = 0 if the caller wanted none."""
    counters_NC: UInt32s
    """Clock of the last push, and the bits of the score (policy_kernels.py); C = 0 if the caller wanted none, or the
    table keeps none."""

    @classmethod
    def of(cls, stored: StoredRows, num_counters: int) -> RowBlock:
        """Rows as they are stored, as float32."""
        counters_NC = stored.counters_N2 if num_counters else np.empty((stored.ids_N.size, 0), dtype=np.uint32)
        return cls(stored.ids_N, stored.rows(), stored.slots(), counters_NC)

    def taken(self, which: slice | npt.NDArray[np.intp]) -> RowBlock:
        """Some of the rows."""
        ids_N, rows_ND, slots_NS, counters_NC = self
        return RowBlock(ids_N[which], rows_ND[which], slots_NS[which], counters_NC[which])


def stream_rows(
    checkpoint: Checkpoint,
    table: str,
    bucket_ranges: Sequence[BucketRange] | None = None,
    *,
    slots: bool = True,
    counters: bool = False,
) -> Iterator[RowBlock]:
    """Yields one block for each range, also for a range without rows. Rows are in the order of `placement.keys_of`.

    With the default ranges all blocks together are sorted by key, for any number of servers. Memory: a
    block, and one part (PART_BYTES in ps/server/snapshot/files.py) of each checkpoint of the chain.

    Args:
        checkpoint: Its files must stay until the last block.
        table: Name of the table.
        bucket_ranges: Ascending and disjoint; None = all buckets, in ranges of about BLOCK_BYTES.
        slots: Whether to read optimizer slots.
        counters: Whether to read what eviction counts.

    Raises:
        UserError: The checkpoint has no such table.
        CheckpointError: A file is missing or damaged; raised also by the iterator.
    """
    chain = Chain(checkpoint)
    parts = chain.table(table)
    arrays = [*_WEIGHTS, *["slots"] * slots, *["counters"] * (counters and parts.spec.evict is not None)]
    resolved = _resolved(parts, parts.ranges() if bucket_ranges is None else bucket_ranges, arrays, chain.checked)
    empty = _empty(parts.spec, arrays)
    return (_block(pieces, empty) for pieces in resolved)


def stored_rows(chain: Chain, table: str, buckets: BucketRange, *, counters: bool) -> Iterator[StoredRows]:
    """Yields the rows of buckets [first, end) of a table, in the precision that they are stored in, some at a time. No
    id comes twice; there are none of a table that the checkpoint has not. If that builds on no other, a thread reads a
    part ahead. Raises CheckpointError."""
    parts, arrays = chain.parts(table), [*_WEIGHTS, "slots", *["counters"] * counters]
    if len(parts.links) == 1:
        reader = _Reader(parts.links[0], parts.removed[0], arrays, chain.checked)
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as pool:
            for part, rows in in_order(pool, 1, lambda part: (part, reader.read(part)), parts.within(buckets)):
                if part.first < buckets[0] or part.end > buckets[1]:
                    buckets_N = bucket_of(rows.ids_N)
                    rows = rows.taken(np.flatnonzero((buckets_N >= buckets[0]) & (buckets_N < buckets[1])))
                yield rows
        return
    ranges = [(max(first, buckets[0]), min(end, buckets[1])) for first, end in parts.ranges()]
    within = [(first, end) for first, end in ranges if first < end]
    for pieces in _resolved(parts, within, arrays, chain.checked):
        yield from (piece.rows for piece in pieces)


def count_rows(checkpoint: Checkpoint, table: str) -> int:
    """The number of rows of a table. Reads ids only where increments could repeat them. Raises like `stream_rows`."""
    return _rows_in(Chain(checkpoint).table(table))


def count_candidates(checkpoint: Checkpoint, table: str) -> int | None:
    """The number of ids that are counted and have no row of `table` yet; None = nothing is counted. Raises like
    `stream_rows`."""
    chain = Chain(checkpoint)
    name = next((name for name, entry in chain.tables.items() if entry.get("counts_for") == table), None)
    return None if name is None else _rows_in(chain.parts(name))


def _rows_in(parts: TableParts) -> int:
    if sum(bool(link) for link in parts.links) < 2 and not any(parts.removed):
        return parts.stored
    return sum(piece.keys_N.size for pieces in _resolved(parts, parts.ranges(), [], None) for piece in pieces)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of the table whose ids fall into buckets [first, end): arrays `prefix`.ids, .rows and .slots of a file."""

    folder: Path
    file: FileRecord
    prefix: str
    first: int
    end: int
    rows: int
    clock: int
    """Of the checkpoint: what a server gives rows whose table counted nothing."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What an increment says about rows of its base that are no longer there.

    `ids_R`: in the order of their keys; some may be in the increment itself again. `ranges`: of buckets with all their
    rows in the increment."""

    ids_R: Ids
    ranges: tuple[BucketRange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ids_R.size or self.ranges)

    @classmethod
    def of(cls, link: Checkpoint, table: str, written: Indexes | None = None) -> Removed:
        """What one checkpoint of a chain says about a table. `written`: its indexes. Raises CheckpointError."""
        id_arrays, ranges = [np.empty(0, dtype=np.int64)], []
        for record, index in (written or indexes(link)) if link.base is not None else ():
            names = [entry["spec"]["name"] for entry in index["tables"]]
            if table not in names:
                continue
            number, folder = names.index(table), record.path.rpartition("/")[0]
            if index.get("full") and index["tables"][number]["spec"].get("evict"):
                ranges.append((int(index["buckets"][0]), int(index["buckets"][1])))
            for file in link.below(folder):
                if file.path == f"{folder}/{REMOVED}":
                    with _opened(file.check(link.folder)) as removed:
                        id_arrays += [removed.get_tensor(str(number))] if str(number) in removed.keys() else []  # noqa: SIM118
        ids_R = np.concatenate(id_arrays)
        return cls(ids_R[np.argsort(keys_of(ids_R))], tuple(ranges))

    def left(self, rows: _Sorted, newer: Sequence[_Sorted]) -> _Sorted:
        """The rows of an earlier checkpoint that are still there, and not `newer` in the increment."""
        gone_N = np.zeros(rows.keys_N.size, dtype=np.bool_)
        for keys_R in (keys_of(self.ids_R), *(piece.keys_N for piece in newer)):
            if keys_R.size:
                at_N = np.minimum(np.searchsorted(keys_R, rows.keys_N), keys_R.size - 1)
                gone_N |= keys_R[at_N] == rows.keys_N
        buckets_N = (rows.keys_N >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
        for first, end in self.ranges:
            gone_N |= (buckets_N >= first) & (buckets_N < end)
        return rows.taken(np.flatnonzero(~gone_N)) if gone_N.any() else rows


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of rows. Raises CheckpointError where it cannot be read."""
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


class Chain:
    """The indexes of a checkpoint and of what it builds on. Each is read once. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.links = [(link, indexes(link)) for link in checkpoint.chain]
        self.checked: set[Path] = set()
        """The files whose checksums were right."""
        entries = [entry for _, index in self.links[-1][1] for entry in index["tables"]]
        self.tables = {entry["spec"]["name"]: entry for entry in entries}
        """The tables of the checkpoint by name, as in the index of a server that wrote it."""
        self._parts = [_parts_of(link, written) for link, written in self.links]

    def table(self, name: str) -> TableParts:
        """The parts of a table that messages name. Raises UserError if there is none."""
        names = [name for name, entry in self.tables.items() if not entry.get("counts_for")]
        if name not in names:
            raise UserError(f"table {name}: unknown; the model has {', '.join(names)}")
        return self.parts(name)

    def parts(self, name: str) -> TableParts:
        """The parts of any table, also of one that counts ids; none if there is no such table."""
        spec = TableSpec.of_record(self.tables[name]["spec"]) if name in self.tables else TableSpec(name=name)
        removed = [Removed.of(link, name, written) for link, written in self.links]
        return TableParts(spec, [sorted(parts.get(name, []), key=lambda p: p.first) for parts in self._parts], removed)


@dataclass(frozen=True, slots=True)
class TableParts:
    """Where the rows of one table are, by checkpoint of the chain, in the order of buckets."""

    spec: TableSpec
    links: list[list[_Part]]
    removed: list[Removed]

    @property
    def stored(self) -> int:
        """Rows in the files; a row counts once for each checkpoint of the chain that has it."""
        return sum(part.rows for parts in self.links for part in parts)

    def within(self, buckets: BucketRange) -> list[_Part]:
        """The parts that may have rows of buckets [first, end)."""
        return [part for parts in self.links for part in parts if part.first < buckets[1] and part.end > buckets[0]]

    def rows_of(self, buckets: BucketRange) -> int:
        """About how many rows of buckets [first, end) are in the files; exact for the servers that wrote them."""
        shares = ((p, min(p.end, buckets[1]) - max(p.first, buckets[0])) for p in self.within(buckets))
        return sum(-(-part.rows * share // (part.end - part.first)) for part, share in shares)

    def ranges(self) -> list[BucketRange]:
        """Ranges of all buckets with about BLOCK_BYTES of weights each, or a single larger bucket."""
        rows_B = np.zeros(BUCKETS)
        for parts in self.links:
            for part in parts:
                rows_B[part.first : part.end] += part.rows / (part.end - part.first)
        before_B = np.concatenate([[0.0], np.cumsum(rows_B)]) * (8 + 4 * self.spec.dim)
        cuts = [0]
        while cuts[-1] < BUCKETS:
            reached = int(np.searchsorted(before_B, before_B[cuts[-1]] + BLOCK_BYTES, side="right")) - 1
            cuts.append(max(cuts[-1] + 1, reached))
        return list(pairwise(cuts))


def _parts_of(link: Checkpoint, written: Indexes) -> dict[str, list[_Part]]:
    """The parts of each table, by name."""
    clock = link.step + max((int(index.get("earlier_steps", 0)) for _, index in written), default=0)
    by_table: dict[str, list[_Part]] = {}
    for record, index in written:
        folder = record.path.rpartition("/")[0]
        files = {file.path: file for file in link.below(folder)}
        names = [entry["spec"]["name"] for entry in index["tables"]]
        for t, number, first, end, rows in index["parts"]:
            part = _Part(link.folder, files[f"{folder}/{file_name(number)}"], f"{t}.{first}", first, end, rows, clock)
            by_table.setdefault(names[t], []).append(part)
    return by_table


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Rows in the order of their keys."""

    keys_N: Keys
    rows: StoredRows

    @classmethod
    def of(cls, rows: StoredRows) -> _Sorted:
        keys_N = keys_of(rows.ids_N)
        return cls(keys_N, rows).taken(np.argsort(keys_N, kind="stable"))

    def taken(self, which: slice | npt.NDArray[np.intp]) -> _Sorted:
        return _Sorted(self.keys_N[which], self.rows.taken(which))

    def buckets(self) -> BucketRange:
        """The range of buckets that the rows are in."""
        if not self.keys_N.size:
            return 0, 0
        shift = np.uint64(64 - BUCKET_BITS)
        return int(self.keys_N[0] >> shift), int(self.keys_N[-1] >> shift) + 1

    def within(self, first: int, end: int) -> _Sorted:
        """The rows of buckets [first, end): views."""
        shift = 64 - BUCKET_BITS
        begin = int(np.searchsorted(self.keys_N, np.uint64(first << shift)))
        stop = self.keys_N.size if end == BUCKETS else int(np.searchsorted(self.keys_N, np.uint64(end << shift)))
        return self.taken(slice(begin, stop))


@dataclass(slots=True)
class _Reader:
    """Reads the parts of one checkpoint. Keeps those whose rows reach into later ranges.

    The index gives a part more buckets than its rows are in: all up to the next part of the same server."""

    parts: list[_Part]
    removed: Removed
    arrays: Sequence[str]
    """The arrays that are read of a part besides its ids; files have only those that their table's rows need."""
    checked: set[Path] | None
    """Files whose checksums were right; None = no file is checked."""
    _open: dict[tuple[str, str], _Sorted] = field(default_factory=dict)
    _buckets: dict[tuple[str, str], BucketRange] = field(default_factory=dict)
    """The buckets of the rows of parts that have been read."""

    def rows(self, first: int, end: int) -> list[_Sorted]:
        """The rows of buckets [first, end): pieces, each in the order of keys."""
        pieces = []
        for part in self.parts:
            key = (part.file.path, part.prefix)
            begin, stop = self._buckets.get(key, (part.first, part.end))
            if begin < end and stop > first:
                arrays = self._open.pop(key, None) or _Sorted.of(self.read(part))
                begin, stop = self._buckets[key] = arrays.buckets()
                if (piece := arrays.within(first, end)).keys_N.size:
                    pieces.append(piece)
                if begin < end < stop:
                    self._open[key] = arrays
        return pieces

    def read(self, part: _Part) -> StoredRows:
        """The rows of a part, in the order of the file."""
        path = part.folder / part.file.path
        if self.checked is not None and path not in self.checked:
            part.file.check(part.folder)
            self.checked.add(path)
        with _opened(path) as file:
            ids_P, there = file.get_tensor(f"{part.prefix}.ids"), set(file.keys())
            none_P0 = np.empty((ids_P.size, 0), dtype=np.float32)
            arrays = {"ids": ids_P, "rows": none_P0, "slots": none_P0}
            names = (f"{part.prefix}.{name}" for name in self.arrays)
            arrays |= {name.rpartition(".")[2]: file.get_tensor(name) for name in names if name in there}
        if "counters" in self.arrays and "counters" not in arrays:
            arrays["counters"] = np.full((ids_P.size, COUNTERS), (part.clock, ONE_PUSH), dtype=np.uint32)
        return StoredRows.of_arrays(arrays)


def _resolved(
    parts: TableParts, ranges: Sequence[BucketRange], arrays: Sequence[str], checked: set[Path] | None
) -> Iterator[list[_Sorted]]:
    """Yields the rows of each range in pieces, each in the order of keys. No id comes twice."""
    readers = [_Reader(*link, arrays, checked) for link in zip(parts.links, parts.removed, strict=True)]
    for first, end in ranges:
        pieces: list[_Sorted] = []
        for reader in readers:
            newer = reader.rows(first, end)
            if newer or reader.removed:
                pieces = [piece for each in pieces if (piece := reader.removed.left(each, newer)).keys_N.size]
            pieces += newer
        yield pieces


def _block(pieces: Sequence[_Sorted], empty: RowBlock) -> RowBlock:
    """All rows of some pieces in the order of their keys, as float32."""
    if not pieces:
        return empty
    floats = [RowBlock.of(piece.rows, empty.counters_NC.shape[1]) for piece in pieces]
    if len(pieces) == 1:
        return floats[0]
    joined = RowBlock(*map(np.concatenate, zip(*floats, strict=True)))
    return joined.taken(np.argsort(np.concatenate([piece.keys_N for piece in pieces])))


def _empty(spec: TableSpec, arrays: Sequence[str]) -> RowBlock:
    slots_0S = np.empty((0, spec.optimizer.num_slots(spec.dim) if "slots" in arrays else 0), np.float32)
    counters_0C = np.empty((0, COUNTERS if "counters" in arrays else 0), np.uint32)
    return RowBlock(np.empty(0, np.int64), np.empty((0, spec.dim), np.float32), slots_0S, counters_0C)
