"""A column is read by one rule: values are compared as values, times have one unit, what cannot teach is named."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.categories import decode_ids
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.decoding import decode_numbers
from shardkeep.workers.data.conversion.hashing import MISSING_ID
from shardkeep.workers.data.conversion.rules import FORM, ReadingRules
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data_config import DataConfig
from tests.support import data_files
from tests.support.cases import every
from tests.support.data_files import labels_of, write_file


def rules() -> ReadingRules:
    return ReadingRules(("", "nan"))


def column(values: Any) -> Column:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return Column("log.csv", np.arange(1, len(array) + 1), "at", array)


def opened(folder: Path, lines: list[str], **settings: Any) -> Data:
    content = {"log.csv": "\n".join(lines) + "\n"}
    return data_files.opened(folder, content, seed=1, **{"sparse": ["u"], "scale": None} | settings)


# Labels

THREE = ["4", "5.0", "6", "1e3"]
COMMAS = {"decimal": ",", "quote": "'"}


@every(
    ("texts", "positive", "settings", "expected"),
    [
        (["4.0", "4.50", "5", "3.5"], [4, 4.5, 5], {}, [1, 1, 1, 0]),
        (["4", "4.5", "5.00", "0"], [4, 4.5, 5], {}, [1, 1, 1, 0]),
        (["4e0", "45e-1", "+5", "-4"], [4, 4.5, 5], {}, [1, 1, 1, 0]),
        (["4.0", "5", "4"], [4], {"missing": ["4"]}, [1, 0, 1]),  # a listed number is not missing
        (["4.0", "5", "4"], [4], {"missing": ["4.0"]}, [1, 0, 1]),
        (["NA", "some", "NA"], ["NA"], {"missing": ["NA"]}, [1, 0, 1]),
        (["4.0", "4", "like", "5"], ["4", "like"], {}, [1, 1, 1, 0]),  # each by what it is
        (["9007199254740993", "9007199254740992"], [(1 << 53) + 1], {}, [1, 0]),  # float64 has no such number
        (["'4,50'", "'5,0'", "5", "'3,5'"], ["4,5", 5], COMMAS, [1, 1, 1, 0]),
        (["'1.234,50'", "1234.5", "n/a", "0"], ["1234,5", "n/a"], COMMAS, [1, 1, 1, 0]),
        (THREE, {"above": 5}, {}, [0, 0, 1, 1]),  # without the bound
        (THREE, {"below": 5}, {}, [1, 0, 0, 0]),
        (THREE, {"above": 4.9, "below": 6}, {}, [0, 1, 0, 0]),
    ],
)
def test_labels_are_compared_by_the_type_of_what_is_listed(
    tmp_path: Path, texts: list[str], positive: Any, settings: dict[str, Any], expected: list[int]
) -> None:
    lines = ["y,u", *(f"{text},{n}" for n, text in enumerate(texts))]
    assert labels_of(opened(tmp_path, lines, label={"column": "y", "positive": positive}, **settings)) == expected


def test_a_positive_value_that_no_row_has_and_a_threshold_that_means_nothing_are_refused(tmp_path: Path) -> None:
    for positive in (["yes", "Yes"], [1, 7]):
        why = r"data\.label\.positive: no row of .* has '(Yes|7)'; column y holds 'yes', '1', 'no'$"
        with pytest.raises(DataError, match=why):
            opened(tmp_path, ["y,u", "yes,a", "1,a", "no,a"], label={"column": "y", "positive": positive})
    for bounds in ({}, {"above": 5, "below": 5}, {"over": 5}):
        with pytest.raises(ValueError, match="positive"):
            DataConfig.model_validate({"label": {"column": "y", "positive": bounds}})


# Times


@every("unit", ["s", "ms", "us", "ns"])
@every("year", [1974, 2001, 2024, 2261])
def test_the_size_of_a_count_shows_its_unit(unit: str, year: int) -> None:
    instant = np.datetime64(f"{year}-03-01T12:00:01", unit)
    expected = [int(instant.astype("datetime64[us]").astype(np.int64))]
    count = int(instant.astype(np.int64))
    for array in (pa.array([count]), pa.array([str(count)]), pa.array([instant]), pa.array([float(count)])):
        if not pa.types.is_floating(array.type) or unit in ("s", "ms"):
            assert times.micros(column(array), rules()).to_pylist() == expected


@every("count", [0, 99_999_999, 20240501, 10_000_000_001, 5 * 10**13])
def test_a_count_of_no_unit_is_refused_with_the_forms_that_are_read(count: int) -> None:
    for array in (pa.array([1_714_521_600, count]), pa.array(["1714521600", str(count)])):
        with pytest.raises(DataError, match=rf"row 2, column at: {count}.* is no time; read are: 2024-05-01"):
            times.micros(column(array), rules())


@every("kind", [pa.int32(), pa.uint32(), pa.int64(), pa.uint64(), pa.float64()])
def test_a_count_is_one_instant_in_each_type_that_holds_it(kind: Any) -> None:
    for count in (1_713_206_700, *([1_713_206_700_123] if kind.bit_width == 64 else [])):
        expected = count * 10**6 if count < 10**10 else count * 1000
        assert times.micros(column(pa.array([count, None], kind)), rules()).to_pylist() == [expected, None]


def test_an_instant_beyond_64_bits_of_microseconds_and_times_of_float32_are_refused() -> None:
    far = column(pa.array([10**14], pa.timestamp("s")))
    for exact in (False, True):  # dense, a category
        with pytest.raises(DataError, match=r"column at: .*out of bounds"), far.named():
            times.micros(far, rules(), exact=exact)
    with pytest.raises(DataError, match="holds float; allowed: times"):
        times.seconds(column(pa.array([1_714_521_600.0], pa.float32())), rules())


@every(
    "text",
    ["2024-05-01", "2024-05-01 00:00", "2024-05-01T00:00:00", "2024-05-01 00:00:00 UTC", "2024-05-01 00:00:00 GMT",
     "2024-05-01 00:00:00.000000123", "2024-05-01T02:00:00+02:00", "2024-05-01 00:00:00+00", "2024-05-01T00:00:00Z",
     "01.05.2024", "01.05.2024 00:00", "01.05.2024 00:00:00 UTC"],
)  # fmt: skip
def test_writings_of_one_instant_are_one_instant(text: str) -> None:
    assert times.micros(column([text, None]), rules()).to_pylist() == [1_714_521_600_000_000, None]


@every(
    "text",
    ["05/01/2024 00:00", "Wed, 01 May 2024 00:00:00 GMT", "yesterday", "2024-13-01", "05.13.2024", "01.05.24",
     "2024-05-01T00:00:00Z", "1714521600"],
)  # fmt: skip
def test_other_writings_than_the_first_are_refused_with_the_forms_that_are_read(text: str) -> None:
    with pytest.raises(DataError, match=r"row [12], column at: .* read are: 2024-05-01"):
        times.micros(column(["2024-05-01T00:00:00", text]), rules())


US, EU = "%m/%d/%Y", "%d/%m/%Y"


@every(
    ("forms", "texts", "days"),
    [
        ([US], ["11/6/2017", "11/26/2017", None], ["2017-11-06", "2017-11-26", None]),
        ([US, EU], ["11/6/2017", "11/26/2017"], ["2017-11-06", "2017-11-26"]),
        (["%b %d, %Y %I:%M %p"], ["Nov 6, 2017 1:05 PM", "may 16, 2017 12:00 am"], ["2017-11-06T13:05", "2017-05-16"]),
        (["%b-%Y"], ["Dec-2015", "Jan-2016"], ["2015-12-01", "2016-01-01"]),
        (["%d/%b/%Y:%H:%M:%S %z"], ["06/Nov/2017:10:00:00 +0100"], ["2017-11-06T09:00"]),
        ([US], ["2017-11-06", "2017-11-26"], ["2017-11-06", "2017-11-26"]),
        ([US], ["3/1/2017", "03/02/2017", "2/29/2016"], ["2017-03-01", "2017-03-02", "2016-02-29"]),
        ([US, EU], ["11/6/2017", "10/7/2017"], "'11/6/2017' is no time"),
        ([US], ["11/6/2017", "2017-11-06"], "times of two forms"),
        ([US], ["2/30/2017"], "'2/30/2017' is no time"),
        ([US], ["11/6/17"], "'11/6/17' is no time"),
        ([], ["11/6/2017"], "'11/6/2017' is no time; .* what data.time_format reads"),
    ],
)  # fmt: skip
def test_a_column_of_times_has_one_of_the_named_forms(forms: list[str], texts: list[str], days: Any) -> None:
    rules = ReadingRules(("",), time_format=tuple(forms))
    if isinstance(days, str):
        with pytest.raises(DataError, match=days):
            times.micros(column(texts), rules)
    else:
        expected = [None if day is None else int(np.datetime64(day, "us").astype(np.int64)) for day in days]
        assert times.micros(column(texts), rules).to_pylist() == expected


@every(
    "form",
    ["%Y%m%d", "%d/%m", "%H:%M", "%m/%Y %H:%M", "%m/%d/%Y %I:%M", "%m/%d/%Y %H %p", "%d/%m/%d %Y", "%Y-%d-%m",
     "%m/%d/%Y %Q", "x"],
)  # fmt: skip
def test_a_form_of_times_that_is_unclear_is_refused(form: str) -> None:
    with pytest.raises(ValueError, match=r"time_format.*\n.*allowed: %d, %m or %b, %Y or %y"):
        DataConfig.model_validate({"time_format": form})


def test_the_first_rows_decide_for_all_files_and_a_form_of_times_needs_a_dense_column_of_them(tmp_path: Path) -> None:
    for first, second, why in (
        (["0,a,2024-05-01", "1,a,2024-05-02"], "5", "5.* is no time"),
        (["0,a,5", "1,a,6"], "2024-05-01", ".* the rows before hold numbers"),
    ):
        write_file(tmp_path / "b.csv", f"y,u,at\n1,a,{second}\n")
        with pytest.raises(DataError, match=rf"b\.csv, row 1, column at: {why}"):
            opened(tmp_path, ["y,u,at", *first], train=["log.csv", "b.csv"], dense=["at"])
    with pytest.raises(ConfigError, match=r"data\.time_format: has no effect: no dense column holds times"):
        opened(tmp_path, ["y,u,at", "0,a,5/1/2024", "1,a,5/2/2024"], sparse=["at"], time_format=[US])


# Columns that cannot teach, and settings without effect


@every("pair", [("US", "us"), ("01", "1"), ("+7", "7"), ("007", "07")])
def test_two_spellings_are_told_once(tmp_path: Path, pair: tuple[str, str]) -> None:
    lines = ["y,u,v", *(f"{n % 2},{pair[n % 2]},{n}" for n in range(8)), *(f"{n % 2},de,{n}" for n in range(8))]
    (note,) = [note for note in opened(tmp_path, lines).notes if "column u" in note]
    assert f"{pair[0]!r} and {pair[1]!r} are two categories" in note or f"{pair[1]!r} and {pair[0]!r}" in note


def test_columns_that_cannot_teach_are_named(tmp_path: Path) -> None:
    lines = ["y,u,same,none,row,x,empty", *(f"{n % 2},{n % 7},k,,r{n},3," for n in range(120))]
    data = opened(tmp_path, lines, sparse=["u", "same", "none", "row"], dense=["x", "empty"])
    notes = {note.split(":")[0].removeprefix("column "): note for note in data.notes}
    assert set(notes) == {"same", "none", "row", "x", "empty"}
    assert "same value" in notes["same"] and "is empty" in notes["none"] and "names rows" in notes["row"]
    assert "same number" in notes["x"] and "is empty" in notes["empty"]


def test_a_column_that_was_constant_counts_as_zero_whatever_it_becomes(tmp_path: Path) -> None:
    data = opened(tmp_path, ["y,u,x,empty", "0,a,3,", "1,b,3,"], dense=["x", "empty"])
    columns = {"u": pa.array(["a"] * 3), "x": pa.array([3.0, 412.0, None]), "empty": pa.array([None, 7.5, -1e9])}
    samples = Inputs.of_json(data.inputs).samples(Chunk("new", np.arange(1, 4), columns))
    assert not samples.gather(np.arange(3)).dense_BI.any()


@every("pooling", ["mean", "max"])
def test_pooling_where_each_row_has_one_value_is_refused(tmp_path: Path, pooling: str) -> None:
    for cached in (False, True):
        with pytest.raises(ConfigError, match=f"u: pooling: {pooling} has no effect"):
            opened(tmp_path, ["y,u", "0,a", "1,b"], sparse=[{"column": "u", "pooling": pooling}])
        assert cached or opened(tmp_path, ["y,u", "0,a", "1,b"])


def test_texts_are_no_lists_for_a_model_of_lists() -> None:
    inputs = Inputs.of_json(
        {
            "form": FORM, "label": {"column": "y"}, "dense": [], "sparse": [{"column": "u"}], "scale": "standard",
            "missing": [""], "lists": ["u"], "kinds": {"u": "texts"}, "scales": {},
            "reading": {"form": "parquet"},
        }
    )  # fmt: skip
    lists = Chunk("new", np.arange(1, 3), {"u": pa.array([["a", "b"], []])})
    assert len(inputs.samples(lists).gather(np.arange(2)).ids["u"].values_N) == 2
    with pytest.raises(DataError, match=r"column u: holds string; allowed: lists, as in training"):
        inputs.samples(Chunk("new", np.arange(1, 3), {"u": pa.array(["a|b", ""])}))


def test_a_decimal_is_the_number_of_its_text_and_the_largest_number_of_64_bits_no_mark() -> None:
    texts = [f"{n * 7919 % 1_000_003 / 1000:.3f}" for n in range(2000)]
    decimals = pa.array([Decimal(text) for text in texts], pa.decimal128(20, 3))
    assert decode_numbers(column(decimals), rules()).tolist() == [float(text) for text in texts]
    found = decode_ids(column(pa.array([2**64 - 1, 1], pa.uint64())), "numbers", ReadingRules(("-1", "1")))
    assert found.tolist() == [-1, MISSING_ID]
