"""Negatives: which items are candidates, for which queries, and how likely each was to be one."""

from __future__ import annotations

import numpy as np

from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.label_config import NegativesConfig
from shardkeep.workers.retrieval.negatives import MicroCandidates, Negatives
from tests.support.cases import every
from tests.support.retrieval import NEXT, TOWERS, Takes, catalogue_of

TAKES = Takes(TOWERS, 2_000, items=60)
CATALOGUE = catalogue_of(TAKES)
NOTHING = np.empty((16, 0), np.float32)


def negatives(catalogue: Catalogue = CATALOGUE, entries: str | None = None, **settings: object) -> Negatives:
    config = NegativesConfig.model_validate(settings)
    return Negatives(
        catalogue=catalogue, config=config, item="item", entries=entries, corrects=True, seed=3, micro_batch=16
    )


def looked_for(drawn: MicroCandidates, catalogue: Catalogue = CATALOGUE) -> list[int]:
    """The item of each query, -1 = none."""
    items_C = catalogue.ids_M[drawn.rows_C]
    return [-1 if at < 0 else int(items_C[at]) for at in drawn.target_Q]


@every("settings", [{}, {"batch": 3}, {"batch": 0, "uniform": 5}, {"batch": 2, "uniform": 50}], ids=str)
def test_each_query_looks_for_its_item_among_distinct_candidates(settings: dict[str, int]) -> None:
    batch = TAKES.gather(np.arange(40))
    drawn = negatives(**settings).draw(batch, 5, 0)
    assert [each.target_Q.size for each in drawn] == [16, 16, 8]
    assert [item for each in drawn for item in looked_for(each)] == batch.ids["item"].values_N.tolist()
    for each in drawn:
        assert np.unique(each.rows_C).size == each.rows_C.size == each.log_q_C.size
        own = set(each.rows_C[each.shared :].tolist())
        assert own <= set(each.rows_C[each.target_Q].tolist())
        assert (~each.uniform_C[each.target_Q]).all()
        assert each.uniform_C.sum() == each.rows_C.size - np.unique(each.target_Q).size
    least = max(settings.get("batch", 0), settings.get("uniform", 0))
    assert all(each.shared >= least for each in drawn)


def test_candidates_depend_on_seed_step_rank_and_micro_batch_alone() -> None:
    batch = TAKES.gather(np.arange(16))
    source = negatives(batch=2, uniform=6)
    first, again, later, other = (source.draw(batch, *place)[0] for place in [(1, 0), (1, 0), (2, 0), (1, 1)])
    assert np.array_equal(first.rows_C, again.rows_C)
    assert not np.array_equal(first.rows_C, later.rows_C) and not np.array_equal(first.rows_C, other.rows_C)
    twice = source.draw(TAKES.gather(np.tile(np.arange(16), 2)), 1, 0)
    assert np.array_equal(twice[0].rows_C, first.rows_C) and not np.array_equal(twice[1].rows_C, first.rows_C)


@every("settings", [{"uniform": 12}, {"batch": 4, "uniform": 12}], ids=str)
def test_log_q_is_how_often_an_item_is_shared(settings: dict[str, int]) -> None:
    source, random, rounds = negatives(**settings), np.random.default_rng(0), 400
    counts_M, told_M = np.zeros(len(CATALOGUE)), np.zeros(len(CATALOGUE))
    for step in range(rounds):
        items = {"item": Ragged(TAKES.item[random.integers(0, len(TAKES), 16)])}
        drawn = source.draw(Batch(NOTHING, items, np.ones((16, 1), np.float32)), step, 0)[0]
        counts_M[drawn.rows_C[: drawn.shared]] += 1
        told_M[drawn.rows_C] = drawn.log_q_C
    often_M = counts_M > 65  # a standard error of 8 %, and what the last draw says of its distinct targets
    assert often_M.sum() >= 10 and counts_M.max() > 2 * counts_M[often_M].min()
    ratio_M = counts_M[often_M] / rounds / np.exp(told_M[often_M])
    assert np.abs(ratio_M - 1).max() < 0.35 and abs(ratio_M.mean() - 1) < 0.1, ratio_M


def test_a_sample_of_label_0_has_no_query_and_its_item_is_a_candidate() -> None:
    batch = TAKES.gather(np.arange(16))
    label_BT = np.zeros((16, 1), np.float32)
    label_BT[3] = 1
    drawn = negatives().draw(Batch(batch.dense_BI, batch.ids, label_BT), 0, 0)[0]
    items_B = batch.ids["item"].values_N
    assert looked_for(drawn) == [int(items_B[3]) if b == 3 else -1 for b in range(16)]
    assert set(CATALOGUE.ids_M[drawn.rows_C]) == set(items_B.tolist()) and drawn.shared == drawn.rows_C.size


def test_each_entry_of_a_list_looks_for_the_next_one_and_the_last_for_the_item() -> None:
    catalogue = catalogue_of(Takes(NEXT, 500))
    known = catalogue.ids_M[:6].tolist()
    a, b, c, d, e, f = known
    ids = {
        "item": Ragged(np.array([d, e, 7, f])),
        "seen_item": Ragged(np.array([a, b, c, a, 7, b, a]), np.array([3, 0, 2, 2], np.int32)),
    }
    label_BT = np.array([[1], [1], [1], [0]], np.float32)
    batch = Batch(np.empty((4, 0), np.float32), ids, label_BT)
    drawn = negatives(catalogue, "seen_item").draw(batch, 0, 0)[0]
    assert looked_for(drawn, catalogue) == [b, c, d, -1, -1, -1, -1]  # 7 is not in the catalogue
    assert set(catalogue.ids_M[drawn.rows_C]) == {b, c, d, f}
    nothing = Batch(np.empty((2, 0), np.float32), {"item": Ragged(np.array([7, 7]))}, np.ones((2, 1), np.float32))
    drawn = negatives().draw(nothing, 0, 0)[0]  # a micro-batch without targets has a candidate
    assert drawn.rows_C.size == drawn.shared == 1 and looked_for(drawn) == [-1, -1]


def test_items_of_the_catalogue_are_taken_with_all_their_columns() -> None:
    rows_C = np.array([4, 0, 7, 4])
    taken, items = CATALOGUE.take(rows_C), CATALOGUE.items
    for at, row in enumerate(rows_C.tolist()):
        one, expected = taken.slice(at, at + 1), items.slice(row, row + 1)
        assert np.array_equal(one.dense_BI, expected.dense_BI)
        for name, bag in one.ids.items():
            assert np.array_equal(bag.values_N, expected.ids[name].values_N), name
    assert len(CATALOGUE.take(rows_C[:0])) == 0
