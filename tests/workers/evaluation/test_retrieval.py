"""A retrieval model is evaluated over all items, with the same numbers for any batches and number of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.table.initializers.initial import Initial
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.workers.blocks import BlockScorer
from shardkeep.workers.collectives.collective import Solo, ThreadCollective
from shardkeep.workers.config import TowerConfig
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.sides import sides_of
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.embeddings.layer import Embeddings
from shardkeep.workers.evaluation.retrieval import ItemModel, Ranking, RankSettings, RetrievalEvaluator
from shardkeep.workers.models.retrieval.vectors import VectorModel
from tests.support.cases import every
from tests.support.histories import SCHEMA, Histories
from tests.support.ranks import run_ranks

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


def catalogue_of(data, *, without=None):
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


def evaluated(ranks=1, size=16, data=DATA, catalogue=None, *, equal=False, exclude_seen=False, best_ranks=None):
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
            ranking=Ranking(SIDES, catalogue or catalogue_of(data), settings),
            best_ranks=best_ranks,
        ).run(0)

    found = run_ranks(ThreadCollective.group(ranks) if ranks > 1 else [Solo()], work)
    assert all(each == found[0] for each in found)
    return found[0]


def rows(table, ids_N):
    """The rows of ids that nobody has pushed."""
    spec = next(each for each in TABLES if each.name == table)
    return Initial(spec.init, seed=SEED, name=table).rows(ids_N, spec.dim).astype(np.float64)


def test_metrics_are_those_of_all_scores():
    batch, catalogue, layer = DATA.gather(np.arange(COUNT)), catalogue_of(DATA), SeenModel().price
    seen = batch.ids["seen_item"]
    parts = np.split(rows("item", seen.values_N), np.cumsum(seen.lengths_B)[:-1])
    users = np.array([part.mean(0) if len(part) else np.zeros(DIM) for part in parts])
    users += batch.dense_BI @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    tags = rows("tag", catalogue.items.ids["tags"].values_N).reshape(-1, 2, DIM).mean(1)
    scores = users @ (rows("item", catalogue.ids_M) + tags).T
    targets = catalogue.index_of(batch.ids["item"].values_N)
    ranks = 1 + (scores > scores[np.arange(COUNT), targets][:, None]).sum(1)
    positive = ranks[batch.label_BT[:, 0] > 0]
    found = evaluated(best_ranks=lambda count: np.arange(1, count + 1))
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
    assert found["recall@5"] == 0.0 and found["mrr"] == pytest.approx(1 / len(catalogue_of(DATA)))
    data = AllPositive(COUNT, seed=4)
    plain, without = (evaluated(data=data, exclude_seen=seen) for seen in (False, True))
    assert without["mrr"] > plain["mrr"], "what a sample has seen is left out but for its target"
    assert without["samples"] == plain["samples"] == COUNT
    lost = int(data.gather(np.arange(1)).ids["item"].values_N[0])  # a target that the catalogue lacks is a miss
    found = evaluated(data=data, catalogue=catalogue_of(data, without=lost))
    count = int((data.gather(np.arange(COUNT)).ids["item"].values_N == lost).sum())
    assert found["unknown_targets"] == count and found["samples"] == COUNT
    data.weighted = True  # a weight of 0 does not count
    found = evaluated(data=data)
    assert found["weights"] == 90.0 and found["mrr"] != plain["mrr"]
