"""How a csv is written, by its first rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkeep.base.errors import DataError
from shardkeep.workers.data.sources.csv_dialect import dialect_of
from shardkeep.workers.data_config import DataConfig
from tests.support.cases import every


def dialect(folder: Path, text: str, **known: Any) -> dict[str, Any]:
    path = folder / "a.csv"
    path.write_text(text, encoding="utf-8")
    return dialect_of(path, DataConfig(source="csv", train=[str(path)], **known))


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
    ids=str,
)
def test_the_dialect_is_found(text: str, known: dict[str, Any], found: dict[str, Any], tmp_path: Path) -> None:
    assert dialect(tmp_path, text, **known) == found


@every(
    ("text", "told"),
    [
        ("a;b,c\n1;2,3\n", "may be ',' (2 columns) or ';' (2 columns); say it by --set data.delimiter=';' (or tab)"),
        ("a\n1\n2\n", "the delimiter is unclear, it is none of"),
        (
            "1,x,2\n2,y,3\n",
            "the first line may be names or a row (1, x, 2: 1 is a number); name the 3 columns by",
        ),
        ("u,x\nu,y\nv,x\n", "u stands below, too"),
    ],
    ids=str,
)
def test_an_unclear_dialect_is_refused_with_the_choices(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        dialect(tmp_path, text)
    assert told in str(refused.value)
