"""Figures of the tables of a checkpoint: rows, bytes, norms, what policies did. Reads each table once, by parts."""

# N = rows of a block, D = embedding dim, S = optimizer slots of a row, K = top rows

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Float64s, Ids, Ints, Rows, UInt32s
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.checkpoints.index import earlier_steps, policy_counts, specs_of
from shardkeep.ps.checkpoints.row_stream import Chain, count_candidates, stream_rows
from shardkeep.ps.config import TableSpec
from shardkeep.ps.server.table.layout import RowLayout
from shardkeep.tables.counters import Bin, CounterTally

Told = Callable[[str, float], None]
"""Called with the table that is read and the share that is done, in [0, 1]."""
_MANTISSA_BITS = 23
_KEPT_BITS = 10
_SHIFT = np.uint32(_MANTISSA_BITS - _KEPT_BITS)
_BINS = 1 << (31 - _MANTISSA_BITS + _KEPT_BITS)
PERCENTILES = (1, 50, 99)

_SQUARES: dict[str, Callable[[Rows, int], Float64s]] = {
    "adagrad": lambda slots_NS, dim: slots_NS.mean(axis=1, dtype=np.float64),
    "rowwise_adagrad": lambda slots_NS, dim: slots_NS[:, 0].astype(np.float64),
    "ftrl": lambda slots_NS, dim: slots_NS[:, dim:].mean(axis=1, dtype=np.float64),
}
"""The sum of a row's mean squared gradients, for optimizers that keep it without decay."""


@dataclass(frozen=True, slots=True)
class TopRow:
    """A row that stands out."""

    id: int
    norm: float
    squared_gradients: float | None
    """The sum of mean squared gradients that the optimizer has kept; None = it keeps none."""


@dataclass(frozen=True, slots=True)
class TableFigures:
    """What is known of one table."""

    spec: TableSpec
    rows: int
    row_bytes: int
    """Ids and weights, and what eviction counts."""
    optimizer_bytes: int
    norms: dict[str, float] | None
    """Of the L2 norms of rows: mean, p1, p50, p99, max; None = no row is finite."""
    not_finite: int
    """Rows with an infinity or a NaN."""
    top_by: str
    """What the top rows are sorted by: `squared_gradients`, or `norm` if the optimizer keeps none."""
    top: tuple[TopRow, ...]
    policy_counts: dict[str, int]
    """`admitted_rows`, `refused_rows`, `evicted_rows` and `candidates`, where the table's policies count them."""
    ages: tuple[Bin, ...] = ()
    """Of tables with `evict`: steps, or seconds with `ttl_s`, since the last push of each row."""
    scores: tuple[Bin, ...] = ()
    """Of tables with `evict`: the decayed number of pushes of each row."""

    def to_json(self) -> dict[str, Any]:
        """As JSON types, without the top rows."""
        return {
            "name": self.spec.name,
            "rows": self.rows,
            "dim": self.spec.dim,
            "optimizer": self.spec.optimizer.name,
            "precision": {"rows": self.spec.dtype, "state": self.spec.state_dtype},
            "bytes": {"rows": self.row_bytes, "optimizer": self.optimizer_bytes},
            "norm": self.norms,
            "not_finite": self.not_finite,
            **self.policy_counts,
            **{key: [bin.to_json() for bin in bins] for key in ("ages", "scores") if (bins := getattr(self, key))},
        }


def figures_of(
    checkpoint: Checkpoint, told: Told = lambda _name, _share: None, *, table: str | None = None, top: int = 0
) -> list[TableFigures]:
    """Figures of all tables, or of `table` alone, in the order of the checkpoint. Blocks while rows are read.

    Args:
        top: The number of top rows.

    Raises:
        UserError: The checkpoint has no such table.
        CheckpointError: A file is missing or damaged.
    """
    names = [spec.name for spec in specs_of(checkpoint)] if table is None else [table]
    chain = Chain(checkpoint)
    sources = [chain.table(name) for name in names]
    total, before = max(1, sum(parts.stored for parts in sources)), 0
    found = []
    for name, parts in zip(names, sources, strict=True):
        tally = _Tally(parts.spec, top, _counters_of(checkpoint, parts.spec))
        for block in stream_rows(checkpoint, name, slots=bool(top), counters=tally.counters is not None):
            tally.add(*block)
            told(name, min(1.0, (before + tally.rows) / total))
        before += parts.stored
        found.append(tally.figures(_policy_counts(checkpoint, name)))
    return found


def _counters_of(checkpoint: Checkpoint, spec: TableSpec) -> CounterTally | None:
    if spec.evict is None:
        return None
    seconds = spec.evict.ttl_s is not None
    return CounterTally(
        spec.evict, checkpoint.written_s if seconds else checkpoint.step + earlier_steps(checkpoint) - 1
    )


def _policy_counts(checkpoint: Checkpoint, table: str) -> dict[str, int]:
    candidates = count_candidates(checkpoint, table)
    return policy_counts(checkpoint, table) | ({} if candidates is None else {"candidates": candidates})


class Norms:
    """Mean, maximum and percentiles of positive numbers, in 2 MB. Percentiles are exact to 0.1 %."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = self._most = 0.0
        self._bins: Ints = np.zeros(_BINS, np.int64)

    def add(self, norms_N: Float64s) -> None:
        """Adds finite numbers, at least 0."""
        if norms_N.size:
            self.count += norms_N.size
            self._sum += float(norms_N.sum())
            self._most = max(self._most, float(norms_N.max()))
            bits_N = norms_N.astype(np.float32).view(np.uint32) >> _SHIFT  # rising in the number: its leading bits
            self._bins += np.bincount(bits_N, minlength=_BINS)

    def figures(self) -> dict[str, float] | None:
        """None = there was no number."""
        if not self.count:
            return None
        return {
            "mean": self._sum / self.count,
            **{f"p{percent}": self._percentile(percent) for percent in PERCENTILES},
            "max": self._most,
        }

    def _percentile(self, percent: int) -> float:
        """The smallest number that is not below `percent` % of all, at the middle of its bin."""
        wanted = max(1, -(-percent * self.count // 100))
        number = np.uint32(np.searchsorted(np.cumsum(self._bins), wanted)) << _SHIFT
        middle = (number | (np.uint32(1) << (_SHIFT - np.uint32(1)))) if number else number
        return min(float(np.array(middle, np.uint32).view(np.float32)), self._most)


@dataclass(slots=True)
class _Tally:
    """Counts while blocks pass."""

    spec: TableSpec
    top: int
    counters: CounterTally | None
    rows: int = 0
    norms: Norms = field(default_factory=Norms)
    best: _Top | None = None

    def add(self, ids_N: Ids, rows_ND: Rows, slots_NS: Rows, counters_NC: UInt32s) -> None:
        self.rows += ids_N.size
        if self.counters is not None:
            self.counters.add(counters_NC)
        norms_N: Float64s = np.sqrt(np.einsum("nd,nd->n", rows_ND, rows_ND, dtype=np.float64))
        finite_N = np.isfinite(norms_N)
        self.norms.add(norms_N[finite_N])
        if self.top and ids_N.size:
            squares_of = _SQUARES.get(self.spec.optimizer.name)
            squares_N = None if squares_of is None else squares_of(slots_NS, self.spec.dim)
            block = _Top(ids_N, norms_N, squares_N)
            self.best = (block if self.best is None else self.best.joined(block)).first(self.top)

    def figures(self, policy_counts: dict[str, int]) -> TableFigures:
        layout = RowLayout.of(self.spec)
        return TableFigures(
            self.spec,
            self.rows,
            row_bytes=4 * (layout.first_slot + layout.num_counters) * self.rows,
            optimizer_bytes=4 * layout.slot_words * self.rows,
            norms=self.norms.figures(),
            not_finite=self.rows - self.norms.count,
            top_by="squared_gradients" if self.spec.optimizer.name in _SQUARES else "norm",
            top=() if self.best is None else self.best.rows(),
            policy_counts=policy_counts,
            ages=() if self.counters is None else self.counters.ages.bins(),
            scores=() if self.counters is None else self.counters.scores.bins(),
        )


@dataclass(frozen=True, slots=True)
class _Top:
    """Rows that may be among the top ones."""

    ids_K: Ids
    norms_K: Float64s
    squares_K: Float64s | None

    def joined(self, other: _Top) -> _Top:
        pairs = zip(self._columns(), other._columns(), strict=True)
        return _Top(*(None if a is None or b is None else np.concatenate([a, b]) for a, b in pairs))  # type: ignore[arg-type]

    def first(self, count: int) -> _Top:
        """The `count` largest; of equal ones those with the smaller id."""
        by_K = np.nan_to_num(self.norms_K if self.squares_K is None else self.squares_K, nan=np.inf, posinf=np.inf)
        if by_K.size > count:
            least = np.partition(by_K, by_K.size - count)[by_K.size - count]
            near = np.flatnonzero(by_K >= least)
        else:
            near = np.arange(by_K.size)
        order = near[np.lexsort((self.ids_K[near], -by_K[near]))][:count]
        return _Top(*(None if column is None else column[order] for column in self._columns()))  # type: ignore[arg-type]

    def rows(self) -> tuple[TopRow, ...]:
        squares: Sequence[float | None] = (
            [None] * self.ids_K.size if self.squares_K is None else self.squares_K.tolist()
        )
        return tuple(map(TopRow, self.ids_K.tolist(), self.norms_K.tolist(), squares))

    def _columns(self) -> tuple[npt.NDArray[Any] | None, ...]:
        return self.ids_K, self.norms_K, self.squares_K
