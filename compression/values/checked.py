"""CheckedCodec: a codec of the user's own, whose results have the types and shapes that `RowCodec` states."""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bytes, Rows
from shardkeep.base.errors import UserError
from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.draws import Draws

PARTS = ("scales", "indices")
"""Parts of the ledger that a codec's packets may have beside values."""


class CheckedCodec(RowCodec):
    """Calls `codec`, and raises UserError, which begins with `name`, for a result of another form."""

    def __init__(self, codec: RowCodec, name: str) -> None:
        self._codec = codec
        self._name = name

    def row_bytes(self, dim: int) -> int:
        found = self._codec.row_bytes(dim)
        if not isinstance(found, int) or found < 1:
            raise self._wrong("row_bytes", repr(found), "a whole number of at least 1")
        return found

    def encode(self, rows_KD: Rows, draws: Draws) -> Bytes:
        expected = len(rows_KD), self.row_bytes(rows_KD.shape[1])
        return self._array("encode", self._codec.encode(rows_KD, draws), np.uint8, expected)

    def decode(self, encoded_KR: Bytes, dim: int) -> Rows:
        return self._array("decode", self._codec.decode(encoded_KR, dim), np.float32, (len(encoded_KR), dim))

    def pack(self, encoded_KR: Bytes, dim: int) -> Bytes:
        return self._array("pack", self._codec.pack(encoded_KR, dim), np.uint8, None)

    def unpack(self, packet: Bytes, num_rows: int, dim: int) -> Bytes:
        expected = num_rows, self.row_bytes(dim)
        return self._array("unpack", self._codec.unpack(packet, num_rows, dim), np.uint8, expected)

    def parts(self, packet: Bytes, num_rows: int, dim: int) -> Mapping[str, int]:
        found = dict(self._codec.parts(packet, num_rows, dim))
        if not set(found) <= set(PARTS) or sum(found.values()) > packet.size or min(found.values(), default=0) < 0:
            raise self._wrong("parts", str(found), f"{' and '.join(PARTS)} within {packet.size} bytes")
        return found

    def _array(self, method: str, found: Any, dtype: Any, shape: tuple[int, int] | None) -> npt.NDArray[Any]:
        fits = isinstance(found, np.ndarray) and found.dtype == dtype
        if not fits or (found.ndim != 1 if shape is None else found.shape != shape):
            came = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
            raise self._wrong(method, came, f"{np.dtype(dtype)} {shape or '(n,)'}")
        return np.ascontiguousarray(found)

    def _wrong(self, method: str, found: str, expected: str) -> UserError:
        return UserError(f"{self._name}: {method} returned {found}; expected {expected}")
