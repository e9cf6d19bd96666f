"""CheckedCodec: a codec of the user's own, whose results have the types and shapes that `RowCodec` states."""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardkeep.base.arrays import Bytes, Rows
from shardkeep.base.plugging.own import Own
from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.draws import Draws

PARTS = ("scales", "indices")
"""Parts of the ledger that a codec's packets may have beside values."""


class CheckedCodec(RowCodec):
    """Calls the codec. Raises UserError for a result of another form."""

    def __init__(self, own: Own) -> None:
        self._own = own

    def row_bytes(self, dim: int) -> int:
        return self._own.whole("row_bytes", dim, at_least=1)

    def encode(self, rows_KD: Rows, draws: Draws) -> Bytes:
        shape = len(rows_KD), self.row_bytes(rows_KD.shape[1])
        return self._own.array("encode", rows_KD, draws, dtype=np.uint8, shape=shape)

    def decode(self, encoded_KR: Bytes, dim: int) -> Rows:
        return self._own.array("decode", encoded_KR, dim, dtype=np.float32, shape=(len(encoded_KR), dim))

    def pack(self, encoded_KR: Bytes, dim: int) -> Bytes:
        return self._own.array("pack", encoded_KR, dim, dtype=np.uint8, shape=None)

    def unpack(self, packet: Bytes, num_rows: int, dim: int) -> Bytes:
        shape = num_rows, self.row_bytes(dim)
        return self._own.array("unpack", packet, num_rows, dim, dtype=np.uint8, shape=shape)

    def parts(self, packet: Bytes, num_rows: int, dim: int) -> Mapping[str, int]:
        found = dict(self._own.call("parts", packet, num_rows, dim))
        if not set(found) <= set(PARTS) or sum(found.values()) > packet.size or min(found.values(), default=0) < 0:
            self._own.returned("parts", str(found), f"{' and '.join(PARTS)} within {packet.size} bytes")
        return found
