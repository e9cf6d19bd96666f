"""ItemIndex: the vectors of all items, which finds the best items of users and the ranks of their targets, exactly.

Scores are dot products of float32. Users come in blocks of one size, and zeros fill the last one. So the bits of a
user's scores do not depend on the users beside it (one type of CPU).
"""

# B = users, M = items, E = width of a vector, P = users of a block, J = items of a block, K = best items

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.sides import Sides

BUFFER_BYTES = 64 << 20
"""Of the scores of a block of users with all items; a block has no fewer than `_FEWEST` users."""
_FEWEST, _MOST = 16, 256
TOP_SIZE = 64
"""Users of a block that gets its best items."""
TOP_ITEMS = 1 << 14
"""Items of a block there: the scores stay in the cache of the CPU."""


@dataclass(frozen=True)
class Left:
    """Items that are left out: user b does without the places from offsets[b] up to offsets[b + 1], each once."""

    offsets_B1: Ints
    places_N: Ints

    @classmethod
    def none(cls, users: int) -> Left:
        """No item of any user."""
        return cls(np.zeros(users + 1, np.int64), np.empty(0, np.int64))

    @classmethod
    def history(cls, batch: Batch, sides: Sides, catalogue: Catalogue) -> Left:
        """The items in the whole lists of each sample that have the table of items. Raises ConfigError where no list
        has it."""
        ids, table = {**batch.ids, **batch.whole()}, sides.item.table
        bags = [ids[feature.name] for feature in sides.users.looked_up if feature.table == table]
        lists = [(bag.values_N, bag.lengths_B) for bag in bags if bag.lengths_B is not None]
        if not lists:
            why = f"has no effect, no list of the user has the table {table}"
            raise ConfigError(f"eval.exclude_seen: {why}; allowed: with a list or a sequence over it")
        places_N = catalogue.index_of(np.concatenate([values_N for values_N, _ in lists]))
        samples_N = np.concatenate([np.repeat(np.arange(len(batch)), lengths_B) for _, lengths_B in lists])
        keys_N = np.unique((samples_N * len(catalogue) + places_N)[places_N >= 0])
        offsets_B1 = np.searchsorted(keys_N, np.arange(len(batch) + 1) * len(catalogue))
        return cls(offsets_B1.astype(np.int64), keys_N % len(catalogue))

    def part(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Offsets and places of the users [start, stop)."""
        return self.offsets_B1[start : stop + 1], self.places_N


@dataclass(frozen=True)
class Best:
    """The best items of users, the best one first; of equal scores the one that comes first in the catalogue. Place -1
    and score -inf = there are no more items."""

    places_BK: Ints
    scores_BK: Floats

    def part(self, start: int, stop: int, k: int) -> Best:
        """The K best of the users [start, stop)."""
        return Best(self.places_BK[start:stop, :k], self.scores_BK[start:stop, :k])

    @classmethod
    def joined(cls, parts: Sequence[Best], k: int) -> Best:
        """Those of all users of the parts."""
        places = [np.empty((0, k), np.int64), *(part.places_BK for part in parts)]
        scores = [np.empty((0, k), np.float32), *(part.scores_BK for part in parts)]
        return cls(np.concatenate(places), np.concatenate(scores))


class ItemIndex:
    """Vectors of items by their places in the catalogue. Any thread may call.

    Args:
        vectors_ME: float32, C-contiguous; only read.
    """

    def __init__(self, vectors_ME: Floats) -> None:
        self.vectors_ME = vectors_ME
        self._items_EM = torch.from_numpy(vectors_ME).T

    def __len__(self) -> int:
        return len(self.vectors_ME)

    def ranks(self, users_BE: Floats, targets_B: Ints, left: Left | None = None) -> Ints:
        """1 + the number of other items whose score is not below that of the target, int64 (B,); 0 where the target is
        -1. Equal scores count against the target."""
        from shardkeep.workers.retrieval.ranking_kernels import (
            count_ranks,  # here: models of labels import this file, too
        )

        left, ranks_B = left or Left.none(len(users_BE)), np.zeros(len(users_BE), np.int64)
        if not len(self):
            return ranks_B
        size = min(max(BUFFER_BYTES // (4 * len(self)) // _FEWEST * _FEWEST, _FEWEST), _MOST)
        scores_PM = torch.empty(size, len(self))
        for start, stop, users_PE in _blocks(users_BE, size):
            torch.mm(users_PE, self._items_EM, out=scores_PM)
            part = slice(start, stop)
            count_ranks(scores_PM.numpy(), targets_B[part], *left.part(start, stop), ranks_B[part])
        return ranks_B

    def top(self, users_BE: Floats, k: int, left: Left | None = None, *, size: int = TOP_SIZE) -> Best:
        """The K best items of each user.

        Args:
            size: Users of a block. Another size may change the last bits of scores."""
        from shardkeep.workers.retrieval.ranking_kernels import keep_best, sort_best

        left = left or Left.none(len(users_BE))
        best = Best(np.full((len(users_BE), k), -1), np.full((len(users_BE), k), -np.inf, np.float32))
        buffer = torch.empty(size * min(TOP_ITEMS, len(self)))
        for start, stop, users_PE in _blocks(users_BE, size):
            for first in range(0, len(self), TOP_ITEMS):
                items_EJ = self._items_EM[:, first : first + TOP_ITEMS]
                scores_PJ = buffer[: size * items_EJ.shape[1]].view(size, -1)
                torch.mm(users_PE, items_EJ, out=scores_PJ)
                heaps = best.scores_BK[start:stop], best.places_BK[start:stop]
                keep_best(scores_PJ.numpy(), first, *left.part(start, stop), *heaps)
        sort_best(best.scores_BK, best.places_BK)
        return best


def _blocks(users_BE: Floats, size: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Start and stop of each block of users, and its vectors, (P, E), with zeros behind them."""
    for start in range(0, len(users_BE), size):
        stop = min(start + size, len(users_BE))
        users_PE = np.zeros((size, users_BE.shape[1]), np.float32)
        users_PE[: stop - start] = users_BE[start:stop]
        yield start, stop, torch.from_numpy(users_PE)
