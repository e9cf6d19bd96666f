"""Files of all kinds give one table: JSON lines, Arrow, Feather, ORC beside Parquet. What is no table is one line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.feather as pf  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from pyarrow import orc

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.input_files import find_files
from shardkeep.workers.data.sources.forms import form_of, form_of_file
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.data_files import damaged, opened, read, refusal, write_file

COUNT = 300
TABLE = pa.table(
    {
        "y": [i % 2 for i in range(COUNT)],
        "x": [None if i % 7 == 0 else i / 8 for i in range(COUNT)],
        "c": [None if i % 11 == 0 else f"2024-05-{i % 28 + 1:02d}" for i in range(COUNT)],  # texts like times
        "n": [2**53 + i % 9 for i in range(COUNT)],
        "tags": [[f"t{i % 5}"] * (i % 3) for i in range(COUNT)],
    }
)
READ: dict[str, Any] = {"dense": ["x"], "sparse": ["c", "n", "tags"]}


def content_of(name: str, table: pa.Table = TABLE) -> bytes:
    """The table as a file of this name holds it."""
    sink = io.BytesIO()
    if ".jsonl" in name or ".json" in name:
        text = "".join(f"{json.dumps(row)}\n" for row in table.to_pylist()).encode()
        return {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)(text)
    if name.endswith(".arrow"):
        with (pa.ipc.new_stream if "data-" in name else pa.ipc.new_file)(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    else:
        writers = {".parquet": pq.write_table, ".orc": orc.write_table, ".feather": pf.write_feather}
        writers |= {".csv": lambda table, sink: pacsv.write_csv(table.drop(["tags"]), sink)}
        writers[Path(name).suffix](table, sink)
    return sink.getvalue()


def saved(folder: Path, *splits: str) -> None:
    """What `save_to_disk` of Hugging Face writes, with a file that an earlier call left there."""
    for split in splits or ("",):
        part, names = folder / split, [f"data-0000{i}-of-00002.arrow" for i in range(2)]
        half = COUNT // 2
        for i, name in enumerate(names):
            write_file(part / name, content_of(name, TABLE.slice(i * half, half)))
        write_file(part / "data-00002-of-00003.arrow", content_of("data-.arrow"))
        write_file(part / "state.json", json.dumps({"_data_files": [{"filename": name} for name in names]}))
        write_file(part / "dataset_info.json", "{}")
    if splits:
        write_file(folder / "dataset_dict.json", json.dumps({"splits": splits}))


@every(
    "name",
    [
        "a.jsonl",
        "a.ndjson",
        "a.json",
        "a.jsonl.gz",
        "a.jsonl.bz2",
        "a.feather",
        "a.arrow",
        "data-.arrow",
        "a.orc",
        "hf/",
        "dict/",
        "spark/part-0.parquet",
        "spark/000000_0",
    ],
)
def test_a_table_has_one_form_in_files_of_every_kind(tmp_path: Path, name: str) -> None:
    expected = read(tmp_path, {"a.parquet": content_of("a.parquet")}, **READ)
    if name in ("hf/", "dict/"):
        saved(tmp_path / name, *(("train", "test") if name == "dict/" else ()))
    else:
        kind = {"a.ndjson": "a.jsonl", "spark/000000_0": "a.parquet"}.get(name, name)
        write_file(tmp_path / name, content_of(kind))
    if name.startswith("spark"):
        write_file(tmp_path / "spark/_SUCCESS", "")
        write_file(tmp_path / "spark/.part-0.parquet.crc", "crc")
    assert read(tmp_path, train=name.split("/")[0], **READ) == expected


ONE = '{"y": 0, "x": 1, "c": "a"}\n'
JSON_LINES: dict[str, tuple[str, Any]] = {
    "a key left out is a missing value": (ONE + '{"y": 1, "c": "b"}', [1, "missing"]),
    "whole numbers beside others": (ONE + '{"y": 1, "x": 1.5}', [1, 1.5]),
    "NaN": (ONE + '{"y": 1, "x": NaN}', [1, "missing"]),
    "blank lines and ends of Windows": (ONE + '\r\n \r\n{"y": 1, "x": 2}\r\n', [1, 2]),
    "a byte order mark": ("\ufeff" + ONE + '{"y": 1, "x": 2}', [1, 2]),
    "two types in a column": (ONE + '{"y": 1, "x": true}', "a.jsonl, row 2, column x: changed from number to boolean"),
    "a text in a number column": (ONE * 9 + '{"y": 1, "x": "2"}', "row 10, column x: changed from number to string"),
    "a list in a column": (ONE + '{"y": 1, "c": ["a"]}', "row 2, column c: changed from string to array"),
    "a key twice": ('{"y": 1, "x": 1, "x": 2}', "row 1, column x: was specified twice"),
    "no object": (ONE + "7", "row 2: changed from object to number"),
    "a struct": (ONE + '{"y": 1, "z": {"a": 1}}', "column z: is a struct with the fields a; flatten it"),
    "a cut line": (ONE + '{"y": 1, "x"', "row 2: Missing a colon .* one object per line"),
    "an array": (f"[{ONE}]", "is one JSON array; write one object per line"),
    "a column less": ('{"y": 1}', "has no column x; it has: y"),
    "a number beyond 64 bits": (
        ONE + '{"y": 1, "x": -1}\n{"y": 1, "x": 123456789012345678901}',
        [1, -1, 123456789012345678901],
    ),
    "spaces": (" \n", "is empty"),
    "zip": ("PK\x03\x04", "is a zip archive"),
    "a CSV": ("y,x\n1,2\n", "row 1: Invalid value"),
}


@every("case", JSON_LINES)
@every("size", [1 << 24, 40])
def test_json_lines_are_rows_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, size: int
) -> None:
    monkeypatch.setattr("shardkeep.workers.data.sources.text_files.BLOCK_BYTES", size)
    text, told = JSON_LINES[case]
    files = {f"{size}.jsonl": text.replace("a.jsonl", f"{size}.jsonl")}
    sparse = [{"column": name} for name in ("z",) if "struct" in case]
    if isinstance(told, list):
        dense = [{"column": "x", "fill": 77}]
        rows = read(tmp_path, files, source="", label={"column": "y", "kind": "number"}, dense=dense)
        assert rows.dense == [[77 if value == "missing" else np.float32(value)] for value in told]
        return
    line = refusal(tmp_path, files, source="", dense=["x"], sparse=sparse)
    assert re.search(told.replace("a.jsonl", f"{size}.jsonl"), line), line


@every(
    ("values", "kind"),
    [
        (["1", "1.5"], "double"), (["null", "1"], "int64"), (["null"], "null"),
        (["18446744073709551615", "7"], "uint64"), (["7", "18446744073709551615"], "uint64"),
        (["1e20", "1"], "double"), (['"2024-05-01"', '"x"'], "string"),
        (['["2024-05-01"]', "[]"], "list<item: string>"),
        (["[]", "[1]", "[1.5]"], "list<item: double>"), (["true", "null"], "bool"),
    ],
)  # fmt: skip
@every("size", [1 << 24, 4])
def test_all_rows_of_json_lines_decide_the_type_of_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str], kind: str, size: int
) -> None:
    monkeypatch.setattr("shardkeep.workers.data.sources.text_files.BLOCK_BYTES", size)
    path = write_file(tmp_path / f"{size}.jsonl", "".join(f'{{"a": {value}}}\n' for value in values))
    form = form_of(DataConfig(source="jsonl"))
    types = {str(chunk.columns["a"].type) for chunk in form.read(path, ["a"], lambda _share: None)}
    assert {str(form.schema(path).field("a").type)} | types == {kind}


@every(
    "name",
    ["a.parquet", "a.orc", "a.arrow", "data-.arrow", "a.feather", "a.jsonl", "a.jsonl.gz", "a.jsonl.bz2", "a.csv"],
)
def test_damaged_files_are_refused_in_one_line_or_read(tmp_path: Path, name: str) -> None:
    """A flipped byte of a value is a value, and a CSV may end anywhere. `damaged` cuts, flips and puts in, in turn."""
    rng, whole = np.random.default_rng(0), content_of(name)
    for number, content in enumerate([b"", b"\0", rng.bytes(400)] + [damaged(whole, i, rng) for i in range(30)]):
        path, refused = write_file(tmp_path / name, content), ""
        try:
            for _ in form_of_file(path, {"form": "parquet"}).read(path, ["y", "x", "c", "n"], lambda _share: None):
                pass
        except DataError as error:
            refused = str(error)
        assert "\n" not in refused and len(refused) < 1000, refused
        assert refused or (number > 2 and (number % 3 or name == "a.csv")), (number, name)


@every("name", ["a.parquet", "a.orc", "a.arrow", "data-.arrow", "a.jsonl"])
def test_a_file_that_is_cut_while_it_is_read_is_refused_or_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("shardkeep.workers.data.sources.text_files.BLOCK_BYTES", 1 << 10)
    path, rows = write_file(tmp_path / name, content_of(name)), 0
    try:
        for chunk in form_of_file(path, {"form": "parquet"}).read(path, ["y", "c"], lambda _share: None):
            rows += len(chunk)
            path.write_bytes(path.read_bytes()[:50])
        assert rows == COUNT
    except DataError as error:
        assert str(path) in str(error)


PLACES: dict[str, tuple[dict[str, Any], str, str]] = {
    "several kinds": ({"d/a.csv": "x", "d/b.parquet": b"", "d/c.jsonl": ""}, "d", "several kinds .csv: a.csv, jsonl"),
    "arrays of NumPy": ({"a.npz": b"PK"}, "a.npz", "a.npz: holds NumPy arrays, .*module:function"),
    "in a folder": ({"d/a.npy": b"x"}, "d", "a.npy: holds NumPy arrays"),
    "a spreadsheet": ({"a.xlsx": b"PK"}, "a.xlsx", "holds a spreadsheet"),
    "s3": ({}, "s3://bucket/a.parquet", "s3://bucket/a.parquet is an address; copy or mount its files"),
    "hf": ({}, "hf://datasets/me/a.parquet", "is an address"),
    "https": ({}, "https://example.com/a.csv", "is an address"),
    "a lost shard": ({"d/state.json": '{"_data_files": [{"filename": "a.arrow"}]}'}, "d", "lacks the file a.arrow"),
    "a broken state": ({"d/state.json": "{"}, "d", "no whole dataset of Hugging Face"),
    "rows in an order of their own": (
        {"d/state.json": '{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}'}, "d", "flatten_indices",
    ),
    "no such split": ({"d/dataset_dict.json": '{"splits": ["a", "b"]}'}, "d", "splits a, b; name one, .*d/SPLIT"),
}  # fmt: skip


@every("case", PLACES)
def test_what_no_source_reads_is_named_with_the_way_out(tmp_path: Path, case: str) -> None:
    files, entry, told = PLACES[case]
    for name, content in files.items():
        write_file(tmp_path / name, content)
    with pytest.raises(DataError, match=told) as caught:
        find_files(tmp_path, [entry], key="data.train", kind="")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=told):
        DataConfig(root=str(tmp_path), train=[entry])


@every("name", ["a.csv", "a.parquet", "a.jsonl"])
def test_a_column_that_files_lack_is_missing_there_where_that_is_said(tmp_path: Path, name: str) -> None:
    def write(folder: str, table: pa.Table) -> dict[str, Any]:
        return {f"{folder}/{name}": content_of(name, table) if name != "a.csv" else table.to_pydict()}

    whole, both = (
        pa.table({"y": [0, 1], "x": [1.5, 2.5], "c": ["a", "b"]}),
        {"train": ["1/*", "2/*"], "source": name[2:]},
    )
    files, settings = write("1", whole.drop(["x", "c"])) | write("2", whole), {"dense": ["x"], "sparse": ["c"], **both}
    assert "has no column x; it has: y" in refusal(tmp_path, files, **settings)
    data = opened(tmp_path, {}, absent="missing", **settings)
    assert [note.partition(";")[0] for note in data.notes] == [
        f"column {column}: 1 of 2 files lack it, such as {name}" for column in ("x", "c")
    ]
    padded = whole.set_column(1, "x", pa.array([None] * 2, pa.float64())).set_column(
        2, "c", pa.array([None] * 2, pa.string())
    )
    written = read(tmp_path, write("3", padded) | {}, **settings | {"train": ["3/*", "2/*"]}, cache="c3")
    assert read(tmp_path, absent="missing", **settings) == written
    for wrong, told in (({"dense": ["z"]}, "and 1 more: has no column z"), ({"label": "w"}, "has no column w")):
        assert told in refusal(tmp_path, absent="missing", **settings | wrong)
    pattern = read(tmp_path, absent="missing", **settings | {"dense": ["x*"]})
    assert pattern == written
    assert data.inputs is not None and data.inputs["reading"]["absent"] == "missing"


@every(
    ("text", "more", "rows"),
    [
        ("c;x\na;1,5\nb;2,5\n", {}, [(b"a", b"1,5"), (b"b", b"2,5")]),
        ("c\tx\na\t1.5\n", {}, [(b"a", b"1.5")]),
        ("c,x\na,1.5\n", {}, [(b"a", b"1.5")]),
        ("a;1,5\nb;1\n", {"columns": ["c", "x"], "delimiter": ";"}, [(b"a", b"1,5"), (b"b", b"1")]),
        ("c;x\na;1.000\n", {"delimiter": ";", "decimal": ","}, [(b"a", b"1.000")]),
    ],
)
def test_a_csv_beside_a_model_of_another_kind_shows_its_dialect(
    tmp_path: Path, text: str, more: dict[str, Any], rows: list[tuple[bytes, bytes]]
) -> None:
    path = write_file(tmp_path / "new.csv", text)
    (chunk,) = form_of_file(path, {"form": "orc", **more}).read(path, ["c", "x"], lambda _share: None)
    assert list(zip(*(chunk.columns[name].to_pylist() for name in ("c", "x")), strict=True)) == rows
    assert chunk.decimal == ("," if "1,5" in text or "decimal" in more else ".")


@every(
    "settings",
    [
        {}, {"delimiter": "::"}, {"quote": None}, {"escape": "\\"}, {"columns": ["x", "y"], "decimal": ","},
        {"absent": "missing"}, {"source": "orc"}, {"source": "jsonl", "absent": "missing"},
    ],
)  # fmt: skip
def test_a_model_reads_later_files_as_those_of_its_training(tmp_path: Path, settings: dict[str, Any]) -> None:
    form = form_of(DataConfig.model_validate({"source": "csv"} | settings))
    path = write_file(tmp_path / f"a.{settings.get('source', 'csv')}", "x,y\n1,2\n")
    assert form_of_file(path, json.loads(json.dumps(form.reading))) == form


def test_a_dialect_is_of_a_csv_alone() -> None:
    with pytest.raises(ConfigError, match=r"data.delimiter: has no effect with source: jsonl"):
        opened(Path(), train="a.jsonl", delimiter=";")
