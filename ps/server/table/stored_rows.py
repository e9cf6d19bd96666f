"""StoredRows: rows of one table as arrays in the table's precision, as files hold them; from and to words of records.

bf16 values are uint16, the upper halves of float32 values, for numpy has no such type.
"""
# N = rows, W = words, D = embedding dim, S = optimizer slots of a row

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Floats, Ids, Rows, UInt32s
from shardkeep.ps.server.table.layout import COUNTERS, RowLayout

Values = npt.NDArray[Any]
_DTYPES: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "int8": np.int8}
_NO_SCALES: Floats = np.empty(0, dtype=np.float32)
NO_COUNTERS: UInt32s = np.empty((0, COUNTERS), dtype=np.uint32)
ONE_PUSH = int(np.float32(1.0).view(np.uint32))
"""The score of a row that one push had, as a counter."""
_LARGEST16 = np.float32(65504.0)
_LARGEST_BRAIN = np.array(0x7F7F0000, dtype=np.uint32).view(np.float32)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows as arrays: ids (N), weights (N, D), optimizer slots (N, S), of int8 weights their scales (N), and of tables
    from which rows go their counters (N, 2)."""

    ids_N: Ids
    rows_ND: Values
    slots_NS: Values
    scales_N: Floats = field(default_factory=lambda: _NO_SCALES)
    counters_N2: UInt32s = field(default_factory=lambda: NO_COUNTERS)

    @classmethod
    def of_words(cls, ids_N: Ids, rows_NW: Rows, slots_NW: Rows, layout: RowLayout) -> StoredRows:
        """From the words of records: those of the weights, with their scales, and those of the slots and counters."""
        scales_N, counters_N2 = _NO_SCALES, NO_COUNTERS
        if layout.num_counters:
            counters_N2 = np.ascontiguousarray(slots_NW[:, -layout.num_counters :]).view(np.uint32)
            slots_NW = np.ascontiguousarray(slots_NW[:, : -layout.num_counters])
        if layout.rows == "int8":
            rows_NW, scales_N = rows_NW[:, :-1], rows_NW[:, -1].copy()
        rows_ND = _unpacked(rows_NW, _DTYPES[layout.rows], layout.dim)
        slots_NS = _unpacked(slots_NW, _DTYPES[layout.state], layout.num_slots)
        return cls(ids_N, rows_ND, slots_NS, scales_N, counters_N2)

    @classmethod
    def of_floats(cls, ids_N: Ids, rows_ND: Rows, slots_NS: Rows, layout: RowLayout) -> StoredRows:
        """From float32 values, rounded to the nearest."""
        scales_N = _scales(rows_ND) if layout.rows == "int8" else _NO_SCALES
        return cls(ids_N, _nearest(rows_ND, layout.rows, scales_N), _nearest(slots_NS, layout.state), scales_N)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Values]) -> StoredRows:
        """Undoes `arrays`."""
        more = arrays.get("scales", _NO_SCALES), arrays.get("counters", NO_COUNTERS)
        return cls(arrays["ids"], arrays["rows"], arrays["slots"], *more)

    def arrays(self) -> dict[str, Values]:
        """The arrays of a file, by name."""
        arrays = {"ids": self.ids_N, "rows": self.rows_ND, "slots": self.slots_NS}
        arrays |= {"scales": self.scales_N} if self.rows_ND.dtype == np.int8 else {}
        return arrays | ({"counters": self.counters_N2} if self.counters_N2.size else {})

    def of(self, layout: RowLayout) -> bool:
        """Whether the arrays have the precision of a layout."""
        return bool(self.rows_ND.dtype == _DTYPES[layout.rows] and self.slots_NS.dtype == _DTYPES[layout.state])

    def words(self, layout: RowLayout) -> tuple[Rows, Rows]:
        """Undoes `of_words`."""
        rows_NW, slots_NW = _packed(self.rows_ND), _packed(self.slots_NS)
        if layout.rows == "int8":
            rows_NW = np.concatenate([rows_NW, self.scales_N[:, None]], axis=1)
        return rows_NW, slots_NW

    def rows(self) -> Rows:
        """Weights as float32 (N, D)."""
        return floats_of(self.rows_ND, self.scales_N)

    def slots(self) -> Rows:
        """Optimizer slots as float32 (N, S)."""
        return floats_of(self.slots_NS)

    def taken(self, which_N: slice | npt.NDArray[np.intp]) -> StoredRows:
        """Some of the rows."""
        scales_N = self.scales_N[which_N] if self.scales_N.size else self.scales_N
        counters_N2 = self.counters_N2[which_N] if self.counters_N2.size else self.counters_N2
        return StoredRows(self.ids_N[which_N], self.rows_ND[which_N], self.slots_NS[which_N], scales_N, counters_N2)


def floats_of(values_ND: Values, scales_N: Floats = _NO_SCALES) -> Rows:
    """Stored values as float32."""
    if values_ND.dtype == np.uint16:
        return (values_ND.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if values_ND.dtype == np.int8:
        return scales_N[:, None] * values_ND.astype(np.float32)
    return values_ND.astype(np.float32, copy=False)


def _nearest(values_ND: Rows, precision: str, scales_N: Floats = _NO_SCALES) -> Values:
    if precision == "fp16":
        return np.clip(values_ND, -_LARGEST16, _LARGEST16).astype(np.float16)
    if precision == "bf16":
        bits_ND = np.clip(values_ND, -_LARGEST_BRAIN, _LARGEST_BRAIN).view(np.uint32)
        return ((bits_ND + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    if precision == "int8":
        divisors_N1 = np.where(scales_N > 0.0, scales_N, np.float32(1.0))[:, None]
        return np.clip(np.rint(values_ND / divisors_N1), -127, 127).astype(np.int8)
    return values_ND


def _scales(rows_ND: Rows) -> Floats:
    scales_N: Floats = np.abs(rows_ND).max(axis=1, initial=0.0) / np.float32(127.0)
    return scales_N.astype(np.float32)


def _unpacked(words_NW: Rows, dtype: Any, count: int) -> Values:
    """The first `count` values of each row of words."""
    if dtype == np.float32:
        return words_NW
    return np.ascontiguousarray(np.ascontiguousarray(words_NW).view(dtype)[:, :count])


def _packed(values_ND: Values) -> Rows:
    """Values as words, filled up with zeros."""
    per_word = 4 // values_ND.dtype.itemsize
    if values_ND.shape[1] % per_word:
        values_ND = np.pad(values_ND, ((0, 0), (0, -values_ND.shape[1] % per_word)))
    return np.ascontiguousarray(values_ND).view(np.float32)
