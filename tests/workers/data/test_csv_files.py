"""Delimited text: what is read, and the error if it cannot be read."""

from __future__ import annotations

import bz2
import gzip
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
from shardkeep.workers.data.sources.csv_files import OneByteDelimiter
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every

GOOD = "x,c,y\n1.5,red,0\n2.5,blue,1\n,,1\n"


def _open(folder: Path, content: str | bytes = GOOD, *, name: str = "a.csv", seed: int = 0, **settings: Any) -> Data:
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
    base: dict[str, Any] = {
        "source": "csv",
        "root": str(folder),
        "train": [name],
        "label": "y",
        "dense": ["x"],
        "sparse": ["c"],
    }
    return open_data(DataConfig.model_validate(base | settings), seed=seed)


def _ids(data: Data, feature: str = "c") -> list[int]:
    return list(data.train.gather(np.arange(len(data.train))).ids[feature].values_N.tolist())


def _dense(data: Data) -> list[list[float]]:
    return list(data.train.gather(np.arange(len(data.train))).dense_BI.tolist())


def test_columns_become_numbers_ids_and_labels(tmp_path: Path) -> None:
    data = _open(tmp_path, scale="none")
    batch = data.train.gather(np.array([2, 0, 1]))
    assert batch.dense_BI.tolist() == [[2.0], [1.5], [2.5]]  # the missing one is the mean
    assert batch.ids["c"].values_N.tolist() == [MISSING_ID, hash_text(b"red"), hash_text(b"blue")]
    assert batch.label_BT.tolist() == [[1.0], [0.0], [1.0]]
    assert data.train.schema.dense == ("x",) and data.eval is None


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(GOOD.replace(",", ", "), id="a space after the delimiter"),
        pytest.param(GOOD.replace("\n", "\r\n"), id="windows lines"),
        pytest.param(GOOD + "\n\n", id="blank lines at the end"),
        pytest.param(GOOD.replace("\n2.5", "\n\n   \n2.5"), id="blank lines inside"),
        pytest.param("\ufeff" + GOOD, id="a byte order mark"),
        pytest.param(GOOD.rstrip("\n"), id="no newline at the end"),
        pytest.param('"x","c","y"\n"1.5","red","0"\n2.5,"blue",1\n,,1\n', id="quotes"),
        pytest.param(GOOD.replace(",,1", "?, NA ,1"), id="other texts for missing"),
    ],
)
def test_files_that_differ_in_form_give_the_same_samples(tmp_path: Path, content: str) -> None:
    data = _open(tmp_path, content, scale="none")
    assert _ids(data) == [hash_text(b"red"), hash_text(b"blue"), MISSING_ID]
    assert _dense(data) == [[1.5], [2.5], [2.0]]


@every(
    ("name", "packed"),
    [
        ("a.csv.gz", gzip.compress(GOOD.encode())),
        ("a.gz", gzip.compress(GOOD[:20].encode()) + gzip.compress(GOOD[20:].encode())),
        ("a.csv", gzip.compress(GOOD.encode())),
        ("a.csv.bz2", bz2.compress(GOOD.encode())),
    ],
    ids=["gz", "gz in two members", "gz without the suffix", "bz2"],
)
def test_compressed_files_are_read_as_they_are(tmp_path: Path, name: str, packed: bytes) -> None:
    assert len(_ids(_open(tmp_path, packed, name=name))) == 3


def test_a_delimiter_and_names_for_a_file_without_a_header(tmp_path: Path) -> None:
    content = "1|red|0\n2|blue|1\n"
    data = _open(tmp_path, content, delimiter="|", columns=["x", "c", "y"])
    assert _ids(data) == [hash_text(b"red"), hash_text(b"blue")]


@pytest.mark.parametrize("rows", [3, 400_000], ids=["few", "more than a block"])
def test_a_delimiter_of_several_characters_is_found_wherever_blocks_end(tmp_path: Path, rows: int) -> None:
    content = "".join(f'{i}::"{i % 7}::{i % 2}\n' for i in range(rows))
    data = _open(tmp_path, content, delimiter="::", columns=["x", "c", "y"], scale="none")
    batch = data.train.gather(np.arange(rows))
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


@pytest.mark.parametrize("delimiter", ["\t", "\\t", "tab"], ids=["a tab", "backslash t", "the word"])
def test_a_tab_may_be_written_in_three_ways(tmp_path: Path, delimiter: str) -> None:
    assert len(_ids(_open(tmp_path, GOOD.replace(",", "\t"), delimiter=delimiter))) == 3


def test_numbers_may_have_a_decimal_comma(tmp_path: Path) -> None:
    content = "x;c;y\n1,5;red;0\n-2,25e1;blue;1\n-1.234.567,5;red;0\n"
    dense = _dense(_open(tmp_path, content, delimiter=";", decimal=",", scale="none"))
    assert dense == [[1.5], [-22.5], [-1234567.5]]


def test_true_and_false_are_one_and_zero(tmp_path: Path) -> None:
    data = _open(tmp_path, "x,c,y\nTrue,a,False\nFALSE,b,True\n", scale="none")
    assert _dense(data) == [[1.0], [0.0]]
    assert data.train.gather(np.arange(2)).label_BT[:, 0].tolist() == [0.0, 1.0]


def test_dates_can_be_dense_as_seconds(tmp_path: Path) -> None:
    content = "x,c,y\n1970-01-02,a,0\n1970-01-01 00:00:30,b,1\n1970-01-01T01:00:00,b,1\n?,b,1\n"
    assert _dense(_open(tmp_path, content, dense=[{"column": "x", "scale": "none", "fill": 7.0}])) == [
        [86400.0],
        [30.0],
        [3600.0],
        [7.0],
    ]


def test_a_number_among_the_missing_values_is_missing_however_it_is_written(tmp_path: Path) -> None:
    content = "x,c,y\n-999,a,0\n-999.0,b,1\n4,b,1\n6,b,1\n"
    assert _dense(_open(tmp_path, content, missing=[-999], scale="none")) == [[5.0], [5.0], [4.0], [6.0]]


def test_a_single_name_needs_no_list_and_numbers_no_quotes(tmp_path: Path) -> None:
    data = _open(tmp_path, "x,c,y\n1,a,3\n2,b,5\n", train="a.csv", label={"column": "y", "positive": 5})
    assert data.train.gather(np.arange(2)).label_BT[:, 0].tolist() == [0.0, 1.0]


def test_patterns_name_all_columns_that_nothing_else_names(tmp_path: Path) -> None:
    content = "id,f10,f2,c,w,f_x,y\n1,2,3,a,0.5,4,0\n1,2,3,b,0.5,4,1\n"
    sparse = [{"column": "c", "separator": ";", "pooling": "weighted", "weights": "w"}, "f_x"]
    schema = _open(tmp_path, content, dense=["f*", {"column": "*", "scale": "log"}], sparse=sparse).train.schema
    assert schema.dense == ("f10", "f2", "id")
    assert [feature.name for feature in schema.features] == ["c", "f_x"]


def test_other_files_in_a_folder_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\n")
    (tmp_path / "old.parquet").write_bytes(b"PAR1")
    assert len(_ids(_open(tmp_path, train="."))) == 3


def test_a_folder_of_folders_says_how_to_name_its_files(tmp_path: Path) -> None:
    (tmp_path / "days" / "1").mkdir(parents=True)
    with pytest.raises(DataError, match=r"has no files .*data.train: \[days/\*\*/\*\]"):
        _open(tmp_path, train="days")


def test_a_header_that_equals_the_given_names_is_no_sample(tmp_path: Path) -> None:
    assert len(_open(tmp_path, columns=["x", "c", "y"]).train) == 3


def test_quoted_fields_may_hold_delimiters_and_newlines(tmp_path: Path) -> None:
    data = _open(tmp_path, 'x,c,y\n1,"a,b\nc",0\n2,"say ""hi""",1\n')
    assert _ids(data) == [hash_text(b"a,b\nc"), hash_text(b'say "hi"')]


def test_bytes_that_are_not_utf8_are_categories_too(tmp_path: Path) -> None:
    assert _ids(_open(tmp_path, b"x,c,y\n1,caf\xe9,0\n2,b,1\n"))[0] == hash_text(b"caf\xe9")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_names_of_columns_may_be_utf8_or_latin1(tmp_path: Path, encoding: str) -> None:
    content = GOOD.replace("x,", "größe,").encode(encoding) + b"1,\xe9\xff,0\n"
    assert _open(tmp_path, content, dense=["größe"]).train.schema.dense == ("größe",)


@every("delimiter", ["", '"', "\n", "§"])
def test_what_cannot_be_a_delimiter_is_refused(delimiter: str) -> None:
    with pytest.raises(ValidationError, match="allowed: "):
        DataConfig(delimiter=delimiter)


@pytest.mark.parametrize("positive", [True, [True], [False, "no"]])
def test_a_truth_value_of_yaml_is_no_text(positive: Any) -> None:
    with pytest.raises(ValidationError, match="put the text in quotes"):
        DataConfig.model_validate({"label": {"column": "y", "positive": positive}})


def test_several_files_folders_and_patterns_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "days").mkdir()
    for name, colour in (("day_1.csv", "one"), ("day_0.csv", "zero"), ("_SUCCESS", "")):
        (tmp_path / "days" / name).write_text(f"y,c,x\n1,{colour},3\n" if colour else "")
    expected = [hash_text(t) for t in (b"red", b"blue")] + [MISSING_ID, hash_text(b"zero"), hash_text(b"one")]
    for rest in ("days", "days/day_*.csv"):
        assert _ids(_open(tmp_path, train=["a.csv", rest])) == expected


def test_one_column_may_be_a_number_and_a_category(tmp_path: Path) -> None:
    data = _open(tmp_path, dense=["x"], sparse=["x", "c"])
    assert _ids(data, "x") == [hash_text(b"1.5"), hash_text(b"2.5"), MISSING_ID]


def test_a_separator_makes_a_column_multi_valued(tmp_path: Path) -> None:
    content = "x,c,w,y\n1,a;b ; c,1;2;3,0\n2,,,1\n3,a;?,5;6,1\n"
    column = {"column": "c", "separator": ";", "pooling": "weighted", "weights": "w"}
    ragged = _open(tmp_path, content, sparse=[column]).train.gather(np.array([2, 1, 0])).ids["c"]
    assert ragged.values_N.tolist() == [hash_text(t) for t in (b"a", b"a", b"b", b"c")]
    assert ragged.lengths_B is not None and ragged.lengths_B.tolist() == [1, 0, 3]
    assert ragged.weights_N is not None and ragged.weights_N.tolist() == [5.0, 1.0, 2.0, 3.0]


def test_positive_texts_name_class_one(tmp_path: Path) -> None:
    content = "x,c,y\n1,a, >50K\n2,b, <=50K\n3,c, >50K.\n"
    data = _open(tmp_path, content, label={"column": "y", "positive": [">50K", ">50K."]})
    assert data.train.gather(np.arange(3)).label_BT[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_a_weighted_field_that_is_one_missing_value_is_an_empty_list(tmp_path: Path) -> None:
    column = {"column": "c", "separator": ";", "pooling": "weighted", "weights": "w"}
    content = "x,c,w,y\n1,a;b,1;2,0\n2,?,3,1\n3,-1.0,3,1\n4,,,0\n5,?;c,3;4,0\n"
    ragged = _open(tmp_path, content, sparse=[column], missing=["", "?", "-1"]).train.gather(np.arange(5)).ids["c"]
    assert ragged.lengths_B is not None and ragged.lengths_B.tolist() == [2, 0, 0, 0, 1]
    assert ragged.weights_N is not None and ragged.weights_N.tolist() == [1.0, 2.0, 4.0]
    with pytest.raises(DataError, match="row 1, column w: holds 2 weights for 0 ids of c"):
        _open(tmp_path, "x,c,w,y\n1,?,1;2,0\n2,a,1,1\n", sparse=[column])
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": [1, 2], "c": [["a"], None], "w": [[1.0], [3.0]], "y": [0, 1]}), sink)
    with pytest.raises(DataError, match="row 2, column w: holds 1 weights for 0 ids of c"):
        _open(tmp_path, sink.getvalue(), name="a.parquet", source="parquet", sparse=[column])


def test_a_share_of_the_rows_is_held_out_by_seed(tmp_path: Path) -> None:
    content = "x,c,y\n" + "".join(f"{i},{i},{i % 2}\n" for i in range(2000))
    parts = []
    for seed in (0, 0, 1):
        data = _open(tmp_path, content, eval_fraction=0.2, scale="none", seed=seed)
        assert data.eval is not None and 300 < len(data.eval) < 500
        rows = data.eval.gather(np.arange(len(data.eval))).dense_BI[:, 0].tolist()
        kept = [row[0] for row in _dense(data)]
        assert sorted(rows + kept) == list(range(2000))
        parts.append(rows)
    assert parts[0] == parts[1] != parts[2]


@pytest.mark.parametrize(
    ("content", "settings", "expected"),
    [
        pytest.param("", {}, "a.csv: is empty", id="empty file"),
        pytest.param("x,c,y\n", {}, "a.csv: has no rows", id="only a header"),
        pytest.param(GOOD, {"dense": ["xx"]}, "has no column xx", id="missing column"),
        pytest.param(GOOD, {"label": "yy"}, "did you mean y?|it has: x, c, y", id="missing label"),
        pytest.param(GOOD, {"train": ["b.csv"]}, "b.csv: no such file .*did you mean a.csv", id="missing file"),
        pytest.param(GOOD, {"train": ["q/b.csv"]}, "there is no folder", id="missing folder"),
        pytest.param(GOOD, {"train": ["*.tsv"]}, "no file matches", id="pattern without files"),
        pytest.param(
            "x,c,y\n1,a,0\n\n2z,b,1\n", {}, r"a.csv, row 2, column x: '2z' is not a number", id="not a number"
        ),
        pytest.param("x,c,y\n1,a,0\n1e999,b,1\n", {}, "row 2, column x: is infinite", id="infinite"),
        pytest.param("x,c,y\n1,a,0\n1e99,b,1\n", {"scale": "none"}, "row 2, column x: is beyond float32", id="huge"),
        pytest.param("x,c,y\n1,a,0\n2,b,2\n", {}, "row 2, column y: the label is 2; allowed: 0 and 1", id="label 2"),
        pytest.param("x,c,y\n1,a,yes\n2,b,no\n", {}, "row 1, column y: 'yes' is not a number", id="text label"),
        pytest.param("x,c,y\n1,a,0\n2,b,\n", {}, "row 2, column y: the label is missing", id="missing label value"),
        pytest.param("x,c,y\n1,a,1\n2,b,1\n", {}, "label column y: all 2 rows .* class 1", id="one class"),
        pytest.param(
            "x,c,y\n1,a,yes\n2,b,no\n",
            {"label": {"column": "y", "positive": ["Yes"]}},
            "class 0 .*'yes', 'no'.*data.label.positive",
            id="no positive text",
        ),
        pytest.param("x,c,y\n1,a,0\n1,2\n", {}, r"a.csv, row 2: has 2 fields, expected 3 \('1,2'\)", id="short row"),
        pytest.param("x,c,y\n1,a,0\n\n  \n1,2,3,4\n", {}, "row 2: has 4 fields, expected 3", id="long row"),
        pytest.param("x,c,y\n1,a,0\n1,2\n", {"columns": ["x", "c", "y"]}, "row 2: has 2 fields", id="short row, named"),
        pytest.param(
            "1,2\n", {"columns": ["x", "c", "y"]}, "row 1: has 2 fields with delimiter .*, expected 3", id="columns"
        ),
        pytest.param("x,x,c,y\n1,1,a,0\n", {}, "2 columns are called x", id="column twice"),
        pytest.param(b"\x00\x01\x02" * 50, {}, "is binary, not delimited text", id="binary"),
        pytest.param(b"PAR1\x00\x01", {}, "use data.source: parquet", id="parquet"),
        pytest.param(GOOD.replace(",", ";"), {}, "has no column y; .*is data.delimiter ';', not ','", id="delimiter"),
        pytest.param('x,c,y\n1,"a,0\n' + "2,b,1\n" * 9, {}, "row 1: a quote is opened and never closed", id="quote"),
        pytest.param("x;c;y\n1,5;a;0\n", {"delimiter": ";"}, "'1,5' is not a number.*data.decimal", id="comma"),
        pytest.param("x,c,y\n2020-01-01,a,0\n5,b,1\n", {}, "row 2, column x: '5' is no time", id="date and number"),
        pytest.param("x,c,y\ntrue,a,0\nno,b,1\n", {}, "row 2, column x: 'no' is not a number", id="true and no"),
        pytest.param(GOOD, {"dense": ["f*"]}, r"data.dense: no column matches f\*; there are: x, c, y", id="pattern"),
        pytest.param(",x,c,y\n0,1,a,0\n", {"sparse": ["*"]}, r"sparse: \* matches column 1 .* has no name", id="index"),
        pytest.param("x,c,y,\n1,a,0,\n", {"dense": ["*"]}, r"dense: \* matches column 4 .* has no name", id="no name"),
        pytest.param(b"PK\x03\x04" + b"\0" * 9, {}, "is a zip archive", id="zip"),
        pytest.param(GOOD.encode("utf-16"), {}, "is text in UTF-16", id="utf-16"),
        pytest.param(GOOD, {"eval": ["a.csv"], "eval_fraction": 0.5}, "eval_fraction: has no effect", id="two evals"),
        pytest.param(
            "x,c,w,y\n1,a;b,1,0\n",
            {"sparse": [{"column": "c", "separator": ";", "pooling": "weighted", "weights": "w"}]},
            "row 1, column w: holds 1 weights for 2 ids of c",
            id="weights",
        ),
    ],
)
def test_bad_input_ends_with_one_line_that_names_the_place(
    tmp_path: Path, content: str | bytes, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DataError, match=expected) as caught:
        _open(tmp_path, content, **settings)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@every(
    ("settings", "expected"),
    [
        ({"label": None}, "data.label: is missing"),
        ({"dense": [], "sparse": []}, "both empty"),
        ({"sparse": ["c", "c"]}, "names column c twice"),
        ({"sparse": ["y"]}, "names y, which is the label"),
        ({"train": []}, "data.train: is empty"),
        ({"options": {"a": 1}}, "data.options: has no effect with source: csv"),
        ({"synthetic": {"zipf": 2.0}}, "data.synthetic: has no effect"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        _open(tmp_path, **settings)


def test_a_column_without_a_name_is_no_hindrance_where_none_matches_it(tmp_path: Path) -> None:
    data = _open(tmp_path, ",x,xx,c,y\n0,1,5,a,0\n1,2,6,b,1\n", dense=["x*"], scale="none")
    assert _dense(data) == [[1, 5], [2, 6]]


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.999], ids=["start", "half", "all but the end"])
def test_a_truncated_gz_is_told_apart_from_a_short_file(tmp_path: Path, keep: float) -> None:
    rng = np.random.default_rng(0)
    content = "x,c,y\n" + "".join(f"{x},{x},{i % 2}\n" for i, x in enumerate(rng.integers(0, 10**9, 60_000)))
    packed = gzip.compress(content.encode())
    with pytest.raises(DataError, match=r"a.csv.gz.*truncated or damaged"):
        _open(tmp_path, packed[: int(len(packed) * keep)], name="a.csv.gz")


def test_a_gz_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ends in .gz but does not hold gzip data"):
        _open(tmp_path, GOOD, name="a.csv.gz")


def test_an_eval_file_whose_labels_match_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("x,c,y\n1,a,>50K.\n2,b,<=50K.\n")
    with pytest.raises(DataError, match=r"evaluation data are class 0 .*'>50K\.'"):
        _open(
            tmp_path,
            "x,c,y\n1,a,>50K\n2,b,<=50K\n",
            eval=["b.csv"],
            label={"column": "y", "positive": [">50K"]},
        )


def test_a_separator_has_at_least_one_character() -> None:
    with pytest.raises(ValidationError, match="allowed: one or more characters"):
        DataConfig.model_validate({"sparse": [{"column": "c", "separator": ""}]})
