"""Ranks and best items are exact: as of a sort of all scores, whatever the blocks, with ties against the model."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.data.sides import sides_of
from shardkeep.workers.retrieval import ranking
from shardkeep.workers.retrieval.ranking import ItemIndex, Left
from tests.support.cases import every

WHOLE = 2.0**-4
"""Vectors of few bits have dot products that any order of additions gives exactly, and many ties."""


def vectors(count: int, width: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.integers(-3, 4, (count, width)) * WHOLE).astype(np.float32)


def left_of(lists: list[list[int]]) -> Left:
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists])]).astype(np.int64)
    return Left(offsets, np.array([place for each in lists for place in each], np.int64))


def right_rank(scores_M: np.ndarray, target: int, left: list[int]) -> int:
    """1 + the others that are not below."""
    if target < 0:
        return 0
    return 1 + sum(s >= scores_M[target] for m, s in enumerate(scores_M) if m != target and m not in left)


@every(("users", "items", "width"), [(1, 1, 1), (5, 40, 3), (300, 37, 6), (33, 1000, 7)])
def test_ranks_are_those_of_all_scores(users: int, items: int, width: int) -> None:
    users_BE, items_ME = vectors(users, width, 1), vectors(items, width, 2)
    random = np.random.default_rng(3)
    targets_B = random.integers(-1, items, users)
    lists = [sorted({*random.integers(0, items, 4).tolist()}) for _ in range(users)]
    found = ItemIndex(items_ME).ranks(users_BE, targets_B, left_of(lists))
    scores = users_BE @ items_ME.T
    assert found.tolist() == [right_rank(scores[b], targets_B[b], lists[b]) for b in range(users)]


def test_ranks_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    users_BE, items_ME = (random.normal(size=(n, 33)).astype(np.float32) for n in (200, 501))
    index, targets_B = ItemIndex(items_ME), random.integers(0, 501, 200)
    whole = index.ranks(users_BE, targets_B)
    parts = [index.ranks(users_BE[b : b + 7], targets_B[b : b + 7]) for b in range(0, 200, 7)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    monkeypatch.setattr(ranking, "BUFFER_BYTES", 1)
    assert index.ranks(users_BE, targets_B).tolist() == whole.tolist()


def test_a_target_is_ranked_last_among_equals_and_behind_what_is_no_number() -> None:
    ranks_B = ItemIndex(np.ones((70, 5), np.float32)).ranks(np.ones((3, 5), np.float32), np.array([0, 33, 69]))
    assert ranks_B.tolist() == [70, 70, 70]
    items_ME = np.eye(4, dtype=np.float32)
    items_ME[3] = np.nan
    index = ItemIndex(items_ME)
    assert index.ranks(np.ones((2, 4), np.float32), np.array([0, 3])).tolist() == [4, 4]
    assert index.top(np.ones((1, 4), np.float32), 4).places_BK.tolist() == [[0, 1, 2, -1]]
    index = ItemIndex(np.empty((0, 4), np.float32))  # no item gives no rank and no best item
    assert index.ranks(np.ones((2, 4), np.float32), np.array([-1, -1])).tolist() == [0, 0]
    assert index.top(np.ones((2, 4), np.float32), 3).places_BK.tolist() == [[-1] * 3] * 2


@every(("users", "items", "k"), [(1, 1, 1), (70, 300, 1), (5, 300, 12), (3, 9, 9)])
def test_the_best_items_are_those_of_a_sort_and_ties_go_to_the_first(users: int, items: int, k: int) -> None:
    users_BE, items_ME = vectors(users, 4, 5), vectors(items, 4, 6)
    best = ItemIndex(items_ME).top(users_BE, k)
    scores = users_BE @ items_ME.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    assert best.places_BK.tolist() == order.tolist()
    assert best.scores_BK.tolist() == np.take_along_axis(scores, order, axis=1).tolist()


def test_the_best_items_of_several_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    users_BE, items_ME = vectors(9, 4, 7), vectors(517, 4, 8)
    lists = [[1, 5, 99, 516], [], *[[0]] * 7]
    whole = ItemIndex(items_ME).top(users_BE, 20, left_of(lists))
    monkeypatch.setattr(ranking, "TOP_ITEMS", 100)
    parts = ItemIndex(items_ME).top(users_BE, 20, left_of(lists), size=4)
    assert parts.places_BK.tolist() == whole.places_BK.tolist()
    assert not {1, 5, 99, 516} & {*whole.places_BK[0].tolist()} and 0 not in whole.places_BK[2:]
    best = ItemIndex(vectors(5, 3, 1)).top(vectors(1, 3, 2), 4, left_of([[0, 1, 4]]))  # fewer are left
    assert sorted(best.places_BK[0].tolist()) == [-1, -1, 2, 3]
    assert np.isneginf(best.scores_BK[0, 2:]).all() and best.places_BK[0, 2:].tolist() == [-1, -1]


def test_a_history_has_each_known_item_of_the_table_once() -> None:
    seen = SequenceColumns("seen", (Feature("seen_item", "item", "none"), Feature("seen_kind", "kind", "none")), (), 4)
    schema = Schema((), (Feature("user", "user"), Feature("item", "item")), ("label",), (seen,))
    ids = {
        "user": Ragged(np.array([1, 2, 3])),
        "item": Ragged(np.array([10, 10, 30])),
        "seen_item": Ragged(np.array([20, 10, 20, 77, 30]), np.array([4, 0, 1], np.int32)),
        "seen_kind": Ragged(np.array([30, 30, 30, 30, 10]), np.array([4, 0, 1], np.int32)),
    }
    batch = Batch(np.empty((3, 0), np.float32), ids, np.ones((3, 1), np.float32))
    items = Batch(np.empty((3, 0), np.float32), {"item": Ragged(np.array([30, 20, 10]))}, np.empty((3, 0), np.float32))
    catalogue = Catalogue(np.array([30, 20, 10]), np.array([3, 2, 1]), items, pa.array([30, 20, 10]))
    left = Left.history(batch, sides_of(schema, ["item"]), catalogue)
    assert left.offsets_B1.tolist() == [0, 2, 2, 3]
    assert left.places_N.tolist() == [1, 2, 0]
