"""Row codecs: rows of float32 in, fewer bytes out, and back.

What a codec is (`RowCodec`), and the codecs of a job by their tags on the wire (`Codecs`); `registry` lists those built
in. Knows no table, no network, no error feedback.
"""
# K = rows, D = embedding dim, R = bytes of one encoded row

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from shardkeep.base.arrays import Bytes, Rows
from shardkeep.base.errors import CorruptMessage
from shardkeep.base.plugging.own import OwnConfig, load_own
from shardkeep.compression.values.draws import Draws
from shardkeep.compression.values.registry import ELEMENTS, FORMATS, PULL_TAG, PUSH_TAG

if TYPE_CHECKING:
    from shardkeep.compression.config import CompressionConfig


class RowCodec(Protocol):
    """Encodes each row on its own, so that encoded rows can be split among servers. Then packs, without loss, the rows
    of one table in one message. A subclass inherits `pack`, `unpack` and `parts` of rows of a fixed length."""

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """R, bytes of one encoded row of `dim` values, at least 1."""
        ...

    @abstractmethod
    def encode(self, rows_KD: Rows, draws: Draws) -> Bytes:
        """Encoded rows, uint8 (K, R). The bits of a row are a function of the row and its draws alone. May share memory
        with the input.

        Args:
            rows_KD: C-contiguous float32; not changed.
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


class NamedCodec(NamedTuple):
    name: str
    codec: RowCodec
    packs: bool
    """Whether its packets have a length of their own."""


class Codecs:
    """The codecs of a job, by tag.

    Args:
        compression: Of the job.
        folder: Searched last for the module of a plug.

    Raises ConfigError for a plug that cannot be loaded."""

    def __init__(self, compression: CompressionConfig, folder: Path | None = None) -> None:
        self._own: dict[int, NamedCodec] = {}
        for tag, way, values in (
            (PUSH_TAG, "push", compression.push.values),
            (PULL_TAG, "pull", compression.pull.values),
        ):
            if isinstance(values, OwnConfig):
                from shardkeep.compression.values.checked import CheckedCodec

                setting = f"compression.{way}.values"
                codec: RowCodec = load_own(values, RowCodec, setting=setting, folder=folder)
                checked = CheckedCodec(codec, f"{setting}: {values.name}")
                self._own[tag] = NamedCodec(values.name, checked, packs(codec))

    def __getitem__(self, tag: int) -> NamedCodec:
        """Raises CorruptMessage for an unknown tag."""
        return self._own[tag] if tag in self._own else built_in(tag)


@functools.cache
def built_in(tag: int) -> NamedCodec:
    """The built-in codec of a tag. Raises CorruptMessage for an unknown one."""
    for plug in (*FORMATS.values(), ELEMENTS):
        for scale, own in plug.config.items():
            if own == tag:
                codec = plug.load()(*([] if scale is None else [scale]))
                return NamedCodec(plug.name, codec, packs(codec))
    raise CorruptMessage(f"unknown value format {tag}")


def packs(codec: RowCodec) -> bool:
    """Whether a codec has a `pack` of its own."""
    return getattr(type(codec), "pack", None) is not RowCodec.pack


def check_rows(rows_KD: Rows) -> None:
    """Raises TypeError unless these are what `RowCodec.encode` takes."""
    if rows_KD.dtype != np.float32 or rows_KD.ndim != 2 or not rows_KD.flags.c_contiguous:
        raise TypeError(f"rows of {rows_KD.dtype} {rows_KD.shape}; allowed: C-contiguous float32 (K, D)")
