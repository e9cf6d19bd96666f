"""Elements: the values of float32 rows that are not zero, in packets that have which these are. Picks none itself.

A packet is one byte that names its form, the number M of elements in 4 bytes, little-endian, then

- form 0: for each row D bits, the first element in the lowest bit, padded with zeros to whole bytes; then the values;
- form 1: the elements' positions k * D + d, ascending, in w bytes each, little-endian; then the values.

w = 1, 2, 4 or 8, the least for K * D positions. M elements take

    size = 5 + min(K * ceil(D / 8), M * w) + 4 * M

bytes; the smaller form is taken, form 0 where both are equal. K and D travel elsewhere, as do the rows' ids.
"""
# K = rows, D = embedding dim, M = elements

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from shardkeep.base.arrays import Bools, Bytes
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.floats import Fp32

MASKS, POSITIONS = 0, 1
_HEAD = struct.Struct("<BI")


class Elements(Fp32):
    """fp32 whose packets leave out zeros."""

    def pack(self, encoded_KR: Bytes, dim: int) -> Bytes:
        """A packet of the values that are not zero, in the order of rows."""
        rows_KD = self.decode(encoded_KR, dim)
        num_rows, mask_KD = len(rows_KD), rows_KD != 0.0
        values, width = rows_KD[mask_KD], _position_bytes(num_rows, dim)
        if num_rows * _mask_bytes(dim) <= values.size * width:
            form, places = MASKS, np.packbits(mask_KD, axis=1, bitorder="little")
        else:
            form, places = POSITIONS, np.flatnonzero(mask_KD).astype(f"<u{width}").view(np.uint8)
        head = np.frombuffer(_HEAD.pack(form, values.size), dtype=np.uint8)
        return np.concatenate([head, places.reshape(-1), values.view(np.uint8)])

    def unpack(self, packet: Bytes, num_rows: int, dim: int) -> Bytes:
        """The rows' bytes, with zeros where there is no element.

        Raises CorruptMessage for anything that is not exactly a packet of such rows: another form, missing or extra
        bytes, positions out of range or order, padding that is not zero."""
        if packet.size < _HEAD.size:
            raise CorruptMessage(f"{packet.size} bytes are no elements of rows; a head has {_HEAD.size}")
        form, count = _HEAD.unpack(packet[: _HEAD.size].tobytes())
        if form not in (MASKS, POSITIONS):
            raise CorruptMessage(f"unknown form {form} of a packet of elements")
        places = num_rows * _mask_bytes(dim) if form == MASKS else count * _position_bytes(num_rows, dim)
        expected = _HEAD.size + places + 4 * count
        if packet.size != expected:
            raise CorruptMessage(
                f"{packet.size} bytes of {count} elements of rows {num_rows, dim}; expected {expected}"
            )
        body, values = packet[_HEAD.size : _HEAD.size + places], packet[_HEAD.size + places :]
        mask_KD = _from_masks(body, num_rows, dim) if form == MASKS else _from_positions(body, num_rows, dim)
        if np.count_nonzero(mask_KD) != count:
            raise CorruptMessage(f"{count} elements, and a mask of {np.count_nonzero(mask_KD)}")
        rows_KD = np.zeros((num_rows, dim), dtype=np.float32)
        rows_KD[mask_KD] = np.frombuffer(values.tobytes(), dtype=np.float32)
        return rows_KD.view(np.uint8)

    def parts(self, packet: Bytes, num_rows: int, dim: int) -> Mapping[str, int]:
        """The head and the places are indices. A packet without a head is none."""
        count = _HEAD.unpack(packet[: _HEAD.size].tobytes())[1] if packet.size >= _HEAD.size else 0
        return {"indices": max(0, packet.size - 4 * count)}


def _from_masks(body: Bytes, num_rows: int, dim: int) -> Bools:
    bits = np.unpackbits(body.reshape(num_rows, _mask_bytes(dim)), axis=1, bitorder="little").astype(np.bool_)
    if bits[:, dim:].any():
        raise CorruptMessage(f"masks of elements have bits beyond {dim}")
    return bits[:, :dim]


def _from_positions(body: Bytes, num_rows: int, dim: int) -> Bools:
    dtype = f"<u{_position_bytes(num_rows, dim)}"
    positions = np.frombuffer(body.tobytes(), dtype=dtype).astype(np.uint64)
    if positions.size and (int(positions[-1]) >= num_rows * dim or (positions[1:] <= positions[:-1]).any()):
        raise CorruptMessage(f"positions of elements out of order, or beyond {num_rows} rows of {dim}")
    mask = np.zeros(num_rows * dim, dtype=np.bool_)
    mask[positions.astype(np.int64)] = True
    return mask.reshape(num_rows, dim)


def _mask_bytes(dim: int) -> int:
    return -(-dim // 8)


def _position_bytes(num_rows: int, dim: int) -> int:
    return next(width for width in (1, 2, 4, 8) if num_rows * dim <= 1 << (8 * width))
