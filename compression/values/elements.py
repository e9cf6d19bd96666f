"""Packets of single elements of rows: which are there, and their values. Bytes in, rows out; picks no element itself.

A packet is one byte that names its form, the number M of elements in 4 bytes, little-endian, then

- form 0: for each row D bits, the first element in the lowest bit, padded with zeros to whole bytes; then the values;
- form 1: the elements' positions k * D + d, ascending, in w bytes each, little-endian; then the values.

w = 1, 2, 4 or 8, the least for K * D positions; a value takes c bytes, those of its codec for one element. M elements
take

    size = 5 + min(K * ceil(D / 8), M * w) + M * c

bytes; the smaller form is taken, form 0 where both are equal. K, D and the codec travel elsewhere, as do the rows' ids.
"""
# K = rows, D = embedding dim, M = elements

from __future__ import annotations

import struct

import numpy as np

from shardkeep.base.arrays import Bools, Bytes, Rows
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.codec import ValueCodec

MASKS, POSITIONS = 0, 1
_HEAD = struct.Struct("<BI")


def size_bytes(num_rows: int, dim: int, num_elements: int, codec: ValueCodec) -> int:
    """Bytes of a packet of `num_elements` elements of rows (K, D)."""
    places = min(num_rows * _mask_bytes(dim), num_elements * _position_bytes(num_rows, dim))
    return _HEAD.size + places + num_elements * codec.row_bytes(1)


def count_of(packet: Bytes) -> int:
    """How many elements a packet of `encode` has. Raises CorruptMessage where it has no head."""
    if packet.size < _HEAD.size:
        raise CorruptMessage(f"{packet.size} bytes are no elements of rows; a head has {_HEAD.size}")
    return int(_HEAD.unpack(packet[: _HEAD.size].tobytes())[1])


def encode(rows_KD: Rows, mask_KD: Bools, codec: ValueCodec) -> Bytes:
    """A packet, uint8, of the elements under the mask, in the order of rows; the codec sees each as a row of one."""
    num_rows, dim = rows_KD.shape
    values = codec.encode(np.ascontiguousarray(rows_KD[mask_KD], dtype=np.float32).reshape(-1, 1))
    width = _position_bytes(num_rows, dim)
    if num_rows * _mask_bytes(dim) <= len(values) * width:
        form, places = MASKS, np.packbits(mask_KD, axis=1, bitorder="little")
    else:
        form, places = POSITIONS, np.flatnonzero(mask_KD).astype(f"<u{width}").view(np.uint8)
    head = np.frombuffer(_HEAD.pack(form, len(values)), dtype=np.uint8)
    return np.concatenate([head, places.reshape(-1), values.reshape(-1)])


def decode(packet: Bytes, num_rows: int, dim: int, codec: ValueCodec) -> tuple[Rows, Bools]:
    """Rows, float32 (K, D), zeros where there is no element; and the mask, bool (K, D).

    Raises CorruptMessage for anything that is not exactly a packet of such rows: another form, missing or extra bytes,
    positions out of range or order, padding that is not zero."""
    if packet.dtype != np.uint8 or packet.ndim != 1 or packet.size < _HEAD.size:
        raise CorruptMessage(f"{packet.size} bytes of {packet.dtype} are no packet of elements")
    form, count = _HEAD.unpack(packet[: _HEAD.size].tobytes())
    if form not in (MASKS, POSITIONS):
        raise CorruptMessage(f"unknown form {form} of a packet of elements")
    places = num_rows * _mask_bytes(dim) if form == MASKS else count * _position_bytes(num_rows, dim)
    expected = _HEAD.size + places + count * codec.row_bytes(1)
    if packet.size != expected:
        raise CorruptMessage(f"{packet.size} bytes of {count} elements of rows {num_rows, dim}; expected {expected}")
    body, values = packet[_HEAD.size : _HEAD.size + places], packet[_HEAD.size + places :]
    mask_KD = _from_masks(body, num_rows, dim) if form == MASKS else _from_positions(body, num_rows, dim)
    if np.count_nonzero(mask_KD) != count:
        raise CorruptMessage(f"{count} elements, and a mask of {np.count_nonzero(mask_KD)}")
    rows_KD = np.zeros((num_rows, dim), dtype=np.float32)
    rows_KD[mask_KD] = codec.decode(np.ascontiguousarray(values), 1)[:, 0]
    return rows_KD, mask_KD


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
