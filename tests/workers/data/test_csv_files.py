"""Delimited text: how a config names its files and columns, and what it then reads."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources import csv_files
from shardkeep.workers.data.sources.csv_files import OneByteDelimiter
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

GOOD = "x,c,y\n1.5,red,0\n2.5,blue,1\n,,1\n"


def _open(folder: Path, content: str | bytes = GOOD, *, name: str = "a.csv", seed: int = 0, **settings: Any) -> Data:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    base: dict[str, Any] = {"source": "csv", "root": str(folder), "train": [name], "label": "y", "scale": "none"}
    return open_data(DataConfig.model_validate(base | {"dense": ["x"], "sparse": ["c"]} | settings), seed=seed)


def _ids(data: Data, feature: str = "c") -> list[int]:
    return list(data.train.gather(np.arange(len(data.train))).ids[feature].values_N.tolist())


def _dense(data: Data) -> list[list[float]]:
    return list(data.train.gather(np.arange(len(data.train))).dense_BI.tolist())


def _labels(data: Data) -> list[float]:
    return list(data.train.gather(np.arange(len(data.train))).label_BT[:, 0].tolist())


def test_columns_become_numbers_ids_and_labels(tmp_path: Path) -> None:
    data = _open(tmp_path)
    batch = data.train.gather(np.array([2, 0, 1]))
    assert batch.dense_BI.tolist() == [[2.0], [1.5], [2.5]]  # the missing one is the mean
    assert batch.ids["c"].values_N.tolist() == [MISSING_ID, hash_text(b"red"), hash_text(b"blue")]
    assert batch.label_BT.tolist() == [[1.0], [0.0], [1.0]]
    assert data.train.schema.dense == ("x",) and data.eval is None
    data = _open(tmp_path, dense=["x"], sparse=["x", "c"])  # a number and a category
    assert _ids(data, "x") == [hash_text(b"1.5"), hash_text(b"2.5"), MISSING_ID]


def test_a_delimiter_and_names_for_a_file_without_a_header(tmp_path: Path) -> None:
    data = _open(tmp_path, "1|red|0\n2|blue|1\n", delimiter="|", columns=["x", "c", "y"])
    assert _ids(data) == [hash_text(b"red"), hash_text(b"blue")]
    assert len(_open(tmp_path, columns=["x", "c", "y"]).train) == 3, "a header of these names is no sample"


@every(("rows", "block"), [(3, 1 << 24), (30_000, 1 << 16)], ids=["few", "more than a block"])
def test_a_delimiter_of_several_characters_is_found_wherever_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, block: int
) -> None:
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", block)
    content = "".join(f'{i}::"{i % 7}::{i % 2}\n' for i in range(rows))
    batch = _open(tmp_path, content, delimiter="::", columns=["x", "c", "y"]).train.gather(np.arange(rows))
    assert np.array_equal(batch.dense_BI[:, 0], np.arange(rows))
    assert np.array_equal(batch.label_BT[:, 0], np.arange(rows) % 2)
    assert batch.ids["c"].values_N[:2].tolist() == [hash_text(b'"0'), hash_text(b'"1')]  # quotes mean nothing


@every("size", [2, 3, 5, 1000])
def test_a_stream_gives_the_same_bytes_for_blocks_of_any_size(size: int) -> None:
    text = b"a::b:::c::::d:\n::"
    stream, parts = OneByteDelimiter(io.BytesIO(text), b"::"), []
    while part := stream.read(size):
        assert len(part) <= size
        parts.append(part)
    assert b"".join(parts) == text.replace(b"::", b"\x1f")


@every("delimiter", ["\t", "\\t", "tab"], ids=["a tab", "backslash t", "the word"])
def test_a_tab_may_be_written_in_three_ways(tmp_path: Path, delimiter: str) -> None:
    assert len(_ids(_open(tmp_path, GOOD.replace(",", "\t"), delimiter=delimiter))) == 3


@every(
    ("content", "settings", "dense", "labels"),
    [
        ("x;c;y\n1,5;a;0\n-2,25e1;a;1\n-1.234.567,5;a;0\n", {"delimiter": ";", "decimal": ","},
         [1.5, -22.5, -1234567.5], [0, 1, 0]),
        ("x,c,y\nTrue,a,False\nFALSE,b,True\n", {}, [1, 0], [0, 1]),
        ("x,c,y\n-999,a,0\n-999.0,b,1\n4,b,1\n6,b,1\n", {"missing": [-999]}, [5, 5, 4, 6], [0, 1, 1, 1]),
        ("x,c,y\n1,a,3\n2,b,5\n", {"train": "a.csv", "label": {"column": "y", "positive": 5}}, [1, 2], [0, 1]),
        ("x,c,y\n1,a, >50K\n2,b, <=50K\n3,c, >50K.\n", {"label": {"column": "y", "positive": [">50K", ">50K."]}},
         [1, 2, 3], [1, 0, 1]),
    ],
    ids=["decimal comma", "truth values", "a number that means missing", "a single name", "positive texts"],
)  # fmt: skip
def test_numbers_and_labels_are_read_as_the_config_says(
    tmp_path: Path, content: str, settings: dict[str, Any], dense: list[float], labels: list[float]
) -> None:
    data = _open(tmp_path, content, **settings)
    assert (_dense(data), _labels(data)) == ([[x] for x in dense], labels)


def test_patterns_name_all_columns_that_nothing_else_names(tmp_path: Path) -> None:
    content = "id,f10,f2,c,w,f_x,y\n1,2,3,a,0.5,4,0\n1,2,3,b,0.5,4,1\n"
    sparse = [{"column": "c", "separator": ";", "pooling": "weighted", "weights": "w"}, "f_x"]
    schema = _open(tmp_path, content, dense=["f*", {"column": "*", "scale": "log"}], sparse=sparse).train.schema
    assert schema.dense == ("f10", "f2", "id")
    assert [feature.name for feature in schema.features] == ["c", "f_x"]
    unnamed = _open(tmp_path, ",x,xx,c,y\n0,1,5,a,0\n1,2,6,b,1\n", dense=["x*"])
    assert _dense(unnamed) == [[1, 5], [2, 6]], "a column without a name is no hindrance where none matches it"


def test_several_files_folders_and_patterns_are_read_in_order_and_others_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "days").mkdir()
    for name, colour in (("day_1.csv", "one"), ("day_0.csv", "zero"), ("_SUCCESS", "")):
        (tmp_path / "days" / name).write_text(f"y,c,x\n1,{colour},3\n" if colour else "")
    (tmp_path / "days" / "job.yaml").write_text("name: a\n")
    (tmp_path / "days" / "old.parquet").write_bytes(b"PAR1")
    expected = [hash_text(t) for t in (b"red", b"blue")] + [MISSING_ID, hash_text(b"zero"), hash_text(b"one")]
    for rest in ("days", "days/day_*.csv"):
        assert _ids(_open(tmp_path, train=["a.csv", rest])) == expected


@every("encoding", ["utf-8", "latin-1"])
def test_names_of_columns_may_be_utf8_or_latin1(tmp_path: Path, encoding: str) -> None:
    content = GOOD.replace("x,", "größe,").encode(encoding) + b"1,\xe9\xff,0\n"
    assert _open(tmp_path, content, dense=["größe"]).train.schema.dense == ("größe",)


WEIGHTED = {"column": "c", "separator": ";", "pooling": "weighted", "weights": "w"}


def test_a_separator_makes_a_column_multi_valued(tmp_path: Path) -> None:
    content = "x,c,w,y\n1,a;b ; c,1;2;3,0\n2,,,1\n3,a;?,5;6,1\n"
    ragged = _open(tmp_path, content, sparse=[WEIGHTED]).train.gather(np.array([2, 1, 0])).ids["c"]
    assert ragged.values_N.tolist() == [hash_text(t) for t in (b"a", b"a", b"b", b"c")]
    assert ragged.lengths_B is not None and ragged.lengths_B.tolist() == [1, 0, 3]
    assert ragged.weights_N is not None and ragged.weights_N.tolist() == [5.0, 1.0, 2.0, 3.0]


def test_a_weighted_field_that_is_one_missing_value_is_an_empty_list(tmp_path: Path) -> None:
    content = "x,c,w,y\n1,a;b,1;2,0\n2,?,3,1\n3,-1.0,3,1\n4,,,0\n5,?;c,3;4,0\n"
    ragged = _open(tmp_path, content, sparse=[WEIGHTED], missing=["", "?", "-1"]).train.gather(np.arange(5)).ids["c"]
    assert ragged.lengths_B is not None and ragged.lengths_B.tolist() == [2, 0, 0, 0, 1]
    assert ragged.weights_N is not None and ragged.weights_N.tolist() == [1.0, 2.0, 4.0]
    with pytest.raises(DataError, match="row 1, column w: holds 2 weights for 0 ids of c"):
        _open(tmp_path, "x,c,w,y\n1,?,1;2,0\n2,a,1,1\n", sparse=[WEIGHTED])
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": [1, 2], "c": [["a"], None], "w": [[1.0], [3.0]], "y": [0, 1]}), sink)
    lists = {key: value for key, value in WEIGHTED.items() if key != "separator"}
    with pytest.raises(DataError, match="row 2, column w: holds 1 weights for 0 ids of c"):
        _open(tmp_path, sink.getvalue(), name="a.parquet", source="parquet", sparse=[lists])


def test_a_share_of_the_rows_is_held_out_by_seed(tmp_path: Path) -> None:
    content = "x,c,y\n" + "".join(f"{i},{i},{i % 2}\n" for i in range(2000))
    parts = []
    for seed in (0, 0, 1):
        data = _open(tmp_path, content, eval_fraction=0.2, seed=seed)
        assert data.eval is not None and 300 < len(data.eval) < 500
        rows = data.eval.gather(np.arange(len(data.eval))).dense_BI[:, 0].tolist()
        assert sorted(rows + [row[0] for row in _dense(data)]) == list(range(2000))
        parts.append(rows)
    assert parts[0] == parts[1] != parts[2]


@every(
    ("settings", "why"),
    [
        ({"dense": ["xx"]}, "has no column xx"),
        ({"label": "yy"}, "did you mean y?|it has: x, c, y"),
        ({"train": ["b.csv"]}, "b.csv: no such file .*did you mean a.csv"),
        ({"train": ["q/b.csv"]}, "there is no folder"),
        ({"train": ["*.tsv"]}, "no file matches"),
        ({"dense": ["f*"]}, r"data.dense: no column matches f\*; there are: x, c, y"),
        ({"eval": ["a.csv"], "eval_fraction": 0.5}, "eval_fraction: has no effect"),
        ({"label": None}, "data.label: is missing"),
        ({"dense": [], "sparse": []}, "both empty"),
        ({"sparse": ["c", "c"]}, "names column c twice"),
        ({"sparse": ["y"]}, "names y, which is the label"),
        ({"train": []}, "data.train: is empty"),
        ({"options": {"a": 1}}, "data.options: has no effect with source: csv"),
        ({"synthetic": {"zipf": 2.0}}, "data.synthetic: has no effect"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    with pytest.raises((ConfigError, DataError), match=why):
        _open(tmp_path, **settings)


@every(
    ("settings", "why"),
    [
        *(({"delimiter": delimiter}, "allowed: ") for delimiter in ("", '"', "\n", "§")),
        *(
            ({"label": {"column": "y", "positive": positive}}, "put the text in quotes")
            for positive in (True, [True], [False, "no"])
        ),
        ({"sparse": [{"column": "c", "separator": ""}]}, "allowed: one or more characters"),
    ],
)
def test_values_that_cannot_be_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        DataConfig.model_validate(settings)


def test_an_eval_file_whose_labels_match_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("x,c,y\n1,a,>50K.\n2,b,<=50K.\n")
    label = {"column": "y", "positive": [">50K"]}
    with pytest.raises(DataError, match=r"evaluation data are class 0 .*'>50K\.'"):
        _open(tmp_path, "x,c,y\n1,a,>50K\n2,b,<=50K\n", eval=["b.csv"], label=label)
