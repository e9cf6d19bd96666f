"""Codes of ids and of subsets from somebody else: a valid set comes out, or one line says why not."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from shardkeep.base.arrays import Bytes, Ints
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.ids.codes import CodedIds, IdFormat, decode_ids, decode_subsets, encode_ids, encode_subsets
from tests.support.cases import every
from tests.support.id_codes import LEAST, MOST, coded, coded_subsets, column, decoded, rows, varint

ID_FORMATS = [IdFormat.RAW, IdFormat.RANGE, IdFormat.BITMAP, IdFormat.RICE]
SUBSET_FORMATS = [format_ for format_ in IdFormat if format_ not in ID_FORMATS]
MESSAGE: list[list[int]] = [
    list(range(0, 300, 3)), [], [-5], [LEAST], list(range(40, 90)), [9, 100_000], [0, 2**40, 2**41, 2**62],
    np.cumsum(np.arange(1, 60) ** 2).tolist(),
]  # fmt: skip
SUBSETS = ([[0, 3, 4], list(range(90)), [], [77], list(range(1, 300)), list(range(0, 900, 31))],
           [10, 90, 7, 800, 300, 900])  # fmt: skip
Decode = Callable[[Ints, Ints, Ints, Bytes], Ints]


def decode_positions(formats_S: Ints, rows_S: Ints, sizes_S: Ints, area: Bytes) -> Ints:
    return decode_subsets(formats_S, rows_S, sizes_S, area, column(SUBSETS[1]), 10**6)


CASES: dict[str, tuple[CodedIds, Ints, Decode]] = {
    "ids": (coded(*MESSAGE), rows(MESSAGE), lambda f, r, s, a: decode_ids(f, r, s, a, 10**6)),
    "subsets": (coded_subsets(*SUBSETS), rows(SUBSETS[0]), decode_positions),
}


def check_rising(rows_S: Ints, ids_V: Ints) -> None:
    assert ids_V.size == rows_S.sum()
    starts = np.cumsum(rows_S)[:-1]
    rising = ids_V[1:] > ids_V[:-1]
    rising[starts[(starts > 0) & (starts < ids_V.size)] - 1] = True
    assert rising.all()


@every("what", CASES)
def test_every_truncation_of_every_section_and_bytes_left_over_are_corrupt(what: str) -> None:
    code, rows_S, decode = CASES[what]
    ends = np.cumsum(code.sizes_S)
    for s in range(rows_S.size):
        for cut in range(-1, int(code.sizes_S[s]) + 1):
            if cut:
                sizes_S = code.sizes_S.copy()
                sizes_S[s] -= cut
                area = (
                    np.insert(code.area, ends[s], 0)
                    if cut < 0
                    else np.delete(code.area, np.s_[ends[s] - cut : ends[s]])
                )
                with pytest.raises(CorruptMessage, match=rf"^section {s}, "):
                    decode(code.formats_S, rows_S, sizes_S, area)
    for cut in range(1, code.area.size + 1):
        with pytest.raises(CorruptMessage):
            decode(code.formats_S, rows_S, code.sizes_S, code.area[:-cut])
    longer = np.append(code.area, np.uint8(0))
    with pytest.raises(CorruptMessage, match=rf"{longer.size} bytes of \w+, the sections have {code.area.size}"):
        decode(code.formats_S, rows_S, code.sizes_S, longer)


@every("what", CASES)
def test_a_section_has_one_number_of_rows_unless_it_is_a_range(what: str) -> None:
    code, rows_S, decode = CASES[what]
    counts = [-1, *range(400), 2**31, 2**40, 2**62, 2**63 - 1]
    for s in range(rows_S.size):
        accepted = []
        for count in counts:
            others_S = rows_S.copy()
            others_S[s] = count
            with contextlib.suppress(CorruptMessage):
                check_rising(others_S, decode(code.formats_S, others_S, code.sizes_S, code.area))
                accepted.append(count)
        assert accepted == counts_of(IdFormat(code.formats_S[s]), int(rows_S[s]))


def counts_of(format_: IdFormat, count: int) -> list[int]:
    """The numbers of rows below 400 that a section of `count` rows may be read with."""
    if format_ is IdFormat.RANGE:  # holds its first id alone
        return list(range(1, 400))
    return [count]


@every("what", CASES)
def test_every_flip_of_every_bit_is_corrupt_or_another_valid_set(what: str) -> None:
    code, rows_S, decode = CASES[what]
    sent_V = decode(code.formats_S, rows_S, code.sizes_S, code.area)
    for bit in range(8 * code.area.size):
        area = code.area.copy()
        area[bit // 8] ^= 1 << bit % 8
        try:
            found_V = decode(code.formats_S, rows_S, code.sizes_S, area)
        except CorruptMessage as error:
            assert str(error).startswith("section ")
        else:
            check_rising(rows_S, found_V)
            assert not np.array_equal(found_V, sent_V), f"bit {bit} means nothing"


@every("what", CASES)
def test_random_bytes_are_corrupt_or_a_valid_set(what: str) -> None:
    rng = np.random.default_rng(7)
    formats = ID_FORMATS if what == "ids" else SUBSET_FORMATS
    valid = dict.fromkeys(formats, 0)
    for _ in range(1500):
        universe = int(rng.integers(0, 200))
        code, count = noise(rng, formats, universe)
        rows_S = column([count])
        try:
            if what == "ids":
                found = decode_ids(code.formats_S, rows_S, code.sizes_S, code.area, 300)
            else:
                found = decode_subsets(code.formats_S, rows_S, code.sizes_S, code.area, column([universe]), 300)
                assert not found.size or 0 <= found[0] <= found[-1] < universe
        except CorruptMessage:
            continue
        check_rising(rows_S, found)
        valid[IdFormat(code.formats_S[0])] += 1
    assert all(valid.values()), valid


def noise(rng: np.random.Generator, formats: list[IdFormat], universe: int) -> tuple[CodedIds, int]:
    """One section and its rows: random bytes, or a code of ours with a random byte in it."""
    if rng.random() < 0.5:
        size = int(rng.integers(0, 24))
        area = rng.integers(0, 256, size).astype(np.uint8)
        return CodedIds(column([rng.choice(formats)]), column([size]), area), int(rng.choice([0, size // 8, 1, 3]))
    chosen = np.flatnonzero(rng.random(universe) < rng.choice([0.0, 0.02, 0.1, 0.5, 0.9, 0.98, 1.0]))
    starts_S1 = column([0, chosen.size])
    if IdFormat.RAW in formats:
        code = encode_ids(starts_S1, chosen * 10 ** rng.integers(0, 17))
    else:
        code = encode_subsets(starts_S1, chosen, column([universe]))
    code.area[rng.integers(0, max(code.area.size, 1)) :][:1] = rng.integers(0, 256)
    return code, chosen.size


FIRST = varint(2 * 5)  # the id 5
LAST = varint(2 * MOST)


@every(
    ("content", "format_", "count", "text"),
    [
        (b"", 4, 0, "0 ids as format 4 in 0 bytes: the format is unknown"),
        (b"", 16, 0, "as ALL in 0 bytes: the format is unknown"),
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


@every(
    ("content", "format_", "count", "text"),
    [
        (b"", IdFormat.RAW, 0, "positions as RAW in 0 bytes: the format is unknown"),
        (b"", 23, 0, "the format is unknown"),
        (b"", IdFormat.ALL, 11, "there are not so many"),
        (b"", IdFormat.NONE, 1, "there are not so many"),
        (b"\0", IdFormat.ALL, 12, "bytes are left over"),
        (b"\x01\x10", IdFormat.MASK, 2, "the padding has bits that are not zero"),
        (b"\x01\x01", IdFormat.MASK, 3, "there are not so many"),
        (b"\x01", IdFormat.MASK, 1, "the bytes end too early"),
        (b"\x01\0\0", IdFormat.MASK, 1, "bytes are left over"),
        (b"\0", IdFormat.RICE_IN, 0, "there are not so many"),
        (b"\x40" + bytes(9), IdFormat.RICE_IN, 1, "a number in its header is none"),
        (b"\0\0\x10", IdFormat.RICE_IN, 1, "an id is beyond the largest"),
        (b"\0\x01", IdFormat.RICE_OUT, 12, "there are not so many"),
        (b"", IdFormat.RICE_OUT, 1, "the bytes end too early"),
    ],
)
def test_what_is_wrong_with_a_subset_of_twelve_is_said(content: bytes, format_: int, count: int, text: str) -> None:
    area = np.frombuffer(content, dtype=np.uint8)
    with pytest.raises(CorruptMessage, match=f"^section 0, .*{text}"):
        decode_subsets(column([format_]), column([count]), column([area.size]), area, column([12]), 100)


@every("format_", IdFormat)
def test_a_claim_of_many_rows_in_few_bytes_takes_no_memory(format_: IdFormat) -> None:
    columns = column([format_]), column([2**40]), column([9]), np.full(9, 1, np.uint8)
    unlimited = {IdFormat.RANGE, IdFormat.ALL}
    tracemalloc.start()
    try:
        for limit in [10**6] if format_ in unlimited else [10**6, MOST]:
            with pytest.raises(CorruptMessage):
                decode_ids(*columns, limit) if format_ in ID_FORMATS else decode_subsets(
                    *columns, column([2**41]), limit
                )
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_limit_is_on_all_sections_together() -> None:
    code = coded(range(10), range(20))
    assert len(decoded(code, column([10, 20]), limit=30)) == 30
    with pytest.raises(CorruptMessage, match="section 1, 20 ids as RANGE in 1 bytes: more than 29 in all"):
        decoded(code, column([10, 20]), limit=29)
