"""The plan of a batch: which rows of each table it needs, and where every feature finds its rows among them.

Arrays only: no torch, no rows, no network. Made in a prefetching thread, then only read.
"""
# B = samples, N = ids of one table or feature, U = unique ids of one table

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Floats
from shardkeep.base.errors import DataError
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedLayout
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.schema import Feature, Schema, SequenceColumns
from shardkeep.workers.embeddings import kernels

_POOLINGS = {
    "sum": kernels.SUM,
    "weighted": kernels.SUM,
    "mean": kernels.MEAN,
    "max": kernels.MAX,
    "none": kernels.NONE,
}
_NO_WEIGHTS: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """Where one feature's rows are among its table's unique rows. Nobody changes the arrays."""

    table: str
    pooling: int
    """kernels.SUM (with or without weights), MEAN, MAX or NONE."""
    inverse_N: npt.NDArray[np.int32]
    """Position of each id in the table's sorted unique ids."""
    offsets_B1: npt.NDArray[np.int32] | None
    """Sample b has the ids from offsets[b] up to offsets[b + 1]; None = exactly one id each, unweighted and pooled."""
    weights_N: npt.NDArray[np.float32]
    """Weight of each id; empty = all 1."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch needs: unique ids per table, and how every feature is made of their rows. The features' arrays
    stand one after the other, as kernels take them."""

    num_samples: int
    unique: JaggedIds
    """Per table the ids to pull, ascending."""
    names: tuple[str, ...]
    features_FK: npt.NDArray[np.int64]
    """A row per feature: the columns of workers/embeddings/kernels.py."""
    inverse_N: npt.NDArray[np.int32]
    """Position of each id in its table's sorted unique ids; those of plans that were made together, one after the
    other."""
    offsets: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    numbers: Mapping[str, Floats]
    """Of each sequence the numbers beside its ids, float32 (N, S)."""

    def range_of(self, part: slice | None) -> tuple[int, int]:
        """Start and stop of a range of samples; None = all."""
        start, stop, step = (part or slice(None)).indices(self.num_samples)
        if step != 1:
            raise ValueError(f"part {part}; allowed: a range of samples, step 1")
        return start, max(start, stop)

    def heights(self, part: slice | None) -> list[int]:
        """The rows that each feature has in a range of samples: one a sample, unpooled one an id."""
        start, stop = self.range_of(part)
        heights_F = np.full(len(self.names), stop - start)
        unpooled_F = self.features_FK[:, kernels.POOLING] == kernels.NONE
        at_F = self.features_FK[unpooled_F, kernels.OFFSETS_AT]
        heights_F[unpooled_F] = self.offsets[at_F + stop] - self.offsets[at_F + start]
        return [int(height) for height in heights_F]

    def offsets_of(self, name: str, part: slice | None) -> npt.NDArray[np.int32]:
        """Where the ids of each sample of a range begin among an unpooled feature's, and where the last one's end."""
        start, stop = self.range_of(part)
        at = self.features_FK[self.names.index(name), kernels.OFFSETS_AT]
        return self.offsets[at + start : at + stop + 1]

    def feature(self, name: str, part: slice | None = None) -> FeaturePlan:
        """One feature of a range of samples, by views."""
        table, ids_at, num_ids, offsets_at, weights_at, pooling = self.features_FK[self.names.index(name)].tolist()
        start, stop = self.range_of(part)
        inverse_N = self.inverse_N[ids_at : ids_at + num_ids]
        weights_N = self.weights[weights_at : weights_at + num_ids] if weights_at >= 0 else _NO_WEIGHTS
        owner = self.unique.layout.catalog.names[table]
        if offsets_at < 0:
            return FeaturePlan(owner, pooling, inverse_N[start:stop], None, weights_N)
        offsets_B1 = self.offsets[offsets_at + start : offsets_at + stop + 1]
        first, end = int(offsets_B1[0]), int(offsets_B1[-1])
        weights_N = weights_N[first:end] if weights_N.size else weights_N
        return FeaturePlan(owner, pooling, inverse_N[first:end], offsets_B1 - first, weights_N)


class Planner:
    """Makes plans for one schema. Stateless between calls, so any thread may call."""

    def __init__(self, schema: Schema, catalog: Catalog) -> None:
        self._features = features = schema.looked_up
        self._sequences = schema.sequences
        self._names = tuple(feature.name for feature in features)
        self._catalog = catalog
        self._tables_F = np.array([catalog.index[feature.table] for feature in features], dtype=np.int64)
        self._order = _order(self._tables_F)
        self._columns = np.zeros((len(features), kernels.FEATURE_COLUMNS), dtype=np.int64)
        self._columns[:, kernels.TABLE] = self._tables_F
        self._columns[:, kernels.OFFSETS_AT] = self._columns[:, kernels.WEIGHTS_AT] = -1
        self._columns[:, kernels.POOLING] = [_POOLINGS[feature.pooling] for feature in features]

    def plan(self, batch: Batch) -> Plan:
        """Deduplicates the batch's ids, table by table. Raises DataError when a feature's arrays do not fit each other
        or the batch."""
        return Planner.plan_together([(self, batch)])[0]

    @staticmethod
    def plan_together(blocks: Sequence[tuple[Planner, Batch]]) -> list[Plan]:
        """As `plan`, of several blocks of samples over the same tables: their plans have the same unique rows, so one
        pull and one push serve all. Raises as `plan`."""
        planners, bags_K = [planner for planner, _ in blocks], [planner._bags(batch) for planner, batch in blocks]
        alone, catalog = len(blocks) == 1, planners[0]._catalog
        tables_F = planners[0]._tables_F if alone else np.concatenate([planner._tables_F for planner in planners])
        by_table, tables_G = planners[0]._order if alone else _order(tables_F)
        bags = bags_K[0] if alone else list(itertools.chain.from_iterable(bags_K))
        lists = [bags[f].values_N for f in by_table.tolist()]
        ids_N = lists[0] if len(lists) == 1 else np.concatenate(lists) if lists else np.empty(0, dtype=np.int64)
        starts_G = np.zeros(len(lists) + 1, dtype=np.int64)  # where each list's ids begin
        np.cumsum([ids.size for ids in lists], out=starts_G[1:])
        starts_T1, unique_V, inverse_N = dedupe(ids_N, starts_G[np.searchsorted(tables_G, np.arange(len(catalog) + 1))])
        unique = JaggedIds(JaggedLayout.of_starts(catalog, starts_T1), unique_V)
        starts_F = np.empty(len(bags), dtype=np.int64)
        starts_F[by_table] = starts_G[:-1]
        plans, first = [], 0
        for (planner, batch), own in zip(blocks, bags_K, strict=True):
            plans.append(planner._plan(batch, own, starts_F[first : first + len(own)], unique, inverse_N))
            first += len(own)
        return plans

    def plan_keyed(self, values_N: npt.NDArray[np.int64], lengths_FB: npt.NDArray[np.int32]) -> Plan:
        """As `plan`, of unweighted ids in one array, one feature after the other, in one pass over all of them. The
        arrays are C-contiguous. Raises DataError for lengths that do not fit the ids."""
        columns, num_samples = self._columns.copy(), lengths_FB.shape[1]
        bounds_T1, ids_N = np.empty(len(self._catalog) + 1, dtype=np.int64), np.empty_like(values_N)
        offsets = np.empty(len(self._features) * (num_samples + 1), dtype=np.int32)
        used = kernels.lay_out(values_N, lengths_FB, columns, bounds_T1, ids_N, offsets)
        if used < 0:
            least, total = int(lengths_FB.min()), int(lengths_FB.sum(dtype=np.int64))
            raise DataError(f"{values_N.size} ids with lengths of {least} or more that sum to {total}")
        starts_T1, unique_V, inverse_N = dedupe(ids_N, bounds_T1)
        unique = JaggedIds(JaggedLayout.of_starts(self._catalog, starts_T1), unique_V)
        return Plan(num_samples, unique, self._names, columns, inverse_N, offsets[:used], _NO_WEIGHTS, {})

    def _bags(self, batch: Batch) -> list[Ragged]:
        return [_checked(feature, batch.ids.get(feature.name), len(batch)) for feature in self._features]

    def _plan(
        self,
        batch: Batch,
        bags: Sequence[Ragged],
        starts_F: npt.NDArray[np.int64],
        unique: JaggedIds,
        inverse_N: npt.NDArray[np.int32],
    ) -> Plan:
        """The plan of a batch whose ids begin at `starts_F` in `inverse_N`."""
        columns = self._columns.copy()
        columns[:, kernels.IDS_AT], columns[:, kernels.NUM_IDS] = starts_F, [bag.values_N.size for bag in bags]
        offsets, weights = _offsets_and_weights(bags, columns)
        lengths = dict(zip(self._names, (bag.lengths_B for bag in bags), strict=True))
        numbers = {group.name: _numbers(group, lengths, batch.numbers.get(group.name)) for group in self._sequences}
        return Plan(len(batch), unique, self._names, columns, inverse_N, offsets, weights, numbers)


def _order(tables_F: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The features in the order in which a table's lists of ids must follow each other, and their tables."""
    by_table = np.argsort(tables_F, kind="stable")
    return by_table, tables_F[by_table]


def dedupe(
    ids_N: npt.NDArray[np.int64], bounds_T1: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Where each table's distinct ids start, these ids, ascending in each table, and each id's position among its
    table's. Table t has the ids from bounds[t] up to bounds[t + 1]. By hashing: O(N + U)."""
    starts_T1 = np.empty(bounds_T1.size, dtype=np.int64)
    unique_V, inverse_N = np.empty(ids_N.size, dtype=np.int64), np.empty(ids_N.size, dtype=np.int32)
    kernels.dedupe(ids_N, bounds_T1, starts_T1, unique_V, inverse_N)
    return starts_T1, unique_V[: int(starts_T1[-1])], inverse_N


def _offsets_and_weights(
    bags: Sequence[Ragged], columns: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """All features' offsets and weights, and in `columns` where each one's begin. A pooled feature of one unweighted id
    per sample has none."""
    offsets: list[npt.NDArray[np.int32]] = []
    weights: list[npt.NDArray[np.float32]] = []
    offsets_at = weights_at = 0
    for f, bag in enumerate(bags):
        unpooled = columns[f, kernels.POOLING] == kernels.NONE
        if bag.lengths_B is None and bag.weights_N is None and not unpooled:
            continue
        lengths_B, weighted = bag.lengths_B, bag.weights_N is not None and bag.weights_N.size > 0
        if lengths_B is not None and (weighted or unpooled or not (lengths_B == 1).all()):
            offsets_B1 = np.zeros(lengths_B.size + 1, dtype=np.int32)
            np.cumsum(lengths_B, out=offsets_B1[1:])
        elif weighted or unpooled:
            offsets_B1 = np.arange(bag.values_N.size + 1, dtype=np.int32)
        else:
            continue
        columns[f, kernels.OFFSETS_AT] = offsets_at
        offsets.append(offsets_B1)
        offsets_at += offsets_B1.size
        if weighted and bag.weights_N is not None:
            columns[f, kernels.WEIGHTS_AT] = weights_at
            weights.append(bag.weights_N)
            weights_at += bag.weights_N.size
    return (
        np.concatenate(offsets) if offsets else np.empty(0, dtype=np.int32),
        np.concatenate(weights) if weights else _NO_WEIGHTS,
    )


def _checked(feature: Feature, bag: Ragged | None, num_samples: int) -> Ragged:
    """The bag, safe for kernels that check nothing. A dataset of the user's own can be wrong in any way."""
    if bag is None:
        raise DataError(f"the batch has no ids for feature {feature.name}")
    if bag.lengths_B is None and bag.weights_N is None and feature.pooling != "weighted":
        values_N = bag.values_N  # by far the most frequent kind
        if values_N.size == num_samples and values_N.dtype == np.int64 and values_N.flags.c_contiguous:
            return bag
    if bag.values_N.dtype.kind not in "iu":
        raise DataError(f"feature {feature.name}: ids of {bag.values_N.dtype}; allowed: int64")
    num_ids = bag.values_N.size
    if bag.lengths_B is None:
        fits, sizes = num_ids == num_samples, f"{num_ids} ids without lengths"
    else:
        fits = bag.lengths_B.size == num_samples and int(bag.lengths_B.sum(dtype=np.int64)) == num_ids
        fits = fits and (num_samples == 0 or int(bag.lengths_B.min()) >= 0)
        sizes = f"{num_ids} ids with {bag.lengths_B.size} lengths that sum to {bag.lengths_B.sum(dtype=np.int64)}"
    if not fits or num_ids >= 2**31:
        raise DataError(f"feature {feature.name}: {sizes}, for a batch of {num_samples} samples")
    if (feature.pooling == "weighted") != (bag.weights_N is not None):
        raise DataError(
            f"feature {feature.name}: pooling: {feature.pooling} "
            f"{'with' if bag.weights_N is not None else 'without'} weights; "
            "weights and pooling: weighted go together"
        )
    if bag.weights_N is not None and bag.weights_N.size != num_ids:
        raise DataError(f"feature {feature.name}: {bag.weights_N.size} weights for {num_ids} ids")
    return _as_kernels_want(bag)


def _numbers(
    group: SequenceColumns, lengths: Mapping[str, npt.NDArray[np.int32] | None], numbers: Floats | None
) -> Floats:
    """The numbers of a sequence (N, S), S = 0 where it has none. Raises DataError where its columns are not of one
    length, not up to `max_length`, or its numbers are not beside them."""
    first, *others = (column.name for column in group.ids)
    lengths_B = lengths[first]
    if lengths_B is None:
        raise DataError(f"sequence {group.name}: {first} has ids without lengths; allowed: lengths, int32 (B,)")
    for name in others:
        if (own_B := lengths[name]) is None or not np.array_equal(own_B, lengths_B):
            b = 0 if own_B is None else int(np.flatnonzero(own_B != lengths_B)[0])
            sizes = f"{lengths_B[b]} entries of {first} and {1 if own_B is None else own_B[b]} of {name}"
            raise DataError(f"sequence {group.name}: sample {b} has {sizes}; allowed: the same number of all columns")
    if lengths_B.size and (longest := int(lengths_B.max())) > group.max_length:
        raise DataError(f"sequence {group.name}: a sample has {longest} entries; max_length: {group.max_length}")
    shape = (int(lengths_B.sum(dtype=np.int64)), len(group.numbers))
    if numbers is None and not shape[1]:
        return np.empty(shape, dtype=np.float32)
    if numbers is None or numbers.shape != shape or numbers.dtype != np.float32:
        form = "none" if numbers is None else f"{numbers.dtype} {numbers.shape}"
        raise DataError(f"sequence {group.name}: its numbers are {form}; expected float32 {shape}")
    return numbers


def _as_kernels_want(bag: Ragged) -> Ragged:
    """Flat, contiguous and of the contract's types; copies nothing that already is."""
    return Ragged(
        np.ascontiguousarray(bag.values_N, dtype=np.int64),
        None if bag.lengths_B is None else np.ascontiguousarray(bag.lengths_B, dtype=np.int32),
        None if bag.weights_N is None else np.ascontiguousarray(bag.weights_N, dtype=np.float32),
    )
