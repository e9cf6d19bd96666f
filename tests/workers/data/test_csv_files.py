"""Delimited text: how a config names its files and columns, and what it then reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.sources import text_files
from tests.support.cases import every
from tests.support.data_files import opened, read, refusal

GOOD = "x,c,y\n1.5,red,0\n2.5,blue,1\n,,1\n"
BOTH: dict[str, Any] = {"dense": ["x"], "sparse": ["c"]}
RED, BLUE = hash_text(b"red"), hash_text(b"blue")


def test_a_delimiter_of_several_characters_is_found_wherever_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 1 << 16)
    content = "".join(f'{i}::"{i % 7}::{i % 2}\n' for i in range(12_000))
    rows = read(tmp_path, {"a.csv": content}, **BOTH, delimiter="::", columns=["x", "c", "y"])
    assert rows.dense == [[float(i)] for i in range(12_000)] and rows.labels == [i % 2 for i in range(12_000)]
    assert rows.ids["c"][:2] == [hash_text(b'"0'), hash_text(b'"1')]  # quotes mean nothing


POSITIVE = {"column": "y", "positive": [">50K", ">50K."]}


@every(
    ("content", "settings", "dense", "labels"),
    [
        ("x;c;y\n1,5;a;0\n-2,25e1;a;1\n-1.234.567,5;a;0\n", {"delimiter": ";", "decimal": ","},
         [1.5, -22.5, -1234567.5], [0, 1, 0]),
        ("x,c,y\nTrue,a,False\nFALSE,b,True\n", {"columns": ["x", "c", "y"]}, [1, 0], [0, 1]),  # the header is no row
        ("x,c,y\n-999,a,0\n-999.0,b,1\n4,b,1\n6,b,1\n", {"missing": [-999]}, [5, 5, 4, 6], [0, 1, 1, 1]),
        ("x,c,y\n1,a,3\n2,b,5\n", {"label": {"column": "y", "positive": 5}}, [1, 2], [0, 1]),
        ("x,c,y\n1,a, >50K\n2,b, <=50K\n3,c, >50K.\n", {"label": POSITIVE}, [1, 2, 3], [1, 0, 1]),
        *((GOOD.replace(",", "\t"), {"delimiter": tab}, [1.5, 2.5, 2.0], [0, 1, 1]) for tab in ("\t", "\\t", "tab")),
        *((GOOD.replace("x,", "größe,").encode(encoding) + b"1,\xe9\xff,0\n", {"dense": ["größe"], "missing": [""]},
           [1.5, 2.5, np.float32(5 / 3), 1.0], [0, 1, 1, 0]) for encoding in ("utf-8", "latin-1")),
    ],
)  # fmt: skip
def test_numbers_and_labels_are_read_as_the_config_says(
    tmp_path: Path, content: str, settings: dict[str, Any], dense: list[float], labels: list[float]
) -> None:
    rows = read(tmp_path, {"a.csv": content}, **BOTH | settings)
    assert (rows.dense, rows.labels) == ([[x] for x in dense], labels)


def test_patterns_name_all_columns_that_nothing_else_names(tmp_path: Path) -> None:
    content = "id,f10,f2,c,w,f_x,y\n1,2,3,a,0.5,4,0\n1,2,3,b,0.5,4,1\n"
    sparse = [{"column": "c", "separator": ";", "pooling": "weighted", "weights": "w"}, "f_x"]
    dense = ["f*", {"column": "*", "scale": "log"}]
    schema = opened(tmp_path, {"a.csv": content}, dense=dense, sparse=sparse).train.schema
    assert schema.dense == ("f10", "f2", "id")
    assert [feature.name for feature in schema.features] == ["c", "f_x"]
    unnamed = read(tmp_path, {"a.csv": ",x,xx,c,y\n0,1,5,a,0\n1,2,6,b,1\n"}, dense=["x*"], sparse=["c"])
    assert unnamed.dense == [[1, 5], [2, 6]], "a column without a name is no hindrance where none matches it"


@every("rest", ["days", "days/day_*.csv"])
def test_several_files_folders_and_patterns_are_read_in_order_and_others_are_no_data(tmp_path: Path, rest: str) -> None:
    days = {f"days/day_{day}.csv": f"y,c,x\n1,{colour},3\n" for day, colour in ((1, "one"), (0, "zero"))}
    others = {"days/_SUCCESS": "", "days/job.yaml": "name: a\n", "days/old.parquet": b"PAR1"}
    rows = read(tmp_path, {"a.csv": GOOD} | days | others, **BOTH, train=["a.csv", rest])
    assert rows.ids["c"] == [RED, BLUE, MISSING_ID, hash_text(b"zero"), hash_text(b"one")]


WEIGHTED = {"column": "c", "separator": ";", "pooling": "weighted", "weights": "w"}


def test_a_weighted_list_keeps_the_weights_of_its_ids_and_one_missing_value_is_an_empty_list(tmp_path: Path) -> None:
    content = "x,c,w,y\n1,a;b ; c,1;2;3,0\n2,?,3,1\n3,-1.0,3,1\n4,,,0\n5,?;c,3;4,0\n"
    settings: dict[str, Any] = {"sparse": [WEIGHTED], "missing": ["", "?", "-1"]}
    a, b, c = (hash_text(text) for text in (b"a", b"b", b"c"))
    rows = read(tmp_path, {"a.csv": content}, **settings)
    assert rows.ids["c"] == [[a, b, c], [], [], [], [c]] and rows.weights["c"] == [[1, 2, 3], [], [], [], [4]]
    backwards = opened(tmp_path, {"a.csv": content}, **settings).train.gather(np.array([4, 1, 0])).ids["c"]
    assert backwards.values_N.tolist() == [c, a, b, c] and backwards.weights_N is not None
    assert backwards.weights_N.tolist() == [4, 1, 2, 3]
    bad = "x,c,w,y\n1,?,1;2,0\n2,a,1,1\n"
    assert "row 1, column w: holds 2 weights for 0 ids of c" in refusal(tmp_path, {"a.csv": bad}, **settings)
    lists = {key: value for key, value in WEIGHTED.items() if key != "separator"}
    for first, second, why in (
        (1.0, [3.0], "row 2, column w: holds 1 weights for 0 ids of c"),
        (None, [], "row 1, column w: a weight is missing"),
        (float("inf"), [], "row 1, column w: is infinite"),
    ):
        table = {"x": [1, 2], "c": [["a"], []], "w": [[first], second], "y": [0, 1]}
        assert why in refusal(tmp_path, {"a.parquet": table}, sparse=[lists])


@every(
    ("settings", "why"),
    [
        ({"dense": ["xx"]}, "has no column xx"),
        ({"label": "yy"}, "did you mean y?|it has: x, c, y"),
        ({"train": ["b.csv"]}, "b.csv: no such file .*did you mean a.csv"),
        ({"train": ["q/b.csv"]}, "there is no folder"),
        ({"dense": ["f*"]}, r"data.dense: no column matches f\*; there are: x, c, y"),
        ({"label": None}, "data.label: is missing"),
        ({"dense": [], "sparse": []}, "both empty"),
        ({"sparse": ["c", "c"]}, "names column c twice"),
        ({"sparse": ["y"]}, "names y, which is the label"),
        ({"train": []}, "data.train: is empty"),
        *(({"delimiter": delimiter}, "allowed: ") for delimiter in ("", '"', "\n", "§")),
        *(({"label": {"column": "y", "positive": positive}}, "put the text in quotes")
          for positive in (True, [True], [False, "no"])),
        ({"sparse": [{"column": "c", "separator": ""}]}, "at least 1 character"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    with pytest.raises((ConfigError, DataError, ValidationError), match=why):
        opened(tmp_path, {"a.csv": GOOD}, **BOTH | settings)
