"""What describes a table to kernels: types of records. An address is a number; the callers keep alive what is there."""

from __future__ import annotations

from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
from numba import from_dtype
from numba.core.types import float32, int64


class RecordBlocks:
    """Where records lie."""

    addresses: int  # address of the blocks' addresses
    shift: int
    width: int  # W


class IndexEntries:
    """Where the index lies (index_kernels.py)."""

    entries: int  # address and number of entries, and of outgrown ones
    num_entries: int
    old: int
    num_old: int
    room: int  # rows that fit before the index or the records must grow


class InitialValues:
    """What initial weights depend on (initial_kernels.py)."""

    key: np.uint64  # of the table's random numbers
    initializer: int
    first: np.float32  # parameters of the distribution
    second: np.float32


class OptimizerCode:
    """The optimizer of a table's rows."""

    code: int  # address of the machine code of its kernel
    slot_value: np.float32  # first value of its slots


class PackedValues:
    """Values of fewer than 32 bits (packed_kernels.py)."""

    pull: int  # addresses of the machine code that reads weights and updates rows; 0 = as of float32
    update: int
    mark: int  # byte of a record at which a new row is marked
    precision: int  # of weights and slots
    num_slots: int  # optimizer slots of a row


class PreImageArea:
    """What pushes keep of a table for a snapshot (pre_image_kernels.py)."""

    rows: int  # rows there were when the snapshot was made; 0 = nothing to keep
    bits: int  # address of the bits of the rows that are kept or taken
    blocks: RecordBlocks  # kept rows, in blocks of the same size
    count: int  # kept rows


class BucketCapacity:
    """The rows of each placement bucket, and how many there may be."""

    capacity: int  # rows of a bucket; 0 = any number, and the rest is not used
    rows: int  # address of the rows of each bucket
    counted: int  # slots up to which rows are counted in their buckets
    full: int  # address of the buckets that have too many rows
    num_full: int


class PolicyRules:
    """What decides which rows come (admission_kernels.py), which go, and when (policy_kernels.py)."""

    clock: int  # of the update that follows
    in_seconds: bool  # the clock is the time of day, not the step
    period: int  # steps in which every bucket is looked at once; 0 = never, and rows of any age stay
    ttl: float  # clock ticks without a push
    log_decay: float  # of a score in one tick
    by_score: bool  # the lowest scores go first; else the oldest pushes
    min_count: int  # pushes with an id that make it a row; 0 = no admission
    buckets: BucketCapacity


class Policies:
    """The policies of a table, and what they did."""

    update: int  # address of the machine code that updates rows (policy_update_kernels.py); 0 = as others
    counters: int  # word of a record's counters; 0 = it has none
    admitted_rows: int  # ids that admission made rows
    refused_rows: int  # rows of pushes that it dropped
    evicted_rows: int  # rows that went
    removed: int  # rows that were removed since the table last gave memory back
    rules: PolicyRules


class Descriptor:
    """A table. Addresses are 0 where there is nothing."""

    count: int  # rows there are
    index: IndexEntries
    blocks: RecordBlocks  # the records
    dim: int
    width: int  # values of a row's gradient: `dim`, and 1 if the mean squared gradient follows
    step: int  # of the update that follows: what random numbers of rounding depend on
    start: InitialValues
    optimizer: OptimizerCode
    changed: int  # address of the bits of changed rows; 0 = changes are not noted
    packed: PackedValues
    policies: Policies
    images: PreImageArea


class PushCursor:
    """The next section of a push that is added to others."""

    sections: int  # how many are left
    tables: int  # address of its table
    starts: int  # address of its start
    ids: int  # address of the push's first id
    values: int  # address of its gradients


def record_dtype(fields: type) -> np.dtype[np.void]:
    """The type of records with the fields of a class: `int` is int64, `float` float64, a class a record inside."""
    kinds: dict[str, Any] = get_type_hints(fields)
    dtypes = [(name, record_dtype(kind) if np.dtype(kind) == object else kind) for name, kind in kinds.items()]
    return np.dtype(dtypes, align=True)


BLOCKS_DTYPE, START_DTYPE, DESCRIPTOR_DTYPE, CURSOR_DTYPE = (
    record_dtype(RecordBlocks),
    record_dtype(InitialValues),
    record_dtype(Descriptor),
    record_dtype(PushCursor),
)
BLOCKS, START, TABLE = from_dtype(BLOCKS_DTYPE), from_dtype(START_DTYPE), from_dtype(DESCRIPTOR_DTYPE)
TABLES, CURSORS = TABLE[::1], from_dtype(CURSOR_DTYPE)[::1]
INTS, FLOATS, ROWS = int64[::1], float32[::1], float32[:, ::1]
Descriptors = npt.NDArray[np.void]
Cursors = npt.NDArray[np.void]
