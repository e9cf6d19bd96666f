"""check_codec: whether a codec of the user's own keeps what `RowCodec` states, on rows and bytes that jobs bring."""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes, Ids, Rows
from shardkeep.base.errors import CorruptMessage, UserError, first_line
from shardkeep.compression.values.checked import CheckedCodec
from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.draws import Draws

ROWS, ZEROS = 40, 5
"""Rows of a check, and which of them is all zeros."""


def check_codec(codec: RowCodec, *, dims: Sequence[int] = (1, 7, 16, 33)) -> None:
    """Checks a codec: types and shapes, row by row, several servers, sizes, zeros, NaN, no rows, hostile bytes.

    Args:
        codec: Made with its options.
        dims: Numbers of values in a row.

    Raises AssertionError: one line with the method, what came and what is expected."""
    name = type(codec).__name__
    lacks = [each for each in ("row_bytes", "encode", "decode", "pack", "unpack", "parts") if not hasattr(codec, each)]
    if lacks:
        raise AssertionError(f"{name}: has no method {lacks[0]}; subclass RowCodec for the defaults of the last three")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns about NaN
        for dim in dims:
            try:
                _Check(CheckedCodec(codec, name), name, dim).run()
            except UserError as error:
                raise AssertionError(f"{error} (dim {dim})") from error


class _Check:
    """A codec at one dim."""

    def __init__(self, codec: RowCodec, name: str, dim: int) -> None:
        self._codec, self._name, self._dim = codec, name, dim
        self._random = np.random.default_rng(dim)
        self._ids = self._random.integers(-(2**62), 2**62, ROWS)
        sizes_K1 = np.exp2(self._random.integers(-20, 20, (ROWS, 1)))
        self._rows_KD = (self._random.normal(size=(ROWS, dim)) * sizes_K1).astype(np.float32)
        self._rows_KD[ZEROS] = 0.0

    def run(self) -> None:
        encoded_KR = self._row_by_row()
        self._values(encoded_KR)
        self._servers(encoded_KR)
        self._hostile_bytes(self._call("pack", encoded_KR, self._dim))

    def _require(self, holds: Any, what: str) -> None:
        if not holds:
            raise AssertionError(f"{self._name}: {what} (dim {self._dim})")

    def _call(self, method: str, *arguments: Any, of: str = "its rows", hostile: bool = False) -> Any:
        """The result of a method. None = it raised CorruptMessage, which it may for hostile bytes."""
        try:
            return getattr(self._codec, method)(*arguments)
        except UserError:  # another type or shape
            raise
        except Exception as error:
            if hostile and isinstance(error, CorruptMessage):
                return None
            expected = "CorruptMessage or rows" if hostile else "a result"
            raise AssertionError(
                f"{self._name}: {method} of {of} raises {type(error).__name__}: {first_line(error)}; "
                f"expected {expected} (dim {self._dim})"
            ) from error

    def _encode(self, rows_KD: Rows, ids: Ids) -> Bytes:
        draws = Draws(np.array([7], np.uint64), np.array([ids.size]), ids, step=3)
        encoded_KR: Bytes = self._call("encode", rows_KD, draws, of=f"{ids.size} rows")
        return encoded_KR.copy()

    def _row_by_row(self) -> Bytes:
        rows_KD = self._rows_KD.copy()
        encoded_KR = self._encode(rows_KD, self._ids)
        self._require(np.array_equal(rows_KD, self._rows_KD), "encode changes the rows that it gets")
        again_KR = self._encode(rows_KD, self._ids)
        self._require(np.array_equal(again_KR, encoded_KR), "encode gives other bits for the same rows and draws")
        for part in (self._random.permutation(ROWS), np.arange(3, 9), np.arange(1), np.arange(0)):
            alone_KR = self._encode(rows_KD[part], self._ids[part])
            self._require(np.array_equal(alone_KR, encoded_KR[part]), "encode: the bits of a row depend on other rows")
        return encoded_KR

    def _values(self, encoded_KR: Bytes) -> None:
        rows_KD = self._call("decode", encoded_KR, self._dim)
        self._require(np.isfinite(rows_KD).all(), "decode makes finite rows infinite or NaN")
        self._require(not rows_KD[ZEROS].any(), "decode makes a row of zeros another one")
        for bad in (np.nan, np.inf):
            odd_KD = self._rows_KD.copy()
            odd_KD[2, -1] = bad
            decoded_KD = self._call("decode", self._encode(odd_KD, self._ids), self._dim)
            self._require(not np.isfinite(decoded_KD[2]).all(), f"decode makes a row with {bad} finite")
            self._require(np.isfinite(np.delete(decoded_KD, 2, 0)).all(), f"a row with {bad} changes other rows")
        for what, encoded in (("some rows", encoded_KR[3:9]), ("bytes of a message", _in_a_message(encoded_KR[3:9]))):
            decoded_KD = self._call("decode", encoded, self._dim, of=what)
            self._require(np.array_equal(decoded_KD, rows_KD[3:9]), f"decode of {what} differs from that of all")
        self._call("decode", self._random.integers(0, 256, encoded_KR.shape, dtype=np.uint8), self._dim, of="any bytes")

    def _servers(self, encoded_KR: Bytes) -> None:
        """Rows are split among servers, each packs its own, and the other end puts them together."""
        expected_KD = self._call("decode", encoded_KR, self._dim)
        for servers in (1, 2, 3, ROWS + 1):
            decoded_KD = np.empty_like(expected_KD)
            for server in range(servers):
                mine_KR = np.ascontiguousarray(encoded_KR[server::servers])
                rows, of = len(mine_KR), f"{len(mine_KR)} rows"
                packet = self._call("pack", mine_KR, self._dim, of=of)
                self._call("parts", packet, rows, self._dim, of=of)
                unpacked_KR = self._call("unpack", _in_a_message(packet), rows, self._dim, of=of)
                decoded_KD[server::servers] = self._call("decode", unpacked_KR, self._dim, of=of)
            self._require(
                np.array_equal(decoded_KD, expected_KD), f"rows of {servers} servers differ after pack and unpack"
            )

    def _hostile_bytes(self, packet: Bytes) -> None:
        for of, wrong in self._packets(packet):
            for rows in (ROWS, 1, 0):
                unpacked_KR = self._call("unpack", wrong, rows, self._dim, of=of, hostile=True)
                if unpacked_KR is not None:
                    self._call("decode", unpacked_KR, self._dim, of=of)

    def _packets(self, packet: Bytes) -> Iterator[tuple[str, Bytes]]:
        """Packets that are none, or not of so many rows."""
        yield from (("a cut packet", packet[:size]) for size in (*range(min(12, packet.size)), packet.size - 1))
        yield "a packet that is too long", np.append(packet, np.uint8(1))
        for _ in range(50):
            yield "random bytes", self._random.integers(0, 256, packet.size, dtype=np.uint8)
            changed = packet.copy()
            changed[self._random.integers(packet.size)] ^= 1 << int(self._random.integers(8))
            yield "a packet with a changed bit", changed


def _in_a_message(array: Bytes) -> Bytes:
    """The same bytes, read-only and at an odd address."""
    return np.frombuffer(b"0" + array.tobytes(), dtype=np.uint8)[1:].reshape(array.shape)
