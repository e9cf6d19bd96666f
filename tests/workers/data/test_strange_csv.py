"""Delimited text as the world writes it: read as it stands, or refused by one line with file, row and column."""

from __future__ import annotations

import bz2
import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.sources import text_files
from tests.support.cases import every
from tests.support.data_files import read, refusal
from tests.support.pairs import cases_of

TABLE = b"x,c,y\n1,a,0\n2,b,1\n"
BOTH: dict[str, Any] = {"dense": [{"column": "x", "fill": -1.0}], "sparse": ["c"]}

# One table in many forms. Its texts hold the characters by which forms differ.
TEXTS = ["red", "Grün", "a b", "0", "", "naïve café", "x" * 300]
NUMBERS = [1.0, -2.5, 3e10, 0.0, -1.0, 1e-3, 7.0]
LABELS = [0, 1, 1, 0, 1, 0, 1]
NEWLINES, QUOTES = ["\n", "\r\n"], ["", '"']
FORMS = [
    *cases_of({"delimiter": [*",;\t|"], "newline": NEWLINES, "quote": QUOTES, "encoding": ["utf-8-sig", "latin-1"]}),
    *cases_of({"delimiter": ["::", "<>"], "newline": NEWLINES, "encoding": ["utf-8", "utf-8-sig"]}),
    *cases_of({"newline": [*NEWLINES, "\r"], "quote": QUOTES, "end": ["", "\n", "\n\n \n"]}),
]


@every("form", FORMS)
def test_one_table_in_many_forms_is_one_table(tmp_path: Path, form: dict[str, str]) -> None:
    plain = {"delimiter": ",", "quote": "", "encoding": "utf-8", "end": "\n"} | form
    delimiter, newline, quote, encoding, end = (
        plain[each] for each in ("delimiter", "newline", "quote", "encoding", "end")
    )
    lines = [delimiter.join(["x", "c", "y"])]
    for number, text, label in zip(NUMBERS, TEXTS, LABELS, strict=True):
        lines.append(delimiter.join(["" if number == -1.0 else repr(number), f"{quote}{text}{quote}", str(label)]))
    content = newline.join(lines) + end.replace("\n", newline)
    rows = read(tmp_path, {"a.csv": content.encode(encoding)}, **BOTH, delimiter=delimiter)
    assert rows.dense == [[float(np.float32(number))] for number in NUMBERS] and rows.labels == LABELS
    encoded = [text.encode(encoding.removesuffix("-sig")) for text in TEXTS]
    assert rows.ids["c"] == [hash_text(text) if text else MISSING_ID for text in encoded]


def _packed(name: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, name) as stream:
        stream.write(TABLE)
    return bytes(sink.getvalue())


@every(
    ("name", "content"),
    [
        ("a.csv.gz", gzip.compress(TABLE)),
        ("a.csv", gzip.compress(TABLE)),
        ("two.csv.gz", gzip.compress(TABLE[:10]) + gzip.compress(TABLE[10:])),
        ("a.csv.bz2", bz2.compress(TABLE)),
        ("a.csv.zst", _packed("zstd")),
        ("a.csv.lz4", _packed("lz4")),
    ],
)
def test_packed_files_are_read_by_their_content(tmp_path: Path, name: str, content: bytes) -> None:
    rows = read(tmp_path, {name: content}, **BOTH)
    assert (rows.dense, rows.labels) == ([[1.0], [2.0]], [0.0, 1.0])


LONG = gzip.compress(("x,c,y\n" + "".join(f"{i},c{i * 7919 % 997},{i % 2}\n" for i in range(3000))).encode())

NO_TABLES: dict[str, tuple[str, bytes, str]] = {
    "no bytes": ("a.csv", b"", "is empty"),
    "a byte order mark only": ("a.csv", b"\xef\xbb\xbf", "is empty|has no column"),
    "blank lines": ("a.csv", b"\n\r\n \n", "is empty"),
    "a header only": ("a.csv", b"x,c,y\n", "has no rows"),
    "a header without newline": ("a.csv", b"x,c,y", "has no rows"),
    "a header and blank lines": ("a.csv", b"x,c,y\n\n  \n\n", "has no rows"),
    "one class": ("a.csv", b"x,c,y\n1,a,1\n2,b,1\n", "column y: all 2 rows of the training data are class 1"),
    "utf-16": ("a.csv", TABLE.decode().encode("utf-16"), "is text in UTF-16"),
    "utf-16 big": ("a.csv", b"\xfe\xff" + TABLE.decode().encode("utf-16-be"), "is text in UTF-16"),
    "utf-16 without a mark": ("a.csv", TABLE.decode().encode("utf-16-le"), "is binary"),
    "a NUL in the header": ("a.csv", b"x\0,c,y\n1,a,0\n2,b,1\n", r"is binary, not text \(byte 1 is 0\)"),
    "a NUL in a value": ("a.csv", b"x,c,y\n1\x00,a,0\n2,b,1\n", r"is binary, not text \(byte 7 is 0\)"),
    "zip": ("a.csv", b"PK\x03\x04" + bytes(30), "is a zip archive or a spreadsheet"),
    "zeros in gz": ("a.csv.gz", gzip.compress(bytes(512)), "is binary"),
    "gz in gz": ("a.csv.gz", gzip.compress(gzip.compress(TABLE)), "has no column|is binary"),
    "parquet": ("a.csv", b"PAR1" + bytes(100), "holds parquet; use data.source: parquet"),
    "gz by name only": ("a.csv.gz", TABLE, "ends in .gz but does not hold gzip data"),
    "zst by name only": ("a.csv.zst", TABLE, "ends in .zst but does not hold zstd data"),
    "an empty gz": ("a.csv.gz", b"", "is empty"),
    "a gz of nothing": ("a.csv.gz", gzip.compress(b""), "is empty"),
    "a gz with a wrong checksum": ("a.csv.gz", LONG[:-8] + bytes(8), "truncated or damaged|cannot be read"),
    "a cut bz2": ("a.csv.bz2", bz2.compress(TABLE)[:-10], "truncated or damaged|cannot be read"),
    "html": ("a.csv", b"<!DOCTYPE html>\n<html><body>404</body></html>\n", "has no column [xy]"),
    "json lines": ("a.csv", b'{"x": 1, "c": "a", "y": 0}\n', "holds jsonl; use data.source: jsonl"),
    "another delimiter": ("a.csv", TABLE.replace(b",", b";"), "is data.delimiter ';', not ','"),
    "a comment on top": ("a.csv", b"# made on Monday\n" + TABLE, "has no column [xy]"),
    "a title on top": ("a.csv", b"Clicks of May\n" + TABLE, "has no column [xy]"),
    "a quote left open in the header": ("a.csv", b'x,"c,y\n1,a,0\n', "has no column y; it has: x, 'c,y.+n1,a,0'"),
    "a column twice": ("a.csv", b"x,c,y,x\n1,a,0,5\n2,b,1,6\n", "2 columns are called x; give each its own name"),
    "capitals": ("a.csv", b"X,C,Y\n1,a,0\n2,b,1\n", "has no column .; .*it has: X, C, Y"),
    "no label": ("a.csv", b"x,c\n1,a\n2,b\n", "has no column y"),
    "carriage returns in a quoted name": ("a.csv", b'"x\r\n",c,z\n1,a,0\n', "has no column y"),
}  # fmt: skip


@every("case", NO_TABLES)
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path, case: str) -> None:
    name, content, why = NO_TABLES[case]
    line = refusal(tmp_path, {name: content}, **BOTH)
    assert re.search(why, line), line
    assert str(tmp_path / name) in line or line.startswith("label column y")


WRONG_ROWS = {
    "a field too few": ("1,a,0\n2,b\n", 2, r"has 2 fields, expected 3 \('2,b'\)"),
    "a field too many": ("1,a,0\n2,b,1,9\n", 2, "has 4 fields, expected 3"),
    "a trailing delimiter": ("1,a,0,\n2,b,1,\n", 1, "has 4 fields, expected 3"),
    "no UTF-8 and a field too many": (b"1,a,0\n2,\xff\xfe,1,1\n", 2, "has 4 fields, expected 3"),
    "no UTF-8 after blank lines": (b"\n1,a,0\n \n2,\xff,1,1\n", 2, "has 4 fields, expected 3"),
    "another delimiter halfway": ("1,a,0\n2;b;1\n", 2, "has 1 fields, expected 3"),
    "a quote that stays open": ('1,a,0\n2,"b,1\n3,c,0\n', 2, "a quote is opened and never closed"),
    "the end of a DOS file": ("1,a,0\n2,b,1\n\x1a", 3, "has 1 fields, expected 3"),
    "a second header": ("1,a,0\nx,c,y\n2,b,1\n", 2, "column (x|y): '(x|y)' is not a number"),
    "a second byte order mark": ("1,a,0\n\ufeff2,b,1\n", 2, r"column x: '.ufeff2' is not a number"),
    "a missing label": ("1,a,0\n2,b,\n3,c,1\n", 2, r"column y: the label is missing \(1 of 3 rows\)"),
    "a row of delimiters": ("1,a,0\n,,\n3,c,1\n", 2, "column y: the label is missing"),
    "a third class": ("1,a,0\n2,b,1\n3,c,2\n", 3, "column y: the label is 2; allowed: 0 and 1"),
    "a label with a fraction": ("1,a,0\n2,b,0.5\n", 2, "the label is 0.5; allowed: 0 and 1, .* or train.loss: mse"),
    "a label in words": ("1,a,0\n2,b,yes\n", 2, "column y: 'yes' is not a number.*data.label.positive"),
    "an infinite label": ("1,a,0\n2,b,inf\n", 2, "column y: is infinite"),
    "a label of -1": ("1,a,1\n2,b,-1\n", 2, "column y: the label is -1"),
    "a number after a date": ("2020-01-01,a,0\n5,b,1\n", 2, "column x: '5' is no time"),
    "a word after a truth value": ("true,a,0\nno,b,1\n", 2, "column x: 'no' is not a number"),
}  # fmt: skip


@every("case", WRONG_ROWS)
def test_a_wrong_row_is_named(tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]) -> None:
    rows, number, why = WRONG_ROWS[case]
    content = b"x,c,y\n" + (rows.encode() if isinstance(rows, str) else rows)
    line = refusal(tmp_path, {"a.csv": content}, **BOTH)
    assert re.search(f"^{tmp_path}/a.csv, row {number}(:|,) ?.*{why}", line), line
    assert capfd.readouterr().err == ""


@every(
    ("content", "settings", "why"),
    [
        ("x,c,y\n1,a,yes\n2,b,no\n", {"label": {"column": "y", "positive": ["Yes"]}},
         "class 0 .*'yes', 'no'.*data.label.positive"),
        ("x,c,y\n1,a,0\n1,2\n", {"columns": ["x", "c", "y"]}, "row 2: has 2 fields"),
        ("1,2\n", {"columns": ["x", "c", "y"]}, "row 1: has 2 fields with delimiter .*, expected 3"),
        ("x;c;y\n1,5;a;0\n", {"delimiter": ";"}, "'1,5' is not a number.*data.decimal"),
        (",x,c,y\n0,1,a,0\n", {"sparse": ["*"]}, r"sparse: \* matches column 1 .* has no name"),
        ("x,c,y,\n1,a,0,\n", {"dense": ["*"]}, r"dense: \* matches column 4 .* has no name"),
        ("x,c,y\n1,a,>50K\n2,b,<=50K\n", {"eval": "b.csv", "label": {"column": "y", "positive": [">50K"]}},
         r"evaluation data are class 0 .*'>50K\.'"),
    ],
)  # fmt: skip
def test_what_the_config_does_not_find_in_a_file_is_named(
    tmp_path: Path, content: str, settings: dict[str, Any], why: str
) -> None:
    line = refusal(tmp_path, {"a.csv": content, "b.csv": "x,c,y\n1,a,>50K.\n2,b,<=50K.\n"}, **BOTH | settings)
    assert re.search(why, line), line


VALUES: dict[str, float | str] = {
    "+1": 1.0, "1e3": 1000.0, "1E-3": 0.001, " 2 ": 2.0, "-0": 0.0, ".5": 0.5, "5.": 5.0, "007": 7.0,
    "TRUE": 1.0, "false": 0.0, "": -1.0, "NA": -1.0, "nan": -1.0, "?": -1.0, " ": -1.0, '"3"': 3.0, '" 3 "': 3.0,
    "2024-01-01": "is not a number",  # beside numbers
    "1e-400": 0.0, "16777217": 16777216.0, "123456789012345678901234567890": 1.2345679e29,
    "1e39": "is beyond float32", "-1e39": "is beyond float32", "9" * 400: "is infinite",
    "1e400": "is infinite",    "inf": "is infinite", "-Infinity": "is infinite",
    "0x10": "is not a number", "1_000": "is not a number", '"1,5"': "see data.decimal", '"1,000.5"': "is not a number",
    "2024-02-30": "is not a number", "12:00": "is not a number", "01.02.2024": "is not a number",
    "١٢": "is not a number", "\uff11": "is not a number", "1 2": "is not a number", "$5": "is not a number",
    "5%": "is not a number", "NULL": "is not a number", "none": "is not a number", "1e": "is not a number",
    "--1": "is not a number", "1\u00a0": "is not a number", "\ufffd": "is not a number", "[1]": "is not a number",
    "x" * 5000: "is not a number", "'1'": "is not a number", "½": "is not a number", "1\x0b": 1.0,
}  # fmt: skip
DATES: dict[str, float | str] = {
    "2024-01-01": 1704067200.0, "2024-01-01T00:00:01": 1704067201.0, "2024-01-01 00:00:00Z": 1704067200.0,
    "1969-12-31": -86400.0, "2024-02-30": "is no time", "2024-13-01": "is no time", "24-01-01": "is no time",
}  # fmt: skip
FIRST = {text: f"1970-01-01 00:00:00{'Z' if text.endswith('Z') else ''}" for text in DATES}


@every("texts", [VALUES, *({text: expected} for text, expected in DATES.items())])
def test_numbers_are_read_to_the_digit_and_dates_to_the_second_or_refused(
    tmp_path: Path, texts: dict[str, float | str]
) -> None:
    first = FIRST[next(iter(texts))] if texts is not VALUES else "8"
    head, zero = f"x,c,y\n{first},a,0\n", 8.0 if texts is VALUES else 0.0
    numbers = {text: expected for text, expected in texts.items() if isinstance(expected, float)}
    if numbers:
        rows = read(tmp_path, {"a.csv": head + "".join(f"{text},b,1\n" for text in numbers)}, **BOTH)
        assert rows.dense == [[zero], *([float(np.float32(number))] for number in numbers.values())]
    for text in texts.keys() - numbers.keys():
        line = refusal(tmp_path, {"a.csv": f"{head}{text},b,1\n"}, **BOTH)
        assert re.search(f"a.csv, row 2, column x: .*({texts[text]})", line), line


@every(
    ("content", "why"),
    [
        ("y,x,c\n1,5,z\n", None),
        ("q,x,c,y\n9,5,z,1\n", None),
        ("x,c,y\n", None),
        ("x,y\n5,1\n", "has no column c"),
        ("", "is empty"),
        ("5,z,1\n", "has no column [xy]"),
        ("x,c,y\nfive,z,1\n", "row 1, column x: 'five' is not a number"),
        ("x,c,y\n5,z,1\n6,z,?\n", "row 2, column y: the label is missing .1 of 4 rows."),
    ],
)
def test_a_second_file_may_differ_in_form_only(tmp_path: Path, content: str, why: str | None) -> None:
    files, settings = {"a.csv": TABLE, "b.csv": content}, BOTH | {"train": ["a.csv", "b.csv"]}
    if why is None:
        assert read(tmp_path, files, **settings).dense == [[1.0], [2.0], *([[5.0]] if "5" in content else [])]
    else:
        line = refusal(tmp_path, files, **settings)
        assert str(tmp_path / "b.csv") in line and re.search(why, line), line


@every(
    "names",
    [
        ["x", "c", "y"] + [f"u{i}" for i in range(3000)],
        ["x", "c", "y", "u", "u"],
        ["x", "c", "y", "", ""],
        [" x ", '"c"', "y "],
        ["x", "c", "y", "n" * 70_000],
    ],
    ids=["3000 columns", "an unused name twice", "no names", "spaces and quotes", "a long name"],
)
def test_headers_of_many_kinds(tmp_path: Path, names: list[str]) -> None:
    rest = ["0"] * (len(names) - 3)
    lines = [names, ["1", "a", "0", *rest], ["2", "b", "1", *rest]]
    assert read(tmp_path, {"a.csv": "\n".join(",".join(line) for line in lines)}, **BOTH).dense == [[1.0], [2.0]]


def test_a_row_longer_than_a_block_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 1 << 20)
    line = refusal(tmp_path, {"a.csv": b"x,c,y\n1,a,0\n2," + b"b" * (5 << 19) + b",1\n"}, **BOTH)
    assert re.search("a.csv, after row [01]: a row is longer than 1 MB", line), line
