"""Small files of clicks with the items that a user has seen before, and a plain reading of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig
from tests.support.data_files import write_file

Rows = Mapping[str, Sequence[Any]]
SEEN: dict[str, Any] = {
    "ids": {"seen_item": "item", "seen_category": "category"},
    "numbers": [{"column": "seen_age", "scale": "none"}],
    "max_length": 3,
}
ROWS: Rows = {
    "clicked": [0, 1, 1, 0, 1, 0],
    "item": ["a", "b", "c", "a", "b", "c"],
    "category": ["x", "y", "x", "y", "x", "y"],
    "seen_item": [["a"], [], ["a", "b", "c", "a", "b"], ["c", None, "a"], None, [None, "b"]],
    "seen_category": [["x"], [], ["x", "y", "x", "y", "y"], [None, "x", "x"], None, ["y", None]],
    "seen_age": [[1.0], [], [1.0, 2.0, 3.0, 4.0, 5.0], [7.0, 8.0, None], None, [None, 0.5]],
}
"""Lists of 1, 0, 5 and 3 entries, a missing list, and entries that are missing at any place."""


def write_parquet(path: Path, rows: Rows) -> Path:
    return write_file(path, dict(rows))


def write_csv(path: Path, rows: Rows, separator: str = "|") -> Path:
    def field(value: Any) -> str:
        texts = value if isinstance(value, list) else [value]
        return separator.join("" if text is None else str(text) for text in texts)

    lines = [",".join(rows), *(",".join(map(field, row)) for row in zip(*rows.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def history_config(path: Path, seen: Mapping[str, Any] = {}, **settings: Any) -> DataConfig:
    """Reads the files of `write_parquet` and `write_csv`. `seen`: changes of the sequence."""
    group = copy.deepcopy(SEEN) | ({"separator": "|"} if path.suffix == ".csv" else {}) | dict(seen)
    base: dict[str, Any] = {"train": str(path), "label": "clicked", "sparse": ["item", "category"]}
    return DataConfig.model_validate(base | {"sequences": {"seen": group}} | settings)


def open_histories(path: Path, seen: Mapping[str, Any] = {}, **settings: Any) -> Data:
    return open_data(history_config(path, seen, **settings), seed=0)
