"""Sorted rows: the rows of all tables as arrays sorted by placement key, mapped from files or in memory. Only read.

A bucket is the ids whose key begins with the same bits, so an id is found without an index that must be built. Layers
lie over each other: the rows of an increment hide those of the checkpoint below. A new layer makes a new object, so
that readers of the old one are not disturbed.
"""

# N = rows, D = embedding dim, V = ids of all sections

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Floats, Ids, Ints, Rows
from shardkeep.inference import sorted_rows_kernels as at
from shardkeep.inference.export.manifest import MOST_BITS
from shardkeep.ps.config import TableSpec
from shardkeep.ps.jagged import SectionIds
from shardkeep.ps.placement import keys_of
from shardkeep.ps.server.table.descriptor_kernels import START_DTYPE
from shardkeep.ps.server.table.initializers.initial import Initial

FORMATS: Mapping[Any, int] = {np.float32: at.FP32, np.float16: at.FP16, np.int8: at.INT8}
"""Types of rows; int8 has a scale for each row."""
_IDS_A_BUCKET = 16


@dataclass(frozen=True)
class SortedTable:
    """The rows of one table.

    Attributes:
        ids_N: In the order of their placement keys.
        offsets: int64 (2**bits + 1,): the ids whose key begins with the bits b are at offsets[b] to offsets[b + 1].
        rows_ND: float32, float16 or int8.
        scales_N: float32 (N,), of int8; else empty.
    """

    ids_N: Ids
    offsets: Ints
    rows_ND: npt.NDArray[Any]
    scales_N: Floats

    @classmethod
    def of(cls, ids_N: Ids, rows_ND: Rows) -> SortedTable:
        """Of ids in the order of their keys, each once, and float32 rows. Raises ValueError for another order."""
        return cls(ids_N, offsets_of(ids_N), np.ascontiguousarray(rows_ND, np.float32), np.empty(0, np.float32))

    @classmethod
    def of_blocks(cls, blocks: Iterable[tuple[Ids, Rows]], dim: int) -> SortedTable:
        """Of blocks that follow each other in the order of their keys."""
        parts = [(np.empty(0, np.int64), np.empty((0, dim), np.float32)), *blocks]
        ids, rows = zip(*parts, strict=True)
        return cls.of(np.concatenate(ids), np.concatenate(rows))

    @property
    def bits(self) -> int:
        return (self.offsets.size - 1).bit_length() - 1


class SortedRows:
    """The rows of all tables in layers; the first layer hides the others. Any thread may read."""

    def __init__(self, specs: Sequence[TableSpec], layers: Sequence[Sequence[SortedTable]], *, seed: int) -> None:
        """`layers`: a table for each spec in every layer."""
        if len({spec.name for spec in specs}) < len(specs) or any(len(layer) != len(specs) for layer in layers):
            raise ValueError("tables of the same name, or a layer with other tables")
        self.specs = list(specs)
        self.layers = [list(layer) for layer in layers]
        self._seed = seed
        self._descriptors = np.zeros((len(layers), len(specs), at.COLUMNS), np.int64)
        self._starts = np.zeros(len(specs), START_DTYPE)
        for t, spec in enumerate(specs):
            self._starts[t] = Initial(spec.init, seed=seed, name=spec.name).start
            for number, layer in enumerate(layers):
                self._descriptors[number, t] = _descriptor(layer[t], spec)

    def over(self, layer: Sequence[SortedTable], *, most_layers: int) -> SortedRows:
        """These rows below a new layer. If there are too many layers then, all but the lowest become one."""
        layers = [list(layer), *self.layers]
        if len(layers) > most_layers:
            middle = [merged([each[t] for each in layers[:-1]]) for t in range(len(self.specs))]
            layers = [middle, layers[-1]]
        return SortedRows(self.specs, layers, seed=self._seed)

    def pull(self, sections: SectionIds, values: Floats) -> Ints:
        """Writes the rows of all ids into `values`, flat, table after table; of an id without a row its initial value.
        Returns the places of the rows (V,), -1 = no row."""
        places_V = np.empty(sections.ids_V.size, np.int64)
        at.pull(
            self._descriptors, self._starts, sections.tables_S, sections.starts_S1, sections.ids_V, places_V, values
        )
        return places_V


def offsets_of(ids_N: Ids) -> Ints:
    """Where each bucket begins, with about `_IDS_A_BUCKET` ids in a bucket. Raises ValueError for ids that are not in
    the order of their keys, each once."""
    keys_N = keys_of(ids_N)
    if (keys_N[1:] <= keys_N[:-1]).any():
        raise ValueError("ids are not in the order of their keys, or one comes twice")
    bits = min(max((ids_N.size // _IDS_A_BUCKET).bit_length(), 1), MOST_BITS)
    counts = np.bincount((keys_N >> np.uint64(64 - bits)).astype(np.int64), minlength=1 << bits)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def merged(tables: Sequence[SortedTable]) -> SortedTable:
    """Several float32 tables as one; of an id that several have, the row of the first."""
    ids_N, rows_ND = (np.concatenate(parts) for parts in zip(*((t.ids_N, t.rows_ND) for t in tables), strict=True))
    keys_N = keys_of(ids_N)
    order_N = np.argsort(keys_N, kind="stable")
    keys_N = keys_N[order_N]
    order_N = order_N[np.append(True, keys_N[1:] != keys_N[:-1])] if order_N.size else order_N
    return SortedTable.of(ids_N[order_N], rows_ND[order_N])


def _descriptor(table: SortedTable, spec: TableSpec) -> Ints:
    found = np.zeros(at.COLUMNS, np.int64)
    for column, array in (
        (at.IDS, table.ids_N),
        (at.OFFSETS, table.offsets),
        (at.ROWS, table.rows_ND),
        (at.SCALES, table.scales_N),
    ):
        found[column] = array.__array_interface__["data"][0]
    found[at.NUM_ROWS], found[at.BITS], found[at.DIM] = table.ids_N.size, table.bits, spec.dim
    found[at.FORMAT] = FORMATS[table.rows_ND.dtype.type]
    return found
