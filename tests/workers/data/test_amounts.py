"""Amounts with a currency, read as numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.chunk import Column
from shardkeep.workers.data.conversion.decoding import decode_numbers
from shardkeep.workers.data.conversion.rules import ReadingRules
from tests.support.cases import every


def read(texts: list[str], decimal: str, encoding: str = "utf-8") -> list[float]:
    values = pa.array([text.encode(encoding) for text in texts], pa.binary())
    column = Column("a.csv", np.arange(len(texts)) + 1, "price", values, decimal)
    return list(decode_numbers(column, ReadingRules(("",))))


@every(
    ("texts", "decimal", "encoding", "numbers"),
    [
        (["84,50 EUR", "1.234,00 EUR", "3 EUR", "-5,10 EUR"], ",", "utf-8", [84.5, 1234.0, 3.0, -5.1]),
        (["84,50 €", "1.234.567 €", "€ 5", "-€5,1"], ",", "utf-8", [84.5, 1_234_567.0, 5.0, -5.1]),
        (["84,50\xa0€", "1.234 €"], ",", "utf-8", [84.5, 1234.0]),
        (["84,50 €", "1.234,00\xa0€"], ",", "cp1252", [84.5, 1234.0]),
        (["84,50 €"], ",", "iso8859-15", [84.5]),
        (["EUR84,50"], ",", "utf-8", [84.5]),
        (["$84.50", "$1,234", "-$1,234.5"], ".", "utf-8", [84.5, 1234.0, -1234.5]),
        (["9.5", "£3"], ".", "utf-8", None),
        (["£3", "9.5"], ".", "latin-1", [3.0, 9.5]),
    ],
    ids=str,
)
def test_amounts_are_numbers(texts: list[str], decimal: str, encoding: str, numbers: list[float] | None) -> None:
    if numbers is None:
        with pytest.raises(DataError, match="one currency"):
            read(texts, decimal, encoding)
    else:
        assert read(texts, decimal, encoding) == numbers


def test_a_missing_amount_is_missing() -> None:
    assert np.isnan(read(["", "3 EUR"], ",")).tolist() == [True, False]


def test_amounts_of_two_currencies_are_no_numbers() -> None:
    with pytest.raises(
        DataError, match=r"row 2, column price: '3 USD' is not a number; .*one column have one currency"
    ):
        read(["84,50 EUR", "3 USD"], ",")


def test_a_text_with_a_byte_of_a_currency_is_no_amount() -> None:
    with pytest.raises(DataError, match=r"'Mädchen 5' is not a number; allowed: numbers, or data.missing; times"):
        read(["Mädchen 5"], ",")


def test_a_number_without_a_currency_keeps_its_only_point() -> None:
    assert read(["1.234", "1,5"], ",") == [1.234, 1.5]
