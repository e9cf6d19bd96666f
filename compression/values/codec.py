"""Value codecs: rows of float32 in, fewer bytes out, and back. One fixed number of bytes per row.

What a codec is (`ValueCodec`), and codecs by name or wire tag; which there are says `formats`. Knows no table,
no network, no error feedback.
"""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np

from shardkeep.base.arrays import Bytes, Rows
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.values.registry import FORMATS, Scale


class ValueCodec(Protocol):
    """Encodes each row on its own, so that encoded rows can be split among servers afterwards."""

    name: str
    """Name in the config."""
    tag: int
    """Number on the wire; never reused."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row that are its scale; 0 for formats without one."""
        ...

    def row_bytes(self, dim: int) -> int:
        """Bytes of one encoded row of `dim` values."""
        ...

    def encode(self, rows_KD: Rows) -> Bytes:
        """Encoded rows, uint8 (K, R), C-contiguous, each value rounded to the nearest, ties to even. The bits of a row
        are a function of the row alone. May share memory with the input.

        Args:
            rows_KD: C-contiguous float32; not changed.

        Raises TypeError for rows of another type or shape."""
        ...

    def decode(self, encoded: Bytes, dim: int) -> Rows:
        """Rows, float32 (K, D), from uint8 of K * R bytes in any shape. May share memory with the input. Any bytes
        decode to something, a row that was not finite to one that is not.

        Raises CorruptMessage when the size is no multiple of a row's bytes."""
        ...


@functools.cache
def value_codec(name_or_tag: str | int, scale: Scale | None = None) -> ValueCodec:
    """The codec of a config name, or of a wire tag, which says the scale too.

    Args:
        scale: Kind of row scale for a name; None = the format's first, pow2 if it takes that. Without effect on a
            format without a scale.

    Raises CorruptMessage for an unknown tag, KeyError for an unknown name or a scale that the format does not take,
    ValueError when two formats have the tag."""
    if isinstance(name_or_tag, str):
        format_ = FORMATS[name_or_tag].config
        kinds = {kind: tag for tag, kind in format_.tags().items()}
        return value_codec(kinds[(scale or format_.scales[0]) if format_.scaled else None])
    names = [name for name, plug in FORMATS.items() if name_or_tag in plug.config.tags()]
    if not names:
        raise CorruptMessage(f"unknown value format {name_or_tag}")
    if len(names) > 1:
        raise ValueError(f"tag {name_or_tag} is that of {' and '.join(names)}; a tag names one format")
    plug = FORMATS[names[0]]
    own_scale = plug.config.tags()[name_or_tag]
    return plug.load()(tag=name_or_tag, **({"scale": own_scale} if own_scale else {}))


def check_rows(rows_KD: Rows) -> None:
    """Raises TypeError unless these are what `ValueCodec.encode` takes."""
    if rows_KD.dtype != np.float32 or rows_KD.ndim != 2 or not rows_KD.flags.c_contiguous:
        raise TypeError(f"rows of {rows_KD.dtype} {rows_KD.shape}; allowed: C-contiguous float32 (K, D)")


def check_bytes(encoded: Bytes, row_bytes: int) -> None:
    """Raises CorruptMessage unless these are whole rows."""
    if encoded.dtype != np.uint8 or encoded.size % row_bytes:
        raise CorruptMessage(f"{encoded.size} bytes of {encoded.dtype} are no rows of {row_bytes} bytes")
