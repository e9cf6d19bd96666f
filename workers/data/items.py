"""Items: found and counted in the training data, once, for the catalogue."""

# B = rows of a block, N = ids, M = items

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shardkeep.base.arrays import Bools, Ints
from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.beginnings import known_targets
from shardkeep.workers.data.catalogue import Catalogue
from shardkeep.workers.data.conversion.hashing import MISSING_ID
from shardkeep.workers.data.samples import Data, Dataset, batches
from shardkeep.workers.data.sides import Sides

BLOCK = 1 << 16
"""Samples that are read at once."""
_LEAST_MERGED = 1 << 22


class ItemCounts:
    """How often each id is there to be predicted, and the last row that has it. Holds 24 bytes for each of some four
    million ids, or of three times those that differ."""

    def __init__(self) -> None:
        self._parts = [np.empty((3, 0), np.int64)]
        self._size = self._merged = 0

    def add(self, ids_N: Ints, counted_N: Bools | None = None, rows_N: Ints | None = None) -> None:
        """Takes in ids. `counted_N`: which of them are predicted, None = all; `rows_N`: their rows, None = -1. The
        missing id is no item."""
        counts_N = np.ones(len(ids_N), np.int64) if counted_N is None else counted_N.astype(np.int64)
        rows_N = np.full(len(ids_N), -1, np.int64) if rows_N is None else rows_N
        part = _merged(np.stack([ids_N, counts_N, rows_N])[:, ids_N != MISSING_ID])
        self._parts.append(part)
        self._size += part.shape[1]
        if self._size > max(_LEAST_MERGED, 3 * self._merged):
            self._size = self._merged = self._merge().shape[1]

    def found(self) -> tuple[Ints, Ints, Ints]:
        """ids_M, counts_M and the last row of each, by falling count, equal counts by id."""
        ids_M, counts_M, rows_M = self._merge()
        order_M = np.lexsort((ids_M, -counts_M))
        return ids_M[order_M], counts_M[order_M], rows_M[order_M]

    def _merge(self) -> Ints:
        self._parts = [_merged(np.concatenate(self._parts, axis=1))]
        return self._parts[0]


def _merged(part_3N: Ints) -> Ints:
    """Each id once, with the sum of its counts and its last row."""
    sorted_3N = part_3N[:, np.argsort(part_3N[0], kind="stable")]
    first_N = np.flatnonzero(np.diff(sorted_3N[0], prepend=sorted_3N[0, :1] - 1))
    if not first_N.size:
        return sorted_3N
    counts_M, rows_M = np.add.reduceat(sorted_3N[1], first_N), np.maximum.reduceat(sorted_3N[2], first_N)
    return np.stack([sorted_3N[0, first_N], counts_M, rows_M])


def make_catalogue(dataset: Dataset, sides: Sides, values_of: Callable[[Ints], pa.Array]) -> Catalogue:
    """The items of the samples with label 1: those that they name, and the entries of a sequence that is predicted, all
    but the first of each list. Reads all samples once, then one of each item. `values_of`: the raw values of ids.

    Raises DataError where there is no item, ConfigError where the column of items has lists."""
    name, counts, start = sides.item.name, ItemCounts(), 0
    for batch in batches(dataset, BLOCK):
        rows_N = np.flatnonzero(batch.label_BT[:, 0] == 1.0)
        items = batch.ids[name]
        if items.lengths_B is not None:
            raise ConfigError(f"model.item: {name} has several values in a row; the first column names the item")
        counts.add(items.values_N[rows_N], rows_N=rows_N + start)
        if sides.predicted is not None:
            counts.add(*_entries(batch, sides.predicted.ids[0].name))
        start += len(batch)
    ids_M, counts_M, rows_M = counts.found()
    if not len(ids_M):
        raise DataError(f"column {name}: no training row of label 1 has an item; a retrieval model needs some")
    return Catalogue(ids_M, counts_M, _items(dataset, sides, ids_M, rows_M), values_of(ids_M))


def _entries(batch: Batch, listed: str) -> tuple[Ints, Bools]:
    """The entries of lists of samples with label 1, and which of them come after another one."""
    ragged = batch.ids[listed]
    lengths_B = np.ones(len(batch), np.int64) if ragged.lengths_B is None else ragged.lengths_B.astype(np.int64)
    later_N = np.ones(len(ragged.values_N), np.bool_)
    later_N[(np.cumsum(lengths_B) - lengths_B)[lengths_B > 0]] = False
    own_N = np.repeat(batch.label_BT[:, 0] == 1.0, lengths_B)
    return ragged.values_N[own_N], later_N[own_N]


def _items(dataset: Dataset, sides: Sides, ids_M: Ints, rows_M: Ints) -> Batch:
    """The columns of items: the ids alone, or those of the rows."""
    none_M0 = np.empty((len(ids_M), 0), np.float32)
    if len(sides.items.features) == 1 and not sides.items.dense:
        return Batch(none_M0, {sides.item.name: Ragged(ids_M)}, none_M0)
    blocks = [sides.items_of(dataset.gather(rows_M[at : at + BLOCK])) for at in range(0, len(rows_M), BLOCK)]
    ids = {feature.name: _joined([block.ids[feature.name] for block in blocks]) for feature in sides.items.features}
    return Batch(np.concatenate([block.dense_BI for block in blocks]), ids, none_M0)


def _joined(parts: list[Ragged]) -> Ragged:
    lengths = [part.lengths_B for part in parts if part.lengths_B is not None]
    weights = [part.weights_N for part in parts if part.weights_N is not None]
    values_N = np.concatenate([part.values_N for part in parts])
    return Ragged(values_N, np.concatenate(lengths) if lengths else None, np.concatenate(weights) if weights else None)


def catalogued(data: Data, sides: Sides, values_of: Callable[[Ints], pa.Array] = pa.array) -> Data:
    """The data with the items of its training samples, all of which it reads, and a note where training has seen those
    of the evaluation samples. `values_of`: the raw values of ids; left out = the ids are the names. Raises as
    `make_catalogue` and `checked`."""
    catalogue, notes = make_catalogue(data.train, sides, values_of), known_targets(data.train, data.eval, sides)
    return checked(replace(data, catalogue=catalogue, notes=(*data.notes, *notes)), sides)


def checked(data: Data, sides: Sides) -> Data:
    """The data. Raises DataError where no sample for evaluation has an item of the catalogue."""
    if data.eval is None or data.catalogue is None:
        return data
    for batch in batches(data.eval, BLOCK // 16):
        own_B = batch.label_BT[:, 0] == 1.0
        if (data.catalogue.index_of(batch.ids[sides.item.name].values_N[own_B]) >= 0).any():
            return data
    raise DataError(
        f"data.eval: none of its {len(data.eval):,} rows has an item of the training data (column {sides.item.name}), "
        "so recall would be 0; check that both parts write items in one way"
    )
