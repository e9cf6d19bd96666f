"""RowMemory: what one worker remembers of rows between steps: gradients not sent yet, and copies of rows it has read.

One pool (compression/selection/pool.py) for all tables of one dim; tables whose own `keep` differs have other pools.
Knows no message and no server.
"""
# V = ids of all tables in a step, K = rows to send, D = embedding dim, T = tables

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bools, Floats, Ints
from shardkeep.base.errors import CheckpointError
from shardkeep.compression.config import CompressionConfig
from shardkeep.compression.per_table import TablePush, push_of
from shardkeep.compression.selection.selected import Selected
from shardkeep.compression.selection.shares import keep_at
from shardkeep.ps.jagged import Catalog, JaggedIds, JaggedLayout
from shardkeep.ps.server.table.initializers.initial import table_key

if TYPE_CHECKING:  # most jobs have no pool: only those that have load the pools and their kernels
    from shardkeep.compression.selection.pool import ResidualPool
    from shardkeep.compression.selection.row_cache import RowCache
    from shardkeep.compression.selection.selector import Selector
    from shardkeep.compression.selection.slots import RowSlots


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Rows to send, table after table."""

    ids: JaggedIds
    flat: Floats
    """The rows' values."""
    squares_K: Floats
    """Sum of the mean squares of the gradients that each row is the sum of."""
    chosen: Sequence[Selected]
    """What each group sends."""


@dataclass(slots=True)
class _Group:
    """The tables of one dim and one share of rows that are sent."""

    name: str
    """Of its residuals in a checkpoint: the dim, and the numbers of the tables if they are not all of the dim."""
    dim: int
    tables: Ints
    keep: float
    """The share of its rows that is sent."""
    whole: bool
    """Whether all rows are sent as they are."""
    slots: RowSlots | None = None
    residuals: ResidualPool | None = None
    """Where gradients wait; None = they do not."""
    cache: RowCache | None = None
    """Rows read before, in the slots of residuals; None = none are kept."""


class RowMemory:
    """The pools of one worker. Not thread safe.

    Args:
        selector: Of unsent gradients; None = all are sent.
        history: Steps that can be undone.
        seed, num_workers: Of the job.
        pushes_T: How each table's gradients are sent; empty = all as `compression` says.
    """

    def __init__(
        self,
        catalog: Catalog,
        compression: CompressionConfig,
        selector: Selector | None,
        *,
        history: int,
        seed: int = 0,
        num_workers: int = 1,
        pushes_T: Sequence[TablePush] = (),
    ) -> None:
        push, pull = self._push, self._pull = compression.push, compression.pull
        self._catalog, self.selector = catalog, selector
        self._seed, self._num_workers, self._history = seed, num_workers, history
        self.sends_later = selector is not None
        """Whether unsent gradients are remembered."""
        self.caches = pull.cache_rows > 0
        """Whether rows are."""
        self._groups: list[_Group] = []
        if capacity := max(push.pool_rows, pull.cache_rows):
            self._make_groups(pushes_T or [push_of(None, push)] * len(catalog), capacity)
        self._used = False
        self._counts = {"overflow_rows": 0, "bad_rows": 0}

    def _make_groups(self, pushes_T: Sequence[TablePush], capacity: int) -> None:
        """Groups the tables, and shares the slots out."""
        dims_T = self._catalog.dims_T
        by_push: dict[tuple[int, float, bool], list[int]] = {}
        for t, (dim, push) in enumerate(zip(dims_T.tolist(), pushes_T, strict=True)):
            own = (push.keep, push.whole) if self.sends_later else (1.0, True)
            by_push.setdefault((dim, *own), []).append(t)
        with_slots = sum(self.caches or not whole for _, _, whole in by_push)
        for (dim, keep, whole), numbers in by_push.items():
            all_of_dim = len(numbers) == (dims_T == dim).sum()
            name = str(dim) if all_of_dim else f"{dim} of {','.join(map(str, numbers))}"
            self._groups.append(group := _Group(name, dim, np.array(numbers, dtype=np.int64), keep, whole))
            if self.caches or not whole:
                self._make_slots(group, -(-capacity // with_slots))

    def _make_slots(self, group: _Group, capacity: int) -> None:
        """Gives a group so many empty slots, which its residuals share with its cache."""
        from shardkeep.compression.selection.pool import ResidualPool
        from shardkeep.compression.selection.row_cache import RowCache
        from shardkeep.compression.selection.slots import RowSlots

        selector = None if group.whole else self.selector
        width = group.dim if selector is None else selector.state_values(group.dim)
        slots = group.slots = RowSlots(width=width, capacity=capacity, history=self._history)
        if selector is not None:
            keys_T = np.array([table_key(self._seed, self._catalog.names[t]) for t in group.tables], dtype=np.uint64)
            group.residuals = ResidualPool(selector, slots, dim=group.dim, keys_T=keys_T, num_workers=self._num_workers)
        if self.caches:
            group.cache = RowCache(slots, num_tables=group.tables.size, dim=group.dim)

    # ---- unsent gradients ----

    def select(self, step: int, ids: JaggedIds, grads: Floats, *, last: bool) -> Outgoing:
        """Returns the rows to send now, which are to be committed. `last` = all gradients that wait, but not what was
        rounded off of rows that were sent."""
        self._used = True
        chosen: list[Selected] = []
        for group in self._groups:
            rows = _part(ids.layout, group, ids.ids_V, grads)
            if group.residuals is None:
                chosen.append(_whole(*rows))
            else:
                keep = keep_at(step, group.keep, self._push.warmup_steps)
                chosen.append(group.residuals.select(step, *rows, keep=keep, flush=last))
        self._counts["overflow_rows"] += sum(selected.num_overflow for selected in chosen)
        self._counts["bad_rows"] += sum(selected.num_bad for selected in chosen)
        return _joined(self._catalog, self._groups, chosen)

    def commit(self, out: Outgoing, sent: Floats) -> None:
        """Keeps the residuals of the last selection. `sent`: what the servers will make of its rows, flat."""
        for group, selected in zip(self._groups, out.chosen, strict=True):
            if group.residuals is not None:
                group.residuals.commit(selected, _part(out.ids.layout, group, out.ids.ids_V, sent)[2])

    # ---- rows read before ----

    def lookup(self, step: int, ids: JaggedIds, flat: Floats) -> Bools:
        """Copies the rows that are still good to their places in `flat`; which these are, bool (V,)."""
        hit_V = np.zeros(ids.ids_V.size, dtype=np.bool_)
        for group in self._groups:
            assert group.cache is not None
            starts_T1, ids_G, rows_GD = _part(ids.layout, group, ids.ids_V, flat)
            hit_G = group.cache.lookup(step, starts_T1, ids_G, rows_GD, self._pull.lease, self._drift)
            for g, t in enumerate(group.tables.tolist()):
                rows = slice(int(starts_T1[g]), int(starts_T1[g + 1]))
                hit_V[ids.layout.starts_T1[t] : ids.layout.starts_T1[t + 1]] = hit_G[rows]
                if not np.shares_memory(rows_GD, flat):
                    flat[ids.layout.values_T1[t] : ids.layout.values_T1[t + 1]] = rows_GD[rows].reshape(-1)
        return hit_V

    def store(self, step: int, ids: JaggedIds, flat: Floats) -> None:
        """Remembers rows that were read for `step`."""
        for group in self._groups:
            assert group.cache is not None
            group.cache.store(step, *_part(ids.layout, group, ids.ids_V, flat), self._drift)

    def rewind(self, step: int) -> None:
        """Goes back to the start of a step, if it has sent anything; forgets rows. Raises KeyError when it is too long
        ago."""
        for group in self._groups:
            if self._used and group.residuals is not None:
                group.residuals.slots.rewind(step)
            elif group.slots is not None:
                group.slots.forget_rows()

    @property
    def _drift(self) -> float:
        return math.inf if self._pull.drift is None else self._pull.drift

    @property
    def _unsent(self) -> list[RowSlots]:
        """Where gradients wait."""
        return [group.residuals.slots for group in self._groups if group.residuals is not None]

    @property
    def num_unsent(self) -> int:
        """Rows with a residual, gradient or the rounding error of what was sent."""
        return sum(slots.num_unsent for slots in self._unsent)

    @property
    def lost_squares(self) -> float:
        """Sum of the squares of the rounding errors that were given up for want of a slot."""
        return float(sum(slots.lost_squares for slots in self._unsent))

    def report(self) -> dict[str, float]:
        """Rows with a residual, the square of what they hold; so far: rows whose rounding errors were given
        up, rows sent for want of a slot, and rows left out because with what waited for them they were not finite."""
        norms = [g.residuals.slots.unsent_norm(g.dim) for g in self._groups if g.residuals is not None]
        return {
            "unsent_rows": self.num_unsent,
            "unsent_squares": float(sum(norm**2 for norm in norms)),
            "lost_rows": sum(slots.lost_rows for slots in self._unsent),
            **self._counts,
        }

    # ---- state ----

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Unsent gradients, as arrays."""
        return {
            f"{group.name}/{key}": array
            for group in self._groups
            if group.residuals is not None
            for key, array in group.residuals.slots.state().items()
        }

    def load(self, states: Sequence[Mapping[str, npt.NDArray[np.generic]]]) -> None:
        """Takes the sum of the unsent gradients of several workers. Raises CheckpointError where other tables shared a
        pool."""
        from shardkeep.compression.selection.slots import merge

        known = {group.name for group in self._groups if group.residuals is not None}
        other = {key.partition("/")[0] for state in states for key in state} - known
        if self.sends_later and other:
            raise CheckpointError(
                f"unsent gradients of a pool of dim {min(other)}; the pools are of dim {', '.join(sorted(known))}: "
                "resume with the same compression of each table"
            )
        for group in self._groups:
            prefix = f"{group.name}/"
            own_states = [{k.removeprefix(prefix): a for k, a in s.items() if k.startswith(prefix)} for s in states]
            own_states = [state for state in own_states if state]
            if own_states and group.residuals is not None:
                state = merge(own_states) if len(own_states) > 1 else own_states[0]
                if len(state["ids"]) > group.residuals.slots.capacity:  # of more workers than there are now
                    self._make_slots(group, len(state["ids"]))
                group.residuals.slots.load(state)


def _part(layout: JaggedLayout, group: _Group, ids_V: Ints, flat: Floats) -> tuple[Ints, Ints, Floats]:
    """A group's starts, ids and rows; views where the group is all there is."""
    if group.tables.size == len(layout.catalog):
        return layout.starts_T1, ids_V, flat.reshape(-1, group.dim)
    ids = [ids_V[layout.starts_T1[t] : layout.starts_T1[t + 1]] for t in group.tables]
    rows = [flat[layout.values_T1[t] : layout.values_T1[t + 1]] for t in group.tables]
    starts_T1 = np.concatenate([[0], np.cumsum([part.size for part in ids])])
    return starts_T1, np.concatenate(ids), np.concatenate(rows).reshape(-1, group.dim)


def _whole(starts_T1: Ints, ids_V: Ints, grad_VD: Floats) -> Selected:
    """All rows of a group. None of them waits."""
    return Selected(starts_T1, ids_V, grad_VD, np.zeros(ids_V.size, dtype=np.float32))


def _joined(catalog: Catalog, groups: Sequence[_Group], chosen: Sequence[Selected]) -> Outgoing:
    """The groups' rows, table after table."""
    counts_T = np.zeros(len(catalog), dtype=np.int64)
    for group, selected in zip(groups, chosen, strict=True):
        counts_T[group.tables] = np.diff(selected.starts_T1)
    out = JaggedLayout.of_counts(catalog, counts_T)
    ids_K, squares_K = np.empty(out.num_rows, np.int64), np.zeros(out.num_rows, np.float32)
    flat = np.empty(out.num_values, np.float32)
    for group, selected in zip(groups, chosen, strict=True):
        for g, t in enumerate(group.tables.tolist()):
            rows = slice(int(selected.starts_T1[g]), int(selected.starts_T1[g + 1]))
            to = slice(int(out.starts_T1[t]), int(out.starts_T1[t + 1]))
            ids_K[to] = selected.ids_K[rows]
            squares_K[to] = selected.squares_K[rows]
            flat[out.values_T1[t] : out.values_T1[t + 1]] = selected.rows_KD[rows].reshape(-1)
    return Outgoing(JaggedIds(out, ids_K), flat, squares_K, chosen)
