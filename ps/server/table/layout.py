"""RowLayout: which words of a row's record hold what. With layout_kernels.py the only place that knows offsets.

A record is float32 words: [id as 2 words | D weights | their scale, of int8 only | S optimizer slots | counters].
Weights and slots of fewer than 32 bits are packed; each of the two begins at a word. A table from
which rows go has two counters a row (policy_kernels.py), other tables none. Loads no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from shardkeep.ps.config import RowPrecision, StatePrecision, TableSpec

FIRST_WEIGHT = 2
"""Words of the id in front of the weights."""
PRECISIONS: dict[str, int] = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3}
"""From the config's name to the number that kernels know."""
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
STATE_SHIFT = 2
assert {*get_args(RowPrecision), *get_args(StatePrecision)} == set(PRECISIONS)

COUNTERS = 2
"""Counters of a row where rows go."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The record of one table's rows."""

    dim: int
    """D, weights."""
    num_slots: int
    """S, optimizer slots."""
    rows: RowPrecision = "fp32"
    """Precision of the weights."""
    state: StatePrecision = "fp32"
    """Precision of the slots."""
    num_counters: int = 0

    @classmethod
    def of(cls, spec: TableSpec, *, counts: bool = False) -> RowLayout:
        """The layout of a table's rows. `counts`: it only counts ids, and has neither weights nor slots."""
        counters = COUNTERS if spec.evict is not None else 0
        if counts:
            return cls(0, 0, num_counters=counters)
        return cls(spec.dim, spec.optimizer.num_slots(spec.dim), spec.dtype, spec.state_dtype, counters)

    @property
    def precision(self) -> int:
        """Both precisions as kernels take them; 0 = all values are float32."""
        return PRECISIONS[self.rows] | PRECISIONS[self.state] << STATE_SHIFT

    @property
    def row_words(self) -> int:
        """Words of the weights, with their scale."""
        return words_of(self.rows, self.dim)

    @property
    def slot_words(self) -> int:
        """Words of the optimizer slots."""
        return words_of(self.state, self.num_slots)

    @property
    def mark(self) -> int:
        """The byte at which a record is marked as new: its first weight, or the scale. 0 = all values are float32."""
        word = self.first_slot - 1 if self.rows == "int8" else FIRST_WEIGHT
        return 4 * word if self.precision else 0

    @property
    def first_slot(self) -> int:
        return FIRST_WEIGHT + self.row_words

    @property
    def first_counter(self) -> int:
        return self.first_slot + self.slot_words

    @property
    def width(self) -> int:
        """Words of a record."""
        return self.first_counter + self.num_counters

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's id, weights and slots."""
        return 4 * self.width


def words_of(precision: str, count: int) -> int:
    """Words that so many values of a row take, with their scale; as `layout_kernels.words_of`."""
    return -(-count * _BYTES[precision] // 4) + (precision == "int8")
