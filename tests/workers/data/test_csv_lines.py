"""Lines and rows of delimited text: its dialect, texts that span lines, and quotes that join rows by mistake."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion.hashing import hash_text
from shardkeep.workers.data.sources.csv_files import CsvForm
from shardkeep.workers.data.sources.csv_lines import CountedLines
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.strange_files import read, refusal

BOTH: dict[str, Any] = {"dense": ["x"], "sparse": ["c"]}
TEXTS: dict[str, Any] = {"sparse": ["x", "c"], "label": {"column": "y", "positive": ["1", '"1']}}
WAY_OUT = "data.quote: none"


def texts_of(*rows: str) -> bytes:
    return ("x,c,y\n" + "".join(f"{row}\n" for row in rows)).encode()


def written(texts: list[str], **dialect: Any) -> bytes:
    """The texts as column c, as Python's csv writes them."""
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, lineterminator="\n", **dialect)
    writer.writerows([["x", "c", "y"], *([i, text, i % 2] for i, text in enumerate(texts))])
    return sink.getvalue().encode()


JOINED = {
    "a word in quotes on two lines": (["1,a,0", '2,"so" called,1', '3,"b,0', '4,"c" d,1'], 3, 2),
    "a quote that begins texts": (["1,a,0", '2,"red,1', "3,b,0", "4,c,1", '5,"green,0', "6,d,1"], 2, 4),
    "a quote alone": (["1,a,0", '2,",1', "3,b,0", '4,",1', "5,c,1"], 2, 3),
    "inches": (["1,a,0", '2,"tube,1', '3,27",0', "4,c,1"], 2, 2),
    "blank lines between": (["1,a,0", '2,"red,1', "", "3,b,0", "  ", '4,"green,0', "5,d,1"], 2, 5),
    "a quote in the first column": (["1,a,0", '"2,b,1', '"3,c,0', "4,d,1"], 2, 2),
    "quoted delimiters before": (["1,a,0", '"2,5","red,1', '3,"green,0', "4,d,1"], 2, 2),
    "quoted delimiters behind": (["1,a,0", '2,"red,1', '3,"c","0,5"', "4,d,1"], 2, 2),
    "the last column": (["1,a,0", '2,b,"1', '3,c,"0', "4,d,1"], 2, 2),
}


@every("packed", [False, True], ids=["plain", "gz"])
@every("case", JOINED)
def test_a_quote_that_joins_rows_is_refused_with_the_way_out(tmp_path: Path, case: str, packed: bool) -> None:
    rows, number, lines = JOINED[case]
    name = "a.csv.gz" if packed else "a.csv"
    content = texts_of(*rows)
    line = refusal(tmp_path, {name: gzip.compress(content) if packed else content}, **TEXTS)
    joined = re.search(f"{name}, row {number}: a quote (joins|is opened .*, over) {lines} lines", line)
    assert joined and WAY_OUT in line, line


@every("case", [case for case in JOINED if "delimiters" not in case])
def test_without_quoting_each_line_is_a_row(tmp_path: Path, case: str) -> None:
    rows = JOINED[case][0]
    ones = {row.split(",")[2] for row in rows if row.strip()} & {"1", '"1'}
    settings = TEXTS | {"label": {"column": "y", "positive": sorted(ones)}}
    found = read(tmp_path, {"a.csv": texts_of(*rows)}, **settings, quote="none")
    assert found.ids["c"] == [hash_text(row.split(",")[1].encode()) for row in rows if row.strip()]


@every(
    ("content", "why"),
    [
        (texts_of("1,a,0", "2,b,1", '3,c,"1', "4,d,0"), "row 3: a quote is opened and never closed"),
        (texts_of("1,a,0", '2,"b,1', "3,c,0"), "row 2: a quote is opened and never closed"),
        (texts_of("1,a,0", '2,"b,1', '3,"c, d",0'), "row 2: a quote is opened and never closed"),
        (texts_of("1,a,0", '2,"b', 'c",d,1'), "row 2: has 4 fields"),
        (b'x,c,y,"note\n1,a,0,b\n2,b,1,"c\n3,c,0,d\n4,c,1,d\n', "the header: a quote is opened and never closed"),
    ],
    ids=["in the last column", "in the middle", "before a quoted delimiter", "a text of two lines", "in the header"],
)
def test_a_quote_that_spoils_a_row_names_the_way_out(tmp_path: Path, content: bytes, why: str) -> None:
    line = refusal(tmp_path, {"a.csv": content}, **TEXTS)
    assert f"a.csv, {why}" in line and WAY_OUT in line, line


REVIEWS = {
    "commas and line ends": ["good", "well, it works\nand looks, too, fine", "bad, bad\n\nbad", "one\ntwo"],
    "lines that could be rows, beside others": ["fine, thanks\nnever, again", "one\ntwo\nthree", "a"],
    "quotes": ['he said "no",\nand left', 'a "b", c\nd', '"'],
    "long": ["word, " * 60_000 + "\nend", "b"],
}


@every("newline", ["\n", "\r\n"], ids=["unix", "windows"])
@every("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL], ids=["where needed", "all"])
@every("case", REVIEWS)
def test_texts_with_commas_quotes_and_line_ends_are_read_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, quoting: int, newline: str
) -> None:
    caplog.clear()
    texts = [text.replace("\n", newline) for text in REVIEWS[case]]
    content = written(texts, quoting=quoting)
    with caplog.at_level(logging.WARNING):
        rows = read(tmp_path, {"a.csv": content}, **BOTH)
    assert rows.ids["c"] == [hash_text(text.strip().encode()) for text in texts]
    lines = sum(line.strip() != "" for line in content.decode().splitlines()) - 1
    spanning = sum("\n" in text for text in texts)
    (told,) = caplog.messages
    assert told.endswith(f"a.csv: {lines:,} lines are {len(texts):,} rows (rows of several lines: {spanning:,})")


def test_a_text_of_which_each_line_could_be_a_row_needs_another_that_could_not(tmp_path: Path) -> None:
    doubtful = '1,"fine, thanks\nnever, again",0'
    assert "row 1: a quote joins 2 lines" in refusal(tmp_path, {"a.csv": texts_of(doubtful, "2,b,1")}, **BOTH)
    rows = read(tmp_path, {"a.csv": texts_of(doubtful, '2,"one\ntwo",1')}, **BOTH)
    assert rows.ids["c"][0] == hash_text(b"fine, thanks\nnever, again")


def test_a_file_without_rows_that_span_lines_is_told_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = b'\n"x","c","y"\n\n1,"a ""b"", c",0\n   \n\n2,5" d,1\n\n'
    with caplog.at_level(logging.WARNING):
        assert len(read(tmp_path, {"a.csv": content}, **BOTH).labels) == 2
    assert not caplog.messages


@every(
    ("content", "settings", "expected"),
    [
        ("x,c,y\n1,'a, b',0\n2,\"b,1\n", {"quote": "'"}, ["a, b", '"b']),
        ("x,c,y\n1,'a\nb',0\n2,\"b,1\n", {"quote": "'"}, ["a\nb", '"b']),
        ('x,c,y\n1,"a \\" b",0\n2,b\\,c,1\n', {"escape": "\\"}, ['a " b', "b,c"]),
        ('x,c,y\n1,"a \\", b",0\n2,"b ""c""",1\n', {"escape": "\\"}, ['a ", b', 'b "c"']),
        ("x,c,y\n1,a\\, b,0\n2,\"b,1\n", {"escape": "\\", "quote": "none"}, ["a, b", '"b']),
        ("x,c,y\n1,a\\\nb,0\n2,c,1\n", {"escape": "\\", "quote": "none"}, ["a\nb", "c"]),
        ('x,c,y\n1,"a",0\n2,"b"" ""c",1\n', {"quote": None}, ['"a"', '"b"" ""c"']),
        ('x,c,y\n1,"a",0\n2,"b,1\n', {"quote": "off"}, ['"a"', '"b']),
    ],
    ids=["single", "over lines", "escape", "escape and doubled", "escape alone", "escaped line end", "null", "off"],
)  # fmt: skip
def test_the_dialect_can_be_set(tmp_path: Path, content: str, settings: dict[str, Any], expected: list[str]) -> None:
    rows = read(tmp_path, {"a.csv": content.encode()}, **BOTH, **settings)
    assert rows.ids["c"] == [hash_text(text.encode()) for text in expected]


def test_a_cache_of_another_dialect_is_not_read(tmp_path: Path) -> None:
    files = {"a.csv": b'x,c,y\n1,"a",0\n2,b,1\n'}
    found = [read(tmp_path, files, **BOTH, quote=quote).ids["c"][0] for quote in ('"', "none", "'", '"')]
    assert found == [hash_text(text) for text in (b"a", b'"a"', b'"a"', b"a")]


@every(
    ("settings", "why"),
    [
        ({"quote": "|", "delimiter": "|"}, "are not three characters"),
        ({"escape": ","}, "are not three characters"),
        ({"escape": '"'}, "are not three characters"),
        ({"quote": "'", "delimiter": "::"}, "have no effect with a data.delimiter of several"),
        ({"escape": "\\", "delimiter": "::"}, "have no effect with a data.delimiter of several"),
        ({"source": "parquet", "quote": "none"}, "data.quote: has no effect with source: parquet"),
        ({"source": "parquet", "escape": "\\"}, "data.escape: has no effect with source: parquet"),
        ({"source": "criteo", "label": None, "quote": "'"}, "data.quote: has no effect with source: criteo"),
        ({"source": "synthetic", "quote": "'"}, "has no effect with source: synthetic"),
    ],
)
def test_marks_that_are_none_or_without_effect_are_refused(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    for value in ("", "''", "é", "\n", 5, ["x"]):
        with pytest.raises(ValidationError):
            DataConfig.model_validate({key: value for key in settings if key in ("quote", "escape")})
    with pytest.raises(ConfigError, match=re.escape(why)):
        read(tmp_path, {"a.csv": texts_of("1,a,0", "2,b,1")}, **BOTH, **settings)


def test_rows_far_apart_are_refused_too(tmp_path: Path) -> None:
    rows = [f"{i},{chr(34) * (i % 20_000 == 10_000)}c{i % 9},{i % 2}" for i in range(60_000)]
    line = refusal(tmp_path, {"a.csv": texts_of(*rows)}, **BOTH)
    assert re.search(r"row 10001: a quote is opened .*, over 20001 lines", line), line


@every("size", [1, 2, 3, 1000])
def test_lines_are_counted_for_blocks_of_any_size(size: int) -> None:
    text = b"\n\na\r\nb\n\n\r\nc\rd\r\n\re\n f"
    stream = CountedLines(pa.input_stream(pa.py_buffer(text)))
    parts = []
    while len(part := bytes(stream.read(size))):
        parts.append(part)
    assert b"".join(parts) == text and stream.lines == 6


@every("seed", range(20))
def test_whatever_a_writer_quotes_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    """Random texts of the characters that mean something: the same rows, or one line."""
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(list('a",\n \r'), rng.integers(0, 9))) for _ in range(12)]
    content = written(texts, quoting=csv.QUOTE_ALL)
    try:
        rows = read(tmp_path, {"a.csv": content}, dense=["x"], sparse=["c"], missing=["never"])
    except DataError as error:
        assert "a quote joins" in str(error)
    else:
        assert rows.ids["c"] == [hash_text(text.strip(" \t\r\n\v\f").encode()) for text in texts]


@every("top", [",,\n", ",\n", " \n\n", '"x\n(m)",c,y2\n'], ids=["empty fields", "fewer", "blank", "unit"])
def test_what_stands_above_the_header_is_no_row(tmp_path: Path, top: str) -> None:
    header = "" if "(m)" in top else "x,c,y\n"
    settings = {"sparse": ["c"], "label": "y" if header else "y2"}
    content = f'{top}{header}1,"a, b\nc",0\n2,d,1\n'.encode()
    assert read(tmp_path, {"a.csv": content}, **settings).ids["c"][1] == hash_text(b"d")


def test_a_file_that_changes_before_its_lines_are_checked_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(texts_of('1,"a\nb",0', "2,b,1"))
    with pytest.raises(DataError, match=r"a.csv: has 1 rows, and 2 were read"):
        list(CsvForm(",", None).read(path, ["x"], lambda _share: path.write_bytes(texts_of("1,a,0")) and None))
