"""Lists that a text column holds as Python, JSON, databases and numpy write them: read entirely, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
import xxhash
from hypothesis import given, strategies as st

from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.chunk import Chunk, Column
from shardkeep.workers.data.conversion.decoding import as_lists, in_brackets
from shardkeep.workers.data.conversion.layout import Fitted, layout_of
from shardkeep.workers.data.conversion.reader import Reader, feature_readers
from shardkeep.workers.data.conversion.rules import ReadingRules
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every
from tests.support.examples import examples

PRINTED = st.characters(min_codepoint=32, blacklist_categories=["Cs", "Cc", "Zl", "Zp"])
ENTRIES = st.text(PRINTED, min_size=1, max_size=5).filter(str.isprintable)  # Python writes others as escapes: refused


def read(fields: list[str | None], separator: str) -> Any:
    column = Column("log.csv", np.arange(1, len(fields) + 1), "tags", pa.array(fields, pa.string()))
    rules = ReadingRules(("", "nan"))
    return as_lists(column, rules, separator, brackets=in_brackets(column, rules, separator) or False).to_pylist()


def database(row: list[str | None]) -> str:
    entries = ("NULL" if e is None else '"' + e.replace("\\", "\\\\").replace('"', '\\"') + '"' for e in row)
    return "{" + ",".join(entries) + "}"


@every("write", [str, lambda row: json.dumps(row, ensure_ascii=False), database], ids=["python", "json", "database"])
@given(rows=st.lists(st.lists(st.one_of(st.none(), ENTRIES), max_size=4), min_size=1, max_size=5))
@examples(100)
def test_a_list_of_texts_is_read_as_it_was_written(write: Callable[[Any], str], rows: list[list[str | None]]) -> None:
    for separator in (",", ", "):
        assert read([write(row) for row in rows], separator) == rows


@every(
    ("fields", "separator", "lists"),
    [
        *(
            ([field, None], separator, [["18", "25"], None])
            for field in ("[18, 25]", "(18, 25)", "{18,25}", "[18,\n 25]", "[ 18 , 25 ]", "['18', \"25\"]")
            for separator in (",", ", ")
        ),
        (["[7]", "(7,)", "[]", "()", "{}"], ",", [["7"], ["7"], [], [], []]),
        (["[18 25\n 28]", "[7]", "['a' 'b c']"], " ", [["18", "25", "28"], ["7"], ["a", "b c"]]),  # numpy's writing
        # a text in parentheses where the separator is another, and words in brackets where no row is a list
        (
            ["(no genres listed)", "Drama|War", "(a)|(b)"],
            "|",
            [["(no genres listed)"], ["Drama", "War"], ["(a)", "(b)"]],
        ),
        *(
            (fields, "|", [field and field.split("|") for field in fields])
            for fields in (["a|b", "[UNK]", "c"], ["[UNK]", None], ["[UNK]", "[a]"], ["[UNK]|a", "[PAD]|b|[UNK]"])
        ),
    ],
)
def test_lists_are_told_from_texts_in_brackets(fields: list[str | None], separator: str, lists: list[Any]) -> None:
    assert read(fields, separator) == lists


@every("separator", [",", "|", " "])
@every("field", ["[18, 25]", "[18 25]", "[18|25]", "[[1], [2]]", "[1 2 ... 9]", "[1,,2]", "['a' 'b']", "['a\\n']"])
def test_a_list_in_another_writing_is_read_entirely_or_refused(field: str, separator: str) -> None:
    try:
        (entries,) = read([field], separator)
    except DataError as error:
        assert "log.csv, row 1, column tags" in str(error) and "is no list" in str(error)
    else:
        assert entries in (["18", "25"], ["a", "b"])


@every("lists", ["[7]", "['a']", "[a|b]", "[]", "{a}", "[None]"])
def test_a_word_in_brackets_is_a_list_beside_another(lists: str) -> None:
    with pytest.raises(DataError, match=r"row 2, column tags: '25' has no brackets, others have"):
        read(["[18]", "25"], ",")
    assert read(["[UNK]", lists], "|")[0] == ["UNK"]
    with pytest.raises(DataError, match="row 2, column tags: 'a' has no brackets, others have"):
        read(["[UNK]", "a", lists], "|")


def ids_of(reader: Reader, fields: list[str]) -> list[int]:
    chunk = Chunk("log.csv", np.arange(1, len(fields) + 1), {"tags": pa.array(fields)})
    return [int(number) for number in reader.read(chunk)["ids:tags"].values_V.view(np.uint64)]


@every(
    ("separator", "trained", "means"),
    [(",", ["[a, b]", "[c]"], "a"), ("|", ["[UNK]", "a|b"], "[a]"), ("|", ["a|b"], "[a]")],
)
def test_a_word_in_brackets_is_read_as_in_training(separator: str, trained: list[str], means: str) -> None:
    tags = {"column": "tags", "separator": separator}
    layout = layout_of(DataConfig.model_validate({"source": "csv", "label": "y", "sparse": [tags]}))
    known = Fitted(frozenset(["tags"]), {"tags": "texts"})
    (first,) = feature_readers(layout, known)
    ids_of(first, trained)
    fitted = replace(known, brackets=first.facts(2)["brackets"])
    for reader in (first, *feature_readers(layout, Fitted.of_json(json.loads(json.dumps(fitted.to_json()))))):
        assert ids_of(reader, ["[a]"]) == [xxhash.xxh3_64_intdigest(means.encode())]
        with pytest.raises(
            DataError, match=r"row 1, column tags: .*(has no brackets, others have|the rows before are none)"
        ):
            ids_of(reader, ["a" if means == "a" else "['a', 'b']"])
