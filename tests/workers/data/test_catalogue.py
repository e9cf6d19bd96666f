"""The catalogue of a retrieval job: which items are in it, in which order, with what; and its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.conversion.hashing import MISSING_ID
from shardkeep.workers.data.items import ItemCounts, make_catalogue
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.data.sides import sides_of
from tests.support.cases import every

SEEN = SequenceColumns("seen", (Feature("seen_item", "item", "none"),), (), 3)
SCHEMA = Schema(
    ("age", "price"), (Feature("user", "user"), Feature("item", "item"), Feature("tags", "tags", "weighted"))
)


class Samples:
    """Samples in memory: users 0, 1, 2 ... of the items, where item i costs i + row / 100."""

    def __init__(
        self, items: Sequence[int], labels: Sequence[int] | None = None, lists: Sequence[list[int]] = ()
    ) -> None:
        self.schema = SCHEMA if not lists else replace(SCHEMA, sequences=(SEEN,))
        self._items = np.array(items, np.int64)
        self._labels = np.array(labels or [1] * len(items), np.float32)
        self._lists = lists

    def __len__(self) -> int:
        return len(self._items)

    def gather(self, rows_B: Ints) -> Batch:
        items_B = self._items[rows_B]
        dense_BI = np.stack([rows_B, items_B + rows_B / 100], axis=1).astype(np.float32)
        tags = Ragged(
            np.repeat(items_B * 10, 2), np.full(len(rows_B), 2, np.int32), np.tile(np.float32([1, 2]), len(rows_B))
        )
        ids = {"user": Ragged(rows_B), "item": Ragged(items_B), "tags": tags}
        if self._lists:
            own = [self._lists[row] for row in rows_B]
            flat, lengths_B = (
                np.array([each for one in own for each in one], np.int64),
                np.array(list(map(len, own)), np.int32),
            )
            ids["seen_item"] = Ragged(flat, lengths_B)
        return Batch(dense_BI, ids, self._labels[rows_B][:, None])


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


@every("values", [pa.array(["b", "a", "é", "d"]), pa.array([2**62, 1, -1, 0])], ids=["texts", "integers"])
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


def test_data_without_items_and_a_column_of_lists_are_refused() -> None:
    with pytest.raises(DataError, match="column item: no training row of label 1 has an item"):
        _made(Samples([MISSING_ID, 3], labels=[1, 0]))
    with pytest.raises(ConfigError, match=r"model\.item: tags has several values in a row"):
        _made(Samples([7, 3]), ("tags", "item"))
