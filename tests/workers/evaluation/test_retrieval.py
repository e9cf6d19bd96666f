"""A retrieval model is evaluated over all items, with the same numbers for any batches and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardkeep.base.arrays import Ints
from shardkeep.ps.server.table.initializers.initial import Initial
from shardkeep.workers.blocks import BlockScorer
from shardkeep.workers.collectives.collective import Collective, Solo, ThreadCollective
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.evaluation.retrieval import ItemModel, Ranking, RankSettings, RetrievalEvaluator
from tests.support.cases import every
from tests.support.histories import Histories
from tests.support.item_models import DIM, SEED, SIDES, TABLES, SeenModel, catalogue_of, client_of, scorer_of
from tests.support.ranks import run_ranks

METRICS = ("recall@1", "recall@5", "ndcg@5", "mrr")
DATA = Histories(90, seed=4)


class AllPositive(Histories):
    """Every sample has label 1, and a weight if that is asked for."""

    weighted = False

    def gather(self, rows_B: np.ndarray) -> Batch:
        batch = super().gather(rows_B)
        weight_B = (rows_B % 3).astype(np.float32) if self.weighted else None
        return replace(batch, label_BT=np.ones_like(batch.label_BT), weight_B=weight_B)


def evaluated(
    ranks: int = 1,
    size: int = 16,
    data: Histories = DATA,
    catalogue: Catalogue | None = None,
    *,
    model: SeenModel | None = None,
    exclude_seen: bool = False,
    best_ranks: Callable[[int], Ints] | None = None,
) -> dict[str, Any]:
    """The metrics of rank 0, which all ranks have."""
    clients, dense = client_of(ranks), scorer_of(model or SeenModel())
    tables = {table.name: table for table in TABLES}

    def work(collective: Collective) -> dict[str, Any]:
        return RetrievalEvaluator(
            dataset=data,
            client=clients[collective.rank],
            users=BlockScorer(Embeddings(SIDES.users, tables), dense, size),
            items=BlockScorer(Embeddings(SIDES.items, tables), ItemModel(dense), size),
            collective=collective,
            max_samples=None,
            ranking=Ranking(SIDES, catalogue or catalogue_of(data), RankSettings(METRICS, exclude_seen)),
            best_ranks=best_ranks,
        ).run(0)

    found = run_ranks(ThreadCollective.group(ranks) if ranks > 1 else [Solo()], work)
    assert all(each == found[0] for each in found)
    return found[0]


def rows(table: str, ids_N: np.ndarray) -> np.ndarray:
    """The rows of ids that nobody has pushed."""
    spec = next(each for each in TABLES if each.name == table)
    return Initial(spec.init, seed=SEED, name=table).rows(ids_N, spec.dim).astype(np.float64)


def test_metrics_are_those_of_all_scores() -> None:
    batch, catalogue, layer = DATA.gather(np.arange(90)), catalogue_of(DATA), scorer_of(SeenModel()).model.price
    seen = batch.ids["seen_item"]
    parts = np.split(rows("item", seen.values_N), np.cumsum(seen.lengths_B)[:-1])
    users = np.array([part.mean(0) if len(part) else np.zeros(DIM) for part in parts])
    users += batch.dense_BI @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    tags = rows("tag", catalogue.items.ids["tags"].values_N).reshape(-1, 2, DIM).mean(1)
    scores = users @ (rows("item", catalogue.ids_M) + tags).T
    targets = catalogue.index_of(batch.ids["item"].values_N)
    ranks = 1 + (scores > scores[np.arange(90), targets][:, None]).sum(1)
    positive = ranks[batch.label_BT[:, 0] > 0]
    found = evaluated()
    assert found["samples"] == len(positive) and found["unknown_targets"] == 0
    assert found["recall@5"] == pytest.approx((positive <= 5).mean())
    assert found["mrr"] == pytest.approx((1 / positive).mean())


@every(("ranks", "size"), [(1, 90), (2, 16), (3, 7)])
def test_metrics_do_not_depend_on_batches_and_ranks(ranks: int, size: int) -> None:
    assert evaluated(ranks, size) == evaluated()


def test_a_model_whose_vectors_are_all_equal_has_no_recall() -> None:
    found = evaluated(model=SeenModel(equal=True, cosine=True))
    assert found["recall@5"] == 0.0 and found["mrr"] == pytest.approx(1 / len(catalogue_of(DATA)))


def test_what_counts_of_a_sample() -> None:
    data = AllPositive(90, seed=4)
    plain, without = (evaluated(data=data, exclude_seen=seen) for seen in (False, True))
    assert without["mrr"] > plain["mrr"], "what a sample has seen is left out but for its target"
    assert without["samples"] == plain["samples"] == 90
    lost = int(data.gather(np.arange(1)).ids["item"].values_N[0])  # a target that the catalogue lacks is a miss
    found = evaluated(data=data, catalogue=catalogue_of(data, without=lost))
    count = int((data.gather(np.arange(90)).ids["item"].values_N == lost).sum())
    assert found["unknown_targets"] == count and found["samples"] == 90
    data.weighted = True  # a weight of 0 does not count
    found = evaluated(data=data)
    assert found["weights"] == 90.0 and found["mrr"] != plain["mrr"]


def test_the_best_possible_recall_stands_beside_each_recall() -> None:
    found = evaluated(best_ranks=lambda count: np.arange(1, count + 1))
    assert found["best_recall@1"] == 1 / len(DATA) and found["best_recall@5"] == 5 / len(DATA)
    assert "best_mrr" not in found and "best_recall@1" not in evaluated()
