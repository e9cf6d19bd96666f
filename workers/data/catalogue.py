"""Catalogue: all items that a retrieval model can answer with, the most frequent first."""

# M = items, N = ids, C = rows asked for

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash

from shardkeep.base.arrays import Floats, Int32s, Ints
from shardkeep.base.files import atomic_write
from shardkeep.workers.data.batch import Batch, Ragged

_CHECKSUM = 16
"""Bytes of it, at the end of a file."""


@dataclass(frozen=True)
class Catalogue:
    """The items of the training data, by falling count, equal counts by id.

    Attributes:
        ids_M: The id of each in the table of `Sides.item`.
        counts_M: How often training has to predict it.
        items: Its columns, M samples of `Sides.items`, as they are in the last row that has it.
        values: Its name as in the training files: text or an integer, since ids of texts are hashes.
    """

    ids_M: Ints
    counts_M: Ints
    items: Batch
    values: pa.Array

    def __len__(self) -> int:
        """Number of items."""
        return len(self.ids_M)

    @cached_property
    def total(self) -> int:
        """The sum of all counts."""
        return int(self.counts_M.sum())

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        order_M = np.argsort(self.ids_M, kind="stable")
        return order_M, self.ids_M[order_M]

    def index_of(self, ids_N: Ints) -> Ints:
        """Where each id is among the items, int64 (N,); -1 = nowhere."""
        order_M, sorted_M = self._sorted
        if not len(self):
            return np.full(ids_N.shape, -1, dtype=np.int64)
        at_N = np.minimum(np.searchsorted(sorted_M, ids_N), len(self) - 1)
        found_N: Ints = np.where(sorted_M[at_N] == ids_N, order_M[at_N], -1)
        return found_N

    @cached_property
    def _starts(self) -> dict[str, Ints]:
        """Where the ids of each item begin, of the columns that have lists."""
        lengths = {name: bag.lengths_B for name, bag in self.items.ids.items()}
        return {name: np.cumsum(each) - each for name, each in lengths.items() if each is not None}

    def take(self, rows_C: Ints) -> Batch:
        """The columns of some items, by their places, in that order."""
        ids = {name: self._bag(name, bag, rows_C) for name, bag in self.items.ids.items()}
        return Batch(self.items.dense_BI[rows_C], ids, self.items.label_BT[rows_C])

    def _bag(self, name: str, bag: Ragged, rows_C: Ints) -> Ragged:
        at_N, lengths_C = rows_C, None
        if bag.lengths_B is not None:
            lengths_C = bag.lengths_B[rows_C]
            ends_C = np.cumsum(lengths_C, dtype=np.int64)
            at_N = np.arange(ends_C[-1] if ends_C.size else 0)
            at_N += np.repeat(self._starts[name][rows_C] - ends_C + lengths_C, lengths_C)
        return Ragged(bag.values_N[at_N], lengths_C, None if bag.weights_N is None else bag.weights_N[at_N])

    def write(self, path: Path) -> str:
        """Writes a file, all of it or none. Returns a checksum of its bytes. Raises OSError."""
        dense_MI = self.items.dense_BI
        columns: dict[str, Any] = {"id": self.ids_M, "count": self.counts_M, "value": self.values}
        if dense_MI.shape[1]:
            columns["dense"] = pa.FixedSizeListArray.from_arrays(pa.array(dense_MI.reshape(-1)), dense_MI.shape[1])
        for name, ragged in self.items.ids.items():
            columns[f"ids:{name}"] = _lists(ragged.values_N, ragged.lengths_B)
            if ragged.weights_N is not None:
                columns[f"weights:{name}"] = _lists(ragged.weights_N, ragged.lengths_B)
        table = pa.table(columns)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        content = sink.getvalue().to_pybytes()
        content += xxhash.xxh3_128_digest(content)  # behind the end of the stream, where other readers do not look
        atomic_write(path, content)
        return xxhash.xxh3_128_hexdigest(content)

    @classmethod
    def read(cls, path: Path) -> Catalogue:
        """Reads what `write` has written. Raises OSError and ValueError: there is none, or it is damaged."""
        content = path.read_bytes()
        if xxhash.xxh3_128_digest(content[:-_CHECKSUM]) != content[-_CHECKSUM:]:
            raise ValueError("damaged, or no catalogue")
        table = pa.ipc.open_stream(content).read_all()
        try:
            columns: Mapping[str, pa.Array] = {name: table[name].combine_chunks() for name in table.column_names}
            ids_M, counts_M = (columns[name].to_numpy().copy() for name in ("id", "count"))
            dense_MI = np.zeros((len(ids_M), 0), np.float32)
            if "dense" in columns:
                dense_MI = columns["dense"].flatten().to_numpy().reshape(len(ids_M), -1).copy()
            names = [name.removeprefix("ids:") for name in columns if name.startswith("ids:")]
            ids = {name: _ragged(columns[f"ids:{name}"], columns.get(f"weights:{name}")) for name in names}
            return cls(ids_M, counts_M, Batch(dense_MI, ids, np.empty((len(ids_M), 0), np.float32)), columns["value"])
        except (KeyError, pa.ArrowException) as error:
            raise ValueError(f"no catalogue: {error}") from error


def _lists(values_N: Ints | Floats, lengths_B: Int32s | None) -> pa.Array:
    if lengths_B is None:
        return pa.array(values_N)
    offsets = np.concatenate([[0], np.cumsum(lengths_B, dtype=np.int64)])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values_N))


def _ragged(ids: pa.Array, weights: pa.Array | None) -> Ragged:
    if not pa.types.is_large_list(ids.type):
        return Ragged(ids.to_numpy().copy())
    lengths_B = ids.value_lengths().to_numpy().astype(np.int32)
    return Ragged(
        ids.flatten().to_numpy().copy(), lengths_B, None if weights is None else weights.flatten().to_numpy().copy()
    )
