"""Which item comes next, by the last one and by popularity? For two_tower, sasrec and hstu.

data:
  source: shardkeep.examples.synthetic.retrieval:samples
  options: {rows: 80000, eval_rows: 5000}

A sample is a walk of 20 items and one more within one of 5 topics. In half of the cases the next item is the successor
of the last one, which is any item of the topic; else it is drawn by Zipf's law among the items of the topic. So the
best list begins with the successor and continues by popularity. A model that is trained against the items of its batch
without a correction ranks by likelihood over popularity: it has no order among the items behind the successor.
"""

import numpy as np

from shardkeep.examples.synthetic.draws import ids_of, key_of, mix, stepped, uniform, zipf_ranks
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns

LENGTH = 20
TOPICS = 5
FOLLOWED = 0.5


def samples(split, rows=80_000, eval_rows=5_000, items=1_000, zipf=1.05, seed=7):
    """A job calls it with `split`, "train" and "eval", and the keys of `data.options`."""
    return Walks(split, rows if split == "train" else eval_rows, items // TOPICS, zipf, seed)


class Walks:
    """Samples of an item and the history before it. Their ids are the names of the items; every label is 1."""

    schema = Schema(
        dense=(),
        features=(Feature("item", "item"),),
        sequences=(SequenceColumns("seen", (Feature("seen_item", "item", "none"),), (), LENGTH),),
    )

    def __init__(self, split, rows, size, zipf, seed):
        self._rows, self._size, self._zipf = rows, size, zipf
        self._names, self._key = key_of("teacher", seed), key_of(split, seed)

    def __len__(self):
        return self._rows

    def gather(self, rows_B):
        return self._walked(rows_B)[0]

    def best_ranks(self, count):
        """The ranks of the items of the first `count` samples in the best possible lists, int64 from 1 on."""
        return self._walked(np.arange(min(count, self._rows)))[1]

    def _walked(self, rows_B):
        """Samples and the rank of each item by its chance to come next."""
        key_B = mix(stepped(self._key, rows_B))
        topic_B = (uniform(stepped(key_B, 1)) * TOPICS).astype(np.int64)
        ids_BL, successor_B = np.empty((len(rows_B), LENGTH + 1), np.int64), None
        for at in range(LENGTH + 1):
            place_B = zipf_ranks(stepped(key_B, 2 * at + 2), self._size, self._zipf)
            if successor_B is not None:
                place_B = np.where(uniform(stepped(key_B, 2 * at + 3)) < FOLLOWED, successor_B, place_B)
            ids_BL[:, at] = ids_of(self._names, place_B * TOPICS + topic_B)
            if at < LENGTH:
                next_B = uniform(ids_BL[:, at].view(np.uint64) ^ np.uint64(0x5851F42D4C957F2D))
                successor_B = (next_B * self._size).astype(np.int64)
        rank_B = np.where(place_B == successor_B, 1, place_B + np.where(successor_B > place_B, 2, 1))
        lengths_B = np.full(len(rows_B), LENGTH, np.int32)
        seen = Ragged(np.ascontiguousarray(ids_BL[:, :-1]).reshape(-1), lengths_B)
        ids = {"item": Ragged(np.ascontiguousarray(ids_BL[:, -1])), "seen_item": seen}
        return Batch(np.zeros((len(rows_B), 0), np.float32), ids, np.ones((len(rows_B), 1), np.float32)), rank_B
