"""Negatives: which items of the catalogue are candidates in a step, drawn by (seed, step, rank) alone, and how likely
each was to be one. Knows no rows and no model."""

# B = samples, Q = queries, C = candidates, D = distinct targets, M = items of the catalogue

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from shardkeep.base.arrays import Bools, Float64s, Floats, Ints
from shardkeep.workers.data.batch import Batch
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.sampling_kernels import permuted_range
from shardkeep.workers.label_config import NegativesConfig

_LEAST = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class MicroCandidates:
    """The candidates of one micro-batch; see `Candidates`.

    Attributes:
        rows_C: Their places in the catalogue; no two are equal.
        target_Q: The candidate that each query looks for; -1 = none.
        uniform_C: Those that no sample has as its item, so that only the draw from the catalogue brought them.
    """

    rows_C: Ints
    shared: int
    log_q_C: Floats
    target_Q: Ints
    uniform_C: Bools


@dataclass(frozen=True, slots=True)
class Negatives:
    """Draws the candidates of a job's micro-batches.

    Attributes:
        item: The column of the item that a sample predicts.
        entries: The column of a list whose entries are predicted, too, each from those before it; None = there is none.
        corrects: Whether the chance of each candidate is computed; else its logarithm is 0.
        micro_batch: Samples of a full one.
    """

    catalogue: Catalogue
    config: NegativesConfig
    item: str
    entries: str | None
    corrects: bool
    seed: int
    micro_batch: int

    def draw(self, batch: Batch, step: int, rank: int) -> list[MicroCandidates]:
        """The candidates of each micro-batch of a rank's batch."""
        wanted_Q, starts_B1 = self._wanted(batch)
        counts_B, positive_B = np.diff(starts_B1), batch.label_BT[:, 0] != 0
        positive_Q = np.repeat(positive_B, counts_B)
        last_Q = np.zeros(wanted_Q.size, dtype=np.bool_)
        last_Q[starts_B1[1:][counts_B > 0] - 1] = True
        wanted_Q[~positive_Q & ~last_Q] = -1  # of a negative sample the item alone is a candidate
        drawn = []
        for number, start in enumerate(range(0, len(batch), self.micro_batch)):
            part = slice(starts_B1[start], starts_B1[min(start + self.micro_batch, len(batch))])
            key = xxhash.xxh3_64_intdigest(struct.pack("<3q", step, rank, number), seed=self.seed)
            drawn.append(self._of_part(wanted_Q[part], positive_Q[part], key))
        return drawn

    def _wanted(self, batch: Batch) -> tuple[Ints, Ints]:
        """The place in the catalogue of the item that each query looks for, -1 = it has none; and where the queries of
        each sample begin, and where the last one's end."""
        item_B = self.catalogue.index_of(batch.ids[self.item].values_N)
        if self.entries is None:
            return item_B, np.arange(len(batch) + 1)
        entries = batch.ids[self.entries]
        assert entries.lengths_B is not None  # a sequence has lengths
        starts_B1 = np.concatenate([[0], np.cumsum(entries.lengths_B, dtype=np.int64)])
        wanted_Q = np.roll(self.catalogue.index_of(entries.values_N), -1)
        filled_B = entries.lengths_B > 0
        wanted_Q[starts_B1[1:][filled_B] - 1] = item_B[filled_B]
        return wanted_Q, starts_B1

    def _of_part(self, wanted_Q: Ints, positive_Q: Bools, key: int) -> MicroCandidates:
        known_Q = wanted_Q >= 0
        distinct_D, num_known = np.unique(wanted_Q[known_Q]), int(known_Q.sum())
        limit, total = self.config.batch, len(self.catalogue)
        count = distinct_D.size if limit == "all" else min(limit, distinct_D.size)
        chosen_D = distinct_D if count == distinct_D.size else distinct_D[_drawn(count, distinct_D.size, key)]
        uniform = min(max(self.config.uniform, int(not count)), total)
        shared_C = np.union1d(chosen_D, _drawn(uniform, total, key ^ 1))
        own_C = np.setdiff1d(wanted_Q[known_Q & positive_Q], shared_C)
        rows_C = np.concatenate([shared_C, own_C])
        order_C = np.argsort(rows_C)
        target_Q = np.full(wanted_Q.size, -1, dtype=np.int64)
        asked_Q = known_Q & positive_Q
        target_Q[asked_Q] = order_C[np.searchsorted(rows_C[order_C], wanted_Q[asked_Q])]
        log_q_C = np.zeros(rows_C.size, dtype=np.float32)
        if self.corrects:
            share = count / max(distinct_D.size, 1)
            chance_C = share * self._chance_in(rows_C, num_known)
            log_q_C = np.log(np.maximum(chance_C + (1 - chance_C) * uniform / total, _LEAST)).astype(np.float32)
        return MicroCandidates(rows_C, shared_C.size, log_q_C, target_Q, ~np.isin(rows_C, distinct_D))

    def _chance_in(self, rows_C: Ints, targets: int) -> Float64s:
        """The chance of each item to be among `targets` items of the training data. One that training never predicts
        counts once."""
        share_C = np.maximum(self.catalogue.counts_M[rows_C], 1) / max(self.catalogue.total, 1)
        return 1.0 - (1.0 - np.minimum(share_C, 1.0)) ** targets


def _drawn(count: int, among: int, key: int) -> Ints:
    """`count` different numbers below `among`, each with the same chance."""
    found = np.empty(count, dtype=np.int64)
    permuted_range(0, among, np.uint64(key), found)
    return found
