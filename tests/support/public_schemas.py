"""Public data sets as their columns, from memory of the field: name, what its values look like, and its role there.

The values are made up. A role such as `sparse/dense` means that users of the set do both. `out` = left out. A set whose
`label` is "" has no label of two values: `init` must refuse it with its candidates, and `asked` is a column to name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

ROWS = 1500
Random = np.random.Generator
LETTERS = str.maketrans("0123456789", "ghijklmnop")
Values = list[Any]


@dataclass(frozen=True)
class Schema:
    """A data set. `columns`: lines of name, values, role; `asked`: the label to name after the refusal."""

    name: str
    columns: str
    asked: str | None = None
    parquet: bool = False

    def lines(self) -> Iterator[tuple[str, str, str]]:
        for line in self.columns.strip().splitlines():
            names, values, role = (part.strip() for part in line.split(" ; "))
            for name in names.split(","):
                yield name.strip(), values, role

    def roles(self) -> dict[str, str]:
        return {name: role for name, _, role in self.lines()}

    def table(self) -> pa.Table:
        random = np.random.default_rng(len(self.name))
        return pa.table(
            {name: MADE[values.split()[0]](random, *values.split()[1:]) for name, values, _ in self.lines()}
        )


def zipf(random: Random, size: int) -> Any:
    """Values from 0 to `size`, some far more often than others."""
    return (size * random.random(ROWS) ** 3).astype(int)


def hexed(number: int) -> str:
    return f"{(number * 2654435761 + 12345) % 2**32:08x}"


def histories(random: Random, size: int, prefix: str, mark: str | None) -> Values:
    lengths = np.random.default_rng(5).integers(0, 12, ROWS)  # of one length in each row
    lists = [[f"{prefix}{each}" if prefix else int(each) for each in random.integers(0, size, n)] for n in lengths]
    return lists if mark is None else [mark.join(map(str, each)) for each in lists]


def dated(random: Random, form: str) -> Values:
    seconds = np.sort(random.integers(1_500_000_000, 1_505_000_000, ROWS)).astype("datetime64[s]")
    return [form.format(each.item()) for each in seconds]


def worded(random: Random, least: str, most: str) -> Values:
    words = [hexed(each).translate(LETTERS) for each in range(3000)]
    return [" ".join(random.choice(words, random.integers(int(least), int(most)))) for _ in range(ROWS)]


def gone(random: Random, share: float, values: Values) -> Values:
    return [None if missing else value for missing, value in zip(random.random(ROWS) < share, values, strict=True)]


GENRES = ["Drama", "Comedy", "War", "Film-Noir", "Sci-Fi"]
MADE: dict[str, Callable[..., Values]] = {
    "bit": lambda r, share="0.3": list((r.random(ROWS) < float(share)).astype(int)),
    "code": lambda r, size, low="0": list(zipf(r, int(size)) + int(low)),
    "big": lambda r, size: [int(each) * 7919 % 1_000_003 + 100_000 for each in zipf(r, int(size))],
    "hex": lambda r, size: [hexed(int(each)) for each in zipf(r, int(size))],
    "name": lambda r, prefix, size: [f"{prefix}{each}" for each in zipf(r, int(size))],
    "pick": lambda r, *words: [word.replace("_", " ") for word in r.choice(words, ROWS)],
    "count": lambda r, scale="3": list(np.floor(r.lognormal(float(scale), 1.5, ROWS)).astype(int) - 1),
    "gaps": lambda r, scale="3": gone(r, 0.3, list(map(int, r.lognormal(float(scale), 1.5, ROWS)))),
    "float": lambda r, scale="1": [round(each, 4) for each in r.lognormal(float(scale), 1, ROWS)],
    "row": lambda r: list(range(ROWS)),
    "unique": lambda r: [hexed(each) + hexed(each + 9) for each in range(ROWS)],
    "seconds": lambda r, times="1": list(np.sort(r.integers(1_500_000_000, 1_505_000_000, ROWS)) * int(times)),
    "small_seconds": lambda r: list(np.sort(r.integers(0, 1_000_000, ROWS))),
    "date": lambda r: dated(r, "{:%Y-%m-%d}"),
    "datetime": lambda r: dated(r, "{:%Y-%m-%d %H:%M:%S}"),
    "zulu": lambda r: dated(r, "{:%Y-%m-%dT%H:%M:%SZ}"),
    "american": lambda r: dated(r, "{:%m/%d/%Y %I:%M:%S %p}"),
    "yyyymmdd": lambda r: list(map(int, dated(r, "{:%Y%m%d}"))),
    "yymmddhh": lambda r: list(map(int, dated(r, "{:%y%m%d%H}"))),
    "rating": lambda r: list(r.integers(1, 6, ROWS)),
    "half_rating": lambda r: list(r.integers(1, 11, ROWS) / 2),
    "words": worded,
    "lists": lambda r, size, prefix="": histories(r, int(size), prefix, None),
    "bars": lambda r, size: histories(r, int(size), "", "|"),
    "hats": lambda r, size: histories(r, int(size), "", "^"),
    "spaced": lambda r, size, prefix: histories(r, int(size), prefix, " "),
    "genres": lambda r: ["|".join(sorted(r.choice(GENRES, r.integers(1, 4), replace=False))) for _ in range(ROWS)],
    "tags": lambda r: [",".join(map(str, r.integers(10_000, 10_070, r.integers(1, 6)))) for _ in range(ROWS)],
    "vector": lambda r, width: [list(map(float, r.normal(size=int(width)))) for _ in range(ROWS)],
    "same": lambda r, value: [value] * ROWS,
    "mostly": lambda r, size: gone(r, 0.95, list(map(int, zipf(r, int(size))))),
}  # fmt: skip


def _read(text: str) -> Iterator[Schema]:
    for part in text.split("\n[")[1:]:
        head, _, columns = part.partition("]\n")
        name, *settings = head.split(" ")
        asked = next((each.removeprefix("asked=") for each in settings if each.startswith("asked=")), None)
        yield Schema(name, columns, asked, "parquet" in settings)


SCHEMAS = tuple(_read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")))
