"""A small model of users and items for samples of `histories`, its catalogue, and its rows in this process."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from shardkeep.ps.client.row_client import RowClient
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.transport.transport import LocalTransport
from shardkeep.workers.config import TowerConfig
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.sides import Sides, sides_of
from shardkeep.workers.dense.scorer import Scorer
from shardkeep.workers.embeddings.inputs import Inputs
from shardkeep.workers.embeddings.sequence import Sequence
from shardkeep.workers.models.retrieval.vectors import VectorModel
from tests.support.histories import SCHEMA, Histories

DIM, SEED = 6, 3
SIDES: Sides = sides_of(SCHEMA, ["item", "tags"])
TABLES = [TableSpec(name=name, dim=DIM, init={"name": "normal", "std": 1.0}) for name in SCHEMA.tables()]


class SeenModel(VectorModel):
    """A user is the mean of what was seen and a linear layer on the price; an item its row and its tags'."""

    def __init__(self, *, cosine: bool = False, equal: bool = False) -> None:
        super().__init__(cosine=cosine, temperature=1.0)
        self.price, self._equal = nn.Linear(1, DIM), equal

    def users(self, dense_BI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        seen = inputs["seen"]
        assert isinstance(seen, Sequence)
        return seen.mean(seen.ids["seen_item"]) + self.price(dense_BI)

    def items(self, dense_CI: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        item, tags = inputs["item"], inputs["tags"]
        assert isinstance(item, torch.Tensor) and isinstance(tags, torch.Tensor)
        return torch.ones_like(item) if self._equal else item + tags


def scorer_of(model: VectorModel, seed: int = 0) -> Scorer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    return Scorer(model, TowerConfig(amp="off", compile="off"), torch.device("cpu"))


def catalogue_of(data: Histories, *, without: int | None = None) -> Catalogue:
    """All items of samples but one."""
    batch = data.gather(np.arange(len(data)))
    ids, first, counts = np.unique(batch.ids["item"].values_N, return_index=True, return_counts=True)
    order = np.lexsort((ids, -counts))
    order = order[ids[order] != without] if without is not None else order
    items = SIDES.items_of(data.gather(first[order]))
    return Catalogue(ids[order], counts[order], items, pa.array([f"item {id}" for id in ids[order]]))


def client_of(ranks: int = 1, servers: int = 2) -> list[RowClient]:
    """A client for each rank; no row was ever pushed, so that each has its initial value."""
    mode = ConsistencyConfig(mode="bounded")
    services = [
        ShardService(shard=s, tables=TABLES, consistency=mode, num_workers=ranks, seed=SEED) for s in range(servers)
    ]
    for service in services:
        service.life.begin(0, 0)
    transport = [LocalTransport([service.handle for service in services]) for _ in range(ranks)]
    return [RowClient(each, tables=TABLES, rank=rank, num_workers=ranks) for rank, each in enumerate(transport)]
