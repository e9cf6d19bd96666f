"""How delimited text is written: its dialect, texts that span lines, quotes that join rows by mistake, and amounts."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion.chunk import Column
from shardkeep.workers.data.conversion.decoding import decode_numbers
from shardkeep.workers.data.conversion.hashing import hash_text
from shardkeep.workers.data.conversion.rules import ReadingRules
from shardkeep.workers.data.sources.csv_dialect import dialect_of
from shardkeep.workers.data.sources.csv_files import CsvFiles
from shardkeep.workers.data.sources.csv_lines import CountedLines
from shardkeep.workers.data.sources.forms import csv_form
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.data_files import read, refusal

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


JOINED = [
    (["1,a,0", '2,so "called",1', '3,"b,0', '4,"c" d,1'], 3, 2),
    (["1,a,0", '2,"red,1', "3,b,0", "4,c,1", '5,"green,0', "6,d,1"], 2, 4),
    (["1,a,0", '2,",1', "3,b,0", '4,",1', "5,c,1"], 2, 3),
    (["1,a,0", '2,"tube,1', '3,27",0', "4,c,1"], 2, 2),
    (["1,a,0", '2,"red,1', "", "3,b,0", "  ", '4,"green,0', "5,d,1"], 2, 5),
    (["1,a,0", '"2,b,1', '"3,c,0', "4,d,1"], 2, 2),
    (["1,a,0", '2,b,"1', '3,c,"0', "4,d,1"], 2, 2),
    (["1,a,0", '"2,5","red,1', '3,"green,0', "4,d,1"], 2, 2),
    (["1,a,0", '2,"red,1', '3,"c","0,5"', "4,d,1"], 2, 2),
    (["1,a,0", '2,"b,\\"",1', '3,\\",0', "4,d,1"], 2, 2),
]


@every("packed", [False, True])
@every(("rows", "number", "lines"), JOINED)
def test_a_quote_that_joins_rows_is_refused_with_the_way_out(
    tmp_path: Path, rows: list[str], number: int, lines: int, packed: bool
) -> None:
    name, content = "a.csv.gz" if packed else "a.csv", texts_of(*rows)
    line = refusal(tmp_path, {name: gzip.compress(content) if packed else content}, **TEXTS)
    joined = re.search(f"{name}, row {number}: a quote (joins|is opened .*, over) {lines} lines", line)
    assert joined and WAY_OUT in line, line


@every(
    ("content", "why"),
    [
        (texts_of("1,a,0", "2,b,1", '3,c,"1', "4,d,0"), "row 3: a quote is opened and never closed"),
        (texts_of("1,a,0", '2,"b,1', "3,c,0"), "row 2: a quote is opened and never closed"),
        (texts_of("1,a,0", '2,"b,1', '3,"c, d",0'), "row 2: a quote is opened and never closed"),
        (texts_of("1,a,0", '2,"b', 'c",d,1'), "row 2: has 4 fields"),
        (texts_of("1,a,0", '2,"so" called,1', "3,b,0"), "row 2: a quote is opened and never closed"),
        (texts_of("1,a,0", '"2" ,b,1', '"3"4,c,0'), "row 3: a quote is opened and never closed"),
        (texts_of("1,a,0", '2,"so" "called",1', "3,b,0"), "row 2: a quote is opened and never closed"),
        (b'\xef\xbb\xbf"x",c,y,"n" m\n1,a,0,b\n2,b,1,c\n', "the header: a quote is opened and never closed"),
        (texts_of("1,a,0", "2,b,1")[:-1] + b'\n3,"c', "row 3: "),
        (b'x,c,y,"note\n1,a,0,b\n2,b,1,"c\n3,c,0,d\n4,c,1,d\n', "the header: a quote is opened and never closed"),
    ],
)
def test_a_quote_that_spoils_a_row_names_the_way_out(tmp_path: Path, content: bytes, why: str) -> None:
    line = refusal(tmp_path, {"a.csv": content}, **TEXTS)
    assert f"a.csv, {why}" in line and WAY_OUT in line, line


@every(
    ("rows", "number"),
    [
        (["1,a,0", r'2,"say \"hi\" now",1', "3,b,0"], 2),
        (["1,a,0", r'2,"say \"hi\", now",1', "3,b,0"], 2),
        (["1,a,0", r'2,"say \"hi\"",1', "3,b,0"], 2),
        (["1,a,0", r'2,"5\" wide",1', r'3,"6\" wide",0'], 2),
        (["1,a,0"] * 20_000 + [r'2,"a \"b\" c",1'] + ["3,b,0"] * 20_000, 20_001),
    ],
)
def test_a_file_with_escaped_quotes_is_refused_and_read_with_the_escape_that_is_named(
    tmp_path: Path, rows: list[str], number: int
) -> None:
    files = {"a.csv": texts_of(*rows)}
    line = refusal(tmp_path, files, **BOTH)
    assert re.search(rf"a.csv, row {number}: .*, or if \\ stands before them: data.escape: '\\'$", line), line
    expected = next(csv.reader([rows[number - 1]], escapechar="\\"))[1]
    assert read(tmp_path, files, **BOTH, escape="\\").ids["c"][number - 1] == hash_text(expected.encode())


@every("newline", ["\n", "\r\n"])
@every("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@every(
    "texts",
    [
        ["good", "well, it works\nand looks, too, fine", "bad, bad\n\nbad", "one\ntwo"],
        ["fine, thanks\nnever, again", "one\ntwo\nthree", "a"],  # lines that could be rows, beside others
        ['he said "no",\nand left', 'a "b", c\nd', '"'],
        ["word, " * 60_000 + "\nend", "b"],
    ],
)
def test_texts_with_commas_quotes_and_line_ends_are_read_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, texts: list[str], quoting: int, newline: str
) -> None:
    caplog.clear()
    texts = [text.replace("\n", newline) for text in texts]
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
    ],
)
def test_marks_that_are_none_or_without_effect_are_refused(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    for value in ("", "''", "é", "\n", 5, ["x"]):
        with pytest.raises(ValidationError):
            DataConfig.model_validate({key: value for key in settings if key in ("quote", "escape")})
    with pytest.raises(ConfigError, match=re.escape(why)):
        read(tmp_path, {"a.csv": texts_of("1,a,0", "2,b,1")}, **BOTH | {"source": "csv"} | settings)


@every("size", [1, 2, 3, 1000])
def test_lines_are_counted_for_blocks_of_any_size(size: int) -> None:
    text = b"\n\na\r\nb\n\n\r\nc\rd\r\n\re\n f"
    stream = CountedLines(pa.input_stream(pa.py_buffer(text)), CsvFiles(",", None).dialect())
    parts = []
    while len(part := bytes(stream.read(size))):
        parts.append(part)
    assert b"".join(parts) == text and stream.lines == 6


@every("form", [CsvFiles(",", None), CsvFiles("\t", None, "'"), CsvFiles(",", None, escape="\\")])
def test_quotes_close_where_they_do_for_a_strict_reader_whatever_the_parts(form: CsvFiles) -> None:
    marks = f"a{form.delimiter}{form.quote}{form.escape or chr(10)}"
    for text in map("".join, itertools.product(marks, repeat=6)):
        try:
            spoiled = not list(csv.reader(io.StringIO(text, newline=""), strict=True, **form.dialect()))
        except csv.Error:
            spoiled = True
        stream = CountedLines(pa.input_stream(pa.py_buffer(text.encode())), form.dialect())
        while stream.read(4).size:
            pass
        assert (stream.spoiled < np.inf) == spoiled or text[-1] == form.escape, text


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
        list(
            csv_form(CsvFiles(",", None)).read(path, ["x"], lambda _share: path.write_bytes(texts_of("1,a,0")) and None)
        )


@every(
    ("text", "known", "found"),
    [
        ("a,b\n1,x\n2,y\n", {}, {}),
        ("a;b\n1;x\n2;y\n", {}, {"delimiter": ";"}),
        ("a\tb c\n1\tx y\n2\ty\n", {}, {"delimiter": "\t"}),
        ("a|b,c\n1|2,3\n2|3\n", {}, {"delimiter": "|"}),
        ("a::b\n1::x, y\n", {}, {"delimiter": "::"}),
        ("a b c\n1 2 3\n", {}, {"delimiter": " "}),
        ("a, b, c\n1, 2, 3\n", {}, {}),
        ('a,b\n"x, y",2\n"u\nv",3\n', {}, {}),
        ("a;price\n1;2,5\n2;\n3;1,25\n", {}, {"delimiter": ";", "decimal": ","}),
        ("a;price\n1;2,5\n2;1.234,50\n", {}, {"delimiter": ";", "decimal": ","}),
        ("a;price\n1;2,5 EUR\n2;1.234 EUR\n3;7 EUR\n", {}, {"delimiter": ";", "decimal": ","}),
        ("a;price\n1;2,5\n2;-21\n3;7\n", {}, {"delimiter": ";", "decimal": ","}),
        ("a;tags\n1;2,5\n2;21\n3;7,8,9\n", {}, {"delimiter": ";"}),
        ("a;price\n1;2 EUR\n2;1.234 EUR\n", {}, {"delimiter": ";"}),
        ("a;price\n1;2,5\n2;\n", {"decimal": "."}, {"delimiter": ";"}),
        ("1,x\n2,y\n", {"columns": ["a", "b"]}, {}),
        ("a;b,c\n1;2,3\n", {"delimiter": ","}, {}),
        ("one\nx\ny\n", {"delimiter": ","}, {}),
    ],
)
def test_the_dialect_is_found(tmp_path: Path, text: str, known: dict[str, Any], found: dict[str, Any]) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    config = DataConfig(source="csv", train=[str(tmp_path / "a.csv")], **known)
    assert dialect_of(tmp_path / "a.csv", config) == found


@every(
    ("text", "told"),
    [
        ("a;b,c\n1;2,3\n", "may be ',' (2 columns) or ';' (2 columns); say it by --set data.delimiter=';' (or tab)"),
        ("a\n1\n2\n", "the delimiter is unclear, it is none of"),
        ('a,b\n"x \\"y\\", z",1\n', "if \\ stands before quotes: --set 'data.escape=\\'"),
        ("1,x,2\n2,y,3\n", "the first line may be names or a row (1, x, 2: 1 is a number); name the 3 columns by"),
        ("u,x\nu,y\nv,x\n", "u stands below, too"),
    ],
)
def test_an_unclear_dialect_is_refused_with_the_choices(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(told)):
        dialect_of(tmp_path / "a.csv", DataConfig(source="csv", train=["a.csv"]))


@every(
    ("texts", "decimal", "encoding", "expected"),
    [
        (["84,50 EUR", "1.234,00 EUR", "3 EUR", "-5,10 EUR"], ",", "utf-8", [84.5, 1234.0, 3.0, -5.1]),
        (["84,50 €", "1.234.567 €", "€ 5", "-€5,1"], ",", "utf-8", [84.5, 1_234_567.0, 5.0, -5.1]),
        (["84,50\xa0€", "1.234 €"], ",", "utf-8", [84.5, 1234.0]),
        (["84,50 €", "1.234,00\xa0€"], ",", "cp1252", [84.5, 1234.0]),
        (["84,50 €"], ",", "iso8859-15", [84.5]),
        (["EUR84,50"], ",", "utf-8", [84.5]),
        (["$84.50", "$1,234", "-$1,234.5"], ".", "utf-8", [84.5, 1234.0, -1234.5]),
        (["£3", "9.5"], ".", "latin-1", [3.0, 9.5]),
        (["", "3 EUR"], ",", "utf-8", [None, 3.0]),
        (["1.234", "1,5"], ",", "utf-8", [1.234, 1.5]),  # a number without a currency keeps its only point
        (["9.5", "£3"], ".", "utf-8", "one currency"),
        (["84,50 EUR", "3 USD"], ",", "utf-8",
         r"row 2, column price: '3 USD' is not a number; .*one column have one currency"),
        (["Mädchen 5"], ",", "utf-8", r"'Mädchen 5' is not a number; allowed: numbers, or data.missing; times"),
    ],
)  # fmt: skip
def test_amounts_of_one_currency_are_numbers(
    texts: list[str], decimal: str, encoding: str, expected: list[float | None] | str
) -> None:
    values = pa.array([text.encode(encoding) for text in texts], pa.binary())
    column = Column("a.csv", np.arange(len(texts)) + 1, "price", values, decimal)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            decode_numbers(column, ReadingRules(("",)))
    else:
        found = decode_numbers(column, ReadingRules(("",))).tolist()
        assert [None if np.isnan(number) else number for number in found] == expected
