"""Codecs as users write them: one that is right, and one for each thing that can be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.draws import Draws

Array = np.ndarray


class Plain(RowCodec):
    """float32 as it is, copied."""

    def row_bytes(self, dim: int) -> int:
        return 4 * dim

    def encode(self, rows_KD: Array, draws: Draws) -> Array:
        return rows_KD.copy().view(np.uint8)

    def decode(self, encoded_KR: Array, dim: int) -> Array:
        return encoded_KR.copy().view(np.float32)


class Halved(RowCodec):
    row_bytes, decode = Plain.row_bytes, Plain.decode

    def encode(self, rows_KD: Array, draws: Draws) -> Array:
        return rows_KD.astype(np.float16).view(np.uint8)


class Unfinished(RowCodec):
    row_bytes, encode = Plain.row_bytes, Plain.encode


class NoPack:
    """Not a RowCodec, so it has no defaults."""

    row_bytes, encode, decode = Plain.row_bytes, Plain.encode, Plain.decode


class _Wrong(Plain):
    """A codec that does one thing otherwise."""

    def __init__(self, **methods: Any) -> None:
        vars(self).update(methods)


def _encoded(change: Any) -> _Wrong:
    """Encodes what `change` makes of the rows."""
    return _Wrong(encode=lambda rows_KD, draws: change(rows_KD).astype(np.float32).view(np.uint8))


def _decoded(change: Any) -> _Wrong:
    return _Wrong(decode=lambda encoded_KR, dim: change(encoded_KR.copy().view(np.float32)))


class _Sorted(Plain):
    """Loses the order of rows."""

    def pack(self, encoded_KR: Array, dim: int) -> Array:
        return encoded_KR[np.lexsort(encoded_KR.T)].reshape(-1)


class _Careless(Plain):
    """Trusts what it unpacks."""

    def unpack(self, packet: Array, num_rows: int, dim: int) -> Array:
        return packet.reshape(num_rows, 4 * dim)


class _Short(Plain):
    def unpack(self, packet: Array, num_rows: int, dim: int) -> Array:
        return packet[4 * dim :].reshape(-1, 4 * dim)


class _Greedy(Plain):
    def parts(self, packet: Array, num_rows: int, dim: int) -> Mapping[str, int]:
        return {"scales": 4 * num_rows * dim + 1}


class _Inventive(Plain):
    def parts(self, packet: Array, num_rows: int, dim: int) -> Mapping[str, int]:
        return {"tables": 1}


def _in_place(encoded_KR: Array, dim: int) -> Array:
    encoded_KR ^= 0
    return encoded_KR.copy().view(np.float32)


def _add_one(rows_KD: Array, draws: Draws) -> Array:
    rows_KD += 1.0
    return rows_KD.view(np.uint8)


WRONG: dict[str, tuple[Any, str]] = {
    "no method": (NoPack(), "NoPack: has no method pack; expected pack(encoded_KR: Bytes, dim: int) -> Bytes"),
    "half a byte": (_Wrong(row_bytes=lambda dim: 4.5 * dim), "row_bytes returned 4.5; expected a whole number of at"),
    "another shape": (Halved(), r"Halved: encode returned uint8 (40, 2); expected uint8 (40, 4) (dim 1)"),
    "another type": (
        _decoded(lambda rows: rows.astype(np.float64)),
        "decode returned float64 (40, 1); expected float32",
    ),
    "no array": (_Wrong(pack=lambda encoded_KR, dim: bytes(encoded_KR)), "pack returned bytes; expected uint8 (n,)"),
    "changed input": (_Wrong(encode=_add_one), "raises ValueError: output array is read-only"),
    "own random numbers": (
        _encoded(lambda rows: rows * np.random.default_rng().random()),
        "encode gives other bits for the same rows and draws",
    ),
    "one scale for all": (
        _encoded(lambda rows: rows / np.abs(rows).max(initial=1)),
        "the bits of a row depend on other",
    ),
    "no rows": (_encoded(lambda rows: rows + 0 * rows[0]), "encode of float32 (0, 1) raises IndexError"),
    "overflow": (_decoded(lambda rows: rows * np.float32(1e37)), "decode makes finite rows infinite or NaN"),
    "zeros": (_decoded(lambda rows: np.where(rows == 0, np.float32(1), rows)), "decode makes a row of zeros another"),
    "NaN": (_encoded(np.nan_to_num), "decode makes a row with nan finite"),
    "NaN spreads": (_decoded(lambda rows: rows + 0 * rows.sum()), "a row with nan changes other rows"),
    "rows decode together": (
        _decoded(lambda rows: np.where(np.isfinite(rows), rows * len(rows), rows)),
        "decode of some rows differs from that of all",
    ),
    "written bytes": (
        _Wrong(decode=_in_place),
        "decode of uint8 (40, 4) raises ValueError: output array is read-only",
    ),
    "order": (_Sorted(), "rows of 1 servers differ after pack and unpack"),
    "lost row": (_Short(), "unpack returned uint8 (39, 4); expected uint8 (40, 4)"),
    "hostile bytes": (_Careless(), "unpack of uint8 (0,) raises ValueError: cannot reshape array of size 0"),
    "too many scales": (_Greedy(), "parts returned {'scales': 161}; expected scales and indices within 160 bytes"),
    "unknown part": (_Inventive(), "parts returned {'tables': 1}; expected scales and indices within"),
}
"""A wrong codec for each rule, and what the check of it says."""
