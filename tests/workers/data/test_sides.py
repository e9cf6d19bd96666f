"""Batches, slices of them, schemas, and sides: which columns are a user's and which an item's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns, schema_of
from shardkeep.workers.data.sides import sides_of_model
from shardkeep.workers.data_config import SparseColumn
from tests.support.cases import every
from tests.support.towers import model_config
from tests.support.vector_models import list_schema, two_sided_schema


def test_slices_of_a_ragged_batch_hold_their_own_ids_and_weights() -> None:
    lengths = np.array([2, 0, 1, 3], np.int32)
    ragged = Ragged(np.arange(6, dtype=np.int64), lengths, np.linspace(0, 1, 6, dtype=np.float32))
    single = Ragged(np.arange(4, dtype=np.int64))
    batch = Batch(np.ones((4, 2), np.float32), {"r": ragged, "s": single}, np.zeros((4, 1), np.float32))
    part = batch.slice(1, 3)
    assert len(batch) == 4 and len(part) == len(part.ids["r"]) == len(part.ids["s"]) == 2
    assert part.ids["r"].values_N.tolist() == [2]
    assert part.ids["r"].lengths_B is not None and part.ids["r"].lengths_B.tolist() == [0, 1]
    assert part.ids["r"].weights_N is not None and part.ids["r"].weights_N.tolist() == [np.float32(0.4)]
    assert part.ids["s"].values_N.tolist() == [1, 2]
    assert len(batch.slice(4, 4)) == 0
    assert batch.slice(0, 4) is batch


def test_tables_are_named_in_order_of_first_use_and_a_feature_without_one_has_its_own() -> None:
    schema = Schema(("x",), (Feature("a", "t2"), Feature("b", "t1"), Feature("c", "t2")))
    assert schema.tables() == ("t2", "t1")
    assert schema.num_dense == 1
    columns = [SparseColumn(column="a"), SparseColumn(column="b", table="users", pooling="mean")]
    assert schema_of([], columns, {}).features == (Feature("a", "a", "sum"), Feature("b", "users", "mean"))


ITEM = Feature("item", "item")


def sides(name: str, schema: Schema, **settings: Any) -> Any:
    config: Any = model_config(name, **settings)
    return sides_of_model(config, schema)


def test_two_towers_leave_all_other_columns_to_the_user() -> None:
    found = sides("two_tower", two_sided_schema(), item=["item", "price", "category"])
    assert found.item == ITEM and [f.name for f in found.items.features] == ["item", "category"]
    assert found.items.dense == ("price",) and not found.items.sequences and not found.items.labels
    assert [f.name for f in found.users.features] == ["user"] and found.users.dense == ("age",)
    assert found.users.sequences == two_sided_schema().sequences and found.users.labels == ("label",)


@every("name", ["sasrec", "hstu"])
@every("settings", [{}, {"item": ["item"]}])
def test_the_item_that_follows_a_list_is_the_feature_of_its_table(name: str, settings: Any) -> None:
    found = sides(name, list_schema(), **settings)
    assert found.item == ITEM and found.users.features == () and found.users.sequences == list_schema().sequences


BOUGHT = SequenceColumns("bought", list_schema().sequences[0].ids, (), 3)
FOLLOWS = "the item that follows seen_item is one column of table item; allowed:"
GROUPS = "model.name: sasrec takes one group of data.sequences; the data has"
OTHERS = "model.name: sasrec takes seen and item alone, not age, price, user, category; allowed: two_tower"


@every(
    ("schema", "settings", "said"),
    [
        (Schema((), (ITEM,)), {}, f"{GROUPS} none"),
        (replace(list_schema(), sequences=(*list_schema().sequences, BOUGHT)), {}, f"{GROUPS} seen, bought"),
        (replace(list_schema(), features=()), {}, f"model.item: no column; {FOLLOWS} none"),
        (replace(list_schema(), features=(ITEM, Feature("other", "item"))), {},
         f"model.item: item, other; {FOLLOWS} item, other"),
        (list_schema(), {"item": ["itm"]}, f"model.item: itm; {FOLLOWS} item"),
        (two_sided_schema(), {}, OTHERS),
    ],
)  # fmt: skip
def test_columns_that_a_model_of_lists_does_not_take_are_refused(schema: Any, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sides("sasrec", schema, **settings)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_a_batch_is_parted_into_its_sides() -> None:
    found = sides("two_tower", two_sided_schema(lists=False), item=["item", "price", "category"])
    ids = {name: Ragged(np.arange(3) + 10 * n) for n, name in enumerate(("user", "item", "category"))}
    batch = Batch(np.array([[1, 2], [3, 4], [5, 6]], dtype=np.float32), ids, np.ones((3, 1), np.float32))
    users, items = found.users_of(batch), found.items_of(batch)
    assert users.dense_BI.tolist() == [[1], [3], [5]] and items.dense_BI.tolist() == [[2], [4], [6]]
    assert set(users.ids) == {"user"} and list(items.ids) == ["item", "category"]
    assert users.label_BT.shape == (3, 1) and items.label_BT.shape == (3, 0)
