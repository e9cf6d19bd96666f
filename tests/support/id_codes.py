"""Codes of ids, made and read in one line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkeep.base.arrays import Ints
from shardkeep.compression.ids.codes import CodedIds, decode_ids, encode_ids

LEAST, MOST = -(2**63), 2**63 - 1
Section = Sequence[int]


def column(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, dtype=np.int64)


def flat(parts: Sequence[Section]) -> tuple[Ints, Ints]:
    return np.cumsum([0, *(len(part) for part in parts)]), column([id_ for part in parts for id_ in part])


def rows(parts: Sequence[Section]) -> Ints:
    return column([len(part) for part in parts])


def coded(*parts: Section) -> CodedIds:
    return encode_ids(*flat(parts))


def decoded(code: CodedIds, rows_S: Ints, limit: int = 10**6) -> list[int]:
    found: list[int] = decode_ids(code.formats_S, rows_S, code.sizes_S, code.area, limit).tolist()
    return found


def varint(number: int) -> bytes:
    found = b""
    while number >= 128:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])
