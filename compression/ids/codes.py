"""Codes of sorted unique ids, section after section (a section is one table's).

Each section gets the format that makes it shortest; of equal ones the lowest tag. Knows no message and no table.

    tag  ids             a section's bytes; first = its first id, zigzag varint; span = last id - first
    0    RAW             8 bytes an id
    1    RANGE           first: all ids follow each other
    2    BITMAP          first, a bit for each id behind it up to the last, which is in the last byte
    3    RICE            first, width, Rice code of the gaps

A width is a byte. Tags 4 and 16 to 22 are those of codes that left.
"""
# S = sections, V = ids of all sections

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from shardkeep.base.arrays import Bytes, Ints
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.ids import code_kernels, set_kernels


class IdFormat(enum.IntEnum):
    """How a section's ids are coded: the tag on the wire, never reused."""

    RAW = code_kernels.RAW
    RANGE = code_kernels.RANGE
    BITMAP = code_kernels.BITMAP
    RICE = code_kernels.RICE


_PROBLEMS = {
    set_kernels.UNKNOWN: "the format is unknown",
    set_kernels.SHORT: "the bytes end too early",
    set_kernels.LONG: "bytes are left over",
    set_kernels.HEADER: "a number in its header is none",
    set_kernels.DISORDER: "the ids do not rise",
    set_kernels.PADDING: "the padding has bits that are not zero",
    set_kernels.BEYOND: "an id is beyond the largest there can be",
    set_kernels.COUNT: "there are not so many",
}


@dataclass(frozen=True, slots=True)
class CodedIds:
    """Codes of S sections: `area` has their bytes one after the other, `sizes` of them each."""

    formats_S: Ints
    sizes_S: Ints
    area: Bytes


def encode_ids(starts_S1: Ints, ids_V: Ints) -> CodedIds:
    """Codes of ids, int64 of any value: section s has those from starts[s] up to starts[s + 1], strictly rising.

    Never longer than 8 bytes an id. Raises ValueError for starts that do not fit and for ids that do not rise."""
    starts_S1, ids_V = _checked(starts_S1, ids_V)
    formats_S, sizes_S, widths_S = np.empty((3, starts_S1.size - 1), dtype=np.int64)
    code_kernels.choose_ids(starts_S1, ids_V, formats_S, sizes_S, widths_S)
    area = np.zeros(int(sizes_S.sum()), dtype=np.uint8)
    code_kernels.write_ids(starts_S1, ids_V, formats_S, sizes_S, widths_S, area)
    return CodedIds(formats_S, sizes_S, area)


def decode_ids(formats_S: Ints, rows_S: Ints, sizes_S: Ints, area: Bytes, limit: int) -> Ints:
    """The ids of all sections (V,), strictly rising in each; V is the sum of `rows`.

    Time is bounded by bytes and rows, memory by rows. Raises CorruptMessage, before memory is taken where V is above
    `limit` or more than the bytes can hold."""
    problem = code_kernels.check_ids(formats_S, rows_S, sizes_S, area.size, limit)
    if problem == -1:
        ids_V = np.empty(int(rows_S.sum()), dtype=np.int64)
        problem = code_kernels.read_ids(formats_S, rows_S, sizes_S, area, ids_V)
    if problem != -1:
        raise CorruptMessage(_message(problem, formats_S, rows_S, sizes_S, area.size, limit))
    return ids_V


def _checked(starts_S1: Ints, ids_V: Ints) -> tuple[Ints, Ints]:
    """Both as kernels can take them."""
    starts_S1, ids_V = np.require(starts_S1, np.int64, ["C", "A"]), np.require(ids_V, np.int64, ["C", "A"])
    at = code_kernels.misplaced(starts_S1, ids_V)
    if at == -2:
        raise ValueError(f"starts do not rise from 0 to the {ids_V.size} ids there are")
    if at >= 0:
        raise ValueError(f"id {ids_V[at]} follows {ids_V[at - 1]} in a section; ids must rise")
    return starts_S1, ids_V


def _message(answer: int, formats_S: Ints, rows_S: Ints, sizes_S: Ints, size: int, limit: int) -> str:
    """What a kernel found wrong, in one line."""
    if answer < 0:
        return f"{size} bytes of ids, the sections have {int(sizes_S.sum())}"
    s, problem = divmod(answer, code_kernels.PROBLEMS)
    tag = int(formats_S[s])
    name = IdFormat(tag).name if tag in list(IdFormat) else f"format {tag}"
    text = f"more than {limit} in all" if problem == set_kernels.LIMIT else _PROBLEMS[problem]
    return f"section {s}, {rows_S[s]} ids as {name} in {sizes_S[s]} bytes: {text}"
