"""Codes of ids: what is coded comes back, in the fewest bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.compression.ids.codes import IdFormat, decode_ids, encode_ids
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.id_codes import LEAST, MOST, Section, coded, column, decoded, flat, rows

id_numbers = st.one_of(
    st.integers(LEAST, MOST), st.integers(-300, 300), st.integers(LEAST, LEAST + 9), st.integers(MOST - 9, MOST)
)
spread = st.lists(id_numbers, unique=True, max_size=25).map(sorted)
gaps = st.lists(st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 2**40)), max_size=40)
dense = st.builds(
    lambda first, rest: (first + np.cumsum([0, *(gap + 1 for gap in rest)])).tolist(),
    st.integers(-(2**60), 2**60),
    gaps,
)
sections = st.lists(st.one_of(spread, dense), max_size=4)


# ---- what is coded comes back ----


@examples(80)
@given(sections)
def test_ids_come_back_in_the_shortest_format_of_all_which_is_as_long_as_the_formula_says(
    parts: list[list[int]],
) -> None:
    code = coded(*parts)
    assert decoded(code, rows(parts)) == flat(parts)[1].tolist()
    assert code.area.size == code.sizes_S.sum()
    for part, size, format_ in zip(parts, code.sizes_S, code.formats_S, strict=True):
        assert (size, format_) == min((length, tag) for tag, length in id_lengths(part).items())


def id_lengths(part: Section) -> dict[IdFormat, int]:
    """Bytes of a section in every format that can hold it, by formulas of its own; in Python's integers."""
    if not part:
        return {IdFormat.RAW: 0}
    first, span = part[0], part[-1] - part[0]
    head = varint_length(2 * first if first >= 0 else -2 * first - 1)
    found = {
        IdFormat.RAW: 8 * len(part),
        IdFormat.BITMAP: head + (span + 7) // 8,
        IdFormat.RICE: head + 1 + rice_length([b - a - 1 for a, b in itertools.pairwise(part)]),
    }
    if span == len(part) - 1:
        found[IdFormat.RANGE] = head
    return found


def varint_length(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


def rice_length(gaps: Section) -> int:
    return min(-(-sum(width + 1 + (gap >> width) for gap in gaps) // 8) for width in range(64))


def test_codes_on_the_wire_are_these_bytes_and_empty_sections_are_none() -> None:
    code = coded([-2, -1], [3, 4, 6], [3, 20, 30, 60, 61, 80, 82], [9, 1000], [LEAST])
    assert code.formats_S.tolist() == [1, 2, 3, 3, 0]
    assert code.area.tobytes().hex(" ") == "03 06 05 06 03 48 a1 50 cc 12 0a de 07 00 00 00 00 00 00 00 80"
    assert coded().area.size == 0 and decoded(coded(), column([])) == []
    assert coded([], [], []).area.size == 0 and decoded(coded([], [], []), column([0, 0, 0])) == []
    assert decoded(coded([], [4], [], [1, 9]), column([0, 1, 0, 2])) == [4, 1, 9]


def test_a_read_only_area_at_any_address_and_ids_in_steps_are_taken() -> None:
    ids_V = np.arange(0, 4000, 2, dtype=np.int64)[::3]
    code = encode_ids(column([0, ids_V.size]), ids_V)
    shifted = np.frombuffer(b"0" + code.area.tobytes(), np.uint8)[1:]
    assert (decode_ids(code.formats_S, column([ids_V.size]), code.sizes_S, shifted, 10**6) == ids_V).all()


@every(
    ("starts", "ids", "text"),
    [
        ([0, 2], [4, 4], "id 4 follows 4"),
        ([0, 1, 3], [9, 5, 3], "id 3 follows 5"),
        ([0, 3], [1, 2], "starts do not rise from 0 to the 2 ids"),
        ([1, 2], [1, 2], "starts do not rise"),
        ([0, 2, 1, 2], [1, 2], "starts do not rise"),
        ([], [], "starts do not rise"),
    ],
)
def test_what_are_no_sorted_sections_is_refused(starts: list[int], ids: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        encode_ids(column(starts), column(ids))
