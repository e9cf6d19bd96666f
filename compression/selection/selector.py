"""Selectors: what a step sends of its row gradients. Arrays in, arrays out; a `ResidualPool` keeps their state."""
# V = rows of a step, W = values of a row's state, D = embedding dim, T = tables

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Literal, Protocol

import numpy as np

from shardkeep.base.arrays import Bools, Floats, Ints, UInt64s
from shardkeep.compression.values.draws import Draws


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of one worker: the rows of all tables of one dim, table after table, each table's sorted by id."""

    number: int
    keep: float
    """The share to send, after warm-up."""
    starts_T1: Ints
    """Where each table's rows begin, int64 (T + 1,)."""
    ids_V: Ints
    num_workers: int
    keys_T: UInt64s
    """Of the tables, from the job's seed and their names."""
    norms_V: Floats = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))
    """L2 norms of the rows' values, float32, for `choose`; -1 = a row that is not finite, whose values are zeros."""

    @property
    def draws(self) -> Draws:
        """Random numbers of the step's rows: functions of seed, step, table, id and column, the same on all workers."""
        return Draws(self.keys_T, np.diff(self.starts_T1), self.ids_V, step=self.number)


class Selector(Protocol):
    """Chooses what is sent, and what is kept for later steps. Subclasses inherit the defaults: error feedback.

    A selector has no state of its own: what it returns follows from its arguments. It changes only `state_VW` of them.
    Each row's state is float32 (W,), zeros for a new row. Its first D values are what is sent where the row loses its
    place, and at the end. A row that would not be finite is left out, and its state stays. A step may have no rows: V
    is then 0.

    `choose` does not get the states. `accumulate` is called right before it with the same rows, and may leave in `self`
    what `choose` needs of them. `settle` may not use it, because its rows are others."""

    sends: Literal["rows", "values"] = "rows"
    """rows = whole rows; values = single values, the others of the row are zeros."""

    def state_values(self, dim: int) -> int:
        """Returns W, at least `dim`; default `dim`."""
        return dim

    def accumulate(self, step: Step, state_VW: Floats, grad_VD: Floats) -> Floats:
        """Returns the values to choose from, float32 (V, D); default: residual + gradient. May change `state_VW`."""
        return np.add(state_VW[:, : grad_VD.shape[1]], grad_VD)

    @abstractmethod
    def choose(self, step: Step, values_VD: Floats) -> Bools:
        """Returns what is sent: bool (V,) of rows, or bool (V, D) of values. Zeros are no values to send."""
        ...

    def settle(self, state_VW: Floats, values_VD: Floats, sent_VD: Bools, decoded_VD: Floats) -> None:
        """Changes `state_VW` to what is kept; default: values - decoded.

        It may get more rows than `choose`: after the rows of the step come rows that lost their place, and in the last
        step all rows that wait.

        Args:
            values_VD: As `accumulate` returned them.
            sent_VD: The values that were sent: `choose`, or all of a row without a place.
            decoded_VD: What the servers receive; zeros where nothing was sent."""
        np.subtract(values_VD, decoded_VD, out=state_VW[:, : values_VD.shape[1]])
