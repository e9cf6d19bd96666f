"""Files of a retrieval job: rows without a label, the catalogue in the cache, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.cache.contents import contents
from shardkeep.workers.data.conversion.hashing import hash_text
from shardkeep.workers.data.conversion.inputs import Inputs
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.data.sources.registry import columns_of_files, open_data
from shardkeep.workers.data_config import DataConfig
from shardkeep.workers.model_config import RetrievalSettings, SasRecConfig, TwoTowerConfig
from tests.support.cases import every
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


@every("write", PARTS, ids=["parquet", "csv"])
def test_items_have_the_values_of_the_files_and_the_features_of_their_last_row(tmp_path: Path, write: Any) -> None:
    rows = ROWS | {"item": ["a", "b", "c", "a", "b", "a"], "category": ["x", "y", "x", "y", "x", "z"]}
    data = _open(write(tmp_path / f"a.{write.__name__[6:]}", rows))
    assert _counts(data) == {"a": 3, "b": 2, "c": 1} and data.catalogue is not None
    assert data.catalogue.ids_M.tolist() == [hash_text(text) for text in (b"a", b"b", b"c")]
    categories_M = data.catalogue.items.ids["category"].values_N
    assert categories_M.tolist() == [hash_text(text) for text in (b"z", b"x", b"x")]


def test_rows_of_label_1_alone_are_counted_and_without_a_label_all_have_it(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    data = _open(path)
    assert data.train.schema.labels == ("label",)
    assert data.train.gather(np.arange(6)).label_BT.tolist() == [[1.0]] * 6
    data = _open(path, label="clicked")
    assert _counts(data) == {"b": 2, "c": 1}
    assert data.train.gather(np.arange(6)).label_BT[:, 0].tolist() == ROWS["clicked"]
    before = open_data(history_config(path), seed=0)
    assert before.catalogue is None and before.fingerprint == data.fingerprint and before.inputs == data.inputs
    assert len(list(tmp_path.joinpath(".shardkeep-cache").glob("*/train.arrow"))) == 2


@every("write", PARTS, ids=["parquet", "csv"])
def test_entries_that_are_kept_are_items_too(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / f"a.{write.__name__[6:]}", NEXT_ROWS | {"item": ["d", "b", "c", "a", "b", "c"]})
    # kept of [a b c a b] are [c a b]: a and b are predicted; [c ? a]: a; [? b]: b
    assert _counts(_next(path)) == {"a": 3, "b": 4, "c": 2, "d": 1}
    # kept of [a b c a b] are [b], which nobody predicts, as of all others
    assert _counts(_next(path, seen={"max_length": 1})) == {"b": 2, "c": 2, "a": 1, "d": 1}
    assert len(list(tmp_path.joinpath(".shardkeep-cache").glob("*/catalogue.arrow"))) == 2


@every(
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


def test_the_catalogue_is_made_once_and_anew_for_other_columns_lists_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = NEXT_ROWS | {"category": ROWS["category"]}
    path = write_parquet(tmp_path / "a.parquet", rows)
    folder = tmp_path / ".shardkeep-cache"
    seen = {"seen": SEEN_ITEMS}

    def entries() -> int:
        return len(list(folder.glob("*/catalogue.arrow")))

    first = _open(path, **seen)
    assert entries() == 1 and len(contents(folder)) == 2 and not any(item.useless for item in contents(folder))
    made = {file: file.stat().st_mtime_ns for file in folder.glob("*/*.arrow")}
    assert _counts(_open(path, **seen)) == _counts(first) and entries() == 1
    assert made == {file: file.stat().st_mtime_ns for file in folder.glob("*/*.arrow")}
    _open(path, **seen | {"seen": SEEN_ITEMS | {"max_length": 1}})  # no list of theirs is predicted
    assert entries() == 1
    _open(path, TwoTowerConfig(item=["item"]), **seen)
    assert entries() == 2
    write_parquet(
        path, {name: [*values, values[0]] for name, values in (NEXT_ROWS | {"category": ROWS["category"]}).items()}
    )
    assert _counts(_open(path, **seen))["a"] == _counts(first)["a"] + 1 and entries() == 2


def test_a_damaged_catalogue_is_made_again(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    counts = _counts(_open(path))
    (file,) = tmp_path.joinpath(".shardkeep-cache").glob("*/catalogue.arrow")
    file.write_bytes(bytes(file.stat().st_size))
    assert _counts(_open(path)) == counts
    file.write_bytes(b"")
    assert _counts(_open(path)) == counts


@every("write", PARTS, ids=["parquet", "csv"])
def test_inputs_without_a_label_read_rows_that_have_none(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / f"a.{write.__name__[6:]}", {name: ROWS[name] for name in ROWS if name != "clicked"})
    stored = _open(path).inputs
    assert stored is not None and stored["form"] == 3 and stored["label"] is None
    inputs = Inputs.of_json(stored)
    assert inputs.to_json() == stored and inputs.layout.label_columns == ()
    assert "clicked" not in inputs.columns() and inputs.layout.schema.labels == ("label",)
    with pytest.raises(ValueError, match="label: is missing"):
        Inputs.of_json(stored | {"form": 2})


def test_held_out_rows_are_in_no_count_and_a_part_without_rows_is_an_error(tmp_path: Path) -> None:
    rows = {"item": [f"i{i % 50}" for i in range(400)], "seen_item": [["i1", "i2"]] * 400}
    path = write_parquet(tmp_path / "a.parquet", rows)
    data = _next(path, eval_fraction=0.25)
    assert data.eval is not None and 60 < len(data.eval) < 140
    assert sum(_counts(data).values()) == 2 * len(data.train)
    with pytest.raises(DataError, match="the evaluation data has no rows"):
        _next(
            write_parquet(tmp_path / "b.parquet", {name: values[:1] for name, values in rows.items()}),
            eval_fraction=0.001,
        )


@every(
    ("model", "why"),  # other refusals: test_sides.py, models/retrieval/test_two_tower.py
    [
        (TwoTowerConfig(), "model.item: is missing; .* allowed: item, category"),
        (SasRecConfig(), "model.name: sasrec takes seen and item alone, not price, category"),
    ],
)
def test_columns_that_are_no_items_are_refused_before_the_data_are_converted(
    tmp_path: Path, model: RetrievalSettings, why: str
) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS | {"price": [1.0] * 6})
    columns = columns_of_files(history_config(path, label=None, dense=["price"]))
    assert columns is not None
    with pytest.raises(ConfigError, match=why) as caught:
        sides_of_model(model, columns)
    assert "\n" not in str(caught.value) and not tmp_path.joinpath(".shardkeep-cache").exists()


def test_a_column_of_vectors_is_all_its_numbers(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS | {"image": [[float(i), -i] for i in range(6)]})
    data = _open(path, TwoTowerConfig(item=["item", "image"]), dense=[{"column": "image", "width": 2, "scale": "none"}])
    assert data.catalogue is not None
    assert data.catalogue.items.dense_BI.tolist() == [[5.0, -5.0], [3.0, -3.0], [4.0, -4.0]]


def test_data_without_a_known_item_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    held = write_parquet(tmp_path / "b.parquet", ROWS | {"item": [f" {each}?" for each in ROWS["item"]]})
    with pytest.raises(DataError, match=r"data\.eval: none of its 6 rows has an item .* recall would be 0") as caught:
        _open(path, eval=[str(held)])
    assert "\n" not in str(caught.value)
    for source in ("criteo", "tests.support.samples:draw"):
        with pytest.raises(ConfigError, match=r"two_tower needs a catalogue of items.*csv, parquet, synthetic"):
            open_data(DataConfig.model_validate({"source": source}), seed=0, items=TWO_TOWER)
