"""Value codecs: rows of float32 in, fewer bytes out, and back. One fixed number of bytes per row.

What a codec is (`ValueCodec`), and the registry from names and wire tags to codecs. Knows no table,
no network, no error feedback.
"""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import CorruptMessage

Rows = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class ValueCodec(Protocol):
    """Encodes each row by itself, so that encoded rows can be split among servers afterwards."""

    name: str
    """Name in the config."""
    tag: int
    """Number on the wire; never reused."""

    def row_bytes(self, dim: int) -> int:
        """Bytes of one encoded row of `dim` values."""
        ...

    def encode(self, rows_KD: Rows) -> Bytes:
        """Encoded rows, uint8 (K, R), C-contiguous. May share memory with the input."""
        ...

    def decode(self, encoded: Bytes, dim: int) -> Rows:
        """Rows, float32 (K, D), from uint8 of K * R bytes in any shape. May share memory with the input.

        Raises CorruptMessage when the size is no multiple of a row's bytes."""
        ...


@functools.cache
def value_codec(name_or_tag: str | int) -> ValueCodec:
    """The codec of a config name or wire tag. Raises CorruptMessage for an unknown tag, KeyError for a name."""
    from shardkeep.compression import quantize

    if isinstance(name_or_tag, str):
        return quantize.CODECS[name_or_tag]
    for codec in quantize.CODECS.values():
        if codec.tag == name_or_tag:
            return codec
    raise CorruptMessage(f"unknown value format {name_or_tag}")
