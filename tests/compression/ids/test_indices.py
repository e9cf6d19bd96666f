"""Codes of ids and of subsets: what is coded comes back, in the fewest bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardkeep.base.arrays import Ints
from shardkeep.compression.ids.codes import (
    CodedIds,
    IdFormat,
    bits_bound,
    decode_ids,
    decode_subsets,
    encode_ids,
)
from tests.support.cases import every
from tests.support.examples import examples
from tests.support.id_codes import LEAST, MOST, Section, coded, coded_subsets, column, decoded, flat, rows

id_numbers = st.one_of(st.integers(LEAST, MOST), st.integers(-300, 300), st.integers(LEAST, LEAST + 9))
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


@every(
    ("part", "format_", "size"),
    [
        ([], IdFormat.RAW, 0),
        ([5], IdFormat.RANGE, 1),
        ([LEAST], IdFormat.RAW, 8),
        ([LEAST, MOST], IdFormat.RAW, 16),
        ([-3, -2, -1, 0, 1], IdFormat.RANGE, 1),
        (range(LEAST, LEAST + 100), IdFormat.RANGE, 10),
        (range(MOST - 99, MOST + 1), IdFormat.RANGE, 10),
        (range(0, 100, 2), IdFormat.BITMAP, 1 + 13),
        (range(0, 10_000, 100), IdFormat.RICE, 2 + 99),
    ],
)
def test_each_format_is_chosen_somewhere(part: Section, format_: IdFormat, size: int) -> None:
    code = coded(part)
    assert (code.formats_S[0], code.sizes_S[0]) == (format_, size)
    assert decoded(code, column([len(part)])) == list(part)


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


@every("mean_gap", [4, 10, 100, 1000, 30_000])
def test_evenly_spread_ids_cost_at_most_015_bits_more_than_the_bound(mean_gap: int) -> None:
    assert bits_bound(10, 0) == 0.0 == bits_bound(4, 4) and bits_bound(5, 2) == pytest.approx(np.log2(10) / 2)
    count = 2000
    ids = np.sort(np.random.default_rng(mean_gap).choice(mean_gap * count, count, replace=False))
    code = encode_ids(column([0, count]), ids)
    bound = bits_bound(mean_gap * count, count)
    assert bound == pytest.approx(np.log2(mean_gap) + 1.4427 - 0.72 / mean_gap, abs=0.025)
    assert -0.1 < 8 * code.area.size / count - bound < 0.15
    part = np.unique(np.random.default_rng(1).integers(LEAST, MOST, 1000)).tolist()  # of random bits
    code = coded(part)
    assert code.formats_S[0] == IdFormat.RICE and decoded(code, column([1000])) == part
    assert 8 * code.area.size / 1000 <= bits_bound(2**64, 1000) + 0.2


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


# ---- subsets ----


@st.composite
def subsets(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Positions and universes of some sections."""
    parts, universes = [], []
    for _ in range(draw(st.integers(0, 4))):
        universe = draw(st.one_of(st.integers(0, 40), st.integers(0, 700)))
        chosen = draw(st.sets(st.integers(0, max(universe - 1, 0)), max_size=min(universe, 60)))
        inverted = draw(st.booleans())
        parts.append(sorted(set(range(universe)) - chosen) if inverted else sorted(chosen))
        universes.append(universe)
    return parts, universes


def decoded_subsets(code: CodedIds, rows_S: Ints, universe_S: Ints, limit: int = 10**6) -> list[int]:
    found: list[int] = decode_subsets(code.formats_S, rows_S, code.sizes_S, code.area, universe_S, limit).tolist()
    return found


@examples(60)
@given(subsets())
def test_positions_come_back_in_the_shortest_format(case: tuple[list[list[int]], list[int]]) -> None:
    parts, universes = case
    code = coded_subsets(parts, universes)
    assert decoded_subsets(code, rows(parts), column(universes)) == flat(parts)[1].tolist()
    for s, (part, universe) in enumerate(zip(parts, universes, strict=True)):
        expected = min((length, tag) for tag, length in subset_lengths(part, universe).items())
        assert (code.sizes_S[s], code.formats_S[s]) == expected


def subset_lengths(part: Section, universe: int) -> dict[IdFormat, int]:
    absent = sorted(set(range(universe)) - set(part))
    if not absent:
        return {IdFormat.ALL: 0}
    if not part:
        return {IdFormat.NONE: 0}
    found = {IdFormat.MASK: (universe + 7) // 8}
    codes = [(part, IdFormat.RICE_IN)]
    if 2 * len(part) > universe:
        codes.append((absent, IdFormat.RICE_OUT))
    for members, rice in codes:
        gaps = [b - a - 1 for a, b in itertools.pairwise([-1, *members])]
        found[rice] = 1 + rice_length(gaps)
    return found


@every(
    ("part", "universe", "format_", "size"),
    [
        ([], 0, IdFormat.ALL, 0),
        (range(500), 500, IdFormat.ALL, 0),
        ([], 500, IdFormat.NONE, 0),
        (range(0, 500, 2), 500, IdFormat.MASK, 63),
        (range(0, 5000, 40), 5000, IdFormat.RICE_IN, 1 + 110),
        (sorted(set(range(5000)) - set(range(0, 5000, 40))), 5000, IdFormat.RICE_OUT, 1 + 110),
    ],
)
def test_each_format_of_a_subset_is_chosen_somewhere(
    part: Section, universe: int, format_: IdFormat, size: int
) -> None:
    code = coded_subsets([part], [universe])
    assert (code.formats_S[0], code.sizes_S[0]) == (format_, size)
    assert decoded_subsets(code, column([len(part)]), column([universe])) == list(part)


@every(("parts", "universes", "text"), [
    ([[0], [-1]], [1, 4], "section 1: a position is outside"),
    ([[0], [4]], [1, 4], "section 1: a position is outside"),
    ([[0], []], [1, -1], "section 1: a position is outside"),
    ([[0]], [1, 2], "2 universes for 1 sections"),
])  # fmt: skip
def test_positions_outside_and_universes_of_other_sections_are_refused(
    parts: list[list[int]], universes: list[int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        coded_subsets(parts, universes)
    with pytest.raises(ValueError, match="0 universes for 1 sections"):
        decoded_subsets(coded_subsets([[0]], [1]), column([1]), column([]))
