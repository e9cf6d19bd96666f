"""RowCodec: rows of float32 in, fewer bytes out, and back. Knows no table, no network, no error feedback."""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from shardkeep.base.arrays import Bytes, Rows
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.draws import Draws


class RowCodec(Protocol):
    """Encodes each row on its own, so that encoded rows can be split among servers. Then packs, without loss, the rows
    of one table in one message. No method changes its arguments. A subclass inherits `pack`, `unpack` and `parts` of
    rows of a fixed length.

    A row of zeros decodes to zeros. Single zeros of another row need not."""

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """R, bytes of one encoded row of `dim` values, at least 1."""
        ...

    @abstractmethod
    def encode(self, rows_KD: Rows, draws: Draws) -> Bytes:
        """Encoded rows, uint8 (K, R). The bits of a row are a function of the row and its draws alone. May share memory
        with the input.

        Args:
            rows_KD: C-contiguous float32; not changed. K may be 0.
            draws: Random numbers of these rows, computed when asked for."""
        ...

    @abstractmethod
    def decode(self, encoded_KR: Bytes, dim: int) -> Rows:
        """Rows, float32 (K, D), from C-contiguous uint8 (K, R). May share memory with the input. Any bytes decode to
        something, a row that was not finite to one that is not."""
        ...

    def pack(self, encoded_KR: Bytes, dim: int) -> Bytes:
        """One packet, uint8 of any length, of encoded rows; by default one row after the other."""
        return encoded_KR.reshape(-1)

    def unpack(self, packet: Bytes, num_rows: int, dim: int) -> Bytes:
        """Undoes `pack`: uint8 (num_rows, R). Raises CorruptMessage for bytes that are no such packet."""
        expected = num_rows * self.row_bytes(dim)
        if packet.size != expected:
            raise CorruptMessage(f"{packet.size} bytes of {num_rows} rows of {dim}; expected {expected}")
        return packet.reshape(num_rows, self.row_bytes(dim))

    def parts(self, packet: Bytes, num_rows: int, dim: int) -> Mapping[str, int]:
        """Bytes of a packet that are no values, by part of the ledger: `scales`, `indices`."""
        return {}


def check_rows(rows_KD: Rows) -> None:
    """Raises TypeError unless these are what `RowCodec.encode` takes."""
    if rows_KD.dtype != np.float32 or rows_KD.ndim != 2 or not rows_KD.flags.c_contiguous:
        raise TypeError(f"rows of {rows_KD.dtype} {rows_KD.shape}; allowed: C-contiguous float32 (K, D)")
