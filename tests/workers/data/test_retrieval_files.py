"""Files of a retrieval job: rows without a label, the catalogue in the cache, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.workers.data.conversion.hashing import hash_text
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.model_config import RetrievalSettings, SasRecConfig, TwoTowerConfig
from tests.support.history_files import ROWS, history_config, write_csv, write_parquet

PARTS = [write_parquet, write_csv]
TWO_TOWER = TwoTowerConfig(item=["item", "category"])
NEXT_ROWS = {name: ROWS[name] for name in ("item", "seen_item")}
SEEN_ITEMS = {"ids": {"seen_item": "item"}, "numbers": []}


def _open(path: Path, model: RetrievalSettings = TWO_TOWER, **settings: Any) -> Data:
    config = history_config(path, settings.pop("seen", {}), **{"label": None, **settings})
    return open_data(config, seed=0, items=model)


def _next(path: Path, **settings: Any) -> Data:
    seen = SEEN_ITEMS | settings.pop("seen", {})
    return _open(path, SasRecConfig(), sparse=["item"], seen=seen, **settings)


def _counts(data: Data) -> dict[Any, int]:
    assert data.catalogue is not None
    return dict(zip(data.catalogue.values.to_pylist(), data.catalogue.counts_M.tolist(), strict=True))


@pytest.mark.parametrize("write", PARTS, ids=["parquet", "csv"])
def test_items_have_the_values_of_the_files_and_the_features_of_their_last_row(tmp_path: Path, write: Any) -> None:
    rows = ROWS | {"item": ["a", "b", "c", "a", "b", "a"], "category": ["x", "y", "x", "y", "x", "z"]}
    data = _open(write(tmp_path / f"a.{write.__name__[6:]}", rows))
    assert _counts(data) == {"a": 3, "b": 2, "c": 1} and data.catalogue is not None
    assert data.catalogue.ids_M.tolist() == [hash_text(text) for text in (b"a", b"b", b"c")]
    categories_M = data.catalogue.items.ids["category"].values_N
    assert categories_M.tolist() == [hash_text(text) for text in (b"z", b"x", b"x")]


def test_samples_without_a_label_have_label_1(tmp_path: Path) -> None:
    data = _open(write_parquet(tmp_path / "a.parquet", ROWS))
    batch = data.train.gather(np.arange(6))
    assert data.train.schema.labels == ("label",) and batch.label_BT.tolist() == [[1.0]] * 6


def test_with_a_label_the_rows_of_1_alone_are_counted(tmp_path: Path) -> None:
    data = _open(write_parquet(tmp_path / "a.parquet", ROWS), label="clicked")
    assert _counts(data) == {"b": 2, "c": 1}
    assert data.train.gather(np.arange(6)).label_BT[:, 0].tolist() == ROWS["clicked"]


@pytest.mark.parametrize("write", PARTS, ids=["parquet", "csv"])
def test_entries_that_are_kept_are_items_too(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / f"a.{write.__name__[6:]}", NEXT_ROWS | {"item": ["d", "b", "c", "a", "b", "c"]})
    # kept of [a b c a b] are [c a b]: a and b are predicted; [c ? a]: a; [? b]: b
    assert _counts(_next(path)) == {"a": 3, "b": 4, "c": 2, "d": 1}
    # kept of [a b c a b] are [b], which nobody predicts, as of all others
    assert _counts(_next(path, seen={"max_length": 1})) == {"b": 2, "c": 2, "a": 1, "d": 1}
    assert len(list(tmp_path.joinpath(".shardkeep-cache").glob("*/catalogue.arrow"))) == 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([5, 2**62, -3, 5, 5, -3]), [5, -3, 2**62]),
        (pa.array([5, 2**63 + 1, 3, 5, 5, 3], pa.uint64()), [5, 3, 2**63 + 1]),
        (pa.array([5.0, None, 3.0, 5.0, 5.0, 3.0]), [5, 3]),
        (pa.array([" b ", "é", "a", "b", "b", "a"]), ["b", "a", "é"]),
    ],
    ids=["integers", "unsigned", "with gaps", "texts"],
)
def test_values_are_those_of_their_type(tmp_path: Path, values: pa.Array, expected: list[Any]) -> None:
    data = _open(
        write_parquet(tmp_path / "a.parquet", ROWS | {"item": values}),
        TwoTowerConfig(item=["item"]),
        sparse=["item"],
        seen=SEEN_ITEMS | {"ids": {"seen_category": "seen_category"}},
    )
    assert data.catalogue is not None and data.catalogue.values.to_pylist() == expected
