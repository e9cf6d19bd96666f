"""Beginnings: evaluation rows of a retrieval job whose item training has seen behind the same entries, as a split by
chance leaves them where each history has a row for each of its beginnings.

N = rows, V = entries of their lists and the row's item behind them
"""

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.columns.column_kernels import fold
from shardkeep.workers.data.samples import Dataset, gathered
from shardkeep.workers.data.sides import Sides

MOST_ROWS, MOST_ENTRIES = 1 << 17, 1 << 21
"""That are read, which takes a second."""
FEWEST, ABOVE_CHANCE = 50, 0.1
"""Evaluation rows that count, and the share of targets above that of chance."""


def known_targets(train: Dataset, held: Dataset | None, sides: Sides) -> list[str]:
    """A warning for each list of users with the table of items that gives many targets of `held` away."""
    names = [feature.name for feature in sides.users.looked_up if feature.table == sides.item.table]
    found = [(name, shares(train, held, name, sides.item.name)) for name in names] if held is not None else []
    return [
        f"{share:.0%} of the evaluation targets stand in training lists ({name}) with the same beginning: "
        "part the rows by user or time (data.split.by)"
        for name, (share, chance) in found
        if share - chance > ABOVE_CHANCE
    ]


def shares(train: Dataset, held: Dataset, name: str, item: str) -> tuple[float, float]:
    """The share of targets that stand in lists of `train` behind the entries of their row; and of the entries of a
    history of `train`, at these places, the share that another history has behind the same entries."""
    hash_V, place_V, end_N = _beginnings(train, name, item)
    target_V, at_V, held_N = _beginnings(held, name, item)
    if len(held_N) < FEWEST or not len(end_N):
        return 0.0, 0.0
    begun, at_N = np.unique(np.delete(hash_V, end_N)), at_V[held_N]
    own_V = np.repeat(~np.isin(hash_V[end_N], begun), place_V[end_N] + 1)  # others: of the history of a longer row
    _, index_V, counts = np.unique(hash_V[own_V], return_inverse=True, return_counts=True)
    size = max(int(place_V.max()), int(at_N.max())) + 1
    total = np.maximum(np.bincount(place_V[own_V], minlength=size), 1)
    chance = np.bincount(place_V[own_V], counts[index_V] > 1, minlength=size) / total
    return float(np.isin(target_V[held_N], begun).mean()), float(chance[at_N].mean())


def _beginnings(dataset: Dataset, name: str, item: str) -> tuple[Ints, Ints, Ints]:
    """A hash of each beginning of the rows' lists with their items, its last place (V,), and the rows' ends (N,). Rows
    of label 0 and those with an empty list are left out."""
    few = gathered(dataset, np.arange(min(len(dataset), 256)))
    entries = len({**few.ids, **few.whole()}[name].values_N)
    most = min(MOST_ROWS, 1 + MOST_ENTRIES * len(few) // max(entries, 1))
    batch = gathered(dataset, np.arange(min(len(dataset), most)))
    bag = {**batch.ids, **batch.whole()}[name]
    length_N = np.zeros(len(batch), np.int64) if bag.lengths_B is None else bag.lengths_B.astype(np.int64)
    own_N = (batch.label_BT[:, 0] == 1.0) & (length_N > 0)
    value_V = np.insert(bag.values_N[: length_N.sum()], np.cumsum(length_N), batch.ids[item].values_N)
    value_V, length_N = value_V[np.repeat(own_N, length_N + 1)], length_N[own_N] + 1
    end_N = np.cumsum(length_N) - 1
    place_V = np.arange(len(value_V)) - np.repeat(end_N + 1 - length_N, length_N)
    hash_V = place_V.astype(np.uint64)
    fold(hash_V, np.ones(len(value_V), np.int64), value_V)  # of a place and its entry; below, of all up to it
    sum_V = np.cumsum(hash_V)
    return (sum_V - np.repeat((sum_V - hash_V)[end_N + 1 - length_N], length_N)).view(np.int64), place_V, end_N
