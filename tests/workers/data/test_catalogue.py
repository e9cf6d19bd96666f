"""The catalogue of a retrieval job: its items, their order and features, its file, and files of such jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_text
from shardkeep.workers.data.conversion.rules import FORM
from shardkeep.workers.data.fitting.inputs import Inputs
from shardkeep.workers.data.items import ItemCounts, make_catalogue
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.data.sides import sides_of
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data.store.contents import contents
from shardkeep.workers.model_config import RetrievalSettings, SasRecConfig, TwoTowerConfig
from tests.support.cases import every
from tests.support.history_files import ROWS, history_config, write_csv, write_parquet

SEEN = SequenceColumns("seen", (Feature("seen_item", "item", "none"),), (), 3)
SCHEMA = Schema(
    ("age", "price"), (Feature("user", "user"), Feature("item", "item"), Feature("tags", "tags", "weighted"))
)


@dataclass(frozen=True)
class Samples:
    """Samples in memory: users 0, 1, 2 ... of the items, where item i costs i + row / 100."""

    items: Sequence[int]
    labels: Sequence[int] = ()
    lists: Sequence[list[int]] = ()

    @property
    def schema(self) -> Schema:
        return replace(SCHEMA, sequences=(SEEN,)) if self.lists else SCHEMA

    def __len__(self) -> int:
        return len(self.items)

    def gather(self, rows_B: Ints) -> Batch:
        items_B, count = np.array(self.items, np.int64)[rows_B], len(rows_B)
        dense_BI = np.stack([rows_B, items_B + rows_B / 100], axis=1).astype(np.float32)
        tags = Ragged(np.repeat(items_B * 10, 2), np.full(count, 2, np.int32), np.tile(np.float32([1, 2]), count))
        ids = {"user": Ragged(rows_B), "item": Ragged(items_B), "tags": tags}
        if self.lists:
            own = [self.lists[row] for row in rows_B]
            flat_N = np.array([entry for entries in own for entry in entries], np.int64)
            ids["seen_item"] = Ragged(flat_N, np.array(list(map(len, own)), np.int32))
        labels = np.array(self.labels or [1] * len(self.items), np.float32)
        return Batch(dense_BI, ids, labels[rows_B][:, None])


def _made(samples: Samples, item: Sequence[str] = ("item", "price", "tags"), **changes: Any) -> Catalogue:
    sides = replace(sides_of(SCHEMA, item), **changes)
    return make_catalogue(samples, sides, lambda ids_M: pa.array([f"item {each}" for each in ids_M]))


def test_items_come_by_falling_count_then_by_id_with_the_features_of_their_last_row() -> None:
    catalogue = _made(Samples([7, 3, 3, 9, 7, 5]))
    assert catalogue.ids_M.tolist() == [3, 7, 5, 9] and catalogue.counts_M.tolist() == [2, 2, 1, 1]
    assert catalogue.items.dense_BI[:, 0].tolist() == pytest.approx([3.02, 7.04, 5.05, 9.03])
    assert catalogue.items.ids["tags"].values_N.tolist() == [30, 30, 70, 70, 50, 50, 90, 90]
    assert catalogue.items.label_BT.shape == (4, 0) and set(catalogue.items.ids) == {"item", "tags"}
    assert catalogue.values.to_pylist() == ["item 3", "item 7", "item 5", "item 9"]


def test_rows_of_label_0_are_no_items_and_entries_of_lists_are() -> None:
    catalogue = _made(Samples([7, 3, MISSING_ID, 3, 9], labels=[1, 0, 1, 1, 0]))
    assert catalogue.ids_M.tolist() == [3, 7] and catalogue.counts_M.tolist() == [1, 1]
    lists = [[4, 7, 7], [], [8, MISSING_ID, 3], [9]]  # the first of each is predicted by no one
    catalogue = _made(Samples([7, 3, 3, 5], labels=[1, 1, 1, 0], lists=lists), ("item",), predicted=SEEN)
    assert dict(zip(catalogue.ids_M.tolist(), catalogue.counts_M.tolist(), strict=True)) == {3: 3, 7: 3, 4: 0, 8: 0}
    with pytest.raises(DataError, match="column item: no training row of label 1 has an item"):
        _made(Samples([MISSING_ID, 3], labels=[1, 0]))
    with pytest.raises(ConfigError, match=r"model\.item: tags has several values in a row"):
        _made(Samples([7, 3]), ("tags", "item"))


def test_counts_are_the_same_for_parts_of_any_size() -> None:
    rng = np.random.default_rng(3)
    ids_N = rng.zipf(1.3, 5_000).astype(np.int64)
    whole, parts = ItemCounts(), ItemCounts()
    whole.add(ids_N, rows_N=np.arange(5_000))
    for start in range(0, 5_000, 7):
        parts.add(ids_N[start : start + 7], rows_N=np.arange(start, min(start + 7, 5_000)))
    distinct, counts = np.unique(ids_N, return_counts=True)
    ids_M, counts_M, rows_M = parts.found()
    assert all((a == b).all() for a, b in zip(whole.found(), parts.found(), strict=True))
    found = dict(zip(ids_M.tolist(), counts_M.tolist(), strict=True))
    assert found == dict(zip(distinct.tolist(), counts.tolist(), strict=True))
    assert (ids_N[rows_M] == ids_M).all()
    assert all(item not in ids_N[row + 1 :] for item, row in zip(ids_M, rows_M, strict=True))


@every("values", [pa.array(["b", "a", "é", "d"]), pa.array([2**62, 1, -1, 0])])
def test_a_file_holds_all_of_a_catalogue(tmp_path: Path, values: pa.Array) -> None:
    catalogue = replace(_made(Samples([7, 3, 3, 9, 7, 5])), values=values)
    checksum = catalogue.write(tmp_path / "catalogue.arrow")
    found = Catalogue.read(tmp_path / "catalogue.arrow")
    assert (found.ids_M == catalogue.ids_M).all() and (found.counts_M == catalogue.counts_M).all()
    assert found.values.equals(values) and found.values.type == values.type
    assert (found.items.dense_BI == catalogue.items.dense_BI).all() and found.items.label_BT.shape == (4, 0)
    for name, ragged in catalogue.items.ids.items():
        pairs = zip(vars(ragged).values(), vars(found.items.ids[name]).values(), strict=True)
        assert all(a is b is None or ((a == b).all() and a.dtype == b.dtype) for a, b in pairs)
    assert found.write(tmp_path / "again.arrow") == checksum
    assert found.index_of(np.array([[9, 4], [3, 7]])).tolist() == [[3, -1], [0, 1]]


def test_a_file_with_any_other_bytes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.arrow"
    _made(Samples([7, 3])).write(path)
    content = path.read_bytes()
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(0, len(content), 23)]
    for damaged in (b"", content[:10], content[:100], content + b"x", bytes(len(content)), *flipped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged, or no catalogue"):
            Catalogue.read(path)


# Files of a retrieval job

FORMS = [("a.parquet", write_parquet), ("a.csv", write_csv)]
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


@every(("name", "write"), FORMS)
def test_items_have_the_values_of_the_files_and_the_features_of_their_last_row(
    tmp_path: Path, name: str, write: Any
) -> None:
    rows = ROWS | {"item": ["a", "b", "c", "a", "b", "a"], "category": ["x", "y", "x", "y", "x", "z"]}
    data = _open(write(tmp_path / name, rows))
    assert _counts(data) == {"a": 3, "b": 2, "c": 1} and data.catalogue is not None
    assert data.catalogue.ids_M.tolist() == [hash_text(text) for text in (b"a", b"b", b"c")]
    categories_M = data.catalogue.items.ids["category"].values_N
    assert categories_M.tolist() == [hash_text(text) for text in (b"z", b"x", b"x")]
    # kept of [a b c a b] are [c a b]: a and b are predicted; [c ? a]: a; [? b]: b
    path = write(tmp_path / name, NEXT_ROWS | {"item": ["d", "b", "c", "a", "b", "c"]})
    assert _counts(_next(path)) == {"a": 3, "b": 4, "c": 2, "d": 1}
    # kept of [a b c a b] are [b], which nobody predicts, as of all others
    assert _counts(_next(path, seen={"max_length": 1})) == {"b": 2, "c": 2, "a": 1, "d": 1}


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
    assert len(list(tmp_path.glob(".shardkeep-cache/*/ids-item-*.column"))) == 1


@every(
    ("values", "expected"),
    [
        (pa.array([5, 2**62, -3, 5, 5, -3]), [5, -3, 2**62]),
        (pa.array([5, 2**63 + 1, 3, 5, 5, 3], pa.uint64()), [5, 3, 2**63 + 1]),
        (pa.array([5.0, None, 3.0, 5.0, 5.0, 3.0]), [5, 3]),
        (pa.array([" b ", "é", "a", "b", "b", "a"]), ["b", "a", "é"]),
    ],
)
def test_values_are_those_of_their_type(tmp_path: Path, values: pa.Array, expected: list[Any]) -> None:
    data = _open(
        write_parquet(tmp_path / "a.parquet", ROWS | {"item": values}),
        TwoTowerConfig(item=["item"]),
        sparse=["item"],
        seen=SEEN_ITEMS | {"ids": {"seen_category": "seen_category"}},
    )
    assert data.catalogue is not None and data.catalogue.values.to_pylist() == expected


def test_the_catalogue_is_made_once_and_anew_for_other_columns_lists_or_files(tmp_path: Path) -> None:
    rows = NEXT_ROWS | {"category": ROWS["category"]}
    path = write_parquet(tmp_path / "a.parquet", rows)
    folder = tmp_path / ".shardkeep-cache"
    seen = {"seen": SEEN_ITEMS}

    def entries() -> int:
        return len(list(folder.glob("*/catalogue-*.arrow")))

    first = _open(path, **seen)
    assert entries() == 1 and [item.useless for item in contents(folder)] == [""]
    made = {file: file.stat().st_mtime_ns for file in folder.glob("*/*.arrow")}
    assert _counts(_open(path, **seen)) == _counts(first) and entries() == 1
    assert made == {file: file.stat().st_mtime_ns for file in folder.glob("*/*.arrow")}
    _open(path, TwoTowerConfig(item=["item"]), **seen)
    assert entries() == 2
    write_parquet(path, {name: [*values, values[0]] for name, values in rows.items()})
    assert _counts(_open(path, **seen))["a"] == _counts(first)["a"] + 1 and entries() == 1  # that of before is gone


@every(("name", "write"), FORMS)
def test_inputs_without_a_label_read_rows_that_have_none(tmp_path: Path, name: str, write: Any) -> None:
    path = write(tmp_path / name, {name: ROWS[name] for name in ROWS if name != "clicked"})
    stored = _open(path).inputs
    assert stored is not None and stored["form"] == FORM and stored["label"] is None
    inputs = Inputs.of_json(stored)
    assert inputs.to_json() == stored and inputs.layout.label_columns == ()
    assert "clicked" not in inputs.columns() and inputs.layout.schema.labels == ("label",)
    with pytest.raises(ValueError, match="form: "):
        Inputs.of_json(stored | {"form": FORM - 1})


def test_held_out_rows_are_in_no_count_and_a_part_without_rows_is_an_error(tmp_path: Path) -> None:
    rows = {"item": [f"i{i % 50}" for i in range(400)], "seen_item": [["i1", "i2"]] * 400}
    path = write_parquet(tmp_path / "a.parquet", rows)
    data = _next(path, split={"by": "random", "eval": 0.25, "test": 0.0})
    assert data.eval is not None and 60 < len(data.eval) < 140
    assert sum(_counts(data).values()) == 2 * len(data.train)
    with pytest.raises(DataError, match="the evaluation data has no rows"):
        path = write_parquet(tmp_path / "b.parquet", {name: values[:1] for name, values in rows.items()})
        _next(path, split={"by": "random", "eval": 0.001, "test": 0.0})


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
