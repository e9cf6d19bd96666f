"""Beginnings: evaluation rows of a retrieval job whose item training has seen behind the same entries, as a split by
chance leaves them where each history has a row for each of its beginnings.

N = rows, V = entries of their lists and the row's item behind them
"""

from __future__ import annotations

import numpy as np

from shardkeep.base.arrays import Ints
from shardkeep.workers.data.gather_kernels import prefixes
from shardkeep.workers.data.samples import Dataset, gathered
from shardkeep.workers.data.sides import Sides

MOST_ROWS, MOST_ENTRIES, BLOCK = 1 << 19, 1 << 20, 1 << 15
"""Rows that are read, and entries that are compared: all of some histories, by a hash of their first two."""
FEWEST, ABOVE_CHANCE = 50, 0.1


def known_targets(train: Dataset, held: Dataset | None, sides: Sides) -> list[str]:
    """A warning for each list of users with the table of items that gives many targets of `held` away."""
    notes, names = list[str](), [f.name for f in sides.users.looked_up if f.table == sides.item.table]
    for name in names if held is not None else ():
        assert held is not None
        share, chance, count = _shares(train, held, name, sides.item.name)
        if count >= FEWEST and share - chance > ABOVE_CHANCE:
            notes.append(
                f"{share:.0%} of the evaluation targets stand in training lists ({name}) with the same beginning: "
                "part the rows by user or time (data.split.by)"
            )
    return notes


def _shares(train: Dataset, held: Dataset, name: str, item: str) -> tuple[float, float, int]:
    """The share of targets that stand in lists of `train` behind the entries of their row; the share of entries of a
    history of `train` that another one has behind the same entries, at these places; and the number of targets."""
    few = len(_beginnings(train, name, item, 1, most=BLOCK)[0])
    one_in = 1 + few * min(len(train), MOST_ROWS) // (min(len(train), BLOCK) * MOST_ENTRIES)
    hash_V, length_N = _beginnings(train, name, item, one_in)
    target_V, held_N = _beginnings(held, name, item, one_in)
    if not len(length_N) or not len(held_N):
        return 0.0, 0.0, 0
    end_N = np.cumsum(length_N) - 1
    begun = np.unique(np.delete(hash_V, end_N))
    known_N = np.isin(target_V[np.cumsum(held_N) - 1], begun)
    own_V = np.repeat(~np.isin(hash_V[end_N], begun), length_N)  # other rows are of the history of a longer one
    place_V = (np.arange(len(hash_V)) - np.repeat(end_N + 1 - length_N, length_N))[own_V]
    _, index_V, counts = np.unique(hash_V[own_V], return_inverse=True, return_counts=True)
    size = max(int(length_N.max()), int(held_N.max()))
    total = np.maximum(np.bincount(place_V, minlength=size), 1)
    chance = np.bincount(place_V, counts[index_V] > 1, minlength=size) / total
    return float(known_N.mean()), float(chance[held_N - 1].mean()), len(held_N)


def _beginnings(dataset: Dataset, name: str, item: str, one_in: int, most: int = MOST_ROWS) -> tuple[Ints, Ints]:
    """A hash of each beginning of a row's list with its item, int64 (V,), and how many each row has. Rows of label 0
    and those with an empty list are left out."""
    hashes, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    most = min(len(dataset), most)
    for start in range(0, most, BLOCK):
        batch = gathered(dataset, np.arange(start, min(start + BLOCK, most)))
        bag = {**batch.ids, **batch.whole()}[name]
        if bag.lengths_B is None:
            break
        length_N = bag.lengths_B.astype(np.int64) + 1
        hash_V = np.insert(bag.values_N, np.cumsum(length_N - 1), batch.ids[item].values_N)
        prefixes(length_N, hash_V)
        second_N = np.minimum(np.cumsum(length_N) - length_N + 1, len(hash_V) - 1)
        own_N = (batch.label_BT[:, 0] == 1.0) & (length_N > 1) & (hash_V[second_N] % one_in == 0)
        hashes.append(hash_V[np.repeat(own_N, length_N)])
        lengths.append(length_N[own_N])
    return np.concatenate(hashes), np.concatenate(lengths)
