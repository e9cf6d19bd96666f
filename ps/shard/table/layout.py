"""RowLayout: which words of a row's record hold what. With layout_kernels.py the only place that knows offsets.

A record is float32 words: [id as 2 words | D weights | S optimizer slots | counters | 0 or 1 word of padding]. A table
from which rows go has two counters a row (policy_kernels.py), other tables none.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardkeep.ps.shard.table.layout_kernels import FIRST_WEIGHT

COUNTERS = 2
"""Counters of a row where rows go."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The record of one table's rows."""

    dim: int
    """D, weights."""
    num_slots: int
    """S, optimizer slots."""
    num_counters: int = 0

    @property
    def first_weight(self) -> int:
        return FIRST_WEIGHT

    @property
    def first_slot(self) -> int:
        return FIRST_WEIGHT + self.dim

    @property
    def first_counter(self) -> int:
        return FIRST_WEIGHT + self.dim + self.num_slots

    @property
    def used(self) -> int:
        """Words that hold something."""
        return self.first_counter + self.num_counters

    @property
    def width(self) -> int:
        """Words of a record; even, so that ids are aligned."""
        return self.used + self.used % 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's id, weights and slots."""
        return 4 * self.used
