"""Row stream: the rows of one table of a checkpoint, one range of buckets after another. Never holds the whole table.

Resolves the chain of a checkpoint: a row of a later increment replaces the row of an earlier checkpoint, and rows that
an increment says were removed are left out.
"""
# N = rows of a block, P = rows of a part, D = embedding dim, S = optimizer slots of a row, B = buckets

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from shardkeep.base.arrays import Ids, Rows, UInt32s
from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.ps.checkpoints import Checkpoint, FileRecord
from shardkeep.ps.config import TableSpec
from shardkeep.ps.placement import BUCKET_BITS, BUCKETS, keys_of
from shardkeep.ps.shard.snapshot.index import REMOVED, counting_specs, earlier_steps, file_name, indexes, specs_of
from shardkeep.ps.shard.table.layout import COUNTERS
from shardkeep.ps.shard.table.optimizers.registry import OPTIMIZERS
from shardkeep.ps.shard.table.stored_rows import ONE_PUSH, floats_of

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
    """Clock of the last push, and the bits of the score (table/policy_kernels.py); C = 0 if the caller wanted none, or
    the table keeps none."""

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
    rows: bool = True,
    counters: bool = False,
    verify: bool = True,
) -> Iterator[RowBlock]:
    """Yields one block for each range, also for a range without rows. Rows are in the order of `placement.keys_of`.

    With the default ranges all blocks together are sorted by key, for any number of servers. Memory: a
    block, and one part (PART_BYTES in files.py) of each checkpoint of the chain.

    Args:
        checkpoint: Its files must stay until the last block.
        table: Name of the table.
        bucket_ranges: Ascending and disjoint; None = all buckets, in ranges of about BLOCK_BYTES.
        slots: Whether to read optimizer slots.
        rows: Whether to read weights; if not, rows_ND has D = 0.
        counters: Whether to read what eviction counts.
        verify: Whether to check the checksum of each file before its first part is read.

    Raises:
        UserError: The checkpoint has no such table.
        CheckpointError: A file is missing or damaged; raised also by the iterator.
    """
    table_parts = TableParts.of(checkpoint, table)
    ranges = table_parts.ranges(BLOCK_BYTES) if bucket_ranges is None else bucket_ranges
    wanted = _Wanted(rows, slots, counters and table_parts.spec.evict is not None, verify)
    return _streamed(table_parts, ranges, wanted)


def _streamed(parts: TableParts, ranges: Sequence[BucketRange], wanted: _Wanted) -> Iterator[RowBlock]:
    readers = [_Reader(*link, wanted) for link in zip(parts.links, parts.removed, strict=True)]
    return _blocks(readers, ranges, _empty(parts.spec, wanted))


def count_rows(checkpoint: Checkpoint, table: str) -> int:
    """The number of rows of a table. Reads ids only where increments could repeat them. Raises like `stream_rows`."""
    return _rows_in(TableParts.of(checkpoint, table))


def count_candidates(checkpoint: Checkpoint, table: str) -> int | None:
    """The number of ids that are counted and have no row of `table` yet; None = nothing is counted. Raises like
    `stream_rows`."""
    spec = counting_specs(checkpoint).get(table)
    return None if spec is None else _rows_in(TableParts.of_spec(checkpoint, spec))


def _rows_in(parts: TableParts) -> int:
    if sum(bool(link) for link in parts.links) < 2 and not any(parts.removed):
        return parts.stored
    wanted = _Wanted(rows=False, slots=False, counters=False, verify=False)
    return sum(block.ids_N.size for block in _streamed(parts, parts.ranges(BLOCK_BYTES), wanted))


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of the table whose ids fall into buckets [first, end): arrays `prefix`.ids, .rows and .slots of a file."""

    checkpoint: Checkpoint
    file: FileRecord
    prefix: str
    first: int
    end: int
    rows: int


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
    def of(cls, link: Checkpoint, table: str) -> Removed:
        """What one checkpoint of a chain says about a table. Raises CheckpointError."""
        found, ranges = [np.empty(0, dtype=np.int64)], []
        for record, index in indexes(link) if link.base is not None else ():
            names = [entry["spec"]["name"] for entry in index["tables"]]
            if table not in names:
                continue
            number, folder = names.index(table), record.path.rpartition("/")[0]
            if index.get("full") and index["tables"][number]["spec"].get("evict"):
                ranges.append((int(index["buckets"][0]), int(index["buckets"][1])))
            for file in link.below(folder):
                if file.path == f"{folder}/{REMOVED}":
                    found.append(_removed_in(file.check(link.folder), str(number)))
        ids_R = np.concatenate(found)
        return cls(ids_R[np.argsort(keys_of(ids_R))], tuple(ranges))

    def left(self, rows: _Sorted) -> _Sorted:
        """The rows of an earlier checkpoint that are still there."""
        keys_R = keys_of(self.ids_R)
        at_N = np.searchsorted(keys_R, rows.keys_N)
        gone_N = keys_R[np.minimum(at_N, keys_R.size - 1)] == rows.keys_N if keys_R.size else np.zeros(at_N.size, bool)
        buckets_N = (rows.keys_N >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
        for first, end in self.ranges:
            gone_N |= (buckets_N >= first) & (buckets_N < end)
        return rows.taken(np.flatnonzero(~gone_N)) if gone_N.any() else rows


def _removed_in(path: Path, name: str) -> Ids:
    try:
        with safe_open(path, framework="np") as file:
            return file.get_tensor(name) if name in file.keys() else np.empty(0, dtype=np.int64)  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


@dataclass(frozen=True, slots=True)
class TableParts:
    """Where the rows of one table are, by checkpoint of the chain, in the order of buckets."""

    spec: TableSpec
    links: list[list[_Part]]
    removed: list[Removed]

    @classmethod
    def of(cls, checkpoint: Checkpoint, table: str) -> TableParts:
        """Reads the indexes of a chain. Raises UserError and CheckpointError."""
        specs = {spec.name: spec for spec in specs_of(checkpoint)}
        if table not in specs:
            raise UserError(f"table {table}: unknown; the model has {', '.join(specs)}")
        return cls.of_spec(checkpoint, specs[table])

    @classmethod
    def of_spec(cls, checkpoint: Checkpoint, spec: TableSpec) -> TableParts:
        """Of a table that a checkpoint has, also of one that counts ids. Raises CheckpointError."""
        chain = checkpoint.chain
        return cls(
            spec, [_parts_of(link, spec.name) for link in chain], [Removed.of(link, spec.name) for link in chain]
        )

    @property
    def stored(self) -> int:
        """Rows in the files; a row counts once for each checkpoint of the chain that has it."""
        return sum(part.rows for parts in self.links for part in parts)

    def ranges(self, block_bytes: int) -> list[BucketRange]:
        """Ranges of all buckets with about `block_bytes` of weights each, or a single larger bucket."""
        rows_B = np.zeros(BUCKETS)
        for parts in self.links:
            for part in parts:
                rows_B[part.first : part.end] += part.rows / (part.end - part.first)
        before_B = np.concatenate([[0.0], np.cumsum(rows_B)]) * (8 + 4 * self.spec.dim)
        cuts = [0]
        while cuts[-1] < BUCKETS:
            reached = int(np.searchsorted(before_B, before_B[cuts[-1]] + block_bytes, side="right")) - 1
            cuts.append(max(cuts[-1] + 1, reached))
        return list(pairwise(cuts))


def _parts_of(link: Checkpoint, table: str) -> list[_Part]:
    found = []
    for record, index in indexes(link):
        folder = record.path.rpartition("/")[0]
        files = {file.path: file for file in link.below(folder)}
        names = [entry["spec"]["name"] for entry in index["tables"]]
        for t, number, first, end, rows in index["parts"]:
            if names[t] == table:
                file = files[f"{folder}/{file_name(number)}"]
                found.append(_Part(link, file, f"{t}.{first}", first, end, rows))
    return sorted(found, key=lambda part: part.first)


@dataclass(frozen=True, slots=True)
class _Wanted:
    rows: bool
    slots: bool
    counters: bool
    verify: bool


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Rows in the order of their keys."""

    keys_N: Keys
    block: RowBlock

    @classmethod
    def joined(cls, pieces: Sequence[_Sorted]) -> _Sorted:
        """Several in the order given."""
        if len(pieces) == 1:
            return pieces[0]
        columns = zip(*(piece.block for piece in pieces), strict=True)
        return cls(np.concatenate([piece.keys_N for piece in pieces]), RowBlock(*map(np.concatenate, columns)))

    def taken(self, which: slice | npt.NDArray[np.intp]) -> _Sorted:
        return _Sorted(self.keys_N[which], self.block.taken(which))

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
    wanted: _Wanted
    _open: dict[tuple[str, str], _Sorted] = field(default_factory=dict)
    _buckets: dict[tuple[str, str], BucketRange] = field(default_factory=dict)
    """The buckets of the rows of parts that have been read."""
    _checked: set[str] = field(default_factory=set)

    def rows(self, first: int, end: int) -> list[_Sorted]:
        """The rows of buckets [first, end): pieces, each in the order of keys."""
        found = []
        for part in self.parts:
            key = (part.file.path, part.prefix)
            begin, stop = self._buckets.get(key, (part.first, part.end))
            if begin < end and stop > first:
                arrays = self._open.pop(key, None) or self._read(part)
                begin, stop = self._buckets[key] = arrays.buckets()
                if (piece := arrays.within(first, end)).keys_N.size:
                    found.append(piece)
                if begin < end < stop:
                    self._open[key] = arrays
        return found

    def _read(self, part: _Part) -> _Sorted:
        path = part.checkpoint.folder / part.file.path
        if self.wanted.verify and part.file.path not in self._checked:
            part.file.check(part.checkpoint.folder)
            self._checked.add(part.file.path)
        try:
            with safe_open(path, framework="np") as file:
                ids_P = file.get_tensor(f"{part.prefix}.ids")
                none_P0 = np.empty((ids_P.size, 0), dtype=np.float32)
                rows_PD = _floats(file, part.prefix, "rows") if self.wanted.rows else none_P0
                slots_PS = _floats(file, part.prefix, "slots") if self.wanted.slots else none_P0
                counters_PC = np.empty((ids_P.size, 0), dtype=np.uint32)
                if self.wanted.counters:
                    counters_PC = _counters(file, part, ids_P.size)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        keys_P = keys_of(ids_P)
        return _Sorted(keys_P, RowBlock(ids_P, rows_PD, slots_PS, counters_PC)).taken(np.argsort(keys_P))


def _counters(file: Any, part: _Part, size: int) -> UInt32s:
    """The counters of a part. Where a table counted nothing, those that servers give its rows when they load them."""
    name = f"{part.prefix}.counters"
    if name in file.keys():  # noqa: SIM118
        return np.asarray(file.get_tensor(name), dtype=np.uint32)
    counters_PC = np.empty((size, COUNTERS), dtype=np.uint32)
    counters_PC[:] = part.checkpoint.step + earlier_steps(part.checkpoint), ONE_PUSH
    return counters_PC


def _floats(file: Any, prefix: str, what: str) -> Rows:
    """An array of a part as float32."""
    values_PD = file.get_tensor(f"{prefix}.{what}")
    return (
        floats_of(values_PD, file.get_tensor(f"{prefix}.scales"))
        if values_PD.dtype == np.int8
        else floats_of(values_PD)
    )


def _blocks(readers: Sequence[_Reader], ranges: Sequence[BucketRange], empty: RowBlock) -> Iterator[RowBlock]:
    for first, end in ranges:
        pieces: list[_Sorted] = []
        for reader in readers:
            if reader.removed:
                pieces = [piece for each in pieces if (piece := reader.removed.left(each)).keys_N.size]
            pieces += reader.rows(first, end)
        if not pieces:
            yield empty
            continue
        found = _Sorted.joined(pieces)
        rise = (found.keys_N[1:] > found.keys_N[:-1]).all()
        yield found.block if rise else _newest(found).block


def _empty(spec: TableSpec, wanted: _Wanted) -> RowBlock:
    dim, num_slots = spec.dim, OPTIMIZERS[spec.optimizer.name].num_slots(spec.dim)
    rows_0D = np.empty((0, dim if wanted.rows else 0), np.float32)
    slots_0S = np.empty((0, num_slots if wanted.slots else 0), np.float32)
    counters_0C = np.empty((0, COUNTERS if wanted.counters else 0), np.uint32)
    return RowBlock(np.empty(0, np.int64), rows_0D, slots_0S, counters_0C)


def _newest(found: _Sorted) -> _Sorted:
    """Sorted by key; of rows with the same id the last one."""
    order_N = np.argsort(found.keys_N, kind="stable")
    keys_N = found.keys_N[order_N]
    last_N = np.ones(keys_N.size, dtype=np.bool_)
    last_N[:-1] = keys_N[1:] != keys_N[:-1]
    return found.taken(order_N[last_N])
