"""Samples of users who take items, with histories, drawn from a seed, and the catalogue of their items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.items import make_catalogue
from shardkeep.workers.data.samples import Data
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.data.sides import sides_of

SEEN = SequenceColumns("seen", (Feature("seen_item", "item", "none"),), (), 8)
TOWERS = Schema(
    ("age", "price"),
    (Feature("user", "user"), Feature("item", "item"), Feature("tags", "tag", "mean")),
    ("label",),
)
ITEM = ("item", "tags", "price")
NEXT = Schema((), (Feature("item", "item"),), ("label",), (SEEN,))


class Takes:
    """Users each take items of one kind, popular ones more often; a list has the 0 to 8 items before.
    `negatives`: share of the samples whose label is 0."""

    def __init__(
        self, schema: Schema, num_samples: int, *, items: int = 40, users: int = 30, seed: int = 0, negatives: float = 0
    ) -> None:
        self.schema = schema
        random = np.random.default_rng(seed)
        self.user = random.integers(0, users, num_samples)
        self.item = 100 + self._popular(random, self.user, items)
        self.lengths = random.integers(0, 9, num_samples).astype(np.int32)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self.seen = 100 + self._popular(random, np.repeat(self.user, self.lengths), items)
        self.age = random.random((num_samples, 1)).astype(np.float32)
        self.label = (random.random((num_samples, 1)) >= negatives).astype(np.float32)

    @staticmethod
    def _popular(random: np.random.Generator, user_N: np.ndarray, items: int) -> np.ndarray:
        return 5 * np.minimum(random.geometric(0.3, user_N.size) - 1, items // 5 - 1) + user_N % 5

    def __len__(self) -> int:
        return len(self.item)

    def gather(self, rows_B: np.ndarray) -> Batch:
        item, lengths_B = self.item[rows_B], self.lengths[rows_B]
        ids = {"user": Ragged(self.user[rows_B]), **_columns(item)}
        at_N = np.arange(lengths_B.sum()) + np.repeat(self.starts[rows_B] - np.cumsum(lengths_B) + lengths_B, lengths_B)
        ids["seen_item"] = Ragged(self.seen[at_N], lengths_B)
        dense_BI = np.concatenate([self.age[rows_B], _price(item)], axis=1)[:, : self.schema.num_dense]
        ids = {feature.name: ids[feature.name] for feature in self.schema.looked_up}
        return Batch(np.ascontiguousarray(dense_BI), ids, self.label[rows_B])


def _columns(item_N: np.ndarray) -> dict[str, Ragged]:
    """The ids of items: the item's own, and one or two tags."""
    counts_N = (1 + item_N % 2).astype(np.int32)
    first_N = np.cumsum(counts_N) - counts_N
    tags = np.repeat(item_N % 7, counts_N) + np.arange(counts_N.sum()) - np.repeat(first_N, counts_N)
    return {"item": Ragged(item_N), "tags": Ragged(tags, counts_N)}


def _price(item_N: np.ndarray) -> np.ndarray:
    return (item_N % 11).astype(np.float32)[:, None] / 10


def catalogue_of(train: Takes) -> Catalogue:
    """Of all items that samples of label 1 have, and their lists."""
    lists = train.schema.sequences
    sides = sides_of(train.schema, ["item"] if lists else ITEM)
    return make_catalogue(train, replace(sides, predicted=SEEN if lists else None), pa.array)


def data_of(schema: Schema, num_samples: int = 300, *, negatives: float = 0.0) -> Data:
    train = Takes(schema, num_samples, negatives=negatives)
    return Data(train, catalogue=catalogue_of(train))
