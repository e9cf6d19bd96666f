"""RowMemory: what one worker remembers of rows between steps: gradients not sent yet, and copies of rows it has read.

One pool (compression/selection/row_pool.py) for all tables of one dim; tables whose own `keep_rows` differs have other
pools. Knows no message and no server.
"""
# V = ids of all tables in a step, K = rows to send, D = embedding dim, T = tables

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.base.errors import CheckpointError
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.per_table import TablePush, push_of
from shardkeep.compression.selection.registry import Choose
from shardkeep.compression.selection.shares import nth_key
from shardkeep.ps.jagged import Catalog, JaggedIds, Layout
from shardkeep.ps.placement_kernels import find_sorted

if TYPE_CHECKING:  # most jobs have no pool: only those that have load the pools and their kernels
    from shardkeep.compression.selection.element_pool import ElementPool, SelectedElements
    from shardkeep.compression.selection.row_pool import RowPool
    from shardkeep.compression.selection.selected import Selected

Encode = Callable[[Layout, Ints, Floats, Floats], Floats]
"""(layout, ids, rows, squares) of the rows to send -> what the servers will make of them, flat."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Rows to send, table after table."""

    layout: Layout
    ids_K: Ints
    flat: Floats
    """The rows' values."""
    squares_K: Floats
    """Sum of the mean squares of the gradients that each row is the sum of."""
    positions_K: Ints
    """Where each id stands among those of the step; -1 = the row is not one of the step's."""


@dataclass(slots=True)
class _Group:
    """The tables of one dim and one share of rows that are sent, and their pool."""

    name: str
    """Of its residuals in a checkpoint: the dim, and the numbers of the tables if they are not all of the dim."""
    dim: int
    tables: Ints
    keep: float
    """The share of its rows that is sent."""
    pool: RowPool
    elements: ElementPool | None = None
    """What single values are sent from; then the pool has rows read before only."""
    whole: bool = False
    """Whether all rows are sent as they are; then the pool has rows read before only."""

    @property
    def unsent(self) -> RowPool | ElementPool:
        """Where gradients wait."""
        return self.pool if self.elements is None else self.elements


class RowMemory:
    """The pools of one worker. Not thread safe.

    Args:
        history: Steps that can be undone.
        num_workers: Of the job.
        pushes_T: How each table's gradients are sent; empty = all as `compression` says.
    """

    def __init__(
        self,
        catalog: Catalog,
        compression: CompressionConfig,
        *,
        history: int,
        num_workers: int = 1,
        pushes_T: Sequence[TablePush] = (),
    ) -> None:
        push, pull = compression.push, compression.pull
        self._catalog = catalog
        self._by_elements = push.keep_values is not None
        self._history = history
        self._max_age = push.max_age
        self._dgc, self._num_workers = push.dgc, num_workers
        self._lease = pull.lease
        self._drift = math.inf if pull.drift is None else pull.drift
        self.sends_later = push.pool_rows > 0
        """Whether unsent gradients are remembered."""
        self.caches = pull.cache_rows > 0
        """Whether rows are."""
        capacity = max(push.pool_rows, pull.cache_rows)
        pushes_T = pushes_T or [push_of(None, push)] * len(catalog)
        by_push: dict[tuple[int, float, bool], list[int]] = {}
        for t, (dim, one) in enumerate(zip(catalog.dims_T.tolist(), pushes_T, strict=True)):
            own = (one.keep, one.whole) if self.sends_later else (push.keep, False)
            by_push.setdefault((dim, *own), []).append(t)
        with_slots = sum(self.caches or not whole for _, _, whole in by_push)
        share = -(-capacity // max(1, with_slots))
        self._groups: list[_Group] = []
        for (dim, keep, whole), numbers in by_push.items() if capacity else ():
            tables = np.array(numbers, dtype=np.int64)
            name = (
                str(dim) if tables.size == (catalog.dims_T == dim).sum() else f"{dim} of {','.join(map(str, numbers))}"
            )
            size = share if self.caches or not whole else 1
            group = _Group(name, dim, tables, keep, self._pool(tables, dim, size), whole=whole)
            if self._by_elements:
                group.elements = self._element_pool(tables, dim, push.pool_rows)
            self._groups.append(group)
        self._used = False
        self._overflow_rows = self._bad_rows = 0

    def _pool(self, tables: Ints, dim: int, capacity: int) -> RowPool:
        from shardkeep.compression.selection.row_pool import RowPool

        return RowPool(
            num_tables=tables.size,
            dim=dim,
            capacity=capacity,
            cache=self.caches,
            history=self._history,
        )

    def _element_pool(self, tables: Ints, dim: int, capacity: int) -> ElementPool:
        from shardkeep.compression.selection.element_pool import Dgc, ElementPool

        dgc = None if self._dgc is None else Dgc(**self._dgc.model_dump(), num_workers=self._num_workers)
        return ElementPool(num_tables=tables.size, dim=dim, capacity=capacity, history=self._history, dgc=dgc)

    # ---- unsent gradients ----

    def select(
        self,
        step: int,
        ids: JaggedIds,
        grads: Floats,
        *,
        keep_now: Callable[[float], float],
        choose: Choose | None = None,
        key: int = 0,
        last: bool,
        encode: Encode,
    ) -> Outgoing:
        """Returns the rows to send now. It keeps the residual, and what `encode` loses.

        `keep_now`: a group's share in this step. `choose`: chooses rows by the step's gradients and `key`; None = the
        pool takes the rows with the largest norm of gradient and residual. `last` = all gradients that wait, but not
        what was rounded off of rows that were sent."""
        self._used = True
        chosen: list[Selected | SelectedElements] = []
        for g, group in enumerate(self._groups):
            rows, keep = _part(ids.layout, group, ids.ids_V, grads), keep_now(group.keep)
            if group.whole:
                chosen.append(_whole(*rows))
            elif group.elements is None:
                max_age = 1 if last else self._max_age
                marks = (
                    None
                    if choose is None or keep == 1.0
                    else _marked(choose(rows[2], keep, nth_key(key, g)), rows[1].size)
                )
                chosen.append(group.pool.select(step, *rows, keep=keep, max_age=max_age, chosen_V=marks))
            else:
                chosen.append(group.elements.select(step, *rows, keep=keep, flush=last))
        self._overflow_rows += sum(selected.num_overflow for selected in chosen)
        self._bad_rows += sum(selected.num_bad for selected in chosen)
        out = self._joined(ids, chosen)
        sent = encode(out.layout, out.ids_K, out.flat, out.squares_K)
        for group, selected in zip(self._groups, chosen, strict=True):
            if not group.whole:
                _, _, mine_KD = _part(out.layout, group, out.ids_K, sent)
                group.unsent.commit(selected, mine_KD)  # type: ignore[arg-type]
        return out

    def _joined(self, ids: JaggedIds, chosen: Sequence[Selected | SelectedElements]) -> Outgoing:
        """The groups' rows, table after table."""
        counts_T = np.zeros(len(self._catalog), dtype=np.int64)
        for group, selected in zip(self._groups, chosen, strict=True):
            counts_T[group.tables] = np.diff(selected.starts_T1)
        out = Layout.of_counts(self._catalog, counts_T)
        ids_K, squares_K = np.empty(out.num_rows, np.int64), np.zeros(out.num_rows, np.float32)
        flat = np.empty(out.num_values, np.float32)
        for group, selected in zip(self._groups, chosen, strict=True):
            for g, t in enumerate(group.tables.tolist()):
                rows = slice(int(selected.starts_T1[g]), int(selected.starts_T1[g + 1]))
                to = slice(int(out.starts_T1[t]), int(out.starts_T1[t + 1]))
                ids_K[to] = selected.ids_K[rows]
                if group.elements is None:
                    squares_K[to] = selected.squares_K[rows]  # type: ignore[union-attr]
                flat[out.values_T1[t] : out.values_T1[t + 1]] = selected.rows_KD[rows].reshape(-1)
        positions_K = np.empty(out.num_rows, np.int64)
        find_sorted(out.starts_T1, ids_K, ids.layout.starts_T1, ids.ids_V, positions_K)
        return Outgoing(out, ids_K, flat, squares_K, positions_K)

    # ---- rows read before ----

    def lookup(self, step: int, ids: JaggedIds, flat: Floats) -> Bools:
        """Copies the rows that are still good to their places in `flat`; which these are, bool (V,)."""
        hit_V = np.zeros(ids.ids_V.size, dtype=np.bool_)
        for group in self._groups:
            starts_T1, ids_G, rows_GD = _part(ids.layout, group, ids.ids_V, flat)
            hit_G = group.pool.lookup(step, starts_T1, ids_G, rows_GD, self._lease, self._drift)
            for t, rows, hits in _by_table(ids.layout, group, rows_GD, hit_G):
                hit_V[ids.layout.starts_T1[t] : ids.layout.starts_T1[t + 1]] = hits
                if not np.shares_memory(rows, flat):
                    flat[ids.layout.values_T1[t] : ids.layout.values_T1[t + 1]] = rows.reshape(-1)
        return hit_V

    def store(self, step: int, ids: JaggedIds, flat: Floats) -> None:
        """Remembers rows that were read for `step`."""
        for group in self._groups:
            group.pool.store(step, *_part(ids.layout, group, ids.ids_V, flat), self._drift)

    def rewind(self, step: int) -> None:
        """Goes back to the start of a step, if it has sent anything; forgets rows. Raises KeyError when it is too long
        ago."""
        for group in self._groups:
            if self._used and not group.whole:
                group.unsent.rewind(step)
            group.pool.forget_rows()

    @property
    def _unsent(self) -> list[RowPool | ElementPool]:
        """Where gradients wait."""
        return [group.unsent for group in self._groups if not group.whole] if self.sends_later else []

    @property
    def num_unsent(self) -> int:
        """Rows with a residual, gradient or the rounding error of what was sent."""
        return sum(pool.num_unsent for pool in self._unsent)

    @property
    def lost_squares(self) -> float:
        """Sum of the squares of the rounding errors that were given up for want of a slot."""
        return float(sum(pool.lost_squares for pool in self._unsent))

    def report(self) -> dict[str, float]:
        """Rows with a residual, the square of what they hold; so far: rows whose rounding errors were given
        up, rows sent for want of a slot, and rows left out because with what waited for them they were not finite."""
        pools = self._unsent
        return {
            "unsent_rows": self.num_unsent,
            "unsent_squares": float(sum(pool.unsent_norm**2 for pool in pools)),
            "lost_rows": sum(pool.lost_rows for pool in pools),
            "overflow_rows": self._overflow_rows,
            "bad_rows": self._bad_rows,
        }

    def delivered_by_age(self) -> list[float]:
        """Sum of the L2 norms of the rows sent, by the age of their oldest gradient: 0, 1, 2-3, 4-7, ... steps; [] if
        no rows wait."""
        groups = self._groups if self.sends_later and not self._by_elements else []
        pools = [group.pool for group in groups if not group.whole]
        return np.sum([pool.delivered_by_age for pool in pools], axis=0).tolist() if pools else []

    # ---- state ----

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Unsent gradients, as arrays."""
        return {
            f"{group.name}/{key}": array
            for group in self._groups
            if not group.whole
            for key, array in group.unsent.state().items()
        }

    def load(self, states: Sequence[Mapping[str, npt.NDArray[np.generic]]]) -> None:
        """Takes the sum of the unsent gradients of several workers. Raises CheckpointError where other tables shared a
        pool."""
        from shardkeep.compression.selection.row_pool_state import merge

        known = {group.name for group in self._groups if not group.whole}
        other = {key.partition("/")[0] for state in states for key in state} - known
        if self.sends_later and other:
            raise CheckpointError(
                f"unsent gradients of a pool of dim {min(other)}; the pools are of dim {', '.join(sorted(known))}: "
                "resume with the same keep_rows and values of each table"
            )
        for group in self._groups:
            prefix = f"{group.name}/"
            mine = [{k.removeprefix(prefix): a for k, a in s.items() if k.startswith(prefix)} for s in states]
            mine = [state for state in mine if state]
            if mine:
                state = merge(mine) if len(mine) > 1 else mine[0]
                size = len(state["ids"])
                if size > group.unsent.capacity:  # of more workers than there are now
                    if group.elements is None:
                        group.pool = self._pool(group.tables, group.dim, size)
                    else:
                        group.elements = self._element_pool(group.tables, group.dim, size)
                group.unsent.load(state)


def _starts(layout: Layout, group: _Group) -> Ints:
    starts_T1 = np.zeros(group.tables.size + 1, dtype=np.int64)
    np.cumsum(np.diff(layout.starts_T1)[group.tables], out=starts_T1[1:])
    return starts_T1


def _part(layout: Layout, group: _Group, ids_V: Ints, flat: Floats) -> tuple[Ints, Ints, Floats]:
    """A group's starts, ids and rows; views where the group is all there is."""
    if group.tables.size == len(layout.catalog):
        return layout.starts_T1, ids_V, flat.reshape(-1, group.dim)
    ids = [ids_V[layout.starts_T1[t] : layout.starts_T1[t + 1]] for t in group.tables]
    rows = [flat[layout.values_T1[t] : layout.values_T1[t + 1]] for t in group.tables]
    return _starts(layout, group), np.concatenate(ids), np.concatenate(rows).reshape(-1, group.dim)


def _whole(starts_T1: Ints, ids_V: Ints, grad_VD: Floats) -> Selected:
    """All rows of a group. None of them waits."""
    from shardkeep.compression.selection.selected import Selected

    empty = Selected.empty(starts_T1.size, 0, grad_VD.shape[1], 0, 0)
    squares_V = np.zeros(ids_V.size, np.float32)
    return replace(empty, starts_T1=starts_T1, ids_K=ids_V, rows_KD=grad_VD, squares_K=squares_V)


def _marked(positions_K: Ints, count: int) -> Bools:
    marks_V = np.zeros(count, dtype=np.bool_)
    marks_V[positions_K] = True
    return marks_V


def _by_table(layout: Layout, group: _Group, rows_GD: Floats, hit_G: Bools) -> Iterator[tuple[int, Floats, Bools]]:
    starts_T1 = _starts(layout, group)
    for g, t in enumerate(group.tables.tolist()):
        rows = slice(int(starts_T1[g]), int(starts_T1[g + 1]))
        yield t, rows_GD[rows], hit_G[rows]
