"""RowLayout: which words of a row's record hold what. With layout_kernels.py the only place that knows offsets.

A record is float32 words: [id as 2 words | D weights | S optimizer slots | 0 or 1 word of padding].
"""

from __future__ import annotations

from dataclasses import dataclass

from shardkeep.ps.shard.table.layout_kernels import FIRST_WEIGHT


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The record of one table's rows."""

    dim: int
    """D, weights."""
    num_slots: int
    """S, optimizer slots."""

    @property
    def first_weight(self) -> int:
        return FIRST_WEIGHT

    @property
    def first_slot(self) -> int:
        return FIRST_WEIGHT + self.dim

    @property
    def used(self) -> int:
        """Words that hold something."""
        return FIRST_WEIGHT + self.dim + self.num_slots

    @property
    def width(self) -> int:
        """Words of a record; even, so that ids are aligned."""
        return self.used + self.used % 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's id, weights and slots."""
        return 4 * self.used
