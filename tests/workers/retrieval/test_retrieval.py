"""Retrieval: which items are candidates, exact ranks and best items, and the metrics of a model over all items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from shardkeep.base.errors import ConfigError
from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.table.initializers.initial import Initial
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.workers.blocks import BlockScorer
from shardkeep.workers.collectives.collective import Solo, ThreadCollective
from shardkeep.workers.config import TowerConfig
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.data.sides import sides_of
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.evaluation.retrieval import ItemModel, Ranking, RankSettings, RetrievalEvaluator
from shardkeep.workers.label_config import NegativesConfig
from shardkeep.workers.models.retrieval.vectors import VectorModel
from shardkeep.workers.retrieval import ranking
from shardkeep.workers.retrieval.negatives import MicroCandidates, Negatives
from shardkeep.workers.retrieval.ranking import ItemIndex, Left
from tests.support.cases import every
from tests.support.histories import SCHEMA, Histories
from tests.support.ranks import run_ranks
from tests.support.retrieval import NEXT, TOWERS, Takes, catalogue_of

TAKES = Takes(TOWERS, 2_000, items=60)
CATALOGUE = catalogue_of(TAKES)


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
        drawn = source.draw(Batch(np.empty((16, 0), np.float32), items, np.ones((16, 1), np.float32)), step, 0)[0]
        counts_M[drawn.rows_C[: drawn.shared]] += 1
        told_M[drawn.rows_C] = drawn.log_q_C
    often_M = counts_M > 65  # a standard error of 8 %, and what the last draw says of its distinct targets
    assert often_M.sum() >= 10 and counts_M.max() > 2 * counts_M[often_M].min()
    ratio_M = counts_M[often_M] / rounds / np.exp(told_M[often_M])
    assert np.abs(ratio_M - 1).max() < 0.35 and abs(ratio_M.mean() - 1) < 0.05, (ratio_M.mean(), ratio_M)


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


def test_items_of_the_catalogue_are_taken_with_all_their_columns():
    rows_C = np.array([4, 0, 7, 4])
    taken, items = CATALOGUE.take(rows_C), CATALOGUE.items
    for at, row in enumerate(rows_C.tolist()):
        one, expected = taken.slice(at, at + 1), items.slice(row, row + 1)
        assert np.array_equal(one.dense_BI, expected.dense_BI)
        for name, bag in one.ids.items():
            assert np.array_equal(bag.values_N, expected.ids[name].values_N), name
    assert len(CATALOGUE.take(rows_C[:0])) == 0


# Ranks and best items: as of a sort of all scores, whatever the blocks, with ties against the model


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


@every(("users", "items", "width", "k"), [(1, 1, 1, 1), (5, 40, 3, 12), (300, 37, 6, 1), (33, 1000, 7, 9)])
def test_ranks_are_those_of_all_scores_and_the_best_items_those_of_a_sort(users, items, width, k):
    users_BE, items_ME = vectors(users, width, 1), vectors(items, width, 2)
    random = np.random.default_rng(3)
    targets_B = random.integers(-1, items, users)
    lists = [sorted({*random.integers(0, items, 4).tolist()}) for _ in range(users)]
    found = ItemIndex(items_ME).ranks(users_BE, targets_B, left_of(lists))
    scores = users_BE @ items_ME.T
    assert found.tolist() == [right_rank(scores[b], targets_B[b], lists[b]) for b in range(users)]
    best = ItemIndex(items_ME).top(users_BE, k)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # ties go to the first
    assert best.places_BK.tolist() == order.tolist()
    assert best.scores_BK.tolist() == np.take_along_axis(scores, order, axis=1).tolist()


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
    cut = replace(batch, ids=ids | {"seen_item": Ragged(np.array([30]), np.array([0, 0, 1], np.int32))})
    whole = replace(cut, whole=lambda: {"seen_item": ids["seen_item"]})
    assert Left.history(whole, sides_of(schema, ["item"]), catalogue).places_N.tolist() == [1, 2, 0]
    other = replace(schema, sequences=(replace(seen, ids=seen.ids[1:]),))
    with pytest.raises(ConfigError, match=r"eval.exclude_seen: has no effect, no list of the user has the table item;"):
        Left.history(batch, sides_of(other, ["item"]), catalogue)


# Evaluation: the same numbers for any batches and number of ranks


DIM, SEED, COUNT = 6, 3, 90
SIDES = sides_of(SCHEMA, ["item", "tags"])
TABLES = [TableSpec(name=name, dim=DIM, init={"name": "normal", "std": 1.0}) for name in SCHEMA.tables()]
DATA = Histories(COUNT, seed=4)


class SeenModel(VectorModel):
    """A user is the mean of what was seen and a linear layer on the price; an item its row and its tags'."""

    def __init__(self, *, equal=False):
        super().__init__(cosine=equal, temperature=1.0)
        self.price, self._equal = nn.Linear(1, DIM), equal
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for parameter in self.parameters():
                nn.init.normal_(parameter)

    def users(self, dense_BI, inputs):
        return inputs["seen"].mean(inputs["seen"].ids["seen_item"]) + self.price(dense_BI)

    def items(self, dense_CI, inputs):
        return torch.ones_like(inputs["item"]) if self._equal else inputs["item"] + inputs["tags"]


def all_items(data, *, without=None):
    """All items of samples but one, the most frequent first."""
    batch = data.gather(np.arange(COUNT))
    ids, first, counts = np.unique(batch.ids["item"].values_N, return_index=True, return_counts=True)
    order = np.lexsort((ids, -counts))
    order = order[ids[order] != without]
    items = SIDES.items_of(data.gather(first[order]))
    return Catalogue(ids[order], counts[order], items, pa.array([f"item {id}" for id in ids[order]]))


def client_of(rank, ranks):
    """No row was ever pushed, so that each has its initial value."""
    mode = ConsistencyConfig(mode="bounded")
    services = [ShardService(shard=s, tables=TABLES, consistency=mode, num_workers=ranks, seed=SEED) for s in range(2)]
    for service in services:
        service.life.begin(0, 0)
    transport = LocalTransport([service.handle for service in services])
    return RowClient(transport, tables=TABLES, rank=rank, num_workers=ranks)


def evaluated(ranks=1, size=16, data=DATA, catalogue=None, *, equal=False, exclude_seen=False):
    """The metrics of rank 0, which all ranks have."""
    dense = Scorer(SeenModel(equal=equal), TowerConfig(amp="off", compile="off"), torch.device("cpu"))
    tables = {table.name: table for table in TABLES}
    settings = RankSettings(("recall@1", "recall@5", "ndcg@5", "mrr"), exclude_seen)

    def work(collective):
        return RetrievalEvaluator(
            dataset=data,
            client=client_of(collective.rank, ranks),
            users=BlockScorer(Embeddings(SIDES.users, tables), dense, size),
            items=BlockScorer(Embeddings(SIDES.items, tables), ItemModel(dense), size),
            collective=collective,
            max_samples=None,
            ranking=Ranking(SIDES, catalogue or all_items(data), settings),
        ).run(0)

    found = run_ranks(ThreadCollective.group(ranks) if ranks > 1 else [Solo()], work)
    assert all(each == found[0] for each in found)
    return found[0]


def rows(table, ids_N):
    spec = next(each for each in TABLES if each.name == table)
    return Initial(spec.init, seed=SEED, name=table).rows(ids_N, spec.dim).astype(np.float64)


class Known(Histories):
    def best_ranks(self, count):
        return np.arange(1, count + 1)


def test_metrics_are_those_of_all_scores():
    batch, catalogue, layer = DATA.gather(np.arange(COUNT)), all_items(DATA), SeenModel().price
    seen = batch.ids["seen_item"]
    parts = np.split(rows("item", seen.values_N), np.cumsum(seen.lengths_B)[:-1])
    users = np.array([part.mean(0) if len(part) else np.zeros(DIM) for part in parts])
    users += batch.dense_BI @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    tags = rows("tag", catalogue.items.ids["tags"].values_N).reshape(-1, 2, DIM).mean(1)
    scores = users @ (rows("item", catalogue.ids_M) + tags).T
    targets = catalogue.index_of(batch.ids["item"].values_N)
    ranks = 1 + (scores > scores[np.arange(COUNT), targets][:, None]).sum(1)
    positive = ranks[batch.label_BT[:, 0] > 0]
    found = evaluated(data=Known(COUNT, seed=4))
    assert found["samples"] == len(positive) and found["unknown_targets"] == 0
    assert found["recall@5"] == pytest.approx((positive <= 5).mean())
    assert found["mrr"] == pytest.approx((1 / positive).mean())
    assert found["best_recall@1"] == 1 / COUNT and found["best_recall@5"] == 5 / COUNT
    assert "best_mrr" not in found and "best_recall@1" not in evaluated()


@every(("ranks", "size"), [(1, 90), (2, 16), (3, 7)])
def test_metrics_do_not_depend_on_batches_and_ranks(ranks, size):
    assert evaluated(ranks, size) == evaluated()


class AllPositive(Histories):
    """Every sample has label 1, and a weight if that is asked for."""

    weighted = False

    def gather(self, rows_B):
        batch = super().gather(rows_B)
        weight_B = (rows_B % 3).astype(np.float32) if self.weighted else None
        return replace(batch, label_BT=np.ones_like(batch.label_BT), weight_B=weight_B)


def test_what_counts_of_a_sample():
    found = evaluated(equal=True)  # a model whose vectors are all equal
    assert found["recall@5"] == 0.0 and found["mrr"] == pytest.approx(1 / len(all_items(DATA)))
    data = AllPositive(COUNT, seed=4)
    plain, without = (evaluated(data=data, exclude_seen=seen) for seen in (False, True))
    assert without["mrr"] > plain["mrr"], "what a sample has seen is left out but for its target"
    assert without["samples"] == plain["samples"] == COUNT
    lost = int(data.gather(np.arange(1)).ids["item"].values_N[0])  # a target that the catalogue lacks is a miss
    found = evaluated(data=data, catalogue=all_items(data, without=lost))
    count = int((data.gather(np.arange(COUNT)).ids["item"].values_N == lost).sum())
    assert found["unknown_targets"] == count and found["samples"] == COUNT
    data.weighted = True  # a weight of 0 does not count
    found = evaluated(data=data)
    assert found["weights"] == 90.0 and found["mrr"] != plain["mrr"]
