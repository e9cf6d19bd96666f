"""Does the category of a sample occur in its history? A sum of the history can hardly tell; attention can.

data:
  source: shardkeep.examples.synthetic.sequences:samples
  options: {rows: 100000, eval_rows: 5000}
"""

import numpy as np

from shardkeep.examples.synthetic.draws import happens, ids_of, key_of, mix, stepped, uniform
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.metrics.quality import auc

LENGTH = 30
ENTRIES = np.arange(3, LENGTH + 3)
STRENGTH = 2.0  # the log-odds of a category that occurs, -2 of any other: chances of 0.88 and 0.12


def samples(split, rows=1_000_000, eval_rows=100_000, categories=500, seed=7):
    """A job calls it with `split`, "train" and "eval", and the keys of `data.options`."""
    return Histories(split, rows if split == "train" else eval_rows, categories, seed)


class Histories:
    """Samples of a category and the 30 before it. In half of them the category is put at a random place of the list."""

    schema = Schema(
        dense=(),
        features=(Feature("category", "category"),),
        sequences=(SequenceColumns("seen", (Feature("seen_category", "category", "none"),), (), LENGTH),),
    )

    def __init__(self, split, rows, categories, seed):
        self._rows, self._categories = rows, categories
        self._names, self._key = key_of("teacher", seed), key_of(split, seed)

    def __len__(self):
        return self._rows

    def gather(self, rows_B):
        return self._drawn(rows_B)[0]

    def best_auc(self, count):
        """The AUC of the true chances, which no model can pass, on the first `count` samples."""
        batch, logit_B = self._drawn(np.arange(min(count, self._rows)))
        return (auc(logit_B, batch.label_BT[:, 0]),)

    def _drawn(self, rows_B):
        """Samples and the log-odds of their labels."""
        key_B = mix(stepped(self._key, rows_B))
        target_B, seen_BL = self._category(stepped(key_B, 1)), self._category(stepped(key_B[:, None], ENTRIES))
        place_B = mix(stepped(key_B, 2))
        put_B = np.flatnonzero(place_B % 2)
        seen_BL[put_B, place_B[put_B] // 2 % LENGTH] = target_B[put_B]
        logit_B = np.where((seen_BL == target_B[:, None]).any(axis=1), STRENGTH, -STRENGTH)
        label_B = happens(key_B ^ np.uint64(0xD1B54A32D192ED03), logit_B)
        lengths_B = np.full(len(rows_B), LENGTH, np.int32)
        seen = Ragged(ids_of(self._names, seen_BL.reshape(-1)), lengths_B)
        ids = {"category": Ragged(ids_of(self._names, target_B)), "seen_category": seen}
        return Batch(np.zeros((len(rows_B), 0), np.float32), ids, label_B.astype(np.float32)[:, None]), logit_B

    def _category(self, keys):
        return (uniform(keys) * self._categories).astype(np.int64)
