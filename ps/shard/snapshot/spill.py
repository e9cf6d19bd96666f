"""Spill: moves pre-images from memory to an unnamed temporary file, sorted by placement bucket."""
# U = rows written at once, K = rows of a part, W = words of a record, B = buckets that have rows

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkeep.ps.placement import BUCKETS
from shardkeep.ps.shard.snapshot.bucket_order import bucket_order
from shardkeep.ps.shard.snapshot.snapshot import Columns, Snapshot
from shardkeep.ps.shard.table import pre_image_kernels as at
from shardkeep.ps.shard.table.records import Records

LIMIT_BYTES = 24 << 20
"""Pre-images above this size are moved to the file."""
_ROWS_AT_ONCE = 16384


@dataclass(frozen=True, slots=True)
class _Run:
    """Records of one table in the file, sorted by bucket, with the start of each bucket that has any."""

    begin: int
    width: int
    buckets_B: npt.NDArray[np.uint16]
    starts_B1: npt.NDArray[np.uint32]

    def range_of(self, first: int, end: int) -> tuple[int, int]:
        """The number of records of buckets [first, end), and the number of records before them."""
        at_first, at_end = np.searchsorted(self.buckets_B, (first, end))
        return int(self.starts_B1[at_end]) - int(self.starts_B1[at_first]), int(self.starts_B1[at_first])


class Spill:
    """Stores pre-images until the walk over the snapshot reaches their bucket. Not thread safe."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        self._runs: dict[int, list[_Run]] = {}  # by table
        self._size = 0

    def close(self) -> None:
        self._file.close()

    def relieve(self, snapshot: Snapshot) -> None:
        """Moves pre-images of the largest tables to the file if the total exceeds LIMIT_BYTES.

        Raises OSError or CheckpointError."""
        bytes_T = snapshot.pre_image_bytes()
        if bytes_T.sum() <= LIMIT_BYTES:
            return
        while bytes_T.sum() > LIMIT_BYTES // 2:
            t = int(bytes_T.argmax())
            self._append(t, *snapshot.take_over(t))
            bytes_T[t] = 0

    def count(self, t: int, first: int, end: int) -> int:
        """A table's rows of buckets [first, end)."""
        return sum(run.range_of(first, end)[0] for run in self._runs.get(t, []))

    def take(self, t: int, first: int, end: int, to: Columns, k: int) -> int:
        """Copies a table's rows of buckets [first, end) to `to`, from index `k` on. Returns the index after them."""
        for run in self._runs.get(t, []):
            count, before = run.range_of(first, end)
            if count:
                self._file.seek(run.begin + 4 * run.width * before)
                records_UW = np.empty((count, run.width), dtype=np.float32)
                if self._file.readinto(records_UW.data) != records_UW.nbytes:
                    raise OSError("a temporary file of a snapshot lost its end")
                at.take_all(records_UW, to.ids_K, to.rows_KD, to.slots_KS, k)
                k += count
        return k

    def _append(self, t: int, kept: Records, count: int) -> None:
        order, starts_B1 = bucket_order(kept, count)
        self._file.seek(self._size)
        for begin in range(0, count, _ROWS_AT_ONCE):
            part_U = order.array[begin : begin + _ROWS_AT_ONCE]
            records_UW = np.empty((part_U.size, kept.width), dtype=np.float32)
            at.copy_records(kept.addresses, kept.shift, kept.width, part_U, records_UW)
            self._file.write(records_UW.data)
        buckets_B = np.flatnonzero(np.diff(starts_B1))
        starts_B1 = starts_B1[np.append(buckets_B, BUCKETS)]
        run = _Run(self._size, kept.width, buckets_B.astype(np.uint16), starts_B1.astype(np.uint32))
        self._runs.setdefault(t, []).append(run)
        self._size += 4 * kept.width * count
