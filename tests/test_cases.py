"""`every`: all cases run, and a failure names its case."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.cases import every


def test_all_cases_run_each_in_a_folder_of_its_own(tmp_path: Path) -> None:
    seen: list[tuple[int, str, int]] = []

    @every("number", [1, 2])
    @every("text, length", [("a", 1), ("", 0)], ids=["one", "none"])
    def check(number: int, text: str, length: int, tmp_path: Path) -> None:
        assert not list(tmp_path.iterdir())
        (tmp_path / "left").touch()
        seen.append((number, text, length))

    check(tmp_path=tmp_path)
    assert seen == [(1, "a", 1), (1, "", 0), (2, "a", 1), (2, "", 0)]


def test_a_failure_names_its_case() -> None:
    @every("number", [1, 2, 3])
    @every(("low", "high"), [(0, 9), (2, 9)], ids=["wide", "narrow"])
    def check(number: int, low: int, high: int) -> None:
        assert low < number + 1 < high

    with pytest.raises(AssertionError) as caught:
        check()
    assert caught.value.__notes__ == ["case: 'narrow'", "case: 1"]


def test_no_cases_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="no cases"):
        every("number", [])


def test_each_example_of_a_property_is_checked_for_all_cases() -> None:
    seen: list[tuple[str, int]] = []

    @settings(max_examples=5, database=None)
    @given(number=st.integers(0, 9))
    @every("text", ["a", "b"])
    def check(text: str, number: int) -> None:
        seen.append((text, number))

    check()
    assert [text for text, _ in seen] == ["a", "b"] * (len(seen) // 2) and seen
    assert [number for _, number in seen[::2]] == [number for _, number in seen[1::2]]
