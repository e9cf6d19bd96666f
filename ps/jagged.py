"""Jagged ids and rows: those of all tables of a step, table after table in one flat array; reads like a dict of arrays.

So that one kernel call serves all tables, and one copy moves them. Knows no server.
"""
# T = tables of the job, S = those that a message has, U = ids of one table, V = ids of all tables, D = embedding dim

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from shardkeep.base.arrays import Floats, Ints
from shardkeep.base.errors import ProtocolError
from shardkeep.ps.config import TableSpec

V = TypeVar("V")


class Catalog:
    """A job's tables in their order, which every member has alike."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self.names = tuple(spec.name for spec in tables)
        self.index = {name: t for t, name in enumerate(self.names)}
        self.dims_T: Ints = np.array([spec.dim for spec in tables], dtype=np.int64)
        self.one_dim = int(self.dims_T[0]) if self.dims_T.size and (self.dims_T == self.dims_T[0]).all() else None
        """The dim of every table; None where they differ."""

    def __len__(self) -> int:
        return len(self.names)

    def same(self, other: Catalog) -> bool:
        """Whether both have the same tables in the same order."""
        return self is other or (self.names == other.names and bool((self.dims_T == other.dims_T).all()))


@dataclass(frozen=True, slots=True)
class JaggedLayout:
    """Where each table's part of jagged ids or rows lies. A table without ids has an empty part."""

    catalog: Catalog
    starts_T1: Ints
    """Table t has the ids and rows from starts[t] up to starts[t + 1]."""
    values_T1: Ints
    """And its rows' values from values[t] up to values[t + 1]."""

    @classmethod
    def of_starts(cls, catalog: Catalog, starts_T1: Ints) -> JaggedLayout:
        if catalog.one_dim is not None:
            return cls(catalog, starts_T1, starts_T1 * catalog.one_dim)
        values_T1 = np.zeros(len(catalog) + 1, dtype=np.int64)
        np.cumsum(np.diff(starts_T1) * catalog.dims_T, out=values_T1[1:])
        return cls(catalog, starts_T1, values_T1)

    @classmethod
    def of_counts(cls, catalog: Catalog, counts_T: Ints) -> JaggedLayout:
        starts_T1 = np.zeros(len(catalog) + 1, dtype=np.int64)
        np.cumsum(counts_T, out=starts_T1[1:])
        return cls.of_starts(catalog, starts_T1)

    @property
    def num_rows(self) -> int:
        """V."""
        return int(self.starts_T1[-1])

    @property
    def num_values(self) -> int:
        return int(self.values_T1[-1])

    def same(self, other: JaggedLayout) -> bool:
        """Whether rows of one are rows of the other."""
        if self is other:
            return True
        return self.catalog.same(other.catalog) and bool((self.starts_T1 == other.starts_T1).all())


class _ByTable(Mapping[str, V]):
    """Arrays by table."""

    def __init__(self, layout: JaggedLayout, names: tuple[str, ...] | None) -> None:
        """`names`: the tables that count as asked for; None = all."""
        self.layout = layout
        self.names = layout.catalog.names if names is None else names

    def _number_of(self, name: str) -> int:
        if name not in self.names:
            raise KeyError(name)
        return self.layout.catalog.index[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class JaggedIds(_ByTable[Ints]):
    """Ids by table, int64 (U,), each table's sorted and unique. Nobody changes them."""

    def __init__(self, layout: JaggedLayout, ids_V: Ints, names: tuple[str, ...] | None = None) -> None:
        """`names`: the tables that count as asked for; left out = all."""
        super().__init__(layout, names)
        self.ids_V = ids_V

    @classmethod
    def of_arrays(cls, catalog: Catalog, ids: Mapping[str, Ints]) -> JaggedIds:
        """Copies arrays into one. Raises ProtocolError for ids of another type or of a table that is not there."""
        counts_T = np.zeros(len(catalog), dtype=np.int64)
        for name, ids_U in ids.items():
            if name not in catalog.index:
                raise ProtocolError(f"table {name} is unknown; the tables are {', '.join(catalog.names)}")
            if ids_U.dtype != np.int64 or ids_U.ndim != 1:
                raise ProtocolError(f"table {name}: ids of {ids_U.dtype} {ids_U.shape}; allowed: int64 (U,)")
            counts_T[catalog.index[name]] = ids_U.size
        layout = JaggedLayout.of_counts(catalog, counts_T)
        parts = [ids[name] for name in catalog.names if name in ids]
        return cls(layout, np.concatenate(parts) if parts else np.empty(0, dtype=np.int64), tuple(ids))

    def __getitem__(self, name: str) -> Ints:
        t = self._number_of(name)
        return self.ids_V[self.layout.starts_T1[t] : self.layout.starts_T1[t + 1]]


@dataclass(frozen=True, slots=True)
class SectionIds:
    """Ids of some tables as a message has them: tables rise, ids rise within each. The arrays suit kernels."""

    tables_S: Ints
    starts_S1: Ints
    """Section s has the ids from starts[s] up to starts[s + 1]."""
    ids_V: Ints

    def __bool__(self) -> bool:
        return self.ids_V.size > 0

    @property
    def counts(self) -> Ints:
        """How many ids each section has."""
        return self.starts_S1[1:] - self.starts_S1[:-1]  # a fifth of the time of np.diff

    def same(self, other: SectionIds) -> bool:
        return (
            np.array_equal(self.tables_S, other.tables_S)
            and np.array_equal(self.starts_S1, other.starts_S1)
            and np.array_equal(self.ids_V, other.ids_V)
        )


class JaggedRows(_ByTable[Floats]):
    """Rows by table, float32 (U, D): views of one flat array."""

    def __init__(self, layout: JaggedLayout, flat: Floats, names: tuple[str, ...] | None = None) -> None:
        """`flat`: all values, (num_values,). `names`: as of the ids."""
        super().__init__(layout, names)
        self.flat = flat

    @classmethod
    def zeros(cls, ids: JaggedIds) -> JaggedRows:
        return cls(ids.layout, np.zeros(ids.layout.num_values, dtype=np.float32), ids.names)

    @classmethod
    def of_arrays(cls, ids: JaggedIds, rows: Mapping[str, Floats]) -> JaggedRows:
        """Copies arrays that fit the ids into one; tables that are left out are zeros."""
        jagged = cls(ids.layout, np.zeros(ids.layout.num_values, dtype=np.float32), tuple(rows))
        for name in rows:
            jagged[name][...] = rows[name]
        return jagged

    def __getitem__(self, name: str) -> Floats:
        t = self._number_of(name)
        part = self.flat[self.layout.values_T1[t] : self.layout.values_T1[t + 1]]
        return part.reshape(-1, int(self.layout.catalog.dims_T[t]))


NO_PUSHES: Floats = np.empty(0, dtype=np.float32)
"""Each row comes from one push."""


@dataclass(frozen=True, slots=True)
class FoundSlots:
    """The result of a pull: the slot of each id (-1 if it had no row) and the number of absent ids per section.

    A slot holds another row, or none, once its row or the last one has gone: `apply` compares the ids."""

    sections: SectionIds
    slots_V: Ints
    absent_S: Ints


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of the sections' rows, flat float32; in tables with moments a row's mean squared gradient follows it.

    `pulled`: the result of an earlier pull of the same sections, if any. `lr_factor`: multiplies the learning rate of
    the update; equal in all pushes that are applied together. `pushes_V`: how many pushes a row is the sum of, float32
    (V,); empty = one, or nobody asks."""

    sections: SectionIds
    values: Floats
    pulled: FoundSlots | None = None
    lr_factor: float = 1.0
    pushes_V: Floats = field(default_factory=lambda: NO_PUSHES)

    def part(self, part: slice, ids: slice, values: slice) -> Gradients:
        """Some of the sections, with their ids and values; arrays are views."""
        sections = self.sections
        starts_S1 = sections.starts_S1[part.start : part.stop + 1] - ids.start
        own = SectionIds(sections.tables_S[part], starts_S1, sections.ids_V[ids])
        pulled = self.pulled and FoundSlots(own, self.pulled.slots_V[ids], self.pulled.absent_S[part])
        pushes_V = self.pushes_V[ids] if self.pushes_V.size else self.pushes_V
        return Gradients(own, self.values[values], pulled, self.lr_factor, pushes_V)


NO_GRADIENTS = Gradients(
    SectionIds(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.int64)), np.empty(0, np.float32)
)
