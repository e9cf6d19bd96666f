"""The plan of a batch: which rows of each table it needs, and where every feature finds its rows among them.

Arrays only: no torch, no rows, no network. Made in a prefetching thread, then only read.
"""
# B = samples, N = ids of one table or feature, U = unique ids of one table

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkeep.base.errors import DataError
from shardkeep.workers import kernels
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature

_NO_WEIGHTS: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """Where one feature's rows are among its table's unique rows. Nobody changes the arrays."""

    table: str
    mean: bool
    inverse_N: npt.NDArray[np.int32]
    """Position of each id in the table's sorted unique ids."""
    offsets_B1: npt.NDArray[np.int32] | None
    """Sample b has the ids from offsets[b] up to offsets[b + 1]; None = exactly one id each, unweighted."""
    weights_N: npt.NDArray[np.float32]
    """Weight of each id; empty = all 1."""

    @property
    def num_samples(self) -> int:
        """B; may be 0."""
        return self.inverse_N.size if self.offsets_B1 is None else self.offsets_B1.size - 1

    def part(self, start: int, stop: int) -> FeaturePlan:
        """The samples [start, stop), as views."""
        if self.offsets_B1 is None:
            return FeaturePlan(self.table, self.mean, self.inverse_N[start:stop], None, self.weights_N)
        offsets_B1 = self.offsets_B1[start : stop + 1]
        first, end = int(offsets_B1[0]), int(offsets_B1[-1])
        weights_N = self.weights_N[first:end] if self.weights_N.size else self.weights_N
        return FeaturePlan(self.table, self.mean, self.inverse_N[first:end], offsets_B1 - first, weights_N)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch needs: unique ids per table, and how every feature is made of their rows."""

    num_samples: int
    unique: dict[str, npt.NDArray[np.int64]]
    """Per table, in the order of first use: the ids to pull, ascending."""
    features: dict[str, FeaturePlan]

    def parts(self, part: slice | None) -> dict[str, FeaturePlan]:
        """The features of a range of samples; None = all."""
        start, stop, step = (part or slice(None)).indices(self.num_samples)
        if step != 1:
            raise ValueError(f"part {part}; allowed: a range of samples, step 1")
        if (start, stop) == (0, self.num_samples):
            return self.features
        return {name: feature.part(start, max(start, stop)) for name, feature in self.features.items()}


def make_plan(batch: Batch, of_table: Mapping[str, Sequence[Feature]]) -> Plan:
    """Deduplicates the batch's ids, table by table. Raises DataError when a feature's arrays do not fit
    each other or the batch."""
    unique: dict[str, npt.NDArray[np.int64]] = {}
    planned: dict[str, FeaturePlan] = {}
    for table, features in of_table.items():
        bags = [_checked(feature, batch.ids.get(feature.name), len(batch)) for feature in features]
        unique[table], inverse_N = dedupe(_joined([bag.values_N for bag in bags]))
        start = 0
        for feature, bag in zip(features, bags, strict=True):
            stop = start + bag.values_N.size
            planned[feature.name] = _feature_plan(feature, bag, inverse_N[start:stop])
            start = stop
    return Plan(len(batch), unique, planned)


def dedupe(ids_N: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """`numpy.unique(ids, return_inverse=True)` with an int32 inverse, by hashing: the unique ids ascending
    (U,), and each id's position among them (N,). O(N + U log U); 2-4 times as fast on skewed ids."""
    slots = np.full(1 << max(4, (2 * ids_N.size).bit_length()), -1, dtype=np.int32)
    unique_N = np.empty(ids_N.size, dtype=np.int64)
    inverse_N = np.empty(ids_N.size, dtype=np.int32)
    count = kernels.first_seen(ids_N, slots, unique_N, inverse_N)
    sorted_U = np.sort(unique_N[:count])
    kernels.renumber_sorted(sorted_U, slots, unique_N, np.empty(count, dtype=np.int32), inverse_N)
    return sorted_U, inverse_N


def _joined(values: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return values[0] if len(values) == 1 else np.concatenate(values)


def _feature_plan(feature: Feature, bag: Ragged, inverse_N: npt.NDArray[np.int32]) -> FeaturePlan:
    lengths_B, weights_N = bag.lengths_B, _NO_WEIGHTS if bag.weights_N is None else bag.weights_N
    offsets_B1 = None
    if lengths_B is not None and not (weights_N.size == 0 and (lengths_B == 1).all()):
        offsets_B1 = np.zeros(lengths_B.size + 1, dtype=np.int32)
        np.cumsum(lengths_B, out=offsets_B1[1:])
    elif weights_N.size:
        offsets_B1 = np.arange(inverse_N.size + 1, dtype=np.int32)
    return FeaturePlan(feature.table, feature.pooling == "mean", inverse_N, offsets_B1, weights_N)


def _checked(feature: Feature, bag: Ragged | None, num_samples: int) -> Ragged:
    """The bag, safe for kernels that check nothing. A dataset of the user's own can be wrong in any way."""
    if bag is None:
        raise DataError(f"the batch has no ids for feature {feature.name}")
    if bag.values_N.dtype.kind not in "iu":
        raise DataError(f"feature {feature.name}: ids of {bag.values_N.dtype}; allowed: int64")
    num_ids = bag.values_N.size
    if bag.lengths_B is None:
        fits, told = num_ids == num_samples, f"{num_ids} ids without lengths"
    else:
        fits = bag.lengths_B.size == num_samples and int(bag.lengths_B.sum(dtype=np.int64)) == num_ids
        fits = fits and (num_samples == 0 or int(bag.lengths_B.min()) >= 0)
        told = f"{num_ids} ids with {bag.lengths_B.size} lengths that sum to {bag.lengths_B.sum(dtype=np.int64)}"
    if not fits or num_ids >= 2**31:
        raise DataError(f"feature {feature.name}: {told}, for a batch of {num_samples} samples")
    if (feature.pooling == "weighted") != (bag.weights_N is not None):
        raise DataError(
            f"feature {feature.name}: pooling: {feature.pooling} "
            f"{'with' if bag.weights_N is not None else 'without'} weights; "
            "weights and pooling: weighted go together"
        )
    if bag.weights_N is not None and bag.weights_N.size != num_ids:
        raise DataError(f"feature {feature.name}: {bag.weights_N.size} weights for {num_ids} ids")
    return _as_kernels_want(bag)


def _as_kernels_want(bag: Ragged) -> Ragged:
    """Flat, contiguous and of the contract's types; copies nothing that already is."""
    return Ragged(
        np.ascontiguousarray(bag.values_N, dtype=np.int64),
        None if bag.lengths_B is None else np.ascontiguousarray(bag.lengths_B, dtype=np.int32),
        None if bag.weights_N is None else np.ascontiguousarray(bag.weights_N, dtype=np.float32),
    )
