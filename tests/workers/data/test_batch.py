"""Batches, slices of them, and schemas."""

from __future__ import annotations

import numpy as np

from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, features_of
from shardkeep.workers.data_config import SparseColumn


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


def test_tables_are_named_in_order_of_first_use() -> None:
    schema = Schema(("x",), (Feature("a", "t2"), Feature("b", "t1"), Feature("c", "t2")))
    assert schema.tables() == ("t2", "t1")
    assert schema.num_dense == 1


def test_a_feature_without_a_table_has_its_own() -> None:
    columns = [SparseColumn(column="a"), SparseColumn(column="b", table="users", pooling="mean")]
    assert features_of(columns) == (Feature("a", "a", "sum"), Feature("b", "users", "mean"))
