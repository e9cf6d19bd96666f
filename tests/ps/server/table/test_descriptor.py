"""Classes of typed fields as records that kernels read and write."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from shardkeep.ps.server.table.descriptor_kernels import record_dtype


class Inner:
    first: np.float32
    count: int


class Outer:
    on: bool
    key: np.uint64
    share: float
    inner: Inner


def test_each_field_has_its_type_and_a_class_is_a_record_inside() -> None:
    dtype = record_dtype(Outer)
    kinds = {name: dtype[name] for name in dtype.names or ()}
    assert kinds == {"on": np.bool_, "key": np.uint64, "share": np.float64, "inner": record_dtype(Inner)}
    assert record_dtype(Inner).names == ("first", "count") and record_dtype(Inner)["count"] == np.int64


def test_a_kernel_reads_and_writes_the_fields_of_one_record_of_an_array() -> None:
    record = numba.from_dtype(record_dtype(Outer))

    @numba.njit([numba.void(record, numba.int64)])  # type: ignore[untyped-decorator]
    def add(outer: Any, more: int) -> None:
        outer.inner.count += more
        outer.on = outer.key == np.uint64(2**64 - 1)

    records = np.zeros(3, record_dtype(Outer))
    records["key"][1] = 2**64 - 1
    add(records[1], 5)
    add(records[2], 7)
    assert records["inner"]["count"].tolist() == [0, 5, 7] and records["on"].tolist() == [False, True, False]
