"""Codes of ids from somebody else: a valid set comes out, or one line says why not."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes, Ints
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.ids.codes import IdFormat, decode_ids
from tests.support.cases import every
from tests.support.id_codes import LEAST, MOST, coded, column, decoded, rows, varint

MESSAGE: list[list[int]] = [
    list(range(0, 300, 3)), [], [-5], [LEAST], list(range(40, 90)), [9, 100_000], [0, 2**40, 2**41, 2**62],
    np.cumsum(np.arange(1, 60) ** 2).tolist(),
]  # fmt: skip
CODE, ROWS_S = coded(*MESSAGE), rows(MESSAGE)


def decode(rows_S: Ints, sizes_S: Ints, area: Bytes) -> Ints:
    """The ids of the message, of which something is changed."""
    return decode_ids(CODE.formats_S, rows_S, sizes_S, area, 10**6)


def check_rising(rows_S: Ints, ids_V: Ints) -> None:
    assert ids_V.size == rows_S.sum()
    starts = np.cumsum(rows_S)[:-1]
    rising = ids_V[1:] > ids_V[:-1]
    rising[starts[(starts > 0) & (starts < ids_V.size)] - 1] = True
    assert rising.all()


def test_every_truncation_of_every_section_and_bytes_left_over_are_corrupt() -> None:
    ends = np.cumsum(CODE.sizes_S)
    for s in range(ROWS_S.size):
        for cut in range(-1, int(CODE.sizes_S[s]) + 1):
            if cut:
                sizes_S = CODE.sizes_S.copy()
                sizes_S[s] -= cut
                area = (
                    np.insert(CODE.area, ends[s], 0)
                    if cut < 0
                    else np.delete(CODE.area, np.s_[ends[s] - cut : ends[s]])
                )
                with pytest.raises(CorruptMessage, match=rf"^section {s}, "):
                    decode(ROWS_S, sizes_S, area)
    for cut in range(1, CODE.area.size + 1):
        with pytest.raises(CorruptMessage):
            decode(ROWS_S, CODE.sizes_S, CODE.area[:-cut])
    longer = np.append(CODE.area, np.uint8(0))
    with pytest.raises(CorruptMessage, match=rf"{longer.size} bytes of ids, the sections have {CODE.area.size}"):
        decode(ROWS_S, CODE.sizes_S, longer)


def test_a_section_has_one_number_of_rows_unless_it_is_a_range() -> None:
    counts = [-1, *range(400), 2**31, 2**40, 2**62, 2**63 - 1]
    for s in range(ROWS_S.size):
        accepted = []
        for count in counts:
            others_S = ROWS_S.copy()
            others_S[s] = count
            with contextlib.suppress(CorruptMessage):
                check_rising(others_S, decode(others_S, CODE.sizes_S, CODE.area))
                accepted.append(count)
        only_first = CODE.formats_S[s] == IdFormat.RANGE
        assert accepted == (list(range(1, 400)) if only_first else [int(ROWS_S[s])])


def test_every_flip_of_every_bit_is_corrupt_or_another_valid_set() -> None:
    sent_V = decode(ROWS_S, CODE.sizes_S, CODE.area)
    for bit in range(8 * CODE.area.size):
        area = CODE.area.copy()
        area[bit // 8] ^= 1 << bit % 8
        try:
            found_V = decode(ROWS_S, CODE.sizes_S, area)
        except CorruptMessage as error:
            assert str(error).startswith("section ")
        else:
            check_rising(ROWS_S, found_V)
            assert not np.array_equal(found_V, sent_V), f"bit {bit} means nothing"


FIRST = varint(2 * 5)  # the id 5
LAST = varint(2 * MOST)


@every(
    ("content", "format_", "count", "text"),
    [
        (b"", 4, 0, "0 ids as format 4 in 0 bytes: the format is unknown"),
        (b"", -1, 0, "the format is unknown"),
        (bytes(15), IdFormat.RAW, 2, "2 ids as RAW in 15 bytes: the bytes end too early"),
        (bytes(17), IdFormat.RAW, 2, "bytes are left over"),
        (bytes(16), IdFormat.RAW, 2, "the ids do not rise"),
        (b"", IdFormat.RANGE, 1, "the bytes end too early"),
        (FIRST, IdFormat.RANGE, 0, "there are not so many"),
        (b"\x8a\x00", IdFormat.RANGE, 1, "a number in its header is none"),
        (b"\xff" * 9 + b"\x02", IdFormat.RANGE, 1, "a number in its header is none"),
        (b"\xff" * 11, IdFormat.RANGE, 1, "a number in its header is none"),
        (LAST, IdFormat.RANGE, 2, "an id is beyond the largest"),
        (FIRST + b"\0", IdFormat.RANGE, 1, "bytes are left over"),
        (FIRST + b"\x07", IdFormat.BITMAP, 3, "there are not so many"),
        (FIRST + b"\x07", IdFormat.BITMAP, 5, "there are not so many"),
        (FIRST + b"\x07\x00", IdFormat.BITMAP, 4, "bytes are left over"),
        (LAST + b"\x01", IdFormat.BITMAP, 2, "an id is beyond the largest"),
        (FIRST, IdFormat.RICE, 1, "the bytes end too early"),
        (FIRST + b"\x40" + bytes(9), IdFormat.RICE, 2, "a number in its header is none"),
        (FIRST + b"\x00\x00", IdFormat.RICE, 2, "the bytes end too early"),
        (FIRST + b"\x00\x05", IdFormat.RICE, 2, "the padding has bits that are not zero"),
        (FIRST + b"\x00\x01\x00", IdFormat.RICE, 2, "bytes are left over"),
        (FIRST + b"\x00", IdFormat.RICE, 40, "the bytes end too early"),
        (FIRST + b"\x3f" + (b"\xff" * 8), IdFormat.RICE, 2, "an id is beyond the largest"),
        (FIRST + b"\x3e" + bytes(7) + b"\x00\x02", IdFormat.RICE, 2, "an id is beyond the largest"),
        (LAST + b"\x00\x01", IdFormat.RICE, 2, "an id is beyond the largest"),
        (varint(2 * (MOST - 3)) + b"\x00\x07", IdFormat.RICE, 4, None),
        (varint(2 * (MOST - 3)) + b"\x00\x0f", IdFormat.RICE, 5, "an id is beyond the largest"),
    ],
)
def test_what_is_wrong_with_a_section_is_said(content: bytes, format_: int, count: int, text: str | None) -> None:
    area = np.frombuffer(content, dtype=np.uint8)
    columns = column([format_]), column([count]), column([area.size])
    if text is None:
        assert decode_ids(*columns, area, 10**6).size == count
        return
    with pytest.raises(CorruptMessage, match=f"^section 0, .*{text}"):
        decode_ids(*columns, area, 10**6)


@every("format_", IdFormat)
def test_a_claim_of_many_rows_in_few_bytes_takes_no_memory(format_: IdFormat) -> None:
    columns = column([format_]), column([2**40]), column([9]), np.full(9, 1, np.uint8)
    tracemalloc.start()
    try:
        for limit in [10**6] if format_ is IdFormat.RANGE else [10**6, MOST]:
            with pytest.raises(CorruptMessage):
                decode_ids(*columns, limit)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_limit_is_on_all_sections_together() -> None:
    code = coded(range(10), range(20))
    assert len(decoded(code, column([10, 20]), limit=30)) == 30
    with pytest.raises(CorruptMessage, match="section 1, 20 ids as RANGE in 1 bytes: more than 29 in all"):
        decoded(code, column([10, 20]), limit=29)
